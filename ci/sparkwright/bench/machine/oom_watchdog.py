"""
Watch the host's memory while a server works, and kill the server before the host hangs.

The GPU of a GB10 shares the host's memory. Without a free part of it the host hangs within seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from sparkwright.bench.machine.kernel_log import KMSG, KernelLog
from sparkwright.bench.machine.state_checks import MemoryPolicy
from sparkwright.core import process

Kill = Callable[[str, str], None]


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
