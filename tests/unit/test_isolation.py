"""Builds run without a network and in folders of fixed names, in namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.refusals import refusal
from tests.support.processes import until

from sparkwright.builder import sandbox
from sparkwright.builder.sandbox import INSIDE, Sandbox
from sparkwright.core.store import Store

missing = sandbox._refusal()
namespaces = pytest.mark.skipif(missing is not None, reason=f"no namespaces here: {missing}")


class Lab:
    """A sandbox around the folder ``work``, and programs that are run in it."""

    def __init__(self, folder: Path, kind: str = "") -> None:
        self.work, self.log = folder / "work", folder / "log"
        self.work.mkdir(parents=True)
        self.sandbox = Sandbox("none") if kind == "none" else Sandbox.create({self.work: "mini"})

    def run(self, *command: str) -> str:
        """Run *command* and return what it printed."""
        self.sandbox.run(command, log=self.log, env=dict(os.environ), cwd=self.work)
        return "".join(self.log.read_text().splitlines(keepends=True)[1:])


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@namespaces
def test_a_program_sees_its_folder_under_a_fixed_name(lab: Lab) -> None:
    script = f"echo inside > {INSIDE}/mini/output; ls {INSIDE}"

    assert lab.run("sh", "-c", script) == "mini\n"
    assert (lab.work / "output").read_text() == "inside\n"
    paths = {lab.work / "a": INSIDE / "mini" / "a", Path("/elsewhere/a"): Path("/elsewhere/a")}
    assert {path: lab.sandbox.sandbox_path(path) for path in paths} == paths
    words = f"-I{lab.work} file://{lab.work}/a:{lab.work} /mnt{lab.work} -I/mnt{lab.work}/a {lab.work}-b -DX='{lab.work}'"
    here = f"{INSIDE}/mini"
    assert lab.sandbox.translate(words) == f"-I{here} file://{here}/a:{here} /mnt{lab.work} -I/mnt{lab.work}/a {lab.work}-b -DX='{here}'"


@namespaces
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("link", ["store", "store/work"])
def test_a_link_above_a_folder_changes_no_byte(tmp_path: Path, link: str) -> None:
    """Where the cache directory, or a folder in it, is a link, an object has the bytes that it has elsewhere, by whichever path it is compiled."""
    folders = [tmp_path / "plain" / "store" / "work", tmp_path / "linked" / "store" / "work"]
    objects = list[bytes]()
    (tmp_path / "disk" / "work").mkdir(parents=True)
    (tmp_path / "linked" / link).parent.mkdir(parents=True)
    (tmp_path / "linked" / link).symlink_to(tmp_path / "disk" / ("work" if link == "store/work" else ""))
    for folder in folders:
        work = Store(folder.parent).folder("work")
        (work / "a.c").write_text("const char *file = __FILE__;\n")
        sandbox = Sandbox.create({work: "mini"})
        for path in (work, work.resolve()):
            sandbox.run(["gcc", "-c", f"{path}/a.c", f"-o{path}/a.o"], log=tmp_path / "log", env=dict(os.environ))
            objects.append((work / "a.o").read_bytes())
    assert len(set(objects)) == 1


@namespaces
def test_a_store_below_the_hidden_folder_keeps_its_names(lab: Lab) -> None:
    """Its files would vanish; they are in a folder in which people keep sources."""
    lab.sandbox = Sandbox.create({INSIDE / "store": "mini"})

    assert lab.run("ls", "-d", str(lab.sandbox.sandbox_path(INSIDE))) == f"{INSIDE}\n"
    assert lab.sandbox.sandbox_path(INSIDE / "store") == INSIDE / "store"


@namespaces
def test_a_program_reaches_no_server_of_this_machine(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = [sys.executable, "-c", f"import socket; socket.create_connection({server.getsockname()!r}, 2)"]
        subprocess.run(connect, check=True)
        with refusal("build-downloads"):
            lab.run(*connect)


CLONE = ("sh", "-c", "git clone -q https://sources.invalid/a/project.git p")
#: The program continues without the source.
CLONE_OR_NOT = ("sh", "-c", f"{CLONE[2]} || true")


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("none", CLONE),
        ("none", CLONE_OR_NOT),
        pytest.param("", CLONE, marks=namespaces),
        pytest.param("", CLONE_OR_NOT, marks=namespaces),
        pytest.param("", ("curl", "-sSf", "http://sources.invalid/a.tar"), marks=[namespaces, pytest.mark.skipif(not shutil.which("curl"), reason="stock Debian has no curl")]),
        *(
            pytest.param("", (sys.executable, "-c", f"import {module}; {module}.{call}('http://sources.invalid')"), marks=namespaces)
            for module, call in (("requests", "get"), ("urllib.request", "urlopen"))
        ),
    ],
)
def test_an_attempt_to_download_is_refused(tmp_path: Path, kind: str, program: tuple[str, ...]) -> None:
    """With and without a network; if the program said the address, it is in the error."""
    with refusal("build-downloads", match=r"sources\.invalid|another host") as caught:
        Lab(tmp_path, kind).run(*program)
    assert CLONE[2] not in program[2] or any("https://sources.invalid/a/project.git" in line for line in caught.value.details)


#: Connects to the proxy that stands in its environment.
CONNECT = "import os, socket, struct; a = socket.create_connection(('127.0.0.1', int(os.environ['http_proxy'].rpartition(':')[2])));"
#: Ends a connection without a request, so that the other side sees a reset one.
RESET = f"{CONNECT} a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); a.close();"


@pytest.mark.parametrize("begin", [RESET, CONNECT], ids=["reset", "silent"])
def test_a_broken_connection_hides_no_attempt(tmp_path: Path, begin: str) -> None:
    """After a connection that was reset, or is open and silent, the next request is refused at once, and its host is named."""
    code = f"{begin} import urllib.request; urllib.request.urlopen('http://sources.invalid', timeout=20)"
    before = time.monotonic()
    with refusal("build-downloads") as caught:
        Lab(tmp_path, "none").run(sys.executable, "-c", code)
    assert time.monotonic() - before < 10
    assert "sources.invalid" in caught.value.what


@pytest.mark.parametrize("kind", ["none", pytest.param("", marks=namespaces)])
@pytest.mark.parametrize("status", [0, 1])
def test_words_of_a_download_decide_nothing(tmp_path: Path, kind: str, status: int) -> None:
    """A compiler's warning quotes the sources; a step that reaches for no host ends as it ended."""
    text = "warning: 'Failed to connect to sources.invalid'"
    with contextlib.nullcontext() if status == 0 else refusal("command-failed"):
        assert text in Lab(tmp_path, kind).run("sh", "-c", f'echo "{text}"; exit {status}')


@namespaces
def test_a_killed_build_leaves_no_process(lab: Lab) -> None:
    """Also none that has left the process group."""
    marker = f"3141.{os.getpid()}"
    code = (
        "import os; from pathlib import Path; from sparkwright.builder.sandbox import Sandbox;"
        f"sandbox = Sandbox.create({{Path({str(lab.work)!r}): 'mini'}});"
        f"sandbox.run(['sh', '-c', 'setsid sleep {marker} & sleep {marker}'], log=Path({str(lab.log)!r}), env=dict(os.environ))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as builder:
        until(lambda: len(_sleeping(marker)) == 2)
        builder.kill()
    until(lambda: not _sleeping(marker))


def _sleeping(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[:2] == ["sleep", marker]]


def test_without_namespaces_a_build_that_needs_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_refusal", lambda: "no unshare")
    assert Sandbox.create({tmp_path: "mini"}) == Sandbox("none")
    with refusal("isolation-missing", match="without a network"):
        Sandbox.create({tmp_path: "mini"}, needed=True)
