"""A child program that is held to its limits of seconds, memory and bytes written; nothing that it starts outlives the call."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.core import process

#: Bytes kept of what a child says; compilers repeat themselves.
TAIL = 4096


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What one child may take.

    Attributes:
        seconds: Of wall clock.
        memory: Megabytes of address space of each of its processes.
        written: Megabytes of each file that it writes.
    """

    seconds: float
    memory: int
    written: int

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory <= 0 or self.written <= 0:
            raise ValueError("limits are larger than zero")


class Ended(msgspec.Struct, frozen=True):
    """How a child ended: its *status* (negative: the signal), whether it was *late* and so was killed, and the last lines that it said."""

    status: int
    late: bool
    tail: str


def run(command: Sequence[str], limits: Limits, log: Path) -> Ended:
    """
    Run *command* within *limits* and return how it ended; what it says goes to *log*.

    Raises:
        tool-missing: The program does not exist.
    """

    with log.open("wb") as sink:
        child = subprocess.Popen(
            process.wrap_with_limits(command, by=signal.SIGKILL, memory=limits.memory << 20, written=limits.written << 20),
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=process.clean_environment(), cwd=log.parent,
            start_new_session=True,
        )  # fmt: skip
        try:
            late = not _ends(child.pid, limits.seconds)
        finally:
            # Also after a normal end: what the child started must not go on.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return Ended(child.returncode, late, _tail(log))


def _ends(pid: int, seconds: float) -> bool:
    """Wait until the child *pid* has ended, and return whether it did so in time; `Popen.wait` looks only every 50 ms."""
    watched = os.pidfd_open(pid)
    try:
        return bool(select.select([watched], [], [], seconds)[0])
    finally:
        os.close(watched)


def _tail(log: Path) -> str:
    with log.open("rb") as said:
        said.seek(max(0, log.stat().st_size - TAIL))
        return said.read().decode("utf-8", "replace").strip()
