"""Pins: releases that exclude each other are named before anything large is fetched, at an index that serves ranges of real wheels."""

from __future__ import annotations

import gzip
import http.server
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
from tests.support import guides, wheels
from tests.unit.conftest import ROOT, Mini, write_sdist

from sparkwright.builder import pins
from sparkwright.cli import main, patch, stages
from sparkwright.core import strict_yaml
from sparkwright.core.files import sha256_file
from sparkwright.demo import upstreams
from sparkwright.forks import package_index, resolve
from sparkwright.forks.stack import render_lock

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


def test_the_advice_names_the_verbs_that_have_the_option() -> None:
    *_, sentence = pins.PinError.references["pins-disagree"].todo.split(". ")
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
