"""The sentinel's child: it answers, is bounded in time and memory, comes again after its death, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from sparkwright.bench.machine.policy import MachinePolicy, SentinelPolicy
from sparkwright.bench.machine.sentinel import Sentinel, Silent
from sparkwright.core import strict_yaml

SHIPPED = strict_yaml.load(Path(__file__).parents[2] / "ci" / "gates" / "machine.yaml", MachinePolicy).sentinel
#: Small, so that a test takes no time; what it reads means nothing then.
SMALL = msgspec.structs.replace(SHIPPED, matrix=8, stream=8, warm=0.0, seconds=0.02, least=2, readings=3, start=120.0, patience=60.0)


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[Sentinel]:
    """Return a sentinel in this Python."""
    with Sentinel(SMALL, Path(sys.executable), tmp_path / "log") as one:
        yield one


def program(path: Path, text: str) -> Path:
    """Write a program that stands in for a Python in which things go wrong."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def silence(policy: SentinelPolicy, python: Path, log: Path) -> str:
    """Return why a sentinel in *python* does not answer."""
    with Sentinel(policy, python, log) as one, pytest.raises(Silent) as caught:
        one.reading()
    assert one.pid is None
    return str(caught.value)


def gone(pid: int) -> bool:
    """Wait until there is no process *pid*."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_it_says_what_it_measures_and_how_long_that_takes(sentinel: Sentinel) -> None:
    """Device and library by name, then readings of the size that was ordered; the same child answers all."""
    device = sentinel.hello()
    first, second = sentinel.reading(), sentinel.reading()

    assert device.kind in ("cuda", "processor")
    assert device.by.startswith(("torch ", "NumPy "))
    assert bool(device.note) == (device.kind == "processor")
    assert first.bytes == second.bytes
    assert abs(first.bytes - 8e6) <= 4 * 8192
    assert first.times >= SMALL.least
    assert sentinel.stream().read > 0
    sentinel.heat(0.05)
    assert sentinel.hello() == device


def test_it_holds_no_array_between_two_orders(tmp_path: Path) -> None:
    """Work on 128 MB twice over leaves it with about what it held before."""
    large = msgspec.structs.replace(SMALL, matrix=128, seconds=0.0001, least=1)
    with Sentinel(large, Path(sys.executable), tmp_path / "log") as one:
        one.reading()
        assert one.pid
        child = psutil.Process(one.pid)
        before = child.memory_info().rss
        one.reading()
        assert child.memory_info().rss - before < 64e6


def test_a_child_that_was_killed_is_started_again(sentinel: Sentinel) -> None:
    """The next question finds another child, and an answer, even while the killed one has not ended yet."""
    sentinel.reading()
    assert sentinel.pid
    first = sentinel.pid
    os.kill(first, signal.SIGKILL)

    assert sentinel.reading().gemv > 0
    assert sentinel.pid != first
    assert gone(first)


#: What a child says first, and its answer to one order.
HELLO = 'echo \'{"kind":"cuda","device":"x","by":"y","unified":false,"uuid":""}\''
READING = 'read line; echo \'{"gemv":2.0,"copy":1.0,"bytes":1,"times":1}\''


@pytest.mark.parametrize("end", ["read line; exit 1", "exec 0<&-; sleep 0.5; exit 1"])
def test_a_question_that_a_dying_child_took_is_asked_again(tmp_path: Path, end: str) -> None:
    """Each child answers once, and dies with the second question in its pipe, or without one to take it: every question has an answer."""
    python = program(tmp_path / "python", f"echo x >> {tmp_path}/starts; {HELLO}; {READING}; {end}")
    with Sentinel(SMALL, python, tmp_path / "log") as one:
        assert [one.reading().gemv for _ in range(3)] == [2.0] * 3

    assert (tmp_path / "starts").read_text() == "x\n" * 3


def test_a_question_that_every_child_dies_of_is_asked_of_two(tmp_path: Path) -> None:
    """The one that was there, and a fresh one; a fresh one that dies is silence at once."""
    python = program(tmp_path / "python", f"echo x >> {tmp_path}/starts; {HELLO}; read line; exit 1")
    with Sentinel(SMALL, python, tmp_path / "log") as one:
        one.hello()
        for starts in (2, 3):
            with pytest.raises(Silent, match="it died"):
                one.reading()
            assert (tmp_path / "starts").read_text() == "x\n" * starts


def test_a_child_that_hangs_is_ended_in_its_time_and_replaced(tmp_path: Path) -> None:
    """A stopped process answers nothing; it is told as silence, it is gone, and the next question is answered."""
    hasty = msgspec.structs.replace(SMALL, patience=0.5)
    with Sentinel(hasty, Path(sys.executable), tmp_path / "log") as one:
        one.hello()
        assert one.pid
        stopped = one.pid
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(Silent, match="did not answer within"):
            one.reading()
        assert gone(stopped)
        assert one.hello().by


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo no room left >&2; exit 3", "it died: no room left"),
        ("echo hello; sleep 60", "it answers something else"),
        ("echo '{\"error\": \"no NumPy\"}'; sleep 60", "no NumPy"),
        ("exec yes without-a-line-end | tr -d '\\n'", "it answers without end"),
        ("exec sleep 60", "it did not answer within"),
        ('echo \'{"kind":"cuda","device":"x","by":"y","unified":false,"uuid":""}\'; exec sleep 60', "it did not answer within"),
        (
            'echo \'{"kind":"cuda","device":"x","by":"y","unified":false,"uuid":""}\'; read line; '
            'echo \'{"gemv":-1.0,"copy":1.0,"bytes":1,"times":1}\'; exec sleep 60',
            "it answers something else",
        ),
        ('echo \'{"kind":"cuda","device":"x","by":"y","unified":false,"uuid":""}\'; exec 0<&-; sleep 0.2; exit 1', "it"),
    ],
)
def test_whatever_a_python_does_instead_is_silence_with_its_reason(tmp_path: Path, text: str, says: str) -> None:
    """One that dies, says something else, errs, talks without end, hangs, or gives an impossible figure."""
    hasty = msgspec.structs.replace(SMALL, start=1.0 if "within" in says else 60.0, patience=1.0)

    assert says in silence(hasty, program(tmp_path / "python", text), tmp_path / "log")


def test_a_python_that_is_not_there_is_silence(tmp_path: Path) -> None:
    """Not an error of ours: the session goes on and says that it has no sentinel."""
    assert "does not run" in silence(SMALL, tmp_path / "none", tmp_path / "log")


def test_a_work_that_fails_says_why_and_the_child_stays(tmp_path: Path) -> None:
    """More memory than any machine has: the answer names the error, and the next order is answered by the same child."""
    huge = msgspec.structs.replace(SMALL, stream=900_000_000)
    with Sentinel(huge, Path(sys.executable), tmp_path / "log") as one:
        one.hello()
        first = one.pid
        with pytest.raises(Silent, match=r"[Mm]emory"):
            one.stream()
        assert one.reading().gemv > 0
        assert one.pid == first


def test_it_never_outlives_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes it along, even in the middle of its work."""
    code = (
        "import sys, time, msgspec; from pathlib import Path\n"
        "from sparkwright.gates.machine.policy import SentinelPolicy\n"
        "from sparkwright.gates.machine.sentinel import Sentinel\n"
        "policy = msgspec.json.decode(sys.argv[1], type=SentinelPolicy)\n"
        "one = Sentinel(policy, Path(sys.executable), Path(sys.argv[2])); one.hello()\n"
        "print(one.pid, flush=True); one.heat(600)\n"
    )
    arguments = [sys.executable, "-c", code, msgspec.json.encode(SMALL).decode(), str(tmp_path / "log")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    assert gone(child)
