"""
The guard of a server: what it costs, and how much memory was left when it ended a server that took 1, 5 and 20 GB/s.

The memory of the fast ones is a file that stands for ``/proc/meminfo``. With ``--real`` (root, a memory control group) a server takes 1 GB/s of
this machine's own memory instead, in a group that bounds it. Exits with 1 if the guard costs more than promised, or the floor was passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import measure
from sparkwright.core.console import console
from sparkwright.serving import guard

sys.path.insert(0, str(measure.ROOT))

from tests.support import eater

#: Promised: seconds of processor a second.
COST = 0.001
GIB = 2**30
FLOOR = 6 * GIB
#: Bytes that a real server may take before the guard ends it, and its group's limit.
ROOM, LIMIT = 4 * GIB, 10 * GIB
#: GiB above the floor → what that is; the promise is not for the last, of which the user was warned.
DISTANCES = {20.0: "much", 6.1: "as full as a plan admits", 2.1: "the server was warned"}


def cost(folder: Path, distance: float, seconds: float) -> float:
    """Return the share of a processor that a guard takes for *seconds* at *distance* from its floor."""
    eater.write(folder, FLOOR + distance * GIB)
    script = (
        "import os, subprocess, sys, time\n"
        "words = [sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), *sys.argv[2:]]\n"
        "print(subprocess.Popen(words).pid, flush=True)\n"
        "time.sleep(600)"
    )
    limits = [str(2 * FLOOR), str(FLOOR + guard.SLACK)]
    words = [sys.executable, "-c", script, guard.__file__, *limits, str(folder / "record"), "/nonexistent", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        pid = int(server.stdout.readline())
        time.sleep(2.0)
        before, began = ticks(pid), time.monotonic()
        time.sleep(seconds)
        share = (ticks(pid) - before) / (time.monotonic() - began)
        server.kill()
    return share


def ticks(pid: int) -> float:
    """Return the seconds of processor that *pid* used, as the scheduler counts them (nanoseconds)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def available() -> int:
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(text[text.index("MemAvailable:") + 13 :].split(None, 1)[0])


@contextlib.contextmanager
def bounded(limit: int) -> Iterator[Path]:
    """Yield a memory control group with *limit*, of either version."""
    first = Path("/sys/fs/cgroup/memory")
    group = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"sparkwright-guard-{os.getpid()}"
    group.mkdir()
    name = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    (group / name).write_text(str(limit))
    try:
        yield group
    finally:
        for _ in range(50):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                group.rmdir()
                break


def run(rate: float, *, real: bool) -> tuple[float, str, int]:
    """Return the GiB that were left above the floor, what the guard said, and the server's status."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        # Two seconds of the rate, and more than the guard leaves.
        eater.write(folder, FLOOR + 4 * GIB + 2 * rate)
        floor = available() - ROOM if real else FLOOR
        variables = {**os.environ, "RECORD": str(folder / "record"), "PYTHONPATH": f"{measure.ROOT}:{measure.ROOT / 'ci'}"}
        command = [sys.executable, "-m", "tests.support.eater", "real" if real else name, str(rate), str(floor)]
        if real:
            group = stack.enter_context(bounded(LIMIT))
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]
        least, over = [float("inf")], threading.Event()

        def sample() -> None:
            while not over.wait(0.002):
                least[0] = min(least[0], available())

        sampler = threading.Thread(target=sample, daemon=True)
        if real:
            sampler.start()
        done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=120)
        over.set()
        time.sleep(0.2)
        left = least[0] / GIB if real else float((folder / "least").read_text())
        message = json.loads((folder / "record").read_text())["message"]
        return left - floor / GIB, message, done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for distance, meaning in () if arguments.real else DISTANCES.items():
            share = cost(Path(name), distance, arguments.seconds)
            failed |= share > COST and distance > 6
            console.result(f"{distance:4.1f} GiB above the floor ({meaning}): {share:.4%} of a processor")
    real = arguments.real
    for rate in [1e9] if real else [1e9, 5e9, 20e9]:
        runs = [run(rate, real=real) for _ in range(arguments.runs)]
        kept = sum(left >= 0 and status == -signal.SIGKILL for left, _, status in runs)
        failed |= kept < len(runs)
        least, most = min(left for left, _, _ in runs), max(left for left, _, _ in runs)
        console.result(f"{rate / 1e9:4.0f} GB/s{' real' if real else ''}: {kept} of {len(runs)} above the floor, {least:.2f} to {most:.2f} GiB left above it")
        console.result(f"     {runs[-1][1]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
