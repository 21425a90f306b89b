"""Results of experiments as values and tables: what was measured, what it supports and lacks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from sparkwright.bench.load.vllm_bench import LoadCurve, LoadResult
from sparkwright.bench.records import METRICS, Metric, Side
from sparkwright.bench.results import CellResult, Measurement, Result, Series, Subject
from sparkwright.bench.statistics import MIN_INTERVAL, mean_interval
from sparkwright.core.console import duration
from sparkwright.core.pages import Table
from sparkwright.core.states import SIGNS

#: Stands where a record holds no number.
NOT_MEASURED = "not measured"
#: Smallest and largest number that a machine may have given.
_LEAST, _MOST = 1e-9, 1e12
#: Facts of the machine that make results comparable.
HOST_FACTS = ("gpu", "driver", "kernel", "memory")
#: Headings of the metrics.
SHORT: dict[Metric, str] = {
    "tpot": "TPOT, ms",
    "ttft": "TTFT, ms",
    "rate": "tok/s",
    "drafts": "tokens/step",
}
#: Heading → factor of its unit; median, 90th and 99th percentile of it over requests (or events) in
#: one measurement, or the figure of the measurement.
_PERCENTILES: dict[str, tuple[Any, ...]] = {
    "TPOT, ms": (1000, "tpot", "tpot_p90", "tpot_p99"),
    "TTFT, ms": (1000, "ttft", "ttft_p90", "ttft_p99"),
    "ITL, ms": (1000, "itl_p50", "itl_p90", "itl_p99"),
    "requests, 1/s": (1, "requests_per_second"),
}
#: Headings of what a configuration reached for each user, for all together, to the first token.
FIGURES = (
    ">tok/s each", ">tok/s all", ">TTFT, ms",
    ">each: 95 % interval", ">all: 95 % interval", ">TTFT: 95 % interval",
)  # fmt: skip


def number(value: float | None, digits: int = 4) -> str:
    """Return *value* with that many significant digits, and thousands apart."""
    if value is None:
        return NOT_MEASURED
    if not math.isfinite(value):
        return "∞"
    size = math.floor(math.log10(abs(value))) if value else 0
    if -4 <= size < 9:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}e}"


def quantity(value: float | None, metric: Metric) -> str:
    """Return *value* of a record in the unit of *metric*, without the unit."""
    return number(value if value is None else value * METRICS[metric][2])


def percent(share: float, digits: int = 1) -> str:
    """Return *share* (0.02) as ``2.0 %``."""
    return f"{100 * share:,.{digits}f} %"


def signed(share: float) -> str:
    """Return a change (0.02) in percent without the unit, as ``+2.00``."""
    return f"{100 * share:+,.2f}"


def interval(ends: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Return two *ends*, each as *write* gives it; a dash where one is unknown."""
    texts = [write(end) for end in ends if end is not None]
    return " … ".join(texts) if len(texts) == len(ends) else "–"


def sparkline(values: Sequence[float]) -> str:
    """Return *values* as a curve from 0 to the largest, two of them in a character."""
    means = [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]
    most = max(means) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * mean / most)] for mean in means)


def moment(second: float) -> str:
    """Return *second* since 1970 as ``2026-11-22 02:40:07 UTC``; empty for 0 and absurd ones."""
    credible = 0 < second < 253_402_300_800
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(second)) if credible else ""


class Value(msgspec.Struct, frozen=True):
    """
    A metric of a cell and side, in the unit of `METRICS`.

    Attributes:
        median: Over the blocks.
        low, high: 95 % interval of the mean of the logarithms; None with too few blocks.
        blocks: Their number; without a baseline, a block is a launch.
    """

    median: float
    low: float | None = None
    high: float | None = None
    blocks: int = 0

    @property
    def inverse(self) -> Value:
        """Tokens per second for milliseconds per token."""
        low, high = (1000 / self.high, 1000 / self.low) if self.low and self.high else (None, None)
        return Value(1000 / self.median, low, high, self.blocks)

    @property
    def interval(self) -> str:
        """Return the interval and its number of blocks as text."""
        return f"{interval((self.low, self.high), number)}, {self.blocks} blocks"


def plausible(value: float) -> bool:
    """Return whether *value* is a positive number that a machine may have given."""
    return _LEAST < value < _MOST


def summary(values: Sequence[float]) -> Value | None:
    """Return the median of *values*, one per block, with its interval; None without any."""
    values = [value for value in values if plausible(value)]
    if not values:
        return None
    if len(values) < MIN_INTERVAL:
        return Value(statistics.median(values), blocks=len(values))
    low, high = mean_interval([math.log(value) for value in values])
    return Value(statistics.median(values), math.exp(low), math.exp(high), len(values))


def shift(series: Series) -> tuple[float, float, float] | None:
    """
    Return the share by which the candidate of *series* is worse (0.02: 2 %), by its paired blocks,
    and the ends of its 95 % interval, which is a point with too few; None without any.
    """
    if not series.differences:
        return None
    mean = math.expm1(max(-20.0, min(20.0, statistics.fmean(series.differences))))
    low, high = series.low, series.high
    if low is None or high is None or not (plausible(low) and plausible(high)):
        return mean, mean, mean
    if METRICS[series.metric][3]:
        low, high = 1 / high, 1 / low
    return mean, low - 1, high - 1


class View:
    """A result and what follows from its measurements."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.subjects: dict[Side, Subject] = {"candidate": result.candidate}
        if result.baseline:
            self.subjects = {"baseline": result.baseline, **self.subjects}

    @property
    def title(self) -> str:
        """What was measured, in a word."""
        result = self.result
        return result.recipe or result.model or result.candidate.label

    @property
    def verdict(self) -> tuple[str, str]:
        """Its sign and its word; what judges nothing was only measured."""
        result = self.result
        unjudged = result.kind == "bench" and result.state == "not-run"
        if unjudged and any(leg.counts for leg in result.legs):
            return "•", "measured"
        return SIGNS[result.state], result.state

    def value(self, cell: CellResult, metric: Metric, side: Side = "candidate") -> Value | None:
        """Return what *side* reached in *cell*; None if no measurement counts."""
        blocks: dict[int, list[float]] = {}
        for leg in self._counted(cell, side):
            if leg.block >= 0:
                blocks.setdefault(leg.block, []).append(getattr(leg.run, metric))
        factor = METRICS[metric][2]
        return summary([factor * statistics.median(values) for values in blocks.values()])

    def figures(self, cell: CellResult, side: Side = "candidate") -> tuple[str, ...]:
        """Return medians and intervals by `FIGURES`; empty if nothing was measured."""
        tpot, rate, ttft = (self.value(cell, metric, side) for metric in ("tpot", "rate", "ttft"))
        values = (tpot.inverse if tpot else None, rate, ttft)
        if not any(values):
            return ()
        medians = (number(value.median if value else None) for value in values)
        return (*medians, *(value.interval if value else "–" for value in values))

    def _counted(self, cell: CellResult, side: Side = "candidate") -> list[Measurement]:
        """Return the measurements of *side* in *cell* that count, oldest first."""
        legs = [leg for leg in self.result.legs if leg.cell == cell.name and leg.side == side]
        return sorted((leg for leg in legs if leg.counts), key=lambda leg: leg.began)

    def _loads(self, cell: CellResult, side: Side = "candidate") -> list[LoadResult]:
        return [leg.run for leg in self._counted(cell, side) if leg.run]

    @property
    def tables(self) -> list[Table]:
        """The tables that have rows."""
        last = {cell.name: loads[-1] for cell in self.result.cells if (loads := self._loads(cell))}
        curves = {name: curve for name, run in last.items() if (curve := run.curve())}
        speeds = self._compared() if self.result.baseline else self._measured()
        tables = (speeds, self._percentiles(), over_time(curves))
        return [table for table in tables if table.rows]

    def _measured(self) -> Table:
        """Return the medians of a result without a baseline."""
        rows = [
            (
                cell.name, SHORT[series.metric], quantity(series.candidate, series.metric),
                interval((series.low, series.high), partial(quantity, metric=series.metric)),
                f"{series.launches}", self._bandwidth(cell, series.metric),
            )
            for cell, series in self._series
        ]  # fmt: skip
        heads = ("Workload", "Metric", ">Median", ">95 % interval", ">Launches", ">Bandwidth")
        return Table("What was measured", heads, rows, 5, "Medians over launches.")

    def _compared(self) -> Table:
        """Return the changes from the baseline to the candidate."""
        rows = []
        for cell, series in self._series:
            metric, moved, change = series.metric, shift(series), "–"
            sign = f"{SIGNS[series.state]} " if series.primary else ""
            if moved:
                ratio = 1 / (1 + moved[0]) if METRICS[metric][3] else 1 + moved[0]
                change = signed(ratio - 1)
            ends = [end and end - 1 for end in (series.low, series.high)]
            rows.append(
                (
                    cell.name, f"{sign}{SHORT[metric]}", quantity(series.baseline, metric),
                    quantity(series.candidate, metric), change,
                    interval(ends, signed), f"{series.launches}",
                    series.conclusion or "–",
                    percent(series.sigma, 2) if series.sigma else "–",
                    self._bandwidth(cell, metric),
                )
            )  # fmt: skip
        heads = (
            "Workload", "Metric", ">Baseline", ">Candidate", ">Change, %", ">95 % interval",
            ">Launches", "What it supports", ">Spread σ", ">Bandwidth",
        )  # fmt: skip
        note = "Medians over blocks; changes of the paired blocks. Rows with a sign decide."
        return Table("Baseline and candidate", heads, rows, 6, note)

    @property
    def _series(self) -> list[tuple[CellResult, Series]]:
        return [(cell, series) for cell in self.result.cells for series in cell.series]

    def _bandwidth(self, cell: CellResult, metric: Metric) -> str:
        """Return the share of the memory's bandwidth that the candidate's time per token needs."""
        share = _median([cell.bandwidth_share(leg) for leg in self._counted(cell)])
        if share is None or metric != "tpot":
            return ""
        return f"{percent(share, 0)} of {number(cell.ceiling)} tok/s"

    def _percentiles(self) -> Table:
        rows = []
        for cell, side in itertools.product(self.result.cells, self.subjects):
            prefix = f"{side} " if self.result.baseline else ""
            if loads := self._loads(cell, side):
                for title, (factor, *names) in _PERCENTILES.items():
                    values = [_median([getattr(load, name) for load in loads]) for name in names]
                    figures = [number(value and factor * value) for value in values]
                    rows.append(
                        (cell.name, f"{prefix}{title}", *figures, *["–"] * (3 - len(names)))
                    )
        note = (
            "TPOT: time per token; TTFT: time to the first token; ITL: gap between events, each of "
            "several tokens with speculation. Medians over the measurements that count."
        )
        heads = ("Workload", "Figure", ">Median", ">p90", ">p99")
        return Table("Percentiles over requests", heads, rows, 5, note)

    def measurements(self, cell: CellResult) -> Table:
        """Return a table of all measurements of *cell*."""
        rows = []
        for leg in (leg for leg in self.result.legs if leg.cell == cell.name):
            shot = leg.after or leg.before
            figures = (quantity(leg.value(metric) or None, metric) for metric in METRICS)
            machine = (shot.temperature, shot.sm_clock) if shot else (None, None)
            accepted = percent(leg.speculation.acceptance) if leg.speculation else "–"
            state = "counts" if leg.counts else "repeated" if leg.discarded else "does not count"
            reasons = [f"{reason.reference}: {reason.message}" for reason in leg.reasons]
            rows.append(
                (
                    f"{leg.block}", leg.side, f"{leg.launch}", f"{leg.attempt}",
                    moment(leg.began), *figures,
                    *(number(value) if value else "–" for value in machine),
                    accepted, "; ".join((state, *reasons)),
                )
            )  # fmt: skip
        heads = (
            "Block", "Side", ">Launch", ">Attempt", ">Began", *(f">{SHORT[m]}" for m in METRICS),
            ">GPU, °C", ">MHz", ">Accepted", "State",
        )  # fmt: skip
        return Table(cell.name, heads, rows, 0)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the result rests on, by name."""
        result, band = self.result, self.result.bandwidth
        took = duration(max(0.0, min(result.seconds, 1e9)))
        resumed = f", continued {result.resumed}×" if result.resumed else ""
        blocks = len({leg.block for leg in result.legs if leg.run and leg.block >= 0})
        facts = {
            "Model": result.model,
            "Quantization": result.quantization,
            "Recipe": result.recipe,
            "Beside the recipe": " ".join(result.added),
            "Stack": result.stack,
            "Blocks": f"{blocks} of at most {result.blocks}" if result.blocks else f"{blocks}",
            "Measurements": f"{sum(leg.counts for leg in result.legs)} of {len(result.legs)} count",
            "Load generator": "; ".join(filter(None, (result.generator, *result.qualified))),
            "Read bandwidth": f"{number(band.gigabytes)} GB/s, {band.origin}" if band else "",
            "Measured": f"{moment(result.began)}, {took}{resumed}" if result.began else "",
            "Policy, sha256": result.policy,
            "Margin": percent(result.margin) if result.margin else "",
            "Error rate α": percent(result.alpha) if result.alpha else "",
            "Gate of this wheel and recipe": f"number {result.attempt}" if result.alpha else "",
            **result.host,
        }
        return [(name, value) for name, value in facts.items() if value]

    @property
    def gaps(self) -> list[str]:
        """What was not measured, or not well enough, in a sentence each."""
        return list(self._gaps()) if self.result.legs else ["Nothing was measured."]

    def _gaps(self) -> Iterator[str]:
        result, gpu, band = self.result, self.result.host.get("gpu", ""), self.result.bandwidth
        if "GB10" not in gpu:
            machine = gpu if gpu not in ("", "none") else "a machine without a GPU"
            yield f"Not a GB10: these are figures of {machine}, not of a Spark."
        if band is None or band.origin != "measured":
            yield f"Read bandwidth: {band.origin if band else NOT_MEASURED}."
        if not result.qualified:
            yield "Load generator: not checked against a server of known times."
        if not result.candidate.sha256:
            yield "Candidate's wheel: unknown, so these figures belong to no known bytes."
        deciding = [(cell.name, series) for cell, series in self._series if series.primary]
        if names := [name for name, series in deciding if series.state == "not-run"]:
            yield f"Not run, although they decide: {', '.join(names)}."
        if counts := Counter(reason.reference for leg in result.legs for reason in leg.reasons):
            reasons = ", ".join(f"{name} {count}×" for name, count in counts.most_common(12))
            yield f"Measurements that do not count: {reasons}."


def over_time(curves: dict[str, LoadCurve]) -> Table:
    """Return tokens and requests over the time of a load, by workload."""
    rows = [
        (
            cell, f"{curve.seconds:,.0f}", sparkline(curve.tokens), f"{max(curve.tokens):,.0f}",
        )
        for cell, curve in curves.items()
    ]  # fmt: skip
    heads = ("Workload", ">Seconds", "tok/s over time", ">Most")
    note = "The last measurement that counts; tokens are spread evenly in a request."
    return Table("Over time", heads, rows, 5, note)


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of the plausible *values*; None without any."""
    plain = [value for value in values if value is not None and plausible(value)]
    return statistics.median(plain) if plain else None


class Column(msgspec.Struct, frozen=True):
    """A side of a result, and the name that distinguishes it from the other columns."""

    name: str
    view: View
    side: Side


def columns(views: Sequence[View]) -> list[Column]:
    """Return the configurations of *views*, each with its own name."""
    marks = {"baseline": "(baseline)"}
    result = []
    for position, view in enumerate(views, 1):
        for side, subject in view.subjects.items():
            words = (f"#{position}", view.result.quantization, subject.label, marks.get(side))
            result.append(Column(" ".join(filter(None, words)), view, side))
    return result


def comparison(views: Sequence[View]) -> Table:
    """Return a row for each configuration that measured a workload, workload by workload."""
    rows = [
        (cell.name, column.name, *figures)
        for column in columns(views)
        for cell in column.view.result.cells
        if (figures := column.view.figures(cell, column.side))
    ]
    cells = [cell.name for view in views for cell in view.result.cells]
    note = (
        "Medians over blocks; of each user, and of all users together. Drift between sessions is "
        "not in the intervals."
    )
    facts = [(view.result.model, *map(view.result.host.get, HOST_FACTS)) for view in views]
    if len({*facts}) > 1:
        note += f" Not all of one model on one machine ({', '.join(HOST_FACTS)})."
    heads = ("Workload", "Configuration", *FIGURES)
    return Table(
        "All configurations", heads, sorted(rows, key=lambda row: cells.index(row[0])), 5, note
    )
