"""The compiler launcher, run for real against a gate that the test plays: what it says, what it starts, and what it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sparkwright.builder.compile import launch, procfs

SCRIPT = Path(launch.__file__)
#: On a busy machine everything takes its time; a launcher that says nothing for so long hangs.
PATIENCE = 60
#: Stands where a compiler would: starts a program of its own, as nvcc does, and waits for it.
SLOW = "import subprocess, sys; print('begun', file=sys.stderr, flush=True); subprocess.run(['sleep', '1000'])"

needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


class Line:
    """The gate's end of one launcher's connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        link.settimeout(PATIENCE)

    def say(self, *words: str) -> None:
        self.link.send("\t".join(words).encode())

    def hear(self) -> list[str]:
        return self.link.recv(65536).decode("utf-8", "surrogateescape").split("\t")


class Stage:
    """A launch folder with a listening socket, and the launchers that meet there."""

    def __init__(self, folder: Path) -> None:
        # Longer than the address of a socket may be.
        self.folder = folder / ("long" * 40)
        self.folder.mkdir()
        (self.folder / "miss.sh").write_text(launch.MISS)
        (self.folder / "miss.sh").chmod(0o755)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(PATIENCE)
        place = os.open(self.folder, os.O_RDONLY)
        self.listener.bind(f"/proc/self/fd/{place}/gate")
        os.close(place)
        self.listener.listen()
        self.started: list[subprocess.Popen[str]] = []
        self.mark = f"test-{os.getpid()}-{id(self)}."

    def start(self, *command: str | Path, **extra: str) -> subprocess.Popen[str]:
        """Start a launcher in front of *command*, as ninja does: in a group of its own."""
        made = subprocess.Popen(
            [sys.executable, "-IS", str(SCRIPT), *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            process_group=0, env={"PATH": os.environ["PATH"], "SPARKWRIGHT_LAUNCH": str(self.folder), **extra},
        )  # fmt: skip
        self.started.append(made)
        return made

    def meet(self, *command: str | Path, **extra: str) -> tuple[subprocess.Popen[str], Line]:
        """Start a launcher and return it with its connection."""
        made = self.start(*command, **extra)
        return made, Line(self.listener.accept()[0])

    def slow(self) -> tuple[subprocess.Popen[str], Line]:
        """Start a launcher whose compiler runs until it is ended, and return when it runs."""
        made, line = self.meet(sys.executable, "-Ic", SLOW, "-c", "a.cu")
        assert line.hear() == ["unit", "a.cu"]
        line.say("go", self.mark)
        wait_for(lambda: len(self.left()) == 2)
        return made, line

    def left(self) -> list[int]:
        """Return the compilers that run, with what they started."""
        return procfs.marked(self.mark)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(name="stage")
def _stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for one in made.started:
        one.kill()
    # A launcher that is killed leaves its compiler to the build, and that holds the launcher's output open.
    procfs.end_marked(made.mark)
    for one in made.started:
        one.communicate()
    made.listener.close()


@needs_cc
def test_a_unit_is_compiled_when_the_gate_says_so(stage: Stage, tmp_path: Path) -> None:
    """The launcher names its source, compiles after ``go``, and tells status and peak."""
    source, made = tmp_path / "a b.c", tmp_path / "a.o"
    source.write_text("int a(void) { return 1; }\n")
    process, line = stage.meet("cc", "-O1", "-c", source, "-o", made)

    assert line.hear() == ["unit", str(source)]
    assert not made.exists()
    line.say("go", stage.mark)
    word, status, kibibytes, cpu, words = line.hear()
    assert (word, status, words) == ("end", "0", "")
    assert int(kibibytes) > 1000
    assert float(cpu) > 0
    line.say("done")
    assert process.wait(PATIENCE) == 0
    assert made.read_bytes().startswith(b"\x7fELF")


@needs_cc
def test_a_refused_unit_keeps_the_compilers_status_and_words(stage: Stage, tmp_path: Path) -> None:
    """What the compiler says reaches ninja and the gate alike, and its status is the launcher's."""
    (tmp_path / "a.c").write_text("int a(void) { return }\n")
    process, line = stage.meet("cc", "-c", tmp_path / "a.c", "-o", tmp_path / "a.o")
    line.hear()
    line.say("go", stage.mark)
    _, status, *_, words = line.hear()
    line.say("done")
    _, said = process.communicate(timeout=PATIENCE)

    assert (status, process.returncode) == ("1", 1)
    assert "a.c:1" in words
    assert said == words


@needs_cc
def test_calls_that_compile_nothing_pass_through(stage: Stage) -> None:
    """Links and questions for the version are no units: they become the program, and the gate hears nothing."""
    process = stage.start("cc", "--version")
    out, _ = process.communicate(timeout=PATIENCE)

    assert (process.returncode, bool(out)) == (0, True)
    stage.listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        stage.listener.accept()


def test_outside_of_a_build_the_launcher_is_not_there(stage: Stage) -> None:
    """Where no gate is named, as in CMake's own trials, the compiler is called at once."""
    process = stage.start("sh", "-c", "exit 7", SPARKWRIGHT_LAUNCH="")

    assert process.wait(PATIENCE) == 7


def test_a_launcher_without_its_gate_compiles_nothing(stage: Stage, tmp_path: Path) -> None:
    """A call that is left over from a build that has ended says so and fails."""
    process = stage.start("touch", tmp_path / "made", "-c", "a.c", SPARKWRIGHT_LAUNCH=str(tmp_path))
    _, said = process.communicate(timeout=PATIENCE)

    assert process.returncode == 1
    assert "no build" in said
    assert not (tmp_path / "made").exists()


def test_a_compiler_that_is_not_there_fails_as_in_a_shell(stage: Stage) -> None:
    """The status is 127 and the sentence names the program."""
    process, line = stage.meet("no-such-compiler", "-c", "a.cu")
    line.hear()
    line.say("go", stage.mark)
    assert line.hear() == ["end", "127", "0", "0", "no-such-compiler: No such file or directory"]
    line.say("done")

    assert process.wait(PATIENCE) == 127


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_compiler_with_all_it_started(stage: Stage, ending: signal.Signals) -> None:
    """Ctrl-C, or ninja's way of stopping its jobs."""
    process, _ = stage.slow()
    process.send_signal(ending)

    assert process.wait(PATIENCE) == -ending
    wait_for(lambda: not stage.left())


def test_the_end_of_the_gate_ends_the_compiler(stage: Stage) -> None:
    """A build that was killed closes the connection, and nothing compiles on."""
    process, line = stage.slow()
    line.link.close()

    assert process.wait(PATIENCE) == -signal.SIGTERM
    wait_for(lambda: not stage.left())


def test_a_launcher_that_waits_ends_with_the_gate(stage: Stage) -> None:
    """A unit whose turn never came ends without a word."""
    process, line = stage.meet("touch", "made", "-c", "a.cu")
    line.hear()
    line.link.close()

    assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_stopped_unit_can_start_again(stage: Stage) -> None:
    """``stop`` ends the compiler and frees its memory; the launcher lives on and takes the next ``go``."""
    process, line = stage.slow()
    line.say("stop")
    assert line.hear()[:2] == ["stopped", str(-signal.SIGKILL)]
    wait_for(lambda: not stage.left())
    line.say("go", stage.mark)
    wait_for(lambda: len(stage.left()) == 2)

    assert process.poll() is None


def test_what_a_compiler_leaves_running_is_ended(stage: Stage) -> None:
    """A program in the background would hold memory that nobody granted."""
    _, line = stage.meet("sh", "-c", "sleep 1000 & exit 0")
    line.hear()
    line.say("go", stage.mark)

    assert line.hear()[:2] == ["end", "0"]
    wait_for(lambda: not stage.left())


def test_a_compiler_is_not_born_deaf(stage: Stage, tmp_path: Path) -> None:
    """It gets the signals that programs have by default: Python ignores SIGPIPE, and the launcher blocks some meanwhile."""
    _, line = stage.meet("sh", "-c", f"cat /proc/self/status > {tmp_path}/status")
    line.hear()
    line.say("go", stage.mark)
    line.hear()
    masks = dict(row.split(":\t") for row in (tmp_path / "status").read_text().splitlines() if row.startswith(("SigBlk", "SigIgn")))

    assert {name: int(mask, 16) & 0x7FFFFFFF for name, mask in masks.items()} == {"SigBlk": 0, "SigIgn": 0}


needs_ccache = pytest.mark.skipif(not (shutil.which("ccache") and shutil.which("cc")), reason="no ccache (apt-get install ccache)")


@needs_ccache
def test_the_cache_asks_for_memory_only_when_it_has_no_result(stage: Stage, tmp_path: Path) -> None:
    """The first call says ``miss`` and waits for ``compile``; the second one ends without having asked."""
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    own = {"CCACHE_DIR": str(tmp_path / "cache"), "CCACHE_CONFIGPATH": os.devnull, "CCACHE_DEPEND": "true"}
    for expected in (["miss"], []):
        process, line = stage.meet("cc", "-MD", "-MF", tmp_path / "a.d", "-c", tmp_path / "a.c", "-o", tmp_path / "a.o", **own)
        line.hear()
        line.say("look", stage.mark, shutil.which("ccache") or "")
        if expected:
            assert line.hear() == expected
            assert not (tmp_path / "a.o").exists()
            line.say("compile")
        assert line.hear()[:2] == ["end", "0"]
        line.say("done")
        assert process.wait(PATIENCE) == 0
        (tmp_path / "a.o").unlink()


@needs_ccache
def test_a_call_that_the_cache_cannot_keep_asks_for_memory_all_the_same(stage: Stage, tmp_path: Path) -> None:
    """ccache calls the compiler itself then, and even so not without the gate's word."""
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    own = {"CCACHE_DIR": str(tmp_path / "cache"), "CCACHE_CONFIGPATH": os.devnull, "CCACHE_DEPEND": "true", "TMPDIR": str(tmp_path)}
    process, line = stage.meet("cc", "-save-temps=obj", "-c", tmp_path / "a.c", "-o", tmp_path / "a.o", **own)
    line.hear()
    line.say("look", stage.mark, shutil.which("ccache") or "")

    assert line.hear() == ["miss"]
    line.say("stop")
    assert line.hear()[0] == "stopped"
    line.say("go", stage.mark)
    assert line.hear()[:2] == ["end", "0"]
    line.say("done")
    assert process.wait(PATIENCE) == 0


def test_a_killed_launcher_leaves_a_compiler_that_its_mark_finds(stage: Stage) -> None:
    """Nothing can be said by a process that is killed; the mark is how the gate finds what it left."""
    process, line = stage.slow()
    process.kill()
    process.wait(PATIENCE)

    assert line.hear() == [""]
    left = stage.left()
    assert len(left) == 2
    assert procfs.end_marked(stage.mark) == 2
    wait_for(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in left))


@pytest.mark.parametrize(
    ("command", "unit"),
    [
        (["nvcc", "-x", "cu", "-c", "/s/csrc/a.cu", "-o", "a.o"], "/s/csrc/a.cu"),
        (["nvcc", "-o", "a.so", "a.o"], ""),
        (["cc", "-c"], ""),
        ([], ""),
    ],
)
def test_a_unit_is_what_follows_c(command: list[str], unit: str) -> None:
    """CMake writes every compile so."""
    assert launch.unit_of(command) == unit
