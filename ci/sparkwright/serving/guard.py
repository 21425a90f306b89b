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

#: Bytes a second that a program can take at most, with a margin: 20 GB/s is what was tried.
FASTEST = 25e9
#: Bytes by which the limit lies above what has to stay free: a server may take them between two
#: looks, and until it has ended. A large allocation at one go ends none above the limit.
SLACK = 2 << 30
#: Seconds in which processes that are killed stop.
REACTION = 0.04
#: The longest time between two looks, in seconds.
LONGEST = 1.0
#: Seconds over which stalls are judged, and between two warnings.
WINDOW, WARNING = 5.0, 60.0
#: Seconds in which a server ends by itself whose other machine is lost.
GRACE = 5.0
#: Share of the time in which every process waited for memory, and bytes a second that came back
#: from swap meanwhile, at which a machine hangs although memory seems available. Proposed.
STALLED, SWAPPED = 0.5, 50e6
#: Bits of mlockall(2): what the guard needs is never swapped out.
MCL_CURRENT, MCL_FUTURE = 1, 2


class Guard:
    """
    A guard of the process *server*.

    Args:
        floor: Bytes with which the server was admitted; it warns below them.
        limit: Bytes below which it ends the server.
        record: File for what it saw if it ends the server.
        model: Folder of the model, for the record.
        proc: As ``/proc``; another folder in tests.
        peers: Descriptors of connections to the other machines of this server.
    """

    def __init__(
        self, server: int, floor: int, limit: int, record: str, model: str, proc: str, *peers: int
    ) -> None:
        self.server, self.floor, self.limit, self.record = server, floor, limit, record
        self.model, self.proc, self.peers = model, Path(proc), peers
        self.meminfo = os.open(self.proc / "meminfo", os.O_RDONLY)
        self.free, self.available = self.read()
        self.least = self.available
        self.warned = float("-inf")
        self.stalls = collections.deque[tuple[float, float, float]]()

    def read(self) -> tuple[int, int]:
        """Return the bytes that are free, and those that are available."""
        words = os.pread(self.meminfo, 200, 0).split()
        return 1024 * int(words[4]), 1024 * int(words[7])

    def look(self, seconds: float) -> str:
        """Return why the server must end, *seconds* after the last look; empty if it may go on."""
        before, (self.free, self.available) = self.available, self.read()
        self.least = min(self.least, self.available)
        if self.available >= self.limit:
            return self.stall()
        rate = (before - self.available) / max(seconds, 1e-3) / 1e9
        return f"{gib(self.available)} GiB of memory were available, {rate:.1f} GB/s were taken"

    @property
    def period(self) -> float:
        """Seconds until the next look: what is left then lasts for `REACTION` at least."""
        above = max(0, self.available - self.limit)
        return min(LONGEST, (SLACK + above) / FASTEST - REACTION)

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

    def warn(self) -> None:
        """
        Tell the user that little is left. The page cache stays: the kernel counts clean pages as
        available and takes them back, and to drop those of a model takes seconds without a look.
        """
        now = time.monotonic()
        if self.available < self.floor and now - self.warned > WARNING:
            self.warned = now
            free, limit = gib(self.available), gib(self.limit)
            self.say(f"{free} GiB of memory are available; at {limit} the server ends")

    def say(self, message: str) -> None:
        """Tell the user, who may have closed the stream."""
        with contextlib.suppress(OSError):
            os.write(2, f"sparkwright guard: {message}\n".encode())

    def end(self, message: str) -> None:
        """Kill the server and its descendants, print the reason, and write it into the record."""
        self.kill([*descendants(self.server), self.server])
        names = ("server", "floor", "limit", "free", "available", "least")
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        values |= {"message": message, "model": self.model, "time": round(time.time())}
        with contextlib.suppress(OSError):
            Path(self.record).write_text(json.dumps({"schema": 1, **values}))
        self.say(message)

    def follow(self, server: int) -> None:
        """End the server, whose descriptor is *server*, since another machine's has ended."""
        processes = [*descendants(self.server), self.server]
        with contextlib.suppress(OSError):
            os.kill(self.server, signal.SIGTERM)
        select.select([server], [], [], GRACE)
        self.kill(processes)
        self.say("another machine of this server has ended or is lost, so it was ended here, too")

    @staticmethod
    def kill(processes: list[int]) -> None:
        """Kill *processes*."""
        for process in processes:
            # The first process of a container ignores SIGKILL from within, so SIGTERM follows.
            for by in (signal.SIGKILL, signal.SIGTERM):
                with contextlib.suppress(OSError):
                    os.kill(process, by)

    def run(self) -> None:
        """Watch until the server has ended."""
        alive, server = select.poll(), os.pidfd_open(self.server)
        for descriptor in (server, *self.peers):
            alive.register(descriptor, select.POLLIN)
        last = time.monotonic()
        while not (ended := alive.poll(1000 * self.period)):
            now = time.monotonic()
            reason, last = self.look(now - last), now
            if reason:
                free = gib(max(0, self.limit - SLACK))
                self.end(f"{reason}: the server was ended, so that {free} GiB stay free")
                return
            self.warn()
        if server not in dict(ended):
            self.follow(server)


def gib(size: float) -> str:
    """Return *size* bytes in GiB."""
    return f"{size / 2**30:.1f}"


def descendants(process: int) -> list[int]:
    """Return the children of *process* and theirs, without this process."""
    results = [process]
    for parent in results:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                results += map(int, children.read_text().split())
    return [pid for pid in results[1:] if pid != os.getpid()]


def records() -> Path:
    """Return the folder with what guards saw of servers of this user that they ended."""
    home = Path(os.environ.get("HOME") or "/nonexistent")
    state = os.environ.get("XDG_STATE_HOME") or home / ".local" / "state"
    return Path(state, "sparkwright", "serving")


def start(floor: float, limit: float, model: Path, peers: list[int]) -> None:
    """
    Start a guard of this process, also when that has become another program (exec).

    Args:
        floor: GiB below which it warns.
        limit: GiB below which it ends this process.
        peers: Descriptors of connections to other machines.
    """
    with contextlib.suppress(OSError):
        records().mkdir(parents=True, exist_ok=True)
    record = records() / f"{os.getpid()}.json"
    sizes = str(round(floor * 2**30)), str(round(limit * 2**30))
    arguments = (str(os.getpid()), *sizes, str(record), str(model.absolute()))
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *arguments, "/proc", *map(str, peers)],
        pass_fds=peers,
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )


def main(arguments: list[str]) -> None:
    """Guard the parent: ``python guard.py PARENT FLOOR LIMIT RECORD MODEL PROC [PEER...]``."""
    parent, floor, limit, record, model, proc, *peers = arguments
    if os.getppid() != int(parent):
        return
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        ctypes.CDLL(None).mlockall(MCL_CURRENT | MCL_FUTURE)
    with contextlib.suppress(OSError):
        os.nice(-10)
    sizes = int(floor), int(limit)
    Guard(int(parent), *sizes, record, model, proc, *map(int, peers)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
