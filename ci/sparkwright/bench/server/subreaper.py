"""
Run a command whose processes never outlive the caller: ``python subreaper.py GRACE COMMAND…``.

Standard input is a pipe that the caller holds. When it ends, by whatever death of the caller, or
brings ``t``, or when the command ends by itself, every process that came of the command is asked to
end (TERM), and killed after GRACE seconds; ``k`` kills at once. None escapes: orphans become
children of this process (prctl's subreaper), whatever session they made for themselves.

This file runs as a script, with the environment of the command, and imports no other module of
sparkwright.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

#: prctl(2): orphaned descendants become children of this process.
PR_SET_CHILD_SUBREAPER = 36
#: Seconds after which processes that the kernel cannot end (waiting for a disk) are left to it.
KILL_SECONDS = 20.0


def _descendants() -> list[psutil.Process]:
    """Return every descendant that runs, and reap those that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    try:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:  # this child has ended since it was listed
        return _descendants()


def _order(seconds: float) -> bytes:
    """Return ``t`` or ``k`` if the caller sends it within *seconds*, ``t`` if it ended."""
    return (os.read(0, 1) or b"t") if select.select([0], [], [], seconds)[0] else b""


def main(grace: float, command: list[str]) -> int:
    """Run *command*, and return its exit status as a shell has it; 0 if it was asked to end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the caller
    # A handler and not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    order = b""
    while child.poll() is None and not order:
        order = _order(0.2)
    status = child.poll() or 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
    term = time.monotonic()
    while (left := _descendants()) and time.monotonic() < term + grace + KILL_SECONDS:
        if order != b"k":
            order = _order(0)
        if order == b"k" or time.monotonic() > term + grace:
            for process in left:
                process.kill()
        time.sleep(0.05)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
