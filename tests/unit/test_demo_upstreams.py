"""The demo's upstreams have fixed ids and the shapes that other tests count on, and its reviewed data fits them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64decode
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.refusals import refusal

from sparkwright.audit import policy
from sparkwright.builder import configure
from sparkwright.builder.arch import rules as archs
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.cherry_picks import series
from sparkwright.core import git
from sparkwright.core.git_store import Objects
from sparkwright.demo import base, toy, upstreams
from sparkwright.demo.upstreams import SOURCES, TAGS
from sparkwright.forks import package_index
from sparkwright.forks.stack import Project

PROJECT = Project(SOURCES.parent / "project", "demo")
PATCHES = series.load(PROJECT.series_folder("vllm"))
TAG = TAGS["vllm"]


@pytest.fixture(name="repositories", scope="module")
def _repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstreams")
    upstreams.write(folder)
    return folder


@pytest.fixture(name="tree")
def _tree(repositories: Path, tmp_path: Path) -> Path:
    """Return a checkout of mini vLLM's tag."""
    ask(repositories, "worktree", "add", "--quiet", "--detach", str(tmp_path / "vllm"), TAG)
    return tmp_path / "vllm"


def ask(repositories: Path, *arguments: str) -> str:
    return git.run(arguments, cwd=repositories / "vllm.git")[1].decode()


def patch(tree: Path) -> None:
    for one in PATCHES:
        subprocess.run(["git", "apply", "--index", str(PROJECT.series_folder("vllm") / one.name)], cwd=tree, check=True)


def settings(tree: Path) -> dict[str, str]:
    fork = toolchain.spec(PROJECT).forks["vllm"]
    return {**fork.defines, **fork.core_defines, "FETCHCONTENT_FULLY_DISCONNECTED": "ON", "VLLM_CUTLASS_SRC_DIR": str(SOURCES / "cutlass")}


def test_ids_depend_on_nothing_of_this_machine(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    upstreams.write(tmp_path)
    assert ask(tmp_path, "for-each-ref") == ask(repositories, "for-each-ref")


def test_tagged_trees_hold_the_shipped_files_byte_for_byte(repositories: Path) -> None:
    for fork, tag in TAGS.items():
        objects = Objects(repositories / f"{fork}.git")
        paths = objects.paths(f"{tag}^{{tree}}")
        assert {path: objects.blob(f"{tag}^{{tree}}", path) for path in paths} == upstreams.files(fork)


def test_reviewed_data_is_read_and_the_rules_find_their_sites(tree: Path) -> None:
    patch(tree)
    rules = archs.load(PROJECT.build_folder / "archs.yaml")
    _, sites = archs.rewrite(lambda path: (tree / path).read_bytes(), rules.of("vllm").rules)
    assert [site.after for site in sites] == ["8.0;9.0;10.0;12.0;12.1", "8.0+PTX;12.0f"]
    assert policy.load(PROJECT.audit_file, PROJECT.spec.arch).target == "sm_121f"
    assert set(toolchain.spec(PROJECT).forks) == set(PROJECT.spec.forks)


def test_index_offers_the_wheel_with_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "files" / f"mini_vllm-0.33.0-{base.tag()}.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"bytes")
    base.write_index(tmp_path, wheel)
    with base.serve(tmp_path) as url:
        monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", f"{url}/simple/")
        (offer,) = package_index.files("mini-vllm")
    assert (offer.name, offer.sha256) == (wheel.name, hashlib.sha256(b"bytes").hexdigest())
    assert urlsplit(offer.url).path == f"/files/{wheel.name}"


def installed(folder: Path, *, patched: bool) -> list[str | Path]:
    """Return the command of the package as a wheel would install it; the host's compiler makes what needs no CUDA."""
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
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from mini_vllm.__main__ import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", code]


def test_patched_package_serves_the_learnt_text(tmp_path: Path) -> None:
    model = toy.write(tmp_path / "toy")
    with toy.serving(installed(tmp_path / "patched", patched=True), model, tmp_path / "log") as url:
        assert toy.ask(url, toy.PROMPT) == toy.ANSWER
        assert toy.ask(url, toy.PROMPT, 3) == " ".join(toy.ANSWER.split()[:3])
        with refusal("source-unreachable"):
            toy.ask(url, "elephants")


def test_unpatched_package_repeats_a_word(tmp_path: Path) -> None:
    """What an earlier layer left in memory becomes the largest scale, which scales every weight away: the first patch's reason."""
    model = toy.write(tmp_path / "toy")
    with toy.serving(installed(tmp_path / "stock", patched=False), model, tmp_path / "log") as url:
        assert set(toy.ask(url, toy.PROMPT, 20).split()) == {"a"}


@pytest.mark.parametrize("part", ["patched/mini_vllm/_C_stable_libtorch.abi3.so", "toy/weights.nvfp4"])
def test_server_does_not_start_without_its_parts(tmp_path: Path, part: str) -> None:
    model, program = toy.write(tmp_path / "toy"), installed(tmp_path / "patched", patched=True)
    (tmp_path / part).unlink()
    with refusal("command-failed", match="did not come up"), toy.serving(program, model, tmp_path / "log") as url:
        toy.ask(url, toy.PROMPT)


@pytest.mark.toolchain
def test_the_unpatched_tree_configures_up_to_its_external_projects(tree: Path, tmp_path: Path, tools: Toolchain) -> None:
    env = tools.environment(TORCH_CUDA_ARCH_LIST="12.1f")
    with refusal("configure-failed") as caught:
        configure.configure(tree, tmp_path / "build", cmake=tools.tool("cmake"), defines=settings(tree), env=env, log=tmp_path / "log")
    said = "\n".join(caught.value.details)
    assert "CUDA supported target architectures: 12.0\n" in (tmp_path / "log").read_text()
    # GCC 13 and later get as far as the download, which the settings forbid.
    assert "GCC" in said or "external_projects/big.cmake" in said


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
    files, _ = archs.rewrite(lambda path: (tree / path).read_bytes(), rules.of("vllm").rules)
    for path, data in files.items():
        (tree / path).write_bytes(data)
    after = configure.configure(tree, tmp_path / "after", cmake=tools.tool("cmake"), defines=settings(tree), env=env, log=tmp_path / "log")
    native = [unit for unit in after.units if unit.gencode == ("compute_121f:sm_121f",)]
    others = [unit.source for unit in after.units if unit not in native]
    assert len(native) == 5
    assert all(unit.object.endswith(f"/{unit.source}.o") for unit in native)
    assert others == [kept.unit for kept in rules.kept]


@pytest.mark.toolchain
def test_the_base_wheel_is_whole_and_holds_device_code(tmp_path: Path, tools: Toolchain) -> None:
    wheel = base.write_base_wheel(
        tmp_path, nvcc=tools.tool("nvcc"), env=tools.environment(), scratch=tmp_path / "scratch"
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
