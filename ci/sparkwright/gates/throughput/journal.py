"""
The journal of a gate: every leg on the disk before the next begins, so that hours of measuring outlive a kill, a reset or a full disk.

A journal is continued by the same question only: the same wheels, cells, policy and machine, told by one digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sparkwright.bench.machine.state_checks import Normal
from sparkwright.bench.records import Reason, Side
from sparkwright.gates.core import journal as journal_file
from sparkwright.gates.throughput.records import Measurement

#: The most bytes read of a journal; twelve blocks of six cells with 64 requests each have about 100 MB.
LARGEST = 1024 * 1024**2


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """
    What is asked.

    Attributes:
        identity: Digest of what must be the same for the journal to be continued. *about*: its parts, by name, for people.
        seed: Of all orders and prompts.
        at: Seconds since 1970.
    """

    identity: str
    about: dict[str, str]
    seed: int
    at: float


class Qualified(msgspec.Struct, frozen=True, tag="qualified"):
    """
    The load generator was found right, and the machine was heated.

    Attributes:
        boot: Of the machine. *at*: seconds since 1970.
        says: How it was found, as sentences.
        normal: What the probe read then; None without a GPU.
    """

    boot: str
    at: float
    says: tuple[str, ...]
    normal: Normal | None = None


class Sized(msgspec.Struct, frozen=True, tag="sized"):
    """Each leg of *cell* makes so many *requests*, on either side and to the end."""

    cell: str
    requests: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """A leg, counted or not."""

    leg: Measurement


class Discarded(msgspec.Struct, frozen=True, tag="aside"):
    """The legs of a launch do not count: it was broken off before its block was whole."""

    side: Side
    launch: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A block is whole: all its legs are there."""

    block: int


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Somebody goes on behind an interruption."""

    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """There is a result; nothing is left to be continued."""

    state: str


Line = Begun | Qualified | Sized | Measured | Discarded | Closed | Resumed | Ended


class Past(msgspec.Struct, frozen=True):
    """
    What a journal holds.

    Attributes:
        legs: In the order in which they were measured.
        closed: Blocks that are whole.
        resumed: How often it was continued, this time included.
        sizes: Requests of a leg, by cell.
        qualified: The last time; None where it was not.
    """

    begun: Begun
    legs: tuple[Measurement, ...] = ()
    closed: frozenset[int] = frozenset()
    resumed: int = 0
    sizes: dict[str, int] = {}
    qualified: Qualified | None = None


def read(path: Path) -> Past | None:
    """
    Return what the journal at *path* holds; None where there is none, or where it ended with a result.

    Raises:
        file-invalid: It is no such journal.
    """
    if not path.exists():
        return None
    lines: list[Line] = journal_file.read(path, Line, largest=LARGEST, what="journal of a throughput gate")
    if not lines or not isinstance(begun := lines[0], Begun) or any(isinstance(line, Ended) for line in lines):
        return None
    return Past(
        begun,
        tuple(_legs(lines)),
        frozenset(line.block for line in lines if isinstance(line, Closed)),
        sum(isinstance(line, Resumed) for line in lines),
        {line.cell: line.requests for line in lines if isinstance(line, Sized)},
        next((line for line in reversed(lines) if isinstance(line, Qualified)), None),
    )


def _legs(lines: list[Line]) -> Iterator[Measurement]:
    gone = {(line.side, line.launch) for line in lines if isinstance(line, Discarded)}
    for line in lines:
        if isinstance(line, Measured):
            yield aside(line.leg) if (line.leg.side, line.leg.launch) in gone else line.leg


def aside(leg: Measurement) -> Measurement:
    """Return *leg* as one of a launch that was broken off."""
    why = Reason("interrupted", "the launch was broken off before its block was whole")
    return msgspec.structs.replace(leg, discarded=True, reasons=(*leg.reasons, why))


class Journal:
    """
    The journal at *path*, open for writing.

    Args:
        begun: What is asked now. Where the journal there asks the same, it is continued; anything else is kept beside it.

    Attributes:
        past: What there was already. *refused*: the parts of `Begun.about` for which an unfinished journal was not continued.
    """

    def __init__(self, path: Path, begun: Begun) -> None:
        found = read(path)
        same = found is not None and found.begun.identity == begun.identity
        self.refused: tuple[str, ...] = ()
        if found and not same:
            now, then = begun.about, found.begun.about
            self.refused = tuple(name for name in sorted({*now, *then}) if now.get(name) != then.get(name))
        self.past = msgspec.structs.replace(found, resumed=found.resumed + 1) if found and same else Past(begun)
        self.path = path
        self._writer = journal_file.JournalWriter(path, more=same)
        self.add(Resumed(begun.at) if same else begun)

    def add(self, line: Line) -> None:
        """Write *line*; it is on the disk when this returns."""
        self._writer.add(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()
