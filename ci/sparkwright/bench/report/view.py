"""One view of the result of an experiment: values, changes, facts, and what is missing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from sparkwright.bench.load.load_curve import LoadCurve, load_curve
from sparkwright.bench.load.vllm_bench import LoadResult
from sparkwright.bench.records import METRICS, PERCENTILES, Metric, Side
from sparkwright.bench.report import text
from sparkwright.bench.results import CellResult, Measurement, Result, Series
from sparkwright.bench.statistics import student
from sparkwright.core.console import duration
from sparkwright.core.states import State

#: Smallest and largest number that a machine may have given.
_LEAST, _MOST = 1e-9, 1e12


class Value(msgspec.Struct, frozen=True):
    """
    A metric of a cell and side, in the unit of the record.

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
        """Tokens per second for seconds per token."""
        low, high = (1 / self.high, 1 / self.low) if self.low and self.high else (None, None)
        return Value(1 / self.median, low, high, self.blocks)


def plausible(value: float | None) -> bool:
    """Return whether *value* is a positive number that a machine may have given."""
    return value is not None and _LEAST < value < _MOST


def summary(values: Sequence[float]) -> Value | None:
    """Return the median of *values*, one per block, with its interval; None without any."""
    values = [value for value in values if plausible(value)]
    if not values:
        return None
    if len(values) < student.MIN_INTERVAL:
        return Value(statistics.median(values), blocks=len(values))
    low, high = student.mean_interval([math.log(value) for value in values])
    return Value(statistics.median(values), math.exp(low), math.exp(high), len(values))


class Shift(msgspec.Struct, frozen=True):
    """The share by which the candidate is worse (0.02: 2 %), and its 95 % interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    def conclusion(self, better: str = "faster", worse: str = "slower") -> str:
        """Return what the interval supports."""
        if self.low is None or self.high is None:
            return "too few blocks for a statement"
        gain = text.percent(1 / (1 + (self.high if self.high < 0 else self.low)) - 1)
        if self.high < 0:
            return f"at least {gain} {better}"
        if self.low > 0:
            return f"at least {text.percent(self.low)} {worse}"
        return f"no difference shown: {gain} {better} to {text.percent(self.high)} {worse}"


def shift(series: Series) -> Shift | None:
    """Return how much worse the candidate of *series* is, by its paired blocks; None without."""
    if not series.differences:
        return None
    mean = math.expm1(max(-20.0, min(20.0, statistics.fmean(series.differences))))
    low, high = series.low, series.high
    if low is None or high is None or not (plausible(low) and plausible(high)):
        return Shift(mean)
    ends = (1 / high, 1 / low) if METRICS[series.metric][3] else (low, high)
    return Shift(mean, ends[0] - 1, ends[1] - 1)


class Row(msgspec.Struct, frozen=True):
    """
    A metric of a cell in words.

    Attributes:
        primary: Whether it decides.
        change: From baseline to candidate. *interval*: of it; without a baseline, of the value.
        conclusion: What the interval supports.
        evidence: For not slower, and for slower.
        sigma: Spread of an A/A block.
        bandwidth: Share of the memory's bandwidth that is used. *ceiling*: what memory allows.
    """

    cell: str
    metric: Metric
    primary: bool
    state: State
    baseline: str
    candidate: str
    change: str
    interval: str
    conclusion: str
    evidence: tuple[str, ...]
    sigma: str
    launches: int
    bandwidth: str
    ceiling: str


class View:
    """A result and what follows from its measurements."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.sides: tuple[Side, ...] = (
            ("baseline", "candidate") if result.baseline else ("candidate",)
        )

    @property
    def title(self) -> str:
        """What was measured, in a word."""
        result = self.result
        return result.recipe or result.model or result.candidate.label or "no name"

    @cached_property
    def _blocks(self) -> dict[tuple[str, Side, Metric], dict[int, list[float]]]:
        values: dict[tuple[str, Side, Metric], dict[int, list[float]]] = {}
        for leg in self.result.legs:
            for metric in METRICS if leg.counts and leg.block >= 0 else ():
                blocks = values.setdefault((leg.cell, leg.side, metric), {})
                blocks.setdefault(leg.block, []).append(getattr(leg.run, metric))
        return values

    def legs(self, cell: CellResult) -> list[Measurement]:
        """Return all measurements of *cell*."""
        return [leg for leg in self.result.legs if leg.cell == cell.name]

    def value(self, cell: CellResult, metric: Metric, side: Side = "candidate") -> Value | None:
        """Return what *side* reached in *cell*; None if no measurement counts."""
        blocks = self._blocks.get((cell.name, side, metric), {})
        return summary([statistics.median(values) for values in blocks.values()])

    @cached_property
    def rows(self) -> list[Row]:
        """A row for each series."""
        return [self._row(cell, series) for cell in self.result.cells for series in cell.series]

    def _row(self, cell: CellResult, series: Series) -> Row:
        metric = series.metric
        factor, more = METRICS[metric][2:]
        change, conclusion, sigma = None, series.conclusion, ""
        interval = text.ratios(series.low, series.high)
        if moved := shift(series):
            change = 1 / (1 + moved.mean) - 1 if more else moved.mean
            conclusion = conclusion or moved.conclusion(*(("more", "less") if more else ()))
            sigma = text.percent(series.sigma, 2) if series.sigma is not None else ""
        elif not self.result.baseline and series.low is not None and series.high is not None:
            interval = " to ".join(text.number(end * factor) for end in (series.low, series.high))
        shares = [
            share
            for leg in self.legs(cell)
            if leg.counts and leg.side == "candidate" and metric == "tpot"
            if plausible(share := cell.bandwidth_share(leg)) and share
        ]
        paths = (series.pass_evidence, series.fail_evidence)
        return Row(
            cell.name, metric, series.primary, series.state,
            text.quantity(series.baseline, metric), text.quantity(series.candidate, metric),
            text.signed(change), interval, conclusion,
            tuple(text.evidence(path[-1]) for path in paths if path), sigma, series.launches,
            text.percent(statistics.median(shares), 0) if shares else "",
            f"{text.number(cell.ceiling)} tok/s" if cell.ceiling and metric == "tpot" else "",
        )  # fmt: skip

    def loads(self, cell: CellResult, side: Side = "candidate") -> list[LoadResult]:
        """Return the loads of *side* in *cell* that count, oldest first."""
        legs = [leg for leg in self.legs(cell) if leg.counts and leg.side == side]
        return [leg.run for leg in sorted(legs, key=lambda leg: leg.began) if leg.run]

    @cached_property
    def percentiles(self) -> list[tuple[str, Side, str, tuple[str, str, str]]]:
        """Cell, side, figure, and its median, p90 and p99; medians over the measurements."""
        rows: list[tuple[str, Side, str, tuple[str, str, str]]] = []
        for cell, side in itertools.product(self.result.cells, self.sides):
            if loads := self.loads(cell, side):
                for title, names in PERCENTILES.items():
                    values = [_median([getattr(load, name) for load in loads]) for name in names]
                    first, second, third = (text.number(v and 1000 * v) for v in values)
                    rows.append((cell.name, side, f"{title}, ms", (first, second, third)))
                rate = _median([load.requests_per_second for load in loads])
                rows.append((cell.name, side, "requests, 1/s", (text.number(rate), "–", "–")))
        return rows

    @cached_property
    def curves(self) -> dict[str, LoadCurve]:
        """Cell → how its last measurement of the candidate that counts went over time."""
        last = {cell.name: loads[-1] for cell in self.result.cells if (loads := self.loads(cell))}
        return {name: curve for name, run in last.items() if (curve := load_curve(run))}

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """What the result rests on, by name."""
        result, band = self.result, self.result.bandwidth
        number = f"gate number {result.attempt} of this wheel and recipe"
        took = duration(max(0.0, min(result.seconds, 1e9)))
        resumed = f", continued {result.resumed}×" if result.resumed else ""
        blocks = len({leg.block for leg in result.legs if leg.run and leg.block >= 0})
        compared = [
            ("Margin", f"a pass excludes slowdowns of {text.percent(result.margin)}"),
            ("Error rate α", f"{text.percent(result.alpha)}, {number}"),
        ]
        facts = [
            ("Model", result.model),
            ("Quantization", result.quantization),
            ("Recipe", result.recipe),
            ("Beside the recipe", " ".join(result.added)),
            ("Stack", result.stack),
            *(compared if result.baseline else ()),
            ("Blocks", f"{blocks} of at most {result.blocks}" if result.blocks else f"{blocks}"),
            (
                "Measurements",
                f"{sum(leg.counts for leg in result.legs)} of {len(result.legs)} count",
            ),
            ("Load generator", "; ".join(filter(None, (result.generator, *result.qualified)))),
            (
                "Read bandwidth",
                f"{text.number(band.gigabytes)} GB/s, {band.origin}" if band else "",
            ),
            ("Measured", f"{text.moment(result.began)}, {took}{resumed}" if result.began else ""),
        ]
        return [(name, value) for name, value in facts if value]

    @cached_property
    def gaps(self) -> list[str]:
        """What was not measured, or not well enough, in a sentence each."""
        return list(self._gaps()) if self.result.legs else ["Nothing was measured."]

    def _gaps(self) -> Iterator[str]:
        result, gpu, band = self.result, self.result.host.get("gpu", ""), self.result.bandwidth
        series = [(cell, series) for cell in result.cells for series in cell.series]
        if "GB10" not in gpu:
            machine = gpu if gpu not in ("", "none") else "a machine without a GPU"
            yield f"Not a GB10: these are figures of {machine}, not of a Spark."
        if band is None or band.origin != "measured":
            yield f"Read bandwidth: {band.origin if band else text.NOT_MEASURED}."
        if not result.qualified:
            yield "Load generator: not checked against a server of known times."
        if not any(leg.before for leg in result.legs):
            yield "State of the machine (clocks, temperature, probe): not read."
        if not result.candidate.sha256:
            yield "Candidate's wheel: unknown, so these figures belong to no known bytes."
        if result.kind == "gate" and result.baseline is None:
            yield "Baseline: none, so nothing was compared."
        undecided = [c.name for c, one in series if one.primary and one.state == "not-run"]
        if undecided and result.baseline:
            yield f"Not run, although they decide: {_names(undecided)}."
        blind = [c.name for c, one in series if one.primary and one.differences and not one.sigma]
        if blind:
            yield f"No A/A block, so that they decide by their own spread alone: {_names(blind)}."
        if strays := [cell.name for cell, one in series if not one.in_band]:
            what = "The newest A/A block contradicts the earlier ones, and alone counts"
            yield f"{what}: {_names(strays)}."
        if counts := Counter(reason.reference for leg in result.legs for reason in leg.reasons):
            reasons = ", ".join(f"{name} {count}×" for name, count in counts.most_common(12))
            yield f"Measurements that do not count: {reasons}."


def _median(values: Sequence[float]) -> float | None:
    """Return the median of the plausible *values*; None without any."""
    plain = [value for value in values if plausible(value)]
    return statistics.median(plain) if plain else None


def _names(names: Sequence[str], most: int = 6) -> str:
    """Return the first of *names*, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
