"""
The host while a server works: faults in the kernel's log, and the memory that is left.

The kernel's log has Xid and other errors of the GPU's driver, and processes killed for memory. The
GPU of a GB10 shares the host's memory, and without a free part of it the host hangs in seconds.
"""

import contextlib
import errno
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sparkwright.bench.machine.monitor import REASONS
from sparkwright.bench.records import Reason
from sparkwright.core import process
from sparkwright.core.console import one_line

KMSG = Path("/dev/kmsg")
#: Seconds between two looks at the memory; a floor of 12 GiB lasts 5 s at 2.5 GB/s.
PERIOD = 0.25
#: Records that are read at a time; the kernel's buffer has some ten thousand.
MOST = 100_000

#: In order: the first pattern that fits names the finding. NVIDIA's "Xid Errors" explains the
#: numbers; NV_ERR_NO_MEMORY before a collapse was seen in vllm #56824.
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("kernel-xid", re.compile(r"NVRM: Xid \([^)]{0,80}\): \d+")),
    ("kernel-no-memory", re.compile(r"NV_ERR_NO_MEMORY|NVRM: .{0,200}[Oo]ut of memory")),
    (
        "kernel-nvrm",
        re.compile(
            r"NVRM: .{0,300}(?:NV_ERR_|[Aa]ssert|[Ee]rror|ERROR|[Ff]ail|fallen off the bus"
            r"|[Tt]imed? ?out)"
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

#: NV_ERR_NOT_SUPPORTED for a power state: driver 580.159.04 printed it every few seconds on an H100
#: in a virtual machine, while nothing was wrong [measured].
HARMLESS = re.compile(r"refcntRequestReference_IMPL: Failed to enter state .{0,80}0x00000056\)")

#: Stable reference → what it means and what to do.
MEANINGS = {
    "kernel-xid": (
        "The GPU reported an error (Xid). Look the number up in NVIDIA's list; "
        "results from that time are not reliable."
    ),
    "kernel-no-memory": REASONS["kernel-no-memory"],
    "kernel-nvrm": "The GPU's driver reported an error.",
    "kernel-oom-kill": "The kernel killed a process for memory. Give the server less: its KV cache "
    "is the largest part.",
    "kernel-hardware": "The kernel reported a fault of the hardware, or a processor that hung.",
    "kernel-log-hidden": "This user, or its sandbox, may not read the kernel's log (/dev/kmsg). "
    "Set kernel.dmesg_restrict=0, and allow the device in the sandbox.",
    "kernel-log-lost": "The kernel overwrote records before they were read, so errors may be "
    "missing.",
}


def finding(text: str) -> Reason | None:
    """Return the fault that the *text* of one record names, or None."""
    text = text[:2000]
    for name, pattern in PATTERNS:
        if pattern.search(text) and not HARMLESS.search(text):
            return Reason(name, one_line(text, 300))
    return None


def is_of_another(fault: Reason, own: Collection[int]) -> bool:
    """Return whether *fault* is an Xid that names a process which is none of *own*."""
    named = re.search(r"NVRM: Xid .{0,80}?pid=(\d{1,10})\b", fault.message)
    return named is not None and int(named[1]) not in own


class KernelLog(io.FileIO):
    """
    The kernel's log from now on.

    Most systems let only root read it, or every user with kernel.dmesg_restrict=0.

    Args:
        path: The device, of which each reading gives one record.

    Attributes:
        lost: How many times records were overwritten before they were read.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, path: Path = KMSG) -> None:
        super().__init__(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        self.lost = 0
        self.seek(0, os.SEEK_END)
        # Some sandboxes let the device be opened and refuse to read it.
        list(self.findings())

    def findings(self) -> Iterator[Reason]:
        """
        Yield the faults in the records that came since the last call.

        Raises:
            OSError: The log cannot be read any more.
        """
        for _ in range(MOST):
            try:
                record = self.read(8192)
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self.lost += 1
                continue
            if not record:  # no further record is there now
                return
            # ``6,339,5140900,-;NET: Registered``, and lines of further fields, which are indented.
            for line in record.decode("utf-8", "replace").splitlines():
                if not line.startswith(" ") and (fault := finding(line.partition(";")[2])):
                    yield fault


def is_readable() -> bool:
    """Return whether this user may read the kernel's log."""
    try:
        KernelLog().close()
    except OSError:
        return False
    return True


def watch_memory(
    floor: int,
    kill: Callable[[str, str], None],
    stopped: threading.Event,
    kernel_log: Path = KMSG,
) -> None:
    """
    Watch the memory until *stopped*; run this in a thread of its own.

    The server is killed if too little memory is available, or if the kernel's log has
    NV_ERR_NO_MEMORY, which was seen while 22 GiB seemed available.

    Args:
        floor: Megabytes that must stay available.
        kill: Called at most once, with a reason (``memory-low``, ``kernel-no-memory``) and a
            message; kills the server.
        kernel_log: Device with the kernel's log; not watched if it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        log = None
        with contextlib.suppress(OSError):
            log = stack.enter_context(KernelLog(kernel_log))
        while not stopped.wait(PERIOD):
            available = process.available_megabytes()
            if available < floor:
                kill("memory-low", f"{available} MB are available, {floor} MB must stay")
                return
            with contextlib.suppress(OSError):
                for fault in log.findings() if log else ():
                    if fault.reference == "kernel-no-memory":
                        kill(fault.reference, f"the kernel's log: {fault.message}")
                        return
