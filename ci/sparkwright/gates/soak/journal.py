"""
The journal of a soak: a line of JSON for each stretch, on the disk before the next begins, so that a killed machine loses one stretch.

A journal without its last line is that of a soak that was interrupted. What it holds is judged as far as it goes: a failure in it is a
failure, but nothing in it is a pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.bench.machine.kernel_log import Finding
from sparkwright.core.errors import FileError
from sparkwright.gates.core import journal as journal_file
from sparkwright.gates.soak.collect import Stretch

#: The most bytes read of a journal; a day of minutes has about 3 MB.
LARGEST = 64 * 1024 * 1024


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """
    What the soak set out with.

    Attributes:
        seconds: How long it is to take.
        model: The model's name at the server.
        processes: Why the server's processes were not watched; empty where they were.
        kernel: Why the kernel's log was not read; empty where it was.
    """

    seconds: float
    model: str
    processes: str
    kernel: str


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """
    One stretch.

    Attributes:
        at: Seconds since the beginning, at its end.
        load: What was asked.
        memory: Seconds since the beginning, and the resident bytes of the server's processes.
        available: The least memory that the machine had left, in bytes; None where nobody looked.
        restarts: What was seen of processes that ended or began again.
        kernel: Faults in the kernel's log.
        lost: Why faults may be missing from *kernel*; empty where they cannot.
    """

    at: float
    load: Stretch
    memory: tuple[tuple[float, float], ...] = ()
    available: float | None = None
    restarts: tuple[str, ...] = ()
    kernel: tuple[Finding, ...] = ()
    lost: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """
    The load is over, and nobody interrupted it.

    Attributes:
        why: ``time`` when it took as long as it should, ``gone`` when the server gave no more answers.
        running: Requests that the server still worked on afterwards; None where it did not say.
        alone: For each of the oddities that were kept, whether the same request is answered so when nothing else is asked.
    """

    at: float
    why: Literal["time", "gone"]
    running: float | None = None
    alone: tuple[bool, ...] = ()


Line = Begun | Observed | Ended


class Record(msgspec.Struct, frozen=True):
    """A journal as it was read: *ended* is None where the soak was interrupted."""

    begun: Begun
    observed: tuple[Observed, ...]
    ended: Ended | None


def read(path: Path) -> Record:
    """
    Return the journal at *path*, less a last line that was only half written.

    Raises:
        file-invalid: It cannot be read, is larger than `LARGEST`, or holds something else.
    """
    lines = journal_file.read(path, Line, largest=LARGEST, what="journal of a soak")
    if not lines or not isinstance(begun := lines[0], Begun):
        raise FileError("file-invalid", f"{path} does not begin like the journal of a soak.")
    observed = tuple(line for line in lines if isinstance(line, Observed))
    ended = next((line for line in lines if isinstance(line, Ended)), None)
    return Record(begun, observed, ended)
