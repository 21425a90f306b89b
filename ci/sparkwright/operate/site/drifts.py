"""Documents of ``drift --json`` and ``status --json``, read back as untrusted files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright.cherry_picks import drift
from sparkwright.cherry_picks.drift import Document, Drift, Line
from sparkwright.core.files import reading
from sparkwright.operate.errors import LabError
from sparkwright.operate.site import problems
from sparkwright.operate.site.problems import Problem
from sparkwright.release.manifest.records import line

T = TypeVar("T")

#: Bytes of a document; a series over forty releases has some megabytes.
LARGEST = 64 << 20


class Carried(msgspec.Struct, frozen=True):
    """What ``status --json`` prints: stack → a line for each patch and pick."""

    stacks: dict[str, tuple[Line, ...]]


class Ended(msgspec.Struct, frozen=True):
    """
    What became of one patch.

    Attributes:
        state: On the newest base, *base*. *taken*: the first base that has it. *last*: the last one, in a row, that takes the patch.
        says: Why; for a conflict, its first lines.
    """

    patch: str
    state: drift.TrialState
    base: str
    taken: str
    last: str
    says: str


class Report(msgspec.Struct, frozen=True):
    """The drift of one fork on one day, patch by patch."""

    stack: str
    fork: str
    day: str
    bases: tuple[str, ...]
    patches: tuple[Ended, ...]

    @property
    def conflicts(self) -> tuple[Ended, ...]:
        """The patches that conflict on the newest base and that upstream did not take."""
        return tuple(one for one in self.patches if one.state == "conflict" and not one.taken)


class Drifted(msgspec.Struct, frozen=True):
    """*reports*: of each stack and fork, newest first."""

    reports: dict[tuple[str, str], tuple[Report, ...]] = {}
    problems: tuple[Problem, ...] = ()


def read(paths: Sequence[Path]) -> Drifted:
    """Return the reports in the files *paths*; a damaged one is named and costs no other."""
    made: dict[tuple[str, str], dict[str, Report]] = {}
    wrong = []
    for path in sorted(paths):
        try:
            found = _told(path)
        except LabError as error:
            if error.reference != "record-damaged":
                raise
            wrong.append(problems.of(path.name, error))
            continue
        for one in found.drift:
            report = _report(one.of)
            # Of a day looked at twice, the later file speaks.
            made.setdefault((report.stack, report.fork), {})[report.day] = report
    reports = {key: tuple(days[day] for day in sorted(days, reverse=True)) for key, days in sorted(made.items())}
    return Drifted(reports, tuple(wrong))


def status(path: Path) -> Carried:
    """Return what the document at *path* says; raises `record-damaged`."""
    return _decoded(path, Carried)


def _told(path: Path) -> Document:
    found = _decoded(path, Document)
    if found.error or not found.drift:
        raise LabError("record-damaged", f"{path.name} tells of no drift.", details=[line(str(found.error.get("what", "")))])
    return found


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        with reading(path) as stream:
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        return msgspec.json.decode(data, type=kind)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        says = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LabError("record-damaged", line(f"{path.name} cannot be taken: {says}")) from error


def _report(one: Drift) -> Report:
    return Report(line(one.stack), line(one.fork), line(one.day), tuple(map(line, one.bases)), tuple(_ended(one)))


def _ended(one: Drift) -> Iterator[Ended]:
    # What the document says was absorbed is not taken: it follows from the trials.
    for name in one.patches:
        told, newest = one.absorption(name), one.of(name)[-1]
        says = told.proof or " · ".join(newest.says[:3])
        yield Ended(line(name), newest.state, line(newest.base), line(told.first), line(told.last), line(says))
