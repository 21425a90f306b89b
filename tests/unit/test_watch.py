"""The watch over memory ends a real process before the machine has none left, once, and leaves a quiet machine alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from sparkwright.bench.machine.conditions import REASONS
from sparkwright.bench.machine.policy import MemoryPolicy
from sparkwright.bench.machine.watch import MemoryWatch
from sparkwright.bench.server.serve import Launch, Server
from sparkwright.core.process import available_megabytes

#: Takes memory, in steps of some MB with some seconds between two, up to a sum; says when it begins, and waits then.
TAKES = """
import sys, time
step, pause, most = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
held = []
print("ready", flush=True)
while len(held) * step < most:
    held.append(bytearray(step * 1_000_000))
    for place in range(0, len(held[-1]), 4096):
        held[-1][place] = 1
    time.sleep(pause)
time.sleep(600)
"""
#: Answers as vLLM does, ignores TERM, and has a child in a session of its own that does the same.
SERVES = """
import http.server, json, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stray = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stray])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "toy", "max_model_len": 64}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

#: Never reached on any machine: no floor, and no fall.
NONE = MemoryPolicy(floor=1, elsewhere=1, fall=100_000_000, period=0.05)


class Ending:
    """Ends a child when it is told to, and remembers why."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child, self.told, self.done = child, list[tuple[str, str]](), threading.Event()

    def __call__(self, reference: str, why: str) -> None:
        self.told.append((reference, why))
        self.child.kill()
        self.done.set()


@contextlib.contextmanager
def taking(step: int, pause: float, most: int) -> Iterator[Ending]:
    """Yield the ending of a process that takes memory."""
    child = subprocess.Popen([sys.executable, "-c", TAKES, str(step), str(pause), str(most)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        yield Ending(child)
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_takes_memory_down_to_the_floor_is_ended() -> None:
    """It takes 20 MB after the other, the floor is 200 MB below what is free now: it is killed, once, and told why."""
    policy = replace(NONE, floor=max(1, available_megabytes() - 200))
    with taking(20, 0.02, 2000) as ending, MemoryWatch(policy, ending) as watch:
        assert ending.child.wait(timeout=60) == -9
    assert watch.ended == "memory-low"
    ((reference, why),) = ending.told
    assert reference in REASONS
    assert str(policy.floor) in why
    assert watch.lowest is not None
    assert watch.lowest < policy.floor


def test_a_process_that_takes_memory_too_fast_is_ended_far_from_the_floor() -> None:
    """Nothing is short yet; the fall alone ends it."""
    policy = replace(NONE, fall=30)
    with taking(20, 0.0, 1500) as ending, MemoryWatch(policy, ending):
        assert ending.child.wait(timeout=60) == -9
    ((reference, why),) = ending.told
    assert reference == "memory-low"
    assert "falls by" in why


def test_the_driver_without_memory_in_the_kernels_log_ends_it_whatever_seems_free(tmp_path: Path) -> None:
    """NV_ERR_NO_MEMORY counts from now on; what the log held before, and other records, do not."""
    log = tmp_path / "kmsg"
    record = "6,{},5140900,-;{}\n"
    log.write_text(record.format(1, "NVRM: old: NV_ERR_NO_MEMORY"))
    with taking(1, 0.0, 1) as ending, MemoryWatch(NONE, ending, kernel=log) as watch:
        assert watch.unknown == ""
        with log.open("a") as stream:
            stream.write(record.format(2, "usb 1-1: new device"))
            stream.flush()
            assert not ending.done.wait(0.3)
            stream.write(record.format(3, "NVRM: nvAssertOkFailedNoLog: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"))
            stream.flush()
            assert ending.done.wait(60)
    ((reference, why),) = ending.told
    assert (reference, watch.ended) == ("kernel-no-memory", "kernel-no-memory")
    assert reference in REASONS
    assert "0x00000051" in why


def test_a_quiet_machine_is_left_alone_and_a_log_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Nothing is ended; that the kernel's log is not watched stands beside the result."""
    with taking(1, 0.0, 1) as ending, MemoryWatch(NONE, ending, kernel=tmp_path / "none") as watch:
        assert not ending.done.wait(0.3)
    assert (ending.told, watch.ended) == ([], "")
    assert watch.unknown.startswith("kernel's log: ")
    assert watch.lowest


def test_it_is_told_once_however_long_memory_stays_low() -> None:
    """The floor is above everything: the first look ends it, and there is no second call."""
    policy = replace(NONE, floor=900_000_000)
    with taking(1, 0.0, 1) as ending, MemoryWatch(policy, ending):
        assert ending.done.wait(60)
        time.sleep(0.3)
    assert len(ending.told) == 1


def test_a_server_is_ended_at_once_without_the_time_to_say_farewell(tmp_path: Path) -> None:
    """It ignores TERM, has 90 s of grace and a child elsewhere: the watch kills all of it within them, and the server says why."""
    folder = tmp_path / "modules" / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(SERVES)
    launch = Launch(Path(sys.executable), tmp_path, (), {"PYTHONPATH": str(tmp_path / "modules")}, "toy", patience=100, grace=90)
    policy = replace(NONE, floor=900_000_000)
    with Server(launch, tmp_path / "log") as server:
        assert server.ready, server.ended
        left = server.processes()
        assert len(left) == 2
        with MemoryWatch(policy, server.kill):
            until = time.monotonic() + 60
            while server.running and time.monotonic() < until:
                server.guard()
                time.sleep(0.02)
            assert not server.running
        assert not server.ready
        assert server.reference == "memory-low"
        assert "must stay" in server.ended
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(timeout=60)


@pytest.mark.parametrize("period", [0.0, 0.51, -1.0])
def test_a_watch_that_looks_too_seldom_is_refused(period: float) -> None:
    """Half a second is the most."""
    with pytest.raises(ValueError, match="period"):
        replace(NONE, period=period)
