"""The processes of a user, and their end, whatever they do against it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

#: So many looks in a row have to find nothing: one that starts itself anew can be missed by a look.
QUIET = 3

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


def end(whose: Whose, patience: float = 10.0, *, user: int | None = None) -> tuple[int, list[int]]:
    """
    Kill every process that *whose* tells, and return how many were seen and which are left after *patience* seconds.

    Args:
        user: Whose processes they are, all of them. Then the kernel is told once to kill them all, which no program outruns by starting
            itself anew faster than a list of processes can be read; looking at a list alone is good for programs that do not try.
    """
    ended: set[int] = set()
    until, quiet = time.monotonic() + patience, 0
    while quiet < QUIET:
        left = whose()
        quiet = 0 if left else quiet + 1
        ended |= set(left)
        if user is not None:
            _sweep(user)
        _signal(left, signal.SIGSTOP)
        _signal(left, signal.SIGKILL)
        if time.monotonic() > until:
            return len(ended - set(left)), left
        time.sleep(0.01)
    return len(ended), []


def _sweep(uid: int) -> None:
    """
    Kill all processes of *uid* at once, by a child that becomes that user and is not hit itself (kill(2), pid −1).

    Raises:
        PermissionError: This process may not become that user.
    """
    if uid in (0, os.getuid(), os.geteuid()):
        return  # these have processes that are no job's
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        os.setgroups([])
        os.setresuid(uid, uid, uid)
        if os.getresuid() == (uid, uid, uid):
            os.kill(-1, signal.SIGKILL)
    finally:
        os._exit(0)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
