"""Builds run without a network and in folders of fixed names: tried with real programs in real namespaces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.refusals import refusal

from sparkwright.builder.environment import sandbox
from sparkwright.builder.environment.sandbox import INSIDE, Sandbox

refused = sandbox._refusal()
apart = pytest.mark.skipif(refused is not None, reason=f"no namespaces here: {refused}")


class Lab:
    """A sandbox around one folder, and programs that are run in it."""

    def __init__(self, folder: Path, kind: str = "") -> None:
        self.work, self.log = folder / "work", folder / "log"
        self.work.mkdir()
        self.sandbox = Sandbox("none") if kind == "none" else Sandbox.create({self.work: "mini"})

    def run(self, *command: str) -> str:
        """Run *command* and return what it printed."""
        self.sandbox.run(command, log=self.log, env=dict(os.environ))
        return "".join(self.log.read_text().splitlines(keepends=True)[1:])

    def shell(self, script: str) -> str:
        return self.run("sh", "-c", script)


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture(name="listener")
def _listener() -> Iterator[int]:
    """A server on this machine's loopback, which a sandbox must not reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@apart
def test_a_program_sees_its_folder_under_a_fixed_name(lab: Lab) -> None:
    """What lies in the folder is read, and what is written there stays, by a name without this machine's paths."""
    (lab.work / "given").write_text("from outside\n")

    assert lab.shell(f"cat {INSIDE}/mini/given; echo made inside > {INSIDE}/mini/made; ls {INSIDE}") == "from outside\nmini\n"
    assert (lab.work / "made").read_text() == "made inside\n"
    assert not (INSIDE / "mini").exists()
    assert lab.sandbox.sandbox_path(lab.work / "a") == INSIDE / "mini" / "a"
    assert lab.sandbox.sandbox_path(Path("/elsewhere/a")) == Path("/elsewhere/a")


@apart
def test_the_same_file_in_two_places_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    """__FILE__ and the debug information hold the fixed name, so two checkouts give one object."""
    objects = []
    for name in ("one", "an/other"):
        (tmp_path / name).mkdir(parents=True)
        lab = Lab(tmp_path / name)
        (lab.work / "a.c").write_text("const char *where(void) { return __FILE__; }\n")
        lab.run("cc", "-g", "-c", f"{INSIDE}/mini/a.c", "-o", f"{INSIDE}/mini/a.o")
        objects.append((lab.work / "a.o").read_bytes())

    assert objects[0] == objects[1]
    assert b"/usr/local/src/mini/a.c" in objects[0]


@apart
def test_no_program_reaches_even_this_machine(lab: Lab, listener: int) -> None:
    """The loopback device in there is another one: a server of this machine does not answer."""
    connect = f"import socket; socket.create_connection(('127.0.0.1', {listener}), 2)"
    subprocess.run([sys.executable, "-c", connect], check=True)

    with refusal("command-failed") as caught:
        lab.run(sys.executable, "-c", connect)
    assert any("Connection refused" in line for line in caught.value.details)


@pytest.mark.parametrize("kind", ["none", pytest.param("", marks=apart)])
def test_a_download_is_named_although_the_program_got_over_it(tmp_path: Path, kind: str) -> None:
    """A clone whose failure is swallowed fails the build, which says from where, whether or not there is a network."""
    lab = Lab(tmp_path, kind)

    with refusal("build-downloads") as caught:
        lab.shell("git clone -q https://sources.invalid/some/project.git p || true")
    assert "sources.invalid" in caught.value.what
    assert any("https://sources.invalid/some/project.git" in line for line in caught.value.details)


@apart
def test_a_download_past_the_proxy_is_named_too(lab: Lab) -> None:
    """A program that does not heed the proxy fails for want of a network, and its words say what it wanted."""
    with refusal("build-downloads") as caught:
        lab.shell("env -u http_proxy -u https_proxy -u HTTPS_PROXY -u ALL_PROXY -u all_proxy git clone -q https://sources.invalid/p.git p")
    assert "sources.invalid" in " ".join(caught.value.details)


@apart
def test_nothing_of_a_killed_build_lives_on(lab: Lab) -> None:
    """Whoever starts the program is killed without warning: the program and its children end, wherever they hid."""
    marker = f"3141.{os.getpid()}"
    script = f"setsid sleep {marker} & sleep {marker}"
    code = (
        "import os; from pathlib import Path; from sparkwright.builder.environment.sandbox import Sandbox;"
        f"sandbox = Sandbox.create({{Path({str(lab.work)!r}): 'mini'}});"
        f"sandbox.run(['sh', '-c', {script!r}], log=Path({str(lab.log)!r}), env=dict(os.environ))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as builder:
        _wait_for(lambda: len(_sleeping(marker)) == 2)
        builder.kill()
    _wait_for(lambda: not _sleeping(marker))


def _sleeping(marker: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[:2] == ["sleep", marker]]


def _wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_namespaces_a_build_that_needs_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose system has no unshare gives a sandbox that hides nothing, and none at all where that would not do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox._refusal.cache_clear()
    try:
        assert Sandbox.create({tmp_path: "mini"}) == Sandbox("none")
        with refusal("isolation-missing", match="without a network"):
            Sandbox.create({tmp_path: "mini"}, needed=True)
    finally:
        sandbox._refusal.cache_clear()


def test_a_container_that_has_a_network_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable alone does not make a sandbox: a machine with more than a loopback device is no container without a network."""
    monkeypatch.setenv(sandbox.VARIABLE, "container")
    devices = {name for _, name in socket.if_nameindex()}

    assert (Sandbox.create({tmp_path: "mini"}).kind == "container") == (devices == {"lo"})
