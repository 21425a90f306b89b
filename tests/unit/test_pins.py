"""Pins: releases that exclude each other are named before anything is written or compiled."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import guides, wheels
from tests.unit.conftest import ROOT, Mini, write_sdist

from sparkwright.builder import BuildError, pins
from sparkwright.cli import main, patch, stages
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.demo import upstreams
from sparkwright.forks import package_index, resolve
from sparkwright.forks.stack import render_lock

TAG = upstreams.tag()
RELEASES: dict[str, dict[str, list[str]]] = {
    "flashinfer": {"0.7.2": [], "0.7.4": []},
    "vllm": {
        "0.33.0": ["mini-flashinfer==0.7.2", "apache-tvm-ffi==0.1.9", "torch==2.14.0", "requests==1; extra == 'x'"],
        "0.34.0": ["mini-flashinfer==0.7.4", "mini-tool==2"],
    },
}


@pytest.fixture(name="locked", scope="module")
def _locked(locked_mini: Mini, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mini, str]]:
    """Return the demo's project, locked at an index with two releases of two of its forks, and the address of that index."""
    made, index = Mini(tmp_path_factory.mktemp("pinned")), tmp_path_factory.mktemp("index")
    shutil.copytree(locked_mini.root.parent, made.root.parent, dirs_exist_ok=True)
    for fork, releases in RELEASES.items():
        project, page = f"mini-{fork}", index / "simple" / f"mini-{fork}" / "index.html"
        page.parent.mkdir(parents=True)
        for version, requires in releases.items():
            path = wheels.plain(index, project, version, requires=requires, tag=TAG if fork == "vllm" else "py3-none-any")
            source = index / f"mini_{fork}-{version}.tar.gz"
            later = {"docs/taken.txt": b"taken\n", "docs/other.txt": b"theirs\n"} if version == "0.34.0" else {}
            write_sdist(source, upstreams.files(fork) | later)
            with page.open("a") as text:
                for file in (path, source):
                    text.write(f'<a href="../../{file.name}#sha256={sha256_file(file)}">{file.name}</a>\n')
        git = f'{fork}.git", ref: "{upstreams.TAGS[fork]}"}}\n'
        made.edit("forks/demo/stack.yaml", git, f'{git}      sdist: {{name: "{project}", version: "{upstreams.TAGS[fork][1:]}"}}\n')
    tool, page = wheels.plain(index, "mini-tool", "2"), index / "simple" / "mini-tool" / "index.html"
    page.parent.mkdir()
    page.write_text(f'<a href="../../{tool.name}#sha256={sha256_file(tool)}">{tool.name}</a>\n')
    base = f'{{name: "mini-vllm", version: "0.33.0", tag: "{TAG}"}}'
    made.edit("forks/demo/stack.yaml", "    needs: [cutlass]\n", f"    needs: [cutlass]\n    bases:\n      {platform.machine()}: {base}\n")
    tools = made.root / "build/demo/requirements.in"
    tools.write_text(tools.read_text() + "torch==2.14.0\napache-tvm-ffi>=0.1.9,<0.2\n")
    with pytest.MonkeyPatch.context() as patch, upstreams.serve(index) as address:
        patch.setenv("SPARKWRIGHT_INDEX_URL", f"{address}/simple/")
        (made.root / "forks/demo/lock.yaml").write_text(render_lock(resolve.resolve(made.context())))
        yield made, f"{address}/simple/"


@pytest.fixture(name="pinned")
def _pinned(locked: tuple[Mini, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """Return a copy of the locked project, with the official wheel in its store."""
    made = Mini(tmp_path / "pinned")
    shutil.copytree(locked[0].root.parent, made.root.parent, ignore=shutil.ignore_patterns(made.cache.name))
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", locked[1])
    context = made.context()
    base = context.lock.forks["vllm"].bases[platform.machine()]
    package_index.obtain(context.store, base.name, base.filename, base.sha256)
    return made


TORCH = ("build/demo/requirements.in", "torch==2.14.0", "torch==2.15.0")
NEEDLESS = ("build/demo/environment.yaml", "    package: mini_vllm\n", '    package: mini_vllm\n    requires: {mini-flashinfer: "mini-flashinfer==0.7.1"}\n')
OFFICIAL = f"mini_vllm-0.33.0-{TAG}.whl names"


@pytest.mark.parametrize(
    ("words", "edit", "lines"),
    [
        ("plan", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("build", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("lock", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("plan", NEEDLESS, [f"forks/demo/stack.yaml names mini-flashinfer==0.7.2, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.1"]),
        ("patch bump --fork flashinfer --to 0.7.4", None, [
            f"forks/demo/stack.yaml names mini-flashinfer==0.7.4, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.2",
        ]),
    ],
    ids=["plan", "build", "lock", "requires", "bump"],
)  # fmt: skip
def test_releases_that_exclude_each_other_are_named(
    pinned: Mini, words: str, edit: tuple[str, str, str] | None, lines: list[str]
) -> None:
    """What the official wheel and the tools require counts, and nothing is written."""
    # A release that was accepted in place of the one that upstream pins fits.
    accepted = 'cutlass.git", ref: "v4.7.2"}\n      upstream: "v4.7.1"\n      accepted: "it compiles"\n'
    pinned.edit("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"}\n', accepted)
    if edit:
        pinned.edit(*edit)
    before = {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()}
    with refusal("pins-disagree") as caught:
        main.run([*words.split(), *pinned.words])

    assert list(caught.value.details) == lines
    assert {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()} == before


def test_a_wheel_that_is_not_in_the_store_is_not_compared_and_that_is_said(pinned: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.edit(*TORCH)
    context = pinned.context()
    assert len(pins.disagreements(context, context.lock)) == 1
    shutil.rmtree(context.store.root / "downloads")
    assert pins.disagreements(context, context.lock) == []
    assert "not all pins of vllm were compared" in capsys.readouterr().err


def test_a_requirement_of_the_official_wheel_that_is_none_is_named(pinned: Mini) -> None:
    context = pinned.context()
    base = context.lock.forks["vllm"].bases[platform.machine()]
    path = package_index.path_of(context.store, base.sha256, base.filename)
    info = "mini_vllm-0.33.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Name: mini-vllm\nRequires-Dist: torch ==\n")
    with refusal("wheel-invalid", match="states a requirement that is none"):
        pins.disagreements(context, context.lock)


def test_the_release_that_a_fork_of_the_stack_asks_for_is_compared(pinned: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """By CMakeLists.txt of the locked tree, which is in the store; a commit is no release."""
    pinned.edit("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"', 'cutlass.git", ref: "v4.7.2"')
    context, files = pinned.context(), upstreams.files("vllm")
    sdist = context.lock.forks["vllm"].sdist
    assert sdist
    tree = sdist.tree
    assert context.objects.store_files((path, REGULAR, data) for path, data in files.items()) == tree
    assert pins.disagreements(context, context.lock) == ["forks/demo/stack.yaml names mini-cutlass==4.7.2, CMakeLists.txt of vllm mini-cutlass==4.7.1"]
    commit = "57e3cfb47a2d9e0d46eb6335c3dc411498efa198"
    cmake = re.sub(rb'(CUTLASS_REVISION) "[^"]*"', rb'\1 "%s"' % commit.encode(), files["CMakeLists.txt"])
    other = context.objects.store_files((path, REGULAR, data) for path, data in {**files, "CMakeLists.txt": cmake}.items())
    lock = context.project.lock_file
    lock.write_text(lock.read_text().replace(f"tree: {tree}", f"tree: {other}"))
    later = pinned.context()
    assert pins.disagreements(later, later.lock) == []
    assert f"vllm names no release of cutlass: {commit}" in capsys.readouterr().err


def test_an_archive_that_the_lock_does_not_have_yet_is_named(pinned: Mini) -> None:
    """A wheel that proves the commit was added to stack.yaml after locking."""
    git = 'cutlass.git", ref: "v4.7.1"}\n'
    wheel = f'      wheel: {{name: "mini-vllm", version: "0.33.0", tag: "{TAG}", folder: "mini_vllm"}}\n'
    pinned.edit("forks/demo/stack.yaml", git, git + wheel)
    with refusal("source-unresolved", match="names no wheel of cutlass"):
        main.run(["fetch", "--fork", "cutlass", "--source", "git", *pinned.words])


def test_the_advice_names_the_verbs_that_have_the_option() -> None:
    *_, sentence = BuildError.references["pins-disagree"].todo.split(". ")
    own = {verb for table in (stages._OPTIONS, patch._OPTIONS) for verb, names in table.items() if "--force-pin" in names}
    assert own == set(re.findall("patch bump|lock|plan|build", sentence))


def test_the_guide_to_a_new_stack(pinned: Mini, tmp_path: Path) -> None:
    """Its commands run as they stand there, but for `plan`, whose compiler the index does not have."""
    (pinned.root / "build/demo/requirements.in").write_text("# Tools of the demo.\nmini-tool==2\n")
    (tmp_path / "config.yaml").write_text(strict_yaml.dump({"mirrors": {upstreams.HOST: f"{pinned.upstreams}/"}}))
    environment = {**os.environ, "SPARKWRIGHT_CONFIG": str(tmp_path / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(pinned.cache)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    places = {"2026.11": "demo", "NEXT": "next", "0.33.1": "0.34.0", "0.7.4": "0.7.2", "0.7.5": "0.7.4", "sparkwright plan": "sparkwright apply"}
    guides.run(ROOT / "docs/howto/make-a-stack.md", pinned.root, environment, places)
