"""
What the kernel said while something ran: Xid and other errors of the GPU's driver, and processes killed for memory.

`/dev/kmsg` gives every record from where it was opened on, to whoever may read it (on most systems only root, or with
kernel.dmesg_restrict=0). Where it cannot be read, nothing is known, and the caller must say so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sparkwright.bench.machine.state_checks import REASONS, MemoryPolicy
from sparkwright.core import process

Kill = Callable[[str, str], None]

KMSG = Path("/dev/kmsg")
#: The most bytes taken in one reading; the kernel's buffer has a few MB at most, and a file may be anything.
MOST = 16 * 1024 * 1024

#: In order: the first pattern that fits names the finding. Xid numbers are explained in NVIDIA's "Xid Errors"; NV_ERR_NO_MEMORY before a
#: collapse was seen in vllm#56824 (gates.md §2.3).
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("kernel-xid", re.compile(r"NVRM: Xid \([^)]{0,80}\): \d+")),
    ("kernel-no-memory", re.compile(r"NV_ERR_NO_MEMORY|NVRM: .{0,200}[Oo]ut of memory")),
    (
        "kernel-nvrm",
        re.compile(
            r"NVRM: .{0,300}(?:NV_ERR_|[Aa]ssert|[Ee]rror|ERROR|[Ff]ail|fallen off the bus|[Tt]imed? ?out)"
        ),
    ),
    ("kernel-oom-kill", re.compile(r"[Oo]ut of memory: Killed process|oom-kill:")),
    (
        "kernel-hardware",
        re.compile(
            r"\[Hardware Error\]|BUG: soft lockup|hung_task|blocked for more than \d+ seconds"
        ),
    ),
)

#: Stable reference → what it means and what to do.
MEANINGS = {
    "kernel-xid": "The GPU reported an error (Xid). Look the number up in NVIDIA's list; nothing that ran then can be believed.",
    "kernel-no-memory": REASONS["kernel-no-memory"],
    "kernel-nvrm": "The GPU's driver reported an error.",
    "kernel-oom-kill": "The kernel killed a process for memory. Give the server less: its KV cache is the largest part.",
    "kernel-hardware": "The kernel reported a fault of the hardware, or a processor that hung.",
    "kernel-log-hidden": "This user, or its sandbox, may not read the kernel's log (/dev/kmsg). Set kernel.dmesg_restrict=0, and allow the device in "
    "the sandbox.",
    "kernel-log-lost": "The kernel overwrote records before they were read, so errors may be missing.",
}


class Finding(msgspec.Struct, frozen=True):
    """A record that names a fault: its reference and its text, at most 300 characters."""

    reference: str
    text: str


def finding(text: str) -> Finding | None:
    """Return what the *text* of one record says of a fault, or None."""
    fitting = (name for name, pattern in PATTERNS if pattern.search(text[:2000]))
    name = next(fitting, "")
    return (
        Finding(name, "".join(char if char.isprintable() else " " for char in text[:300]))
        if name
        else None
    )


def message(line: str) -> str:
    """Return the text of a line of `/dev/kmsg` (``6,339,5140900,-;NET: Registered``), of another line all, of a line of fields nothing."""
    if line.startswith(" "):
        return ""
    head, separator, text = line.partition(";")
    return text if separator and re.fullmatch(r"\d+,\d+,\d+,[^;]*", head) else line


class KernelLog:
    """
    The kernel's log from now on.

    Args:
        path: The device; a file of its lines does as well, and is read from its end.

    Attributes:
        lost: How many times records were overwritten before they were read.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, path: Path = KMSG) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self.lost = 0
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)
            # Some sandboxes let the device be opened and refuse to read it.
            self._rest = self._read()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _read(self) -> bytes:
        """Return what is there now; each reading of the device gives one record."""
        while True:
            try:
                return os.read(self._descriptor, 8192)
            except BlockingIOError:
                return b""
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self.lost += 1

    def findings(self) -> Iterator[Finding]:
        """
        Yield the faults in the records that came since the last call.

        Raises:
            OSError: The log cannot be read any more.
        """
        taken = 0
        while taken < MOST and (data := self._read()):
            taken += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            # A line without an end is no record; what follows it is searched all the same.
            self._rest = self._rest[-8192:]
            for line in lines:
                if found := finding(message(line.decode("utf-8", "replace"))):
                    yield found


@contextlib.contextmanager
def watch_memory(policy: MemoryPolicy, kill: Kill, *, kernel_log: Path = KMSG) -> Iterator[None]:
    """
    Watch the memory in a thread of its own until the block ends.

    The server is killed if too little memory is available, if it shrinks too fast within a second,
    or if the kernel's log has NV_ERR_NO_MEMORY, which was seen while 22 GiB seemed available.

    Args:
        kill: Called at most once, from that thread, with a reason (``memory-low``,
            ``kernel-no-memory``) and a message; kills the server.
        kernel_log: Device with the kernel's log; not watched if it cannot be read.
    """
    stopped = threading.Event()
    log = None
    with contextlib.suppress(OSError):
        log = KernelLog(kernel_log)
    thread = threading.Thread(target=_watch, args=(policy, kill, log, stopped), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        if log:
            log.close()


def _watch(
    policy: MemoryPolicy, kill: Kill, log: KernelLog | None, stopped: threading.Event
) -> None:
    # The samples of one second: a large array that is allocated at once is no leak.
    recent: deque[int] = deque(maxlen=1 + round(1 / policy.period))
    while not stopped.wait(policy.period):
        available = process.available_megabytes()
        recent.append(available)
        fall = max(recent) - available
        if available < policy.floor:
            message = f"{available} MB are available, {policy.floor} MB must stay"
            return kill("memory-low", message)
        if fall > policy.max_fall:
            message = (
                f"available memory fell by {fall} MB in a second, {policy.max_fall} MB is allowed"
            )
            return kill("memory-low", message)
        with contextlib.suppress(OSError):
            for finding in log.findings() if log else ():
                if finding.reference == "kernel-no-memory":
                    return kill(finding.reference, f"the kernel's log: {finding.text}")
    return None
