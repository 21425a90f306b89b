"""What people ask of a Result, told from its records: values by launch, changes and their intervals, and what was not measured."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import msgspec

from sparkwright.bench.records import METRICS, Metric, Side
from sparkwright.bench.report import words
from sparkwright.bench.results import CellResult, Measurement, Result, Series

#: Launches without which no interval is told.
FEWEST = 3

#: Beyond these a number is none of a measurement, and no axis could hold it.
_LEAST, _MOST = 1e-9, 1e12


class Value(msgspec.Struct, frozen=True):
    """
    One metric of one cell and side.

    Attributes:
        middle: Median over the launches, in the unit of the record. *low*, *high*: 95 % interval; None with too few launches.
        launches: Behind it.
    """

    middle: float
    low: float | None = None
    high: float | None = None
    launches: int = 0

    def inverse(self) -> Value:
        """Return one divided by it: tokens per second for seconds per token."""
        low, high = (1 / self.high, 1 / self.low) if self.low and self.high else (None, None)
        return Value(1 / self.middle, low, high, self.launches)


def sound(value: float | None) -> bool:
    """Is *value* a number above zero that a machine may have?"""
    return value is not None and _LEAST < value < _MOST


def interval(values: list[float]) -> Value | None:
    """Return the median of *values*, one for each launch, with the t-interval of the mean of their logarithms; None without any."""
    values = [value for value in values if sound(value)]
    if not values:
        return None
    middle = statistics.median(values)
    if len(values) < FEWEST:
        return Value(middle, launches=len(values))
    from sparkwright.bench.statistics import student

    low, high = student.mean_interval([math.log(value) for value in values])
    return Value(middle, math.exp(low), math.exp(high), len(values))


class Shift(msgspec.Struct, frozen=True):
    """By which share the candidate is worse than the baseline (0.02: 2 %, below 0: better), and the ends of its 95 % interval."""

    middle: float
    low: float | None
    high: float | None

    def says(self, better: str = "faster", worse: str = "slower") -> str:
        """Return what the interval supports, and nothing more."""
        if self.low is None or self.high is None:
            return "too few blocks for a statement"
        if self.high < 0:
            return f"at least {words.percent(1 / (1 + self.high) - 1)} {better}"
        if self.low > 0:
            return f"at least {words.percent(self.low)} {worse}"
        return f"no difference shown: {words.percent(1 / (1 + self.low) - 1)} {better} to {words.percent(self.high)} {worse}"


def shift(series: Series) -> Shift | None:
    """Return by how much the candidate of *series* is worse, from its paired blocks; None without any."""
    if not series.differences:
        return None
    mean = max(-20.0, min(20.0, statistics.fmean(series.differences)))
    low, high = series.low, series.high
    if not (sound(low) and sound(high)) or low is None or high is None:
        return Shift(math.expm1(mean), None, None)
    return (
        Shift(math.expm1(mean), 1 / high - 1, 1 / low - 1)
        if METRICS[series.metric][3]
        else Shift(math.expm1(mean), low - 1, high - 1)
    )


def change(series: Series) -> float | None:
    """Return the change of the metric itself from baseline to candidate (0.02: 2 % more), from the paired blocks."""
    found = shift(series)
    return (
        None
        if found is None
        else 1 / (1 + found.middle) - 1
        if METRICS[series.metric][3]
        else found.middle
    )


class View:
    """A Result and what follows from it; made once, read by every page."""

    def __init__(self, result: Result) -> None:
        self.result = result

    @cached_property
    def figures(self) -> tuple[dict[Metric, float], ...]:
        """The metrics of each leg, in the order of the legs; empty where nothing was measured."""
        return tuple(
            {"tpot": leg.run.tpot, "ttft": leg.run.ttft, "rate": leg.run.rate} if leg.run else {}
            for leg in self.result.legs
        )

    @cached_property
    def _launches(self) -> dict[tuple[str, Side, Metric], dict[int, list[float]]]:
        found: dict[tuple[str, Side, Metric], dict[int, list[float]]] = {}
        for leg, figures in zip(self.result.legs, self.figures, strict=True):
            for metric, value in figures.items() if leg.counts else ():
                found.setdefault((leg.cell, leg.side, metric), {}).setdefault(
                    leg.launch, []
                ).append(value)
        return found

    def value(self, cell: CellResult, metric: Metric, side: Side = "candidate") -> Value | None:
        """Return what *side* measured in *cell*; None where nothing counts."""
        series = self.series(cell, metric)
        if (
            series
            and side == "candidate"
            and not self.result.baseline
            and series.candidate is not None
            and sound(series.candidate)
        ):
            low, high = (
                (series.low, series.high)
                if sound(series.low) and sound(series.high)
                else (None, None)
            )
            return Value(series.candidate, low, high, series.launches)
        launches = self._launches.get((cell.name, side, metric), {})
        found = interval([statistics.median(values) for values in launches.values()])
        kept: float | None = getattr(series, side, None)
        return found or (Value(kept) if kept is not None and sound(kept) else None)

    def speed(self, cell: CellResult, side: Side = "candidate") -> Value | None:
        """Return tokens per second of one user: one by the time per token."""
        found = self.value(cell, "tpot", side)
        return found.inverse() if found else None

    @staticmethod
    def series(cell: CellResult, metric: Metric) -> Series | None:
        """Return the series of *metric*, if the cell has it."""
        return next((one for one in cell.series if one.metric == metric), None)

    @cached_property
    def sides(self) -> tuple[Side, ...]:
        """The sides that there are."""
        return ("baseline", "candidate") if self.result.baseline else ("candidate",)

    @cached_property
    def blocks(self) -> int:
        """Blocks that were measured, at least in part."""
        return len({leg.block for leg in self.result.legs if leg.run and leg.block >= 0})

    def legs(self, cell: str) -> Iterator[tuple[int, Measurement, dict[Metric, float]]]:
        """Yield number, leg and figures of each leg of *cell*."""
        for number, (leg, figures) in enumerate(zip(self.result.legs, self.figures, strict=True)):
            if leg.cell == cell:
                yield number, leg, figures

    def use(self, cell: CellResult, side: Side = "candidate") -> float | None:
        """Return the median share of the memory's bandwidth that the legs of *side* need; None where nobody told."""
        own = (
            leg
            for leg in self.result.legs
            if leg.cell == cell.name and leg.side == side and leg.counts
        )
        told = [
            share
            for leg in own
            if (share := cell.bandwidth_share(leg)) is not None and sound(share)
        ]
        return statistics.median(told) if told else None

    @cached_property
    def tally(self) -> tuple[int, int, int]:
        """How many legs count, were discarded, and are invalid."""
        counted = sum(leg.counts for leg in self.result.legs)
        discarded = sum(leg.discarded for leg in self.result.legs)
        return counted, discarded, len(self.result.legs) - counted - discarded

    @cached_property
    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Why legs do not count, the most frequent first."""
        return tuple(
            Counter(
                reason.reference for leg in self.result.legs for reason in leg.reasons
            ).most_common(12)
        )
