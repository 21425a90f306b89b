"""The records of nights, read back: as untrusted files, and with the days of which there is none."""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.operate.errors import LabError
from sparkwright.operate.site import problems
from sparkwright.operate.site.problems import Problem
from sparkwright.operate.site.records import FORMAT, Night
from sparkwright.release.manifest.records import line

#: Bytes of a record; one with the figures of a large gate has some 20 kB.
LARGEST = 4 << 20
#: Records on a page, and their bytes.
PAGE, WEIGHT = 200, 400_000
#: Days that a calendar shows at the most.
LONGEST = 3660


class Read(msgspec.Struct, frozen=True):
    """*nights*: oldest first. *problems*: files that are no records."""

    nights: tuple[Night, ...] = ()
    problems: tuple[Problem, ...] = ()


def read(folder: Path) -> Read:
    """Return the records in *folder*; a damaged one is named and costs no other. A folder that is not there holds none."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  names alone
    except FileNotFoundError:
        return Read()
    except OSError as error:
        return Read(problems=(_damaged(folder.name, error.strerror or "it cannot be read"),))
    nights, wrong = list[Night](), list[Problem]()
    for name in names:
        if name.endswith(".json") and not name.startswith("."):
            found = _read(folder, name)
            (nights if isinstance(found, Night) else wrong).append(found)  # type: ignore[arg-type]
    nights.sort(key=lambda one: (one.began or one.ended, one.workflow, one.stack, one.run))
    return Read(tuple(nights), tuple(wrong))


def _read(folder: Path, name: str) -> Night | Problem:
    try:
        # A pipe would never end, and a link leads to what nobody put here.
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ValueError("it is no file")
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        night = msgspec.json.decode(data, type=Night)
        if night.format != FORMAT:
            raise ValueError(f"it is of format {night.format}; this program reads {FORMAT}")
        if night.filename != name:
            raise ValueError(f"it is the record of {night.filename}")
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        says = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _damaged(name, says)
    return night


def _damaged(name: str, says: str) -> Problem:
    return problems.of(name, LabError("record-damaged", line(says)))


def places(nights: Sequence[Night]) -> dict[str, str]:
    """Return where the site shows each record, by its file's name: pages of a month, filled from its beginning, so that none moves."""
    filled: dict[str, tuple[int, int, int]] = {}
    made = {}
    for one in nights:
        month, name = one.day[:7], one.filename
        page, count, weight = filled.get(month, (1, 0, 0))
        # Of a record that was made to flood the page, only a part is shown.
        more = min(len(msgspec.json.encode(one)), 60_000)
        if count >= PAGE or weight + more > WEIGHT:
            page, count, weight = page + 1, 0, 0
        filled[month] = page, count + 1, weight + more
        made[name] = f"nights/{month}{f'-{page}' if page > 1 else ''}.html#{name.removesuffix('.json')}"
    return made


class Row(msgspec.Struct, frozen=True):
    """
    The days of one workflow on one stack, newest first.

    Attributes:
        days: Each with its runs; with none where there is no record.
    """

    workflow: str
    stack: str
    days: tuple[tuple[str, tuple[Night, ...]], ...]

    @property
    def lacking(self) -> int:
        """Days without a record."""
        return sum(not runs for _, runs in self.days)


def calendar(nights: Sequence[Night], today: str, on_demand: Iterable[str], most: int) -> Iterator[Row]:
    """Yield a row for each workflow that is expected every night, from its first record to *today*, *most* days at the most."""
    skipped = frozenset(on_demand)
    for workflow, stack in sorted({(one.workflow, one.stack) for one in nights if one.workflow not in skipped}):
        own = [one for one in nights if (one.workflow, one.stack) == (workflow, stack)]
        by_day: dict[str, list[Night]] = {}
        for one in own:
            by_day.setdefault(one.day, []).append(one)
        days = _days(min(by_day), max(today, *by_day), min(most, LONGEST))
        yield Row(workflow, stack, tuple((day, tuple(by_day.get(day, ()))) for day in days))


def _days(first: str, last: str, most: int) -> list[str]:
    """Return the days from *last* back to *first*, *most* at the most."""
    end = datetime.date.fromisoformat(last)
    count = min(most, (end - datetime.date.fromisoformat(first)).days + 1)
    return [(end - datetime.timedelta(days=back)).isoformat() for back in range(count)]
