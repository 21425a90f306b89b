"""The engine that is not there, and what a build in a container decides before one is asked."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import platform
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import sys_tags
from tests.refusals import refusal
from tests.support import endings

import sparkwright
from sparkwright.builder import container, container_engine, container_run, self_wheel
from sparkwright.builder.container_engine import Engine
from sparkwright.builder.environment import toolchain
from sparkwright.builder.errors import ContainerError
from sparkwright.builder.self_wheel import Interpreter
from sparkwright.cli import main
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]
ID = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where the engine's socket would be; its path is short, because the kernel takes 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/engine.sock")
        yield Path(folder, "engine.sock")


@pytest.fixture
def demo(store: Store) -> RunContext:
    """Return a run on the demo's reviewed data."""
    project = Project(ROOT / "ci" / "sparkwright" / "demo" / "project", "demo")
    return RunContext(project, store, tuple(project.spec.forks), store.root / "dist")


def failure(work: Callable[[], object]) -> SparkwrightError:
    """Return how *work* fails."""
    with pytest.raises(SparkwrightError) as caught:
        work()
    return caught.value


def test_an_absent_engine_is_missing(address: Path) -> None:
    """Where no socket is, no engine is."""
    assert failure(container_engine.connect).reference == "engine-missing"


def test_a_stopped_engine_is_unreachable(address: Path) -> None:
    """A socket that nobody listens at was left by an engine that stopped."""
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(address))

    assert failure(container_engine.connect).reference == "engine-unreachable"


def test_what_is_no_engine_is_unreachable(address: Path) -> None:
    """Some other program at the socket does not count as an engine."""

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    class Wrong(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
            pass

        def address_string(self) -> str:
            return "unix"

    with Server(str(address), Wrong) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = failure(container_engine.connect)
        server.shutdown()

    assert found.reference == "engine-unreachable"


def test_a_socket_of_somebody_else_is_forbidden(address: Path) -> None:
    """The permission that is missing is named, with the group that has it."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        address.chmod(0)
        address.parent.chmod(0o755)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            # Root may open every socket, so another user tries.
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                container_engine._check_socket(str(address))
                os.write(writing, b"opened")
            except SparkwrightError as error:
                os.write(writing, f"{error.reference}: {error.details}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 1000).decode()

    assert said.startswith("engine-forbidden")
    assert "group" in said


def test_an_engine_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders cannot be lent to an engine on another machine."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")

    assert failure(container_engine.connect).reference == "engine-unreachable"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("write /var/lib/dpkg/x: No space left on device", "disk-full"),
        ("OCI runtime create failed: exec /bin/sh: exec format error: unknown", "emulation-missing"),
        ("conflict: unable to delete", "engine-refused"),
    ],
)
def test_the_words_of_an_engine_are_understood(words: str, kind: str) -> None:
    """An error that the engine puts into words becomes the failure that a person can act on, its words kept."""
    asked: Any = SimpleNamespace(info=lambda: {"DockerRootDir": "/var/lib/engine"})
    found = Engine(asked).translate_error(words)

    assert found.reference == kind
    assert words in found.details


def test_a_living_run_keeps_its_containers() -> None:
    """This process is not gone, and neither is one in a process namespace that cannot be seen from here."""
    boot, _, *rest = container.owner_id().split("/")

    assert not container.has_exited(container.owner_id())
    assert not container.has_exited("/".join([boot, "1", *rest]))


def test_a_dead_run_is_gone() -> None:
    """A process that ended, another one with its number, and every process before the last boot own nothing any more."""
    script = "from sparkwright.builder import container; print(container.owner_id())"
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    mine = container.owner_id()

    assert container.has_exited(dead)
    assert container.has_exited(mine + "1")
    assert container.has_exited("another-boot" + mine[mine.index("/") :])


@given(text=st.text(), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_lines_do_not_depend_on_how_they_arrive(text: str, cuts: list[int]) -> None:
    """However an engine cuts a stream into pieces, inside a letter too, the same lines come out."""
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found: list[str] = []
    chunks = ((data[start:end], None) for start, end in itertools.pairwise(places))
    container._forward_lines(chunks, found.append, found.append)

    assert found == (text.removesuffix("\n").split("\n") if text else [])


@pytest.mark.parametrize("named", ["debian:bookworm", "debian@sha256:12", "debian@unresolved", "sha256:0 1", f"{ID}@{ID}@x"])
def test_a_base_without_its_digest_is_refused(demo: RunContext, named: str) -> None:
    """A tag means another image tomorrow, so it never becomes the base of a build."""
    assert failure(lambda: container.pinned_base(demo, named)).reference == "base-unresolved"


@pytest.mark.parametrize("stack", sorted(path.parent.name for path in ROOT.glob("forks/*/stack.yaml")))
def test_every_stack_names_a_base_by_digest_or_says_that_it_cannot(store: Store, stack: str) -> None:
    """The base of each stack is pinned, or refused as unresolved; --base takes its place in both cases."""
    session = RunContext(Project(ROOT, stack), store, (), store.root)
    named = toolchain.spec(session.project).image

    assert container.PINNED.fullmatch(named) or named.endswith("@unresolved")
    assert container.pinned_base(session, f"mirror.example/debian@{ID}") == f"mirror.example/debian@{ID}"
    assert container.pinned_base(session, ID) == ID


def test_the_program_is_packed_whole_and_always_alike(tmp_path: Path) -> None:
    """The wheel of the running program holds every file of it, and equal code gives equal bytes."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    first, second = map(self_wheel.write, folders)
    package = Path(sparkwright.__file__).parent
    files = {f"sparkwright/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}

    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = set(wheel.namelist())
        assert names >= {name for name in files if "__pycache__" not in name}
        assert b"Requires-Dist: msgspec" in wheel.read(next(name for name in names if name.endswith("/METADATA")))


def test_tags_of_a_described_python_are_those_that_it_states() -> None:
    """What is computed for the Python of an image is what that Python itself would say, in the same order."""
    described = json.loads(subprocess.run([sys.executable, "-c", Interpreter.SCRIPT], capture_output=True, check=True).stdout)
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not a glibc system")
    stated = [str(tag) for tag in sys_tags() if not str(tag).endswith(("-linux_x86_64", "-linux_aarch64"))]

    assert Interpreter(**described).tags() == stated


def test_the_best_file_is_chosen_for_a_python() -> None:
    """The wheel whose tag ranks first wins, then the source distribution, and without either the package is refused."""

    def file(name: str) -> dict[str, object]:
        return {"url": f"https://index.example/x/{name}", "hashes": {"sha256": name}}

    ranks = {tag: rank for rank, tag in enumerate(Interpreter("3.12.3", "aarch64", "2.39").tags())}
    native = "p-1-cp312-cp312-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
    package = {"name": "p", "version": "1", "sdist": file("p-1.tar.gz")}

    def best(*wheels: str, **more: object) -> str:
        return self_wheel._best({**package, "wheels": [file(name) for name in wheels], **more}, ranks).filename

    assert best("p-1-py3-none-any.whl", native, "p-1-cp312-cp312-manylinux_2_40_aarch64.whl") == native
    assert best("p-1-cp312-cp312-manylinux_2_17_x86_64.whl") == "p-1.tar.gz"
    with refusal("not-provided"):
        best("p-1-cp313-cp313-manylinux_2_17_aarch64.whl", sdist=None)


def test_the_same_command_runs_inside_less_what_is_of_outside() -> None:
    """Only options that name places and limits of this side are left out; the rest is repeated word by word."""
    words = ["build", "--container", "--stack", "2026.11", "--platform=linux/arm64", "--base", ID, "--cache-dir", "c", "--jobs", "3"]
    words += ["--mirror", "a=b", "--json", "--memory", "4", "--without-rule", "r", "--output=o", "-v", "--root", "x", "--offline"]

    assert container_run.inner_arguments(words) == ["build", "--stack", "2026.11", "--jobs", "3", "--json", "--without-rule", "r", "-v"]


@pytest.mark.parametrize("words", [["--base", ID], ["--platform", "linux/arm64"]])
def test_what_is_said_of_a_container_needs_one(words: list[str], tmp_path: Path) -> None:
    """--base and --platform without --container are a mistake, not a wish to be passed over."""
    with refusal("usage"):
        main.run(["build", "--cache-dir", str(tmp_path), *words])


def test_an_end_without_a_word_says_why() -> None:
    """A container that the kernel ended for want of memory is told from one that was removed."""
    assert "memory" in container_run._killed(container.ExitStatus(137, True), ["last"]).details[-1]
    assert "137" in container_run._killed(container.ExitStatus(137, False), []).details[-1]
    assert container_run._killed(container.ExitStatus(137, False), []).reference == "container-killed"


def test_a_failure_inside_is_the_same_failure_out_here() -> None:
    """What the program inside could not do before its build is told by its own class and words, and anything else as a failed command."""
    error = ContainerError("image-mismatch", "This one.", details=["a"], todo="Do that.")
    told = container_run._inner_error({"error": error.document()}, [])

    assert (told.reference, told.what, told.details, told.todo) == ("image-mismatch", "This one.", ("a",), "Do that.")
    assert container_run._inner_error({}, ["Traceback", "why"]).details == ("Traceback", "why")


@pytest.mark.parametrize(
    ("number", "ignored", "heeded"), [("INT", "", True), ("TERM", "", True), ("INT", "INT", False), ("TERM", "INT", True)]
)
def test_an_interruption_is_held_back_unless_it_is_ignored(number: str, ignored: str, heeded: bool) -> None:
    """It comes after the block, and not at all where whoever started the program wants it ignored."""
    code = (
        "import os, signal\nfrom sparkwright.builder import container_engine\n"
        f"for name in {ignored.split()}: signal.signal(signal.Signals['SIG' + name], signal.SIG_IGN)\n"
        "try:\n    with container_engine.defer_signals():\n"
        f"        os.kill(os.getpid(), signal.SIG{number}); print('after', flush=True)\n    print('not heeded')\n"
        "except KeyboardInterrupt: print('heeded')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=endings.heard)

    assert run.stdout.split("\n")[:-1] == ["after", "heeded" if heeded else "not heeded"]
