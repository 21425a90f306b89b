"""
The journal of an experiment: every measurement is on the disk before the next begins, so that hours
of measuring outlive a kill, a reset or a full disk.

It is continued by the same experiment only: the same wheels, cells, policy and machine.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.records import Reason, Side
from sparkwright.core.store import append_line, read_lines
from sparkwright.gates.throughput.records import Measurement


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """
    The experiment.

    Attributes:
        identity: Digest of what must be the same to continue. *about*: its parts, by name.
        seed: Of all orders and prompts.
        at: Seconds since 1970.
        attempt: Number of this gate of the wheel, from 1.
    """

    identity: str
    about: dict[str, str]
    seed: int
    at: float
    attempt: int = 1


class Sized(msgspec.Struct, frozen=True, tag="sized"):
    """Each measurement of *cell* makes so many *requests*, on either side and to the end."""

    cell: str
    requests: int


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """A measurement, counted or not."""

    measurement: Measurement


class Discarded(msgspec.Struct, frozen=True, tag="discarded"):
    """The measurements of a launch do not count: it was interrupted before its block was whole."""

    side: Side
    launch: int


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """All measurements of a block are there."""

    block: int


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """The experiment continues after an interruption."""

    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """There is a result; nothing is left to continue."""

    state: str


Line = Begun | Sized | Measured | Discarded | Closed | Resumed | Ended


class Past(msgspec.Struct, frozen=True):
    """
    The contents of a journal.

    Attributes:
        measurements: In their order.
        closed: Complete blocks.
        resumed: How often it was continued, this time included.
        sizes: Requests of a measurement, by cell.
    """

    begun: Begun
    measurements: tuple[Measurement, ...] = ()
    closed: frozenset[int] = frozenset()
    resumed: int = 0
    sizes: dict[str, int] = {}


def read(path: Path) -> Past | None:
    """
    Return the contents of the journal at *path*; None without one, or if it ended with a result.

    Raises:
        file-invalid: It is not such a journal.
    """
    if not path.exists():
        return None
    lines: list[Line] = read_lines(path, Line, "journal of a throughput gate")
    if not lines or not isinstance(begun := lines[0], Begun):
        return None
    if any(isinstance(line, Ended) for line in lines):
        return None
    gone = {(line.side, line.launch) for line in lines if isinstance(line, Discarded)}
    measurements = [line.measurement for line in lines if isinstance(line, Measured)]
    return Past(
        begun,
        tuple(discarded(one) if (one.side, one.launch) in gone else one for one in measurements),
        frozenset(line.block for line in lines if isinstance(line, Closed)),
        sum(isinstance(line, Resumed) for line in lines),
        {line.cell: line.requests for line in lines if isinstance(line, Sized)},
    )


def discarded(measurement: Measurement) -> Measurement:
    """Return *measurement* as one of an interrupted launch."""
    why = Reason("interrupted", "the launch was interrupted before its block was complete")
    return replace(measurement, discarded=True, reasons=(*measurement.reasons, why))


class Journal:
    """
    The journal at *path*, open for writing.

    Args:
        begun: The experiment. A journal of the same one is continued; another is kept beside it.

    Attributes:
        past: What it held already.
        refused: Parts of `Begun.about` for which an unfinished journal was not continued.
    """

    def __init__(self, path: Path, begun: Begun) -> None:
        found = read(path)
        same = found is not None and found.begun.identity == begun.identity
        self.refused: tuple[str, ...] = ()
        self.past = Past(begun)
        if found and same:
            self.past = replace(found, resumed=found.resumed + 1)
        elif found:
            now, then = begun.about, found.begun.about
            names = sorted({*now, *then})
            self.refused = tuple(name for name in names if now.get(name) != then.get(name))
        self._path = path
        if path.exists() and not same:
            path.replace(path.with_name(f"{path.name}.before"))
        self.add(Resumed(begun.at) if same else begun)

    def add(self, line: Line) -> None:
        """Write *line*; it is on the disk when this returns."""
        append_line(self._path, line)
