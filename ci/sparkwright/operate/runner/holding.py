"""
Who has this machine: one lock for the one who does, another by which those who wait for it are known.

Both are the kernel's (flock), so that whoever dies lets go. filelock, which the rest of the package uses, has no shared locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator

from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.ground import Ground

MACHINE, WANTED = "machine.lock", "wanted.lock"


@contextlib.contextmanager
def machine(ground: Ground, patience: float = 0, still: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """
    Have this machine for the block: nobody else starts a job on it.

    Args:
        patience: Seconds to wait for it. *still*: asked while waiting; False ends that.

    Raises:
        runner-busy: Somebody else has it.
    """
    until = time.monotonic() + patience
    with (ground.state / MACHINE).open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not still() or time.monotonic() >= until:
                    raise LabError("runner-busy", f"{ground.settings.name} is doing another job.") from None
            time.sleep(min(0.2, ground.policy.limits.look))
        yield


@contextlib.contextmanager
def wanting(ground: Ground) -> Iterator[None]:
    """Let this machine's runner know, for the block, that somebody waits for it: one without a job makes room."""
    with (ground.state / WANTED).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def wanted(ground: Ground) -> bool:
    """Does somebody wait for this machine? Those who died do not."""
    with (ground.state / WANTED).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
