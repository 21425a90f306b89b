"""
Watch the memory while a server loads and serves, and end the server before the machine stops.

A Spark without memory does not answer any more (vllm #56824: 18 GiB went in five seconds), and the
limits of systemd and of containers do not count the memory of its GPU. So a small process looks at
``/proc/meminfo``: often enough that a server that takes `FASTEST` cannot pass the floor between two
looks, and rarely while there is much. It is the child of the server, in a session of its own, so
that signals and exit status are the server's, and it ends when the server does.

This file runs as a script, and imports no other module of sparkwright: it must need nothing when
there is no memory.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Bytes a second that a program can take at most, with a margin: 20 GB/s is what was tried.
FASTEST = 25e9
#: Bytes above the floor at which a server is ended; what is left of them at the last look lasts for
#: 40 ms, in which killed processes stop. A step, such as the allocation of a cache, ends nothing.
SLACK = 2 << 30
#: The longest time between two looks, in seconds.
LONGEST = 1.0
#: Seconds for which the end of a server is remembered.
REMEMBERED = 86_400
#: Seconds over which stalls are judged, between two droppings of the page cache, and two warnings.
WINDOW, DROPPING, WARNING = 5.0, 2.0, 60.0
#: Share of the time in which every process waited for memory, and bytes a second that came back
#: from swap meanwhile, at which a machine hangs although memory seems available. Proposed.
STALLED, SWAPPED = 0.5, 50e6
#: Bits of mlockall(2): what the guard needs is never swapped out.
MCL_CURRENT, MCL_FUTURE = 1, 2


class Guard:
    """
    A guard of the process *server*.

    Args:
        floor: Bytes that stay available.
        record: File with what it saw.
        model: Folder of the model, whose files may leave the page cache.
        proc: As ``/proc``; another folder in tests.
    """

    def __init__(self, server: int, floor: int, record: str, model: str, proc: str) -> None:
        self.server, self.floor, self.model, self.proc = server, floor, Path(model), Path(proc)
        self.path, self.started = record, start_time(server)
        self.meminfo = os.open(self.proc / "meminfo", os.O_RDONLY)
        self.free, self.available = self.read()
        self.least = self.available
        self.dropped = self.warned = float("-inf")
        self.stalls = collections.deque[tuple[float, float, float]]()

    def read(self) -> tuple[int, int]:
        """Return the bytes that are free, and those that are available."""
        words = os.pread(self.meminfo, 200, 0).split()
        return 1024 * int(words[4]), 1024 * int(words[7])

    def look(self, seconds: float) -> str:
        """Return why the server must end, *seconds* after the last look; empty if it may go on."""
        before, (self.free, self.available) = self.available, self.read()
        self.least = min(self.least, self.available)
        if self.available < self.floor + SLACK:
            rate = (before - self.available) / max(seconds, 1e-3) / 1e9
            return f"{gib(self.available)} GiB of memory were available, {rate:.1f} GB/s were taken"
        return self.stall()

    @property
    def period(self) -> float:
        """Seconds until the next look: no program takes three quarters of what is left before."""
        return min(LONGEST, 0.75 * max(SLACK, self.available - self.floor) / FASTEST)

    def stall(self) -> str:
        """Return why the machine hangs, by the kernel's own accounts; empty if it does not."""
        now = time.monotonic()
        if self.stalls and now - self.stalls[-1][0] < LONGEST / 2:
            return ""
        with contextlib.suppress(OSError):
            waited = self.number("pressure/memory", r"full .*total=(\d+)") / 1e6
            swapped = self.number("vmstat", r"pswpin (\d+)") * os.sysconf("SC_PAGE_SIZE")
            self.stalls.append((now, waited, swapped))
            begin, first, before = self.stalls[0]
            if (seconds := now - begin) < WINDOW:
                return ""
            self.stalls.popleft()
            share, rate = (waited - first) / seconds, (swapped - before) / seconds
            if share > STALLED and rate > SWAPPED:
                return f"all programs waited for memory for {share:.0%} of {seconds:.0f} s"
        return ""

    def number(self, name: str, pattern: str) -> int:
        """Return the number in the line of the file *name* that *pattern* begins."""
        match = re.search(f"^{pattern}", (self.proc / name).read_text(), re.MULTILINE)
        return int(match[1]) if match else 0

    def relieve(self) -> None:
        """Drop the model's files from the page cache, and warn, while little is left."""
        now = time.monotonic()
        if self.free < 2 * self.floor and now - self.dropped > DROPPING:
            self.dropped = now
            for path in self.model.glob("*.safetensors"):
                with contextlib.suppress(OSError):
                    file = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)
        if self.available < 2 * self.floor and now - self.warned > WARNING:
            self.warned = now
            end = gib(self.floor + SLACK)
            self.say(f"{gib(self.available)} GiB of memory are available; at {end} the server ends")

    def say(self, message: str, state: str = "watching") -> None:
        """Tell the user and the record, which is all that is told without a *message*."""
        names = ("server", "started", "floor", "least")
        values = {name: getattr(self, name) for name in names}
        values |= {"state": state, "message": message, "time": round(time.time())}
        values |= {"guard": os.getpid(), "model": str(self.model)}
        with contextlib.suppress(OSError):
            if message:
                os.write(2, f"sparkwright guard: {message}\n".encode())
        with contextlib.suppress(OSError):
            Path(f"{self.path}.new").write_text(json.dumps({"schema": 1, **values}))
            Path(f"{self.path}.new").replace(self.path)

    def end(self, reason: str) -> None:
        """Kill the server and all that came of it, and tell why."""
        for process in [*descendants(self.server), self.server]:
            # The first process of a container is deaf to the former.
            for by in (signal.SIGKILL, signal.SIGTERM):
                with contextlib.suppress(OSError):
                    os.kill(process, by)
        kept = f"so that {gib(self.floor)} GiB stay free"
        self.say(f"{reason}: the server was ended, {kept}", "ended")

    def run(self) -> None:
        """Watch until the server has ended."""
        alive = select.poll()
        alive.register(os.pidfd_open(self.server), select.POLLIN)
        self.say("")
        last = time.monotonic()
        while not alive.poll(1000 * self.period):
            now = time.monotonic()
            reason, last = self.look(now - last), now
            if reason:
                self.end(reason)
                alive.poll(30_000)
                return
            self.relieve()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()


def gib(size: float) -> str:
    """Return *size* bytes in GiB."""
    return f"{size / 2**30:.1f}"


def start_time(process: int) -> str:
    """
    Return when *process* started, in the kernel's ticks, which tells it from a later one.

    Raises:
        OSError: It has ended.
    """
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    if fields[0] == "Z":
        raise ProcessLookupError(process)
    return fields[19]


def descendants(process: int) -> list[int]:
    """Return the children of *process* and theirs, without this process."""
    results = [process]
    for parent in results:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                results += [int(pid) for pid in children.read_text().split()]
    return [pid for pid in results[1:] if pid != os.getpid()]


def records() -> Path:
    """Return the folder with the records of this user's servers."""
    home = Path(os.environ.get("HOME") or "/nonexistent")
    state = os.environ.get("XDG_STATE_HOME") or home / ".local" / "state"
    return Path(state, "sparkwright", "serving")


def servers() -> list[dict[str, Any]]:
    """
    Return the records of this user's servers that run, or that a guard ended within a day: of one
    that lost its guard, the state is ``unguarded``.
    """
    results = []
    for path in records().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads(path.read_bytes())
            recent = time.time() - record["time"] < REMEMBERED
            if record["state"] != "ended" and start_time(record["server"]) == record["started"]:
                recent = True
                try:
                    start_time(record["guard"])
                except OSError:
                    record["state"] = "unguarded"
            elif record["state"] != "ended":
                continue
            results += [record] * recent
    return results


def start(floor: float, model: Path) -> None:
    """Start a guard of this process, also when that has become another program (exec)."""
    with contextlib.suppress(OSError):
        records().mkdir(parents=True, exist_ok=True)
    record = records() / f"{os.getpid()}.json"
    arguments = (str(os.getpid()), str(round(floor * 2**30)), str(record), str(model.absolute()))
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )


def main(arguments: list[str]) -> None:
    """Guard the parent: ``python guard.py PARENT FLOOR RECORD MODEL [PROC]``."""
    parent, floor, record, model, proc = [*arguments, "/proc"][:5]
    if os.getppid() != int(parent):
        return
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        ctypes.CDLL(None).mlockall(MCL_CURRENT | MCL_FUTURE)
    with contextlib.suppress(OSError):
        os.nice(-10)
    Guard(int(parent), int(floor), record, model, proc).run()


if __name__ == "__main__":
    main(sys.argv[1:])
