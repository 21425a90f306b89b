"""Pins: releases that exclude each other are named before anything large is fetched, at an index that serves ranges of real wheels."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support import guides, processes, wheels
from tests.unit.conftest import ROOT, Mini, write_sdist

from sparkwright.builder import new_stack, pins, toolchain
from sparkwright.builder.arch import rules
from sparkwright.cherry_picks import series
from sparkwright.cli import main, patch, stages
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.core.git import REGULAR
from sparkwright.demo import upstreams
from sparkwright.forks import package_index, resolve
from sparkwright.forks.stack import Project, read_lock, render_lock, stack_names

TAG = upstreams.tag()
#: Bytes of the official wheel.
SIZE = 6_000_000
RELEASES = {
    "flashinfer": {"0.7.2": ["ninja"], "0.7.4": ["apache-tvm-ffi>=0.2"]},
    "vllm": {
        "0.33.0": ["mini-flashinfer==0.7.2", "apache-tvm-ffi==0.1.9", "torch==2.14.0", "requests==1; extra == 'x'"],
        "0.34.0": ["mini-flashinfer==0.7.4", "mini-tool==2"],
    },
}


class Server(http.server.SimpleHTTPRequestHandler):
    """
    Serves the files below a folder, and, if *ranges* is set, ranges of them; *sent* has the bytes of each reply but pages, and
    *instead* what is served in place of a file, nothing for 403.
    """

    ranges, sent, instead = True, list[int](), dict[str, bytes]()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        match = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", self.headers.get("Range", ""))
        if not path.is_file():
            super().do_GET()
            return
        data = self.instead.get(path.name, path.read_bytes())
        if not data:
            self.send_error(403)
            return
        start, end = match.groups() if match and self.ranges else ("0", "")
        first = int(start) if start else max(0, len(data) - int(end))
        part = data[first : int(end) + 1 if start and end else None]
        self.send_response(206 if match and self.ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)
        self.sent.append(len(part))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(name="locked", scope="module")
def _locked(locked_mini: Mini, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mini, str]]:
    """Return the demo's project, locked at an index with two releases of two of its forks, and the address of that index."""
    made, index = Mini(tmp_path_factory.mktemp("pinned")), tmp_path_factory.mktemp("index")
    shutil.copytree(locked_mini.root.parent, made.root.parent, dirs_exist_ok=True)
    for fork, releases in RELEASES.items():
        project, page = f"mini-{fork}", index / "simple" / f"mini-{fork}" / "index.html"
        page.parent.mkdir(parents=True)
        for version, requires in releases.items():
            tag, size = (TAG, SIZE) if fork == "vllm" else ("py3-none-any", 0)
            path = wheels.plain(index, project, version, requires=requires, tag=tag, size=size)
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
    with pytest.MonkeyPatch.context() as patch, http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(index))) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        patch.setenv("SPARKWRIGHT_INDEX_URL", address := f"http://127.0.0.1:{server.server_port}/simple/")
        (made.root / "forks/demo/lock.yaml").write_text(render_lock(resolve.resolve(made.context())))
        yield made, address
        server.shutdown()


@pytest.fixture(name="pinned")
def _pinned(locked: tuple[Mini, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """Return a copy of the locked project with an empty store."""
    made = Mini(tmp_path / "pinned")
    shutil.copytree(locked[0].root.parent, made.root.parent, ignore=shutil.ignore_patterns(made.cache.name))
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", locked[1])
    monkeypatch.setattr(Server, "sent", [])
    monkeypatch.setattr(Server, "instead", {})
    return made


TORCH = ("build/demo/requirements.in", "torch==2.14.0", "torch==2.15.0")
NEEDLESS = ("build/demo/environment.yaml", "    package: mini_vllm\n", '    package: mini_vllm\n    requires: {mini-flashinfer: "mini-flashinfer==0.7.1"}\n')
OFFICIAL, SDIST = f"mini_vllm-0.33.0-{TAG}.whl names", "CMakeLists.txt of mini_vllm-0.33.0.tar.gz"


@pytest.mark.parametrize(
    ("words", "edit", "lines"),
    [
        ("plan", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("build", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("lock", TORCH, [f"{OFFICIAL} torch==2.14.0, build/demo/requirements.in torch==2.15.0"]),
        ("plan", NEEDLESS, [f"forks/demo/stack.yaml names mini-flashinfer==0.7.2, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.1"]),
        ("patch bump --fork flashinfer --to 0.7.4", None, [
            f"forks/demo/stack.yaml names mini-flashinfer==0.7.4, {OFFICIAL.removesuffix(' names')} mini-flashinfer==0.7.2",
            f"mini_flashinfer-0.7.4-py3-none-any.whl names apache-tvm-ffi>=0.2, {OFFICIAL.removesuffix(' names')} apache-tvm-ffi==0.1.9",
            "mini_flashinfer-0.7.4-py3-none-any.whl names apache-tvm-ffi>=0.2, build/demo/requirements.in apache-tvm-ffi<0.2,>=0.1.9",
        ]),
        ("patch bump --fork cutlass --to 4.8.0", None, [f"forks/demo/stack.yaml names mini-cutlass==4.8.0, {SDIST} mini-cutlass==4.7.1"]),
    ],
    ids=["plan", "build", "lock", "requires", "bump", "bump of a needed fork"],
)  # fmt: skip
def test_releases_that_exclude_each_other_are_named_before_a_download(
    pinned: Mini, words: str, edit: tuple[str, str, str] | None, lines: list[str]
) -> None:
    """What the official wheel, its sources and the tools require counts; parts of two files are read, and nothing is written."""
    # A release that was accepted in place of the one that upstream pins fits.
    accepted = 'cutlass.git", ref: "v4.7.2"}\n      upstream: "v4.7.1"\n      accepted: "it compiles"\n'
    pinned.edit("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"}\n', accepted)
    if edit:
        pinned.edit(*edit)
    before = {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()}
    with refusal("pins-disagree") as caught:
        main.run([*words.split(), *pinned.words])

    assert list(caught.value.details) == lines
    assert sum(Server.sent) < SIZE / 2
    assert {path: path.read_bytes() for path in pinned.root.rglob("*") if path.is_file()} == before


def test_what_was_read_of_a_locked_file_is_known_without_a_network(pinned: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """It is kept by the hash of the file; from a server that would send a large wheel whole, nothing is taken, and the run says so."""
    pinned.edit(*TORCH)
    Server.ranges = False
    try:
        with refusal("source-unreachable"):
            main.run(["plan", *pinned.words, "--source", "sdist"])
    finally:
        Server.ranges = True
    assert "not all pins of vllm were compared" in capsys.readouterr().err
    for words in ([], ["--offline"]):
        with refusal("pins-disagree"):
            main.run(["plan", *pinned.words, *words])


OTHER_CUTLASS = ("forks/demo/stack.yaml", 'cutlass.git", ref: "v4.7.1"', 'cutlass.git", ref: "v4.7.2"')


@pytest.mark.parametrize("answer", [b"", b"no archive", gzip.compress(b"no tar")], ids=["403", "other bytes", "no tar"])
def test_an_answer_that_is_no_archive_is_not_kept_as_no_pins(pinned: Mini, answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """The run says that it compared less, and the next one reads the pins."""
    pinned.edit(*OTHER_CUTLASS)
    Server.instead["mini_vllm-0.33.0.tar.gz"] = answer
    assert pins.disagreements(pinned.context()) == []
    assert "not all pins of vllm were compared" in capsys.readouterr().err
    Server.instead.clear()
    assert pins.disagreements(pinned.context()) == [f"forks/demo/stack.yaml names mini-cutlass==4.7.2, {SDIST} mini-cutlass==4.7.1"]


def test_a_part_of_a_file_counts_until_the_whole_is_there(pinned: Mini, tmp_path: Path) -> None:
    """The index served another wheel under the locked name: what was read of it does not outlive the one with the locked hash."""
    context = pinned.context()
    locked = context.lock.forks["vllm"].bases[platform.machine()]
    other = wheels.plain(tmp_path, "mini-vllm", "0.33.0", requires=["torch==2.15.0"], tag=TAG, size=100)
    Server.instead[locked.filename] = other.read_bytes()
    assert [line.rpartition(" ")[2] for line in pins.disagreements(context)] == ["torch==2.14.0"]
    Server.instead.clear()
    package_index.obtain(context.store, locked.name, locked.filename, locked.sha256)
    assert pins.disagreements(context) == []


def test_a_pin_by_commit_is_compared_with_no_release(pinned: Mini, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.edit(*OTHER_CUTLASS)
    files, commit = upstreams.files("vllm"), "57e3cfb47a2d9e0d46eb6335c3dc411498efa198"
    cmake = re.sub(rb'(CUTLASS_REVISION) "[^"]*"', rb'\1 "%s"' % commit.encode(), files["CMakeLists.txt"])
    assert commit.encode() in cmake
    write_sdist(tmp_path / "other.tar.gz", files | {"CMakeLists.txt": cmake})
    Server.instead["mini_vllm-0.33.0.tar.gz"] = (tmp_path / "other.tar.gz").read_bytes()
    assert pins.disagreements(pinned.context()) == []
    assert f"names no release of cutlass: {commit}" in capsys.readouterr().err


def test_an_archive_that_the_lock_does_not_have_yet_is_named(pinned: Mini) -> None:
    """A wheel that proves the commit was added to stack.yaml after locking."""
    git = 'cutlass.git", ref: "v4.7.1"}\n'
    wheel = f'      wheel: {{name: "mini-vllm", version: "0.33.0", tag: "{TAG}", folder: "mini_vllm"}}\n'
    pinned.edit("forks/demo/stack.yaml", git, git + wheel)
    with refusal("source-unresolved", match="names no wheel of cutlass"):
        main.run(["fetch", "--fork", "cutlass", "--source", "git", *pinned.words])


def test_an_accepted_release_of_the_index_fits(pinned: Mini) -> None:
    """What it requires itself is compared all the same."""
    release = 'sdist: {name: "mini-flashinfer", version: "0.7.2"}\n'
    pinned.edit("forks/demo/stack.yaml", release, f'{release.replace("0.7.2", "0.7.4")}      upstream: "v0.7.2"\n      accepted: "it compiles"\n')
    lines = pins.disagreements(pinned.context(), every=True)
    assert {line.partition(" ")[0] for line in lines} == {"mini_flashinfer-0.7.4-py3-none-any.whl"}


PATCH = """From: T <t@t.example>
Date: Sun, 1 Nov 2026 12:00:00 +0000
Subject: [PATCH] Change a file

As told.

Upstream-Status: Pending
Reason: the test wants it
Drop-When: the test ends
---
diff --git a/docs/{0}.txt b/docs/{0}.txt
new file mode 100644
--- /dev/null
+++ b/docs/{0}.txt
@@ -0,0 +1 @@
+{0}
"""
VENDORED_RULE = """
  - {name: attention-12.1, fork: vllm, source: flash-attention, file: CMakeLists.txt, command: set, where: [ARCHS], argument: 1,
     expect: "8.0", append: ["12.1"], reason: the test, drop_when: it ends}

kept:
"""
NEW = ["lock", "--new", "next", "--vllm", "0.34.0"]


@pytest.fixture(name="older")
def _older(pinned: Mini) -> Mini:
    """Return the project with a patch that the next release has, one that conflicts with it, a rule for another list, and few tools."""
    series = pinned.root / "forks/demo/vllm/series"
    series.write_text(f"{series.read_text()}taken.patch\nother.patch\n")
    for name in ("taken", "other"):
        series.with_name(f"{name}.patch").write_text(PATCH.format(name))
    pinned.edit("build/demo/archs.yaml", '"8.0;9.0;10.0;12.0"', '"8.0"')
    pinned.edit("build/demo/archs.yaml", "\nkept:\n", VENDORED_RULE)
    entry = "    requires:\n      torch: torch==2.14.1\n"
    pinned.edit("build/demo/environment.yaml", "    package: mini_vllm\n", f"    package: mini_vllm\n{entry}")
    (pinned.root / "build/demo/requirements.in").write_text("# Tools of the demo.\nmini-tool==1\n")
    return pinned


def test_a_new_stack_has_the_pins_of_its_release_and_says_what_no_longer_fits(older: Mini, capsys: pytest.CaptureFixture[str]) -> None:
    """What upstream took is gone, what conflicts stays, and the commands to go on are named; another stack changes in nothing."""
    before = {path: path.read_bytes() for path in older.root.rglob("*") if path.is_file()}
    assert main.main([*NEW, *older.words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    states = {finding["name"]: finding["state"].partition(":")[0] for finding in document["findings"]}
    todo = [finding["todo"] for finding in document["findings"] if finding["todo"]]
    made, words = Project(older.root, "next"), "--stack next --fork vllm"

    assert [pins.release(made.spec.forks[fork]) for fork in ("cutlass", "flashinfer", "vllm")] == ["4.7.1", "0.7.4", "0.34.0"]
    assert made.build_folder.joinpath("requirements.in").read_text().endswith("\nmini-tool==2\n")
    assert toolchain.spec(made).forks["vllm"].requires == {}
    assert (states["taken.patch"], states["other.patch"]) == ("is upstream", "conflicts")
    assert (states["supported-12.1"], states["marlin-repack-native"]) == ("no longer matches", "matches")
    assert states["attention-12.1"] == "not tried"
    assert todo == [f"sparkwright patch rebase {words}, then sparkwright patch export {words}", "correct it in build/next/archs.yaml, or remove it"]
    assert series.names(made.series_folder("vllm"))[-1] == "other.patch"
    locked = read_lock(made).forks["vllm"].bases[platform.machine()]
    assert (locked.version, before) == ("0.34.0", {path: path.read_bytes() for path in before})
    with refusal("usage", match="There is a stack"):
        main.run([*NEW, *older.words])


def test_a_new_stack_loses_nothing_that_people_wrote(older: Mini) -> None:
    """Whatever the form of the files; only what was changed for the other release of vLLM goes."""
    stack_file, tools = older.root / "forks/demo/stack.yaml", older.root / "build/demo/requirements.in"
    stack_file.write_text(stack_file.read_text()[stack_file.read_text().index("stack:") :])
    tools.write_text('mini-tool[fast]==1; python_version >= "3.8"  # of ours\n')
    older.edit("build/demo/environment.yaml", "    distribution: mini-cutlass\n", "    distribution: mini-cutlass\n    variables:\n      torch: a variable\n")
    shutil.copy(older.root / "build/demo/archs.yaml", older.root / "build/demo/archs-9.0a.yaml")
    audit = older.root / "ci/audit"
    for name in ("demo", "demo-9.0a", "demo-other"):
        (audit / f"{name}.yaml").write_text(f"# {name}\n")
    shutil.copytree(older.root / "forks/demo", older.root / "forks/branch")
    older.edit("forks/branch/stack.yaml", 'sdist: {name: "mini-vllm", version: "0.33.0"}', "")
    older.edit("forks/branch/stack.yaml", f'vllm.git", ref: "{upstreams.TAGS["vllm"]}"', 'vllm.git", ref: "main"')
    assert main.main([*NEW, *older.words]) == 0

    made, near = Project(older.root, "next"), Project(older.root, "demo")
    assert (made.spec.arch, [*made.spec.forks]) == (near.spec.arch, [*near.spec.forks])
    assert tools.parent.with_name("next").joinpath("requirements.in").read_text().splitlines()[1:] == ['mini-tool[fast]==2; python_version >= "3.8"']
    assert toolchain.spec(made).forks["cutlass"].variables == {"torch": "a variable"}
    assert {path.name: path.read_text() for path in audit.glob("next*")} == {"next.yaml": "# demo\n", "next-9.0a.yaml": "# demo-9.0a\n"}


@pytest.mark.parametrize("folder", ["build", "forks"])
def test_a_new_stack_takes_no_folder_that_is_there(older: Mini, folder: str) -> None:
    notes = older.root / folder / "next" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with refusal("usage", match="There is a stack 'next' already"):
        main.run([*NEW, *older.words])
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("words", [["--tools"], ["--force-pin"], ["--fork", "vllm"]])
def test_a_new_stack_refuses_what_it_does_not_heed(older: Mini, words: list[str]) -> None:
    with refusal("usage", match="--new excludes"):
        main.run([*NEW, *older.words, *words])


def test_without_a_stack_of_a_release_there_is_no_new_one(older: Mini) -> None:
    older.edit("forks/demo/stack.yaml", 'sdist: {name: "mini-vllm", version: "0.33.0"}', "")
    older.edit("forks/demo/stack.yaml", f'vllm.git", ref: "{upstreams.TAGS["vllm"]}"', 'vllm.git", ref: "main"')
    with refusal("not-provided", match="release of vllm"):
        main.run([*NEW, *older.words])


def test_rules_for_a_file_that_is_too_large_no_longer_match(older: Mini) -> None:
    context = older.context()
    tree = context.objects.store_files([("CMakeLists.txt", REGULAR, b"#" * (rules.LARGEST_CMAKE + 1))])
    findings = new_stack._try_rules(context, "vllm", tree)
    assert {finding.state for finding in findings if finding.name == "supported-12.1"} == {
        f"no longer matches: CMakeLists.txt is larger than {rules.LARGEST_CMAKE} bytes."
    }


def test_the_advice_names_the_verbs_that_have_the_option() -> None:
    *_, sentence = pins.PinError.references["pins-disagree"].todo.split(". ")
    own = {verb for table in (stages._OPTIONS, patch._OPTIONS) for verb, names in table.items() if "--force-pin" in names}
    assert own == set(re.findall("patch bump|lock|plan|build", sentence))


def test_a_killed_run_leaves_no_stack(older: Mini) -> None:
    """Whatever was written is no stack, and the next run makes it."""
    for below, step in ((".new-next/forks", 3), ("project/build/next", 1), ("project/forks/next", 1), ("project/build/next", 2)):
        assert processes.kill_at(step, lambda: main.main([*NEW, *older.words]), below)
        assert stack_names(older.root) == ["demo"]
    assert main.main([*NEW, *older.words]) == 0

    assert (stack_names(older.root), [*(older.root / ".rebase").iterdir()]) == (["demo", "next"], [])


def test_the_guide_to_a_new_stack(pinned: Mini, tmp_path: Path) -> None:
    """Its commands run as they stand there, but for `plan`, whose compiler the index does not have."""
    (pinned.root / "build/demo/requirements.in").write_text("# Tools of the demo.\nmini-tool==1\n")
    (tmp_path / "config.yaml").write_text(strict_yaml.dump({"mirrors": {upstreams.HOST: f"{pinned.upstreams}/"}}))
    environment = {**os.environ, "SPARKWRIGHT_CONFIG": str(tmp_path / "config.yaml"), "SPARKWRIGHT_CACHE_DIR": str(pinned.cache)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    places = {"NEXT": "next", "0.33.1": "0.34.0", "0.7.4": "0.7.2", "sparkwright plan": "sparkwright apply"}
    guides.run(ROOT / "docs/howto/make-a-stack.md", pinned.root, environment, places)
