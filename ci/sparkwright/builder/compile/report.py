"""
What a compile cost, against what was expected of it: memory and seconds of each unit, the budget and its use over time, the makespan.

The record is kept in the store; a plot of it lies beside the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec

from sparkwright.builder.compile.calls import Limits, Outcome, Sample
from sparkwright.core import schedule
from sparkwright.core.console import console, duration
from sparkwright.core.schedule import Unit

#: Units in the table, those with the largest peak; the record has all.
SHOWN = 12
#: Of a long build, so many samples are kept; each is the largest use among those that it stands for.
SAMPLES = 1500


class UnitCost(msgspec.Struct, frozen=True):
    """
    A unit: what was expected, and what came.

    Attributes:
        expected_by: Where the expectation is from (`sparkwright.builder.compile.costs.Expected`).
        seconds, cpu: From start to end, and of CPU; *expected_seconds* are of CPU.
        began, waited: Seconds after the first unit asked at which it got its memory, and for which it waited for that.
        stops: How often it was ended to make room.
    """

    unit: str
    hit: bool
    megabytes: int
    expected_megabytes: int
    seconds: float
    cpu: float
    expected_seconds: float
    expected_by: str
    began: float
    waited: float
    stops: int


class CompileReport(msgspec.Struct, frozen=True):
    """
    A compile, for one fork.

    Attributes:
        megabytes: The budget.
        peak: The most that all compilers together held, as sampled.
        overruns: Samples above the budget.
        work: Seconds that all compiled units took together.
        makespan: Seconds from the first question to the last end.
        lower_bound: What no schedule could have been below, from the real costs (`schedule.lower_bound`).
        samples: Use over time.
    """

    fork: str
    stack: str
    cores: int
    megabytes: int
    peak: int
    overruns: int
    work: float
    makespan: float
    lower_bound: float
    units: tuple[UnitCost, ...]
    samples: tuple[Sample, ...]


def of(fork: str, stack: str, limits: Limits, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> CompileReport:
    """Return the report of a run."""
    done = [outcome for outcome in outcomes if outcome.status == 0]
    compiled = [outcome for outcome in done if not outcome.hit]
    first = min((outcome.asked for outcome in done), default=0.0)
    units = [Unit(outcome.unit, outcome.seconds, outcome.megabytes) for outcome in compiled]
    return CompileReport(
        fork=fork, stack=stack, cores=limits.cores, megabytes=limits.megabytes,
        peak=max((sample.used for sample in samples), default=0),
        overruns=sum(sample.used > limits.megabytes for sample in samples),
        work=round(sum(unit.seconds for unit in units), 1),
        makespan=round(max((outcome.ended for outcome in done), default=0.0) - first, 1),
        lower_bound=round(schedule.lower_bound(units, limits.cores, limits.megabytes), 1),
        units=tuple(sorted((_cost(outcome, first) for outcome in done), key=lambda cost: (cost.began, cost.unit))),
        samples=tuple(_thinned([msgspec.structs.replace(sample, second=round(sample.second - first, 1)) for sample in samples])),
    )  # fmt: skip


def _cost(outcome: Outcome, first: float) -> UnitCost:
    expected = outcome.expected
    return UnitCost(
        unit=outcome.unit, hit=outcome.hit, megabytes=outcome.megabytes, expected_megabytes=expected.megabytes,
        seconds=round(outcome.seconds, 2), cpu=round(outcome.cpu, 2), expected_seconds=expected.seconds, expected_by=expected.origin,
        began=round(outcome.began - first, 2), waited=round(outcome.began - outcome.asked, 2), stops=outcome.stops,
    )  # fmt: skip


def _thinned(samples: Sequence[Sample]) -> Iterator[Sample]:
    step = max(1, -(-len(samples) // SAMPLES))
    for start in range(0, len(samples), step):
        yield max(samples[start : start + step], key=lambda sample: sample.used)


def show(report: CompileReport) -> None:
    """Print the largest units, and how near memory and time came to their bounds."""
    compiled = [unit for unit in report.units if not unit.hit]
    if not compiled:
        return
    rows = [
        [
            unit.unit, f"{unit.expected_megabytes:,}", f"{unit.megabytes:,}", unit.expected_by, f"{unit.expected_seconds:.0f}",
            f"{unit.cpu:.0f}", f"{unit.seconds:.0f}", f"{unit.waited:.0f}", str(unit.stops or "–"),
        ]
        for unit in sorted(compiled, key=lambda unit: -unit.megabytes)[:SHOWN]
    ]  # fmt: skip
    columns = ["unit", ">expected MB", ">peak MB", "expected by", ">expected CPU s", ">CPU s", ">s", ">waited s", ">stops"]
    console.table(f"{report.fork}: the largest of {len(compiled)} compiled units", columns, rows)
    console.note(f"memory: {report.peak / 1000:.1f} of {report.megabytes / 1000:.1f} GB at most, {_overran(report)}")
    over = report.makespan / report.lower_bound if report.lower_bound else 1.0
    times = f"{duration(report.makespan)} for {duration(report.work)} of work"
    console.note(f"time: {times} on {report.cores} cores, {over:.2f} × the lower bound of {duration(report.lower_bound)}")


def _overran(report: CompileReport) -> str:
    return f"over the budget in {report.overruns} of {len(report.samples)} samples" if report.overruns else "never over the budget"


Scale = Callable[[float], float]
#: Geometry of the plot, in pixels.
_WIDTH, _MARGIN, _MEMORY = 1200, 70, 260
#: Height of a unit's row, and of one whose name is shown: text of 9 pixels must not run into the next.
_ROW, _NAMED = 7, 12


def plot(report: CompileReport) -> str:
    """Return an SVG: memory used and granted against the budget over time, and below it one bar per unit from its start to its end."""
    compiled = [unit for unit in report.units if not unit.hit]
    end = max(report.makespan, 1.0)
    top = max([report.megabytes, *(max(sample.used, sample.granted) for sample in report.samples)]) * 1.05
    rows = [_NAMED if _is_named(unit, top) else _ROW for unit in compiled]
    height = _MARGIN + _MEMORY + 50 + sum(rows) + 30

    def x(second: float) -> float:
        return round(_MARGIN + max(0.0, second) / end * (_WIDTH - _MARGIN - 20), 1)

    def y(megabytes: float) -> float:
        return round(_MARGIN + _MEMORY * (1 - megabytes / top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="16">{escape(report.fork)} {escape(report.stack)}: {len(compiled)} units on {report.cores}'
        f" cores, {report.megabytes / 1000:g} GB</text>",
        f'<text x="{_MARGIN}" y="44">{escape(duration(report.makespan))}; lower bound {escape(duration(report.lower_bound))}; peak '
        f"{report.peak / 1000:.1f} GB. Blue: held; grey: granted; red: budget. Bars: units, darker with more memory.</text>",
        *_axis(top, end, x, y),
        _area(report.samples, "granted", "#dddddd", x, y),
        _area(report.samples, "used", "#4477aa", x, y),
        f'<line x1="{x(0)}" x2="{x(end)}" y1="{y(report.megabytes)}" y2="{y(report.megabytes)}" stroke="#cc3311" stroke-width="2"/>',
        *_bars(compiled, rows, top, x),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axis(top: float, end: float, x: Scale, y: Scale) -> Iterator[str]:
    for part in range(5):
        gigabytes, second = top * part / 4 / 1000, end * part / 4
        # Half of the last time would lie outside of the picture.
        anchor = "end" if part == 4 else "middle"
        yield f'<text x="{_MARGIN - 8}" y="{y(gigabytes * 1000) + 4}" text-anchor="end">{gigabytes:.1f} GB</text>'
        yield f'<text x="{x(second)}" y="{_MARGIN + _MEMORY + 18}" text-anchor="{anchor}">{escape(duration(second))}</text>'


def _area(samples: Sequence[Sample], what: str, colour: str, x: Scale, y: Scale) -> str:
    if not samples:
        return ""
    points = " ".join(f"{x(sample.second)},{y(getattr(sample, what))}" for sample in samples)
    return f'<polygon points="{x(samples[0].second)},{y(0)} {points} {x(samples[-1].second)},{y(0)}" fill="{colour}"/>'


def _is_named(unit: UnitCost, top: float) -> bool:
    return unit.megabytes > top / 5


def _bars(units: Sequence[UnitCost], rows: Sequence[int], top: float, x: Scale) -> Iterator[str]:
    place = _MARGIN + _MEMORY + 40
    for unit, row in zip(units, rows, strict=True):
        shade = round(200 - 170 * min(1.0, unit.megabytes / top))
        left, width = x(unit.began), max(1.0, round(x(unit.began + unit.seconds) - x(unit.began), 1))
        says = f"{unit.unit}: {unit.seconds:.0f} s, {unit.megabytes} MB (expected {unit.expected_megabytes} MB)"
        yield f'<rect x="{left}" y="{place}" width="{width}" height="{row - 1}" fill="rgb({shade},{shade},235)">'
        yield f"<title>{escape(says)}</title></rect>"
        if _is_named(unit, top):
            where = _beside(left, round(left + width, 1), "white" if shade < 110 else "black")
            yield f'<text {where} y="{place + row - 3}" font-size="9">{escape(Path(unit.unit).name)}</text>'
        place += row


def _beside(left: float, right: float, inside: str) -> str:
    """Return where the name of a bar has room: behind it, else before it, else in it, in the colour *inside*."""
    if right < _WIDTH * 0.7:
        return f'x="{round(right + 4, 1)}"'
    if left > _WIDTH * 0.3:
        return f'x="{round(left - 4, 1)}" text-anchor="end"'
    return f'x="{round(right - 4, 1)}" text-anchor="end" fill="{inside}"'
