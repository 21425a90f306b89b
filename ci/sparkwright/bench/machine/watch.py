"""
The watch over memory while a server works: unified memory that is gone takes the whole machine with it, within seconds.

It ends the server where too little is left, where it falls too fast, or where the kernel's log has NV_ERR_NO_MEMORY, which was seen while
22 GiB seemed available (gates.md §2.3 "Crash safety").
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from sparkwright.bench.machine import kernel_log
from sparkwright.bench.machine.kernel_log import KernelLog
from sparkwright.bench.machine.policy import MemoryPolicy
from sparkwright.core import process

#: Seconds over which a fall is told: between two looks alone, one array that is taken at once would look like a landslide.
WINDOW = 1.0


class MemoryWatch:
    """
    Looks at the memory inside its ``with`` block, in a thread of its own.

    Args:
        end: Called at most once, from that thread, with a reference (``memory-low``, ``kernel-no-memory``) and a sentence; ends the server.
        kernel: Where the kernel's log is read.

    Attributes:
        ended: The reference that *end* was called with; empty while all is well.
        unknown: Why the kernel's log is not watched; empty where it is.
        lowest: The least that was available, in MB; None before the first look.
    """

    def __init__(self, policy: MemoryPolicy, end: Callable[[str, str], None], *, kernel: Path = kernel_log.KMSG) -> None:
        self._policy, self._end, self._kernel = policy, end, kernel
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._seen: deque[tuple[float, int]] = deque()
        self._log: KernelLog | None = None
        self.ended = self.unknown = ""
        self.lowest: int | None = None

    def __enter__(self) -> Self:
        try:
            self._log = KernelLog(self._kernel)
        except OSError as error:
            self.unknown = f"kernel's log: {error.strerror}"
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._log:
            self._log.close()

    def _watch(self) -> None:
        while not self._over.is_set():
            if found := self._wrong():
                self.ended = found[0]
                self._end(*found)
                return
            self._over.wait(self._policy.period)

    def _wrong(self) -> tuple[str, str] | None:
        """Return the reference and the sentence of what is wrong now, if anything is."""
        try:
            free, now = process.available_megabytes(), time.monotonic()
        except OSError as error:
            self.unknown = f"available memory: {error.strerror}"
            return None
        self.lowest = free if self.lowest is None else min(self.lowest, free)
        while self._seen and self._seen[0][0] < now - max(WINDOW, self._policy.period * 1.5):
            self._seen.popleft()
        self._seen.append((now, free))
        if free < self._policy.floor:
            return "memory-low", f"{free} MB are available on the machine, {self._policy.floor} MB must stay"
        if (fell := max(earlier for _, earlier in self._seen) - free) > self._policy.fall:
            return "memory-low", f"the machine's available memory falls by {fell} MB in a second, at most {self._policy.fall} MB is allowed"
        return self._said()

    def _said(self) -> tuple[str, str] | None:
        """Return what the kernel says of the GPU's memory, if anything."""
        if self._log is None:
            return None
        with contextlib.suppress(OSError):
            for found in self._log.findings():
                if found.reference == "kernel-no-memory":
                    return found.reference, f"the kernel's log: {found.text}"
            return None
        self._log.close()
        self._log, self.unknown = None, "kernel's log: it cannot be read any more"
        return None
