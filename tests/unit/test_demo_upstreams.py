"""The demo's upstreams have fixed ids and the shapes that other tests count on, and its reviewed data fits them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import requests
from tests.refusals import refusal

from sparkwright.audit import policy
from sparkwright.builder import configure
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.cherry_picks import apply, series
from sparkwright.core import git
from sparkwright.core.git_store import Objects
from sparkwright.demo import base, toy, upstreams
from sparkwright.demo.upstreams import PULL_REQUEST, SOURCES, Upstreams
from sparkwright.forks import package_index
from sparkwright.forks.stack import Project

PROJECT = Project(SOURCES.parent / "project", "demo")
PATCHES = series.load(PROJECT.series_folder("vllm"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Upstreams:
    return upstreams.write(tmp_path_factory.mktemp("upstreams"))


@pytest.fixture
def tree(made: Upstreams, tmp_path: Path) -> Path:
    """A checkout of mini vLLM's tag."""
    folder = tmp_path / "vllm"
    ask(made, "worktree", "add", "--quiet", "--detach", str(folder), made.forks["vllm"].tag)
    return folder


def ask(made: Upstreams, *arguments: str) -> str:
    return git.run(arguments, cwd=made.forks["vllm"].path)[1].decode()


def patch(tree: Path) -> None:
    for one in PATCHES:
        subprocess.run(["git", "apply", "--index", str(PROJECT.series_folder("vllm") / one.name)], cwd=tree, check=True)


def scales(tree: Path) -> ModuleType:
    module = ModuleType("nvfp4_scales")
    exec((tree / "mini_vllm/quantization/nvfp4_scales.py").read_text(), module.__dict__)
    return module


def settings(tree: Path) -> dict[str, str]:
    fork = toolchain.spec(PROJECT).forks["vllm"]
    return {**fork.defines, **fork.core_defines, "FETCHCONTENT_FULLY_DISCONNECTED": "ON", "VLLM_CUTLASS_SRC_DIR": str(SOURCES / "cutlass")}


def test_ids_depend_on_nothing_of_this_machine(made: Upstreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    again = upstreams.write(tmp_path)
    assert {fork: one.refs for fork, one in again.forks.items()} == {fork: one.refs for fork, one in made.forks.items()}
    assert upstreams.write(tmp_path) == again


def test_the_tagged_tree_holds_the_shipped_files_byte_for_byte(made: Upstreams) -> None:
    for fork, one in made.forks.items():
        objects = Objects(one.path)
        assert {path: objects.blob(one.tree, path) for path in objects.paths(one.tree)} == upstreams.files(fork)
    crlf, binary = (upstreams.files("vllm")[f"docs/{name}"] for name in ("windows.txt", "logo.bin"))
    assert b"\r\n" in crlf
    assert b"\0" in binary


def test_no_line_of_the_shipped_trees_is_left_behind_by_a_run_of_python(made: Upstreams) -> None:
    assert not [path for fork in made.forks for path in upstreams.files(fork) if "__pycache__" in path or path.endswith(".pyc")]


def test_main_goes_on_after_the_tag(made: Upstreams) -> None:
    touched = {path for one in PATCHES for path in one.files}
    log = ask(made, "log", "-M", "--format=", "--name-status", "--reverse", f"{made.forks['vllm'].tag}..main").splitlines()
    assert touched & {line.split("\t")[-1] for line in log}
    assert "R100\tcsrc/moe/topk.cu\tcsrc/moe/topk_one.cu" in log


def test_the_pull_request_reached_main_as_one_commit(made: Upstreams) -> None:
    tag = made.forks["vllm"].tag
    assert len(ask(made, "rev-list", f"{tag}..{PULL_REQUEST}").split()) == 2
    assert ask(made, "log", "-1", "--format=%s", "main").strip().endswith("(#7)")
    assert ask(made, "diff", tag, PULL_REQUEST) == ask(made, "diff", "main~1", "main")


def test_the_mirror_map_names_every_source_of_the_stack(made: Upstreams) -> None:
    specs = {fork: spec.sources.git for fork, spec in PROJECT.spec.forks.items()}
    assert {spec.url: spec.ref for spec in specs.values() if spec} == {one.url: one.tag for one in made.forks.values()}
    assert all(Path(path, "HEAD").is_file() for path in made.mirror_map().values())


def test_the_series_applies_to_the_tag_as_plain_git_would(tree: Path) -> None:
    for one in PATCHES:
        file = PROJECT.series_folder("vllm") / one.name
        subprocess.run(["git", "apply", "--check", str(file)], cwd=tree, check=True)
        subprocess.run(["git", "apply", "--index", str(file)], cwd=tree, check=True)
        assert all(b"\r" not in line for line in one.data.splitlines())


def test_the_first_patch_does_not_apply_to_main(made: Upstreams) -> None:
    objects = Objects(made.forks["vllm"].path)
    assert apply.evaluate(objects, objects.resolve("main^{tree}"), PATCHES[:1])[0].status == "conflict"


def test_the_first_patch_mends_the_maximum(tree: Path) -> None:
    def largest() -> float:
        module = scales(tree)
        earlier = module.ExpertScales(4)
        for expert in range(4):
            earlier.load(expert, 448.0)
        earlier.free()
        later = module.ExpertScales(4)
        later.load(1, 0.5)
        return float(later.largest())

    assert largest() == 448.0
    patch(tree)
    assert largest() == 0.5


def test_the_reviewed_data_is_read_and_the_rules_find_their_sites(tree: Path) -> None:
    patch(tree)
    rules = archs.load(PROJECT.build_folder / "archs.yaml")
    done = archs.rewrite(lambda path: (tree / path).read_bytes(), rules, "vllm")
    assert [site.after for site in done.sites] == ["8.0;9.0;10.0;12.0;12.1", "8.0+PTX;12.0f"]
    assert policy.load(PROJECT.audit_file, PROJECT.spec.arch).target == "sm_121f"
    assert set(toolchain.spec(PROJECT).forks) == set(PROJECT.spec.forks)


def test_the_index_offers_the_wheel_with_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "files" / f"mini_vllm-0.33.0-{base.tag()}.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"bytes")
    base.write_index(tmp_path, wheel)
    with base.serve(tmp_path) as url:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{url}/simple/")
        (offer,) = package_index.files("mini-vllm")
    assert (offer.name, offer.sha256) == (wheel.name, hashlib.sha256(b"bytes").hexdigest())


def installed(folder: Path, *, patched: bool) -> Path:
    """Return a folder with the package as a wheel would install it; its library holds what needs no CUDA, by the host's compiler."""
    for path, data in upstreams.files("vllm").items():
        if path.startswith("mini_vllm/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    if patched:
        subprocess.run(["git", "apply", str(PROJECT.series_folder("vllm") / PATCHES[0].name)], cwd=folder, check=True)
    includes = [f"-I{SOURCES / 'cutlass' / place}" for place in ("include", "tools/util/include")]
    library = folder / "mini_vllm" / "_C_stable_libtorch.abi3.so"
    source = SOURCES / "vllm" / "csrc" / "bindings.cpp"
    subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *includes, str(source), "-o", str(library)], check=True)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed"), patched=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("model") / "toy")


def program(package: Path) -> list[str | Path]:
    """Return the command of an installed package, without a folder of ours on its path."""
    code = f"import sys; sys.path.insert(0, {str(package)!r}); from mini_vllm.__main__ import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", code]


@pytest.fixture(scope="module")
def served(package: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with toy.serving(program(package), model, tmp_path_factory.mktemp("log") / "log") as url:
        yield url


def test_the_toy_is_the_same_each_time_and_knows_its_text(model: Path, tmp_path: Path) -> None:
    """Equal bytes, a valid safetensors file, and a reference that writes the text that was learnt."""
    again = toy.write(tmp_path / "again")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {path.name: path.read_bytes() for path in model.iterdir()}
    assert toy.expected(model, toy.PROMPT) == toy.ANSWER


def test_the_served_words_are_the_expected_ones(served: str, model: Path) -> None:
    """The library's decoding and the independent one agree, whole and streamed, also on prompts that nobody learnt."""
    for prompt in (toy.PROMPT, "A", "Every kernel decides", "", "elephants . is", "its proof"):
        for most in (1, 7, 64):
            assert toy.ask(served, prompt, most) == toy.expected(model, prompt, most)
        assert toy.ask(served, prompt, stream=True) == toy.expected(model, prompt)


def test_many_ask_at_once(served: str) -> None:
    """Answers do not mix."""
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: toy.ask(served, toy.PROMPT), range(24))) == {toy.ANSWER}


def test_usage_and_the_reason_of_the_end_are_told(served: str) -> None:
    """Words are counted; an answer ends at the end of the text, or at its length."""
    whole = requests.post(f"{served}/v1/completions", json={"prompt": "A wheel", "max_tokens": 64}, timeout=60).json()
    count = len(toy.ANSWER.split())
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": count + 2}
    assert whole["choices"][0]["finish_reason"] == "stop"
    question = {"prompt": "A wheel", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    lines = requests.post(f"{served}/v1/completions", json=question, timeout=60).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-4][6:])["usage"]["completion_tokens"] == 3
    assert json.loads(lines[-6][6:])["choices"][0]["finish_reason"] == "length"


def test_it_says_what_it_serves(served: str) -> None:
    """Health, version and the name of the model's folder."""
    assert requests.get(f"{served}/health", timeout=60).status_code == 200
    assert requests.get(f"{served}/version", timeout=60).json() == {"version": "0.33.0"}
    assert [one["id"] for one in requests.get(f"{served}/v1/models", timeout=60).json()["data"]] == ["toy"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"prompt": 7}', 400), (b'{"prompt": "a", "max_tokens": 0}', 400),
        (b'{"prompt": "a", "max_tokens": true}', 400), (b'{"prompt": "a", "temperature": 0.7}', 400),
        (b'{"prompt": "a", "model": "other"}', 404), (b" " * (1 << 20) + b"{}", 413), (b"\xff\xfe", 400),
    ],
)  # fmt: skip
def test_a_bad_question_is_refused(served: str, body: bytes, status: int) -> None:
    """With a status and a reason, and the server goes on."""
    reply = requests.post(f"{served}/v1/completions", data=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, status)
    assert toy.ask(served, toy.PROMPT, 3) == "is only as"


def test_without_the_patch_it_repeats_a_word(model: Path, tmp_path: Path) -> None:
    """What an earlier layer left in memory becomes the largest scale, which scales every weight away: the first patch's reason."""
    with toy.serving(program(installed(tmp_path / "stock", patched=False)), model, tmp_path / "log") as url:
        assert set(toy.ask(url, toy.PROMPT, 20).split()) == {"a"}


def test_a_changed_weight_changes_the_words(package: Path, model: Path, tmp_path: Path) -> None:
    """The words come from the file: with the signs of one layer turned, server and reference write something else, and the same."""
    other = tmp_path / "toy"
    shutil.copytree(model, other)
    data = bytearray((other / "model.safetensors").read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    place = slice(*(body + offset for offset in json.loads(data[8:body])["layers.0.weight"]["data_offsets"]))
    data[place] = bytes(byte ^ 0x88 for byte in data[place])
    (other / "model.safetensors").write_bytes(data)
    with toy.serving(program(package), other, tmp_path / "log") as url:
        said = toy.ask(url, toy.PROMPT)
    assert said == toy.expected(other, toy.PROMPT)
    assert said != toy.ANSWER


@pytest.mark.parametrize("what", ["library", "config.json", "model.safetensors", "cut", "words"])
def test_without_its_parts_it_does_not_start(package: Path, model: Path, tmp_path: Path, what: str) -> None:
    """No library, no words; no model, none either; and the reason is told."""
    shutil.copytree(package, tmp_path / "installed")
    shutil.copytree(model, tmp_path / "toy")
    weights = tmp_path / "toy" / "model.safetensors"
    if what == "library":
        (tmp_path / "installed" / "mini_vllm" / "_C_stable_libtorch.abi3.so").unlink()
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif what == "words":
        config = tmp_path / "toy" / "config.json"
        config.write_text(config.read_text().replace('"wheel",', '"wheel", "more",'))
    else:
        (tmp_path / "toy" / what).unlink()
    with (
        refusal("command-failed", match="did not come up") as caught,
        toy.serving(program(tmp_path / "installed"), tmp_path / "toy", tmp_path / "log"),
    ):
        pass
    assert any("mini-vllm: " in line for line in caught.value.details)


@pytest.mark.toolchain
def test_the_unpatched_tree_configures_up_to_its_external_projects(tree: Path, tmp_path: Path, tools: Toolchain) -> None:
    env = tools.environment(TORCH_CUDA_ARCH_LIST="12.1f")
    with refusal("configure-failed") as caught:
        configure.configure(tree, tmp_path / "build", cmake=tools.tool("cmake"), defines=settings(tree), env=env, log=tmp_path / "log")
    said = "\n".join(caught.value.details)
    assert "CUDA supported target architectures: 12.0\n" in (tmp_path / "log").read_text()
    # GCC 13 and later get as far as the download, which the settings forbid.
    assert "GCC >= 13 is required" in said or "external_projects/big.cmake" in said


@pytest.mark.toolchain
def test_without_the_rules_the_request_is_folded_in_silence(tree: Path, tmp_path: Path, tools: Toolchain) -> None:
    patch(tree)
    env = tools.environment(TORCH_CUDA_ARCH_LIST="12.1f")
    before = configure.configure(
        tree, tmp_path / "before", cmake=tools.tool("cmake"), defines=settings(tree), env=env, log=tmp_path / "log"
    )
    codes = {code for unit in before.units for code in unit.gencode}
    assert codes == {"compute_120:sm_120", "compute_120f:sm_120f", "compute_80:sm_80", "compute_80:compute_80"}

    rules = archs.load(PROJECT.build_folder / "archs.yaml")
    for path, data in archs.rewrite(lambda path: (tree / path).read_bytes(), rules, "vllm").files.items():
        (tree / path).write_bytes(data)
    after = configure.configure(tree, tmp_path / "after", cmake=tools.tool("cmake"), defines=settings(tree), env=env, log=tmp_path / "log")
    native = [unit for unit in after.units if unit.gencode == ("compute_121f:sm_121f",)]
    others = [unit.source for unit in after.units if unit.language == "CUDA" and unit not in native]
    assert len(native) == 5
    assert all(unit.object.endswith(f"/{unit.source}.o") for unit in native)
    assert others == [kept.unit for kept in rules.kept]


@pytest.mark.toolchain
def test_the_base_wheel_is_whole_and_holds_device_code(tmp_path: Path, tools: Toolchain) -> None:
    wheel = base.write_base_wheel(
        tmp_path, SOURCES / "vllm", SOURCES / "cutlass", nvcc=tools.tool("nvcc"), env=tools.environment(), scratch=tmp_path / "scratch"
    )
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    record = members.pop("mini_vllm-0.33.0.dist-info/RECORD").decode().splitlines()[:-1]
    stated = {name: urlsafe_b64decode(digest.removeprefix("sha256=") + "=") for name, digest, _ in (line.split(",") for line in record)}
    assert stated == {name: hashlib.sha256(data).digest() for name, data in members.items()}
    libraries = [name for name in members if name.endswith(".so")]
    assert len(libraries) == 3
    assert members["mini_vllm-0.33.0.dist-info/entry_points.txt"] == b"[console_scripts]\nmini-vllm = mini_vllm.__main__:main\n"
    assert all(members[name].startswith(b"\x7fELF") and b".nv_fatbin" in members[name] for name in libraries)
    # nvcc's temporary names hold its process id; with them the wheel, and so the demo's lock, would differ from run to run.
    assert not [name for name in libraries if b"tmpxft" in members[name]]
