"""
Stands between a gate and the server that it started: ``python -m sparkwright.bench.server.keeper COMMAND``.
The server never outlives the gate.

Its standard input is a pipe whose other end the gate holds. The first line that comes is an `Order`, as JSON. When that end closes, by
whatever death, or when the server ends by itself, every process that came of the server is asked to end, and then killed. None escapes:
orphans become children of the keeper (prctl's subreaper), whatever session they made for themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import msgspec
import psutil

from sparkwright.core.process import wrap_with_limits

#: prctl(2): orphaned descendants become children of this process.
PR_SET_CHILD_SUBREAPER = 36
#: Seconds after which processes that the kernel cannot end (waiting for a disk, say) are left to it.
PATIENCE = 20.0


class Order(msgspec.Struct, frozen=True):
    """
    How the server is kept.

    Attributes:
        variables: Its environment.
        grace: Seconds between TERM and KILL.
    """

    variables: dict[str, str]
    grace: float


def below() -> list[psutil.Process]:
    """Return every descendant that still runs; dead ones are buried."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


def end(child: int, grace: float) -> None:
    """Ask the group that *child* leads to end, and kill what is left after *grace* seconds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGTERM)
    asked = time.monotonic()
    while time.monotonic() < asked + grace and _below():
        time.sleep(0.1)
    while time.monotonic() < asked + grace + PATIENCE and (left := _below()):
        for one in left:
            one.kill()
        time.sleep(0.1)


def _below() -> list[psutil.Process]:
    try:
        return below()
    except psutil.NoSuchProcess:  # gone between two looks
        return _below()


def main(command: list[str]) -> int:
    """Run *command* until it ends or standard input does, and return its exit status, as a shell has it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # An interruption is for the gate, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: os.close(0))
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    child = subprocess.Popen(
        wrap_with_limits(command, path=order.variables.get("PATH")), env=order.variables, stdin=subprocess.DEVNULL, process_group=0
    )
    while child.poll() is None:
        try:
            ready, _, _ = select.select([0, reading], [], [])
        except (OSError, ValueError):  # TERM closed the pipe
            break
        if reading in ready:
            os.read(reading, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
    status = child.poll()
    end(child.pid, order.grace)
    return 0 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
