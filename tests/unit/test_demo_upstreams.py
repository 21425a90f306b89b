"""The demo's upstreams have fixed ids and the shapes that other tests count on, and its reviewed data fits them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkwright.audit import policy
from sparkwright.builder import toolchain
from sparkwright.builder.arch import rules as archs
from sparkwright.cherry_picks import series
from sparkwright.core import git
from sparkwright.core.git import Objects
from sparkwright.demo import upstreams
from sparkwright.demo.upstreams import SOURCES, TAGS
from sparkwright.forks.stack import Project

PROJECT = Project(SOURCES.parent / "project", "demo")
PATCHES = series.load(PROJECT.series_folder("vllm"))
TAG = TAGS["vllm"]


@pytest.fixture(name="repositories", scope="module")
def _repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstreams")
    upstreams.write_repositories(folder)
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


def test_ids_depend_on_nothing_of_this_machine(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    upstreams.write_repositories(tmp_path)
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


def words(command: list[str | Path], model: Path, *options: str) -> str:
    """Return the words of *model* after the prompt, as the installed program prints them."""
    done = subprocess.run([*command, model, upstreams.PROMPT, *options], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_patched_package_writes_the_learnt_text(tmp_path: Path) -> None:
    command, model = installed(tmp_path / "patched", patched=True), upstreams.write_model(tmp_path / "toy")
    assert words(command, model) == upstreams.ANSWER
    assert words(command, model, "--count", "3") == " ".join(upstreams.ANSWER.split()[:3])


def test_unpatched_package_repeats_a_word(tmp_path: Path) -> None:
    """What an earlier layer left in memory becomes the largest scale, which scales every weight away: the first patch's reason."""
    command, model = installed(tmp_path / "stock", patched=False), upstreams.write_model(tmp_path / "toy")
    assert set(words(command, model).split()) == {"a"}
