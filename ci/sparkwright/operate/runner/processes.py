"""The processes of a user, and their end, whatever they do against it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

#: Tells which processes are meant, afresh whenever it is asked.
Whose = Callable[[], list[int]]


def of_user(uid: int) -> list[int]:
    """Return the processes that have *uid* in any of its four roles: real, effective, saved, file system (proc_pid_status(5))."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            text = (folder / "status").read_text("utf-8", "replace")
            lines = {name: rest for name, _, rest in (line.partition(":\t") for line in text.splitlines())}
            # A zombie holds nothing, and only its parent can take it away.
            if str(uid) in lines.get("Uid", "").split() and not lines.get("State", "").startswith("Z"):
                found.append(int(folder.name))
    return found


def shown(pids: list[int]) -> list[str]:
    """Return a line for each process, with its name as the kernel has it."""
    lines = []
    for pid in pids[:20]:
        name = "?"
        with contextlib.suppress(OSError):
            name = "".join(one if one.isprintable() else "?" for one in Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip())
        lines.append(f"process {pid} ({name})")
    return lines


def ask_to_end(whose: Whose, patience: float) -> None:
    """Send SIGTERM once to each, and wait until all have gone or *patience* seconds have."""
    _signal(whose(), signal.SIGTERM)
    until = time.monotonic() + patience
    while whose() and time.monotonic() < until:
        time.sleep(0.05)


def end(whose: Whose, patience: float = 10.0) -> tuple[int, list[int]]:
    """
    Kill every process that *whose* tells, and return how many there were and which are left after *patience* seconds.

    They are stopped before they are killed: one that starts others faster than they can be found does not, once it is stopped.
    """
    ended: set[int] = set()
    until = time.monotonic() + patience
    while left := whose():
        _signal(left, signal.SIGSTOP)
        _signal(left, signal.SIGKILL)
        ended |= set(left)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return len(ended - set(left)), left


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
