"""From a result of the throughput gate to the figures that a history shows: the candidate's own, with an interval over launches."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence

from sparkwright.bench.load.vllm_bench import LoadResult
from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.results import Measurement, Result
from sparkwright.gates.throughput.paired_differences import MIN_INTERVAL
from sparkwright.operate.site.records import Measured
from sparkwright.release.manifest import times
from sparkwright.release.manifest.records import line

#: As `records.Amount`.
LEAST_AMOUNT, MOST_AMOUNT = 1e-9, 1e9


def of(result: Result, source: str) -> tuple[Measured, ...]:
    """
    Return the figures of *result*; nothing where no leg counts. *source*: sha256 of its file.

    They are computed from the legs, so nothing that the result claims besides is taken for a figure. A gate's interval of the ratio
    is another one: it holds the noise of both sides, and not what both share.
    """
    legs: dict[str, list[Measurement]] = {}
    for leg in result.legs:
        if leg.side == "candidate" and leg.counts:
            legs.setdefault(leg.cell, []).append(leg)
    return tuple(
        one
        for cell in result.cells
        for metric in METRICS
        if (one := _measured(result, source, cell.name, metric, legs.get(cell.name, [])))
    )


def _measured(
    result: Result, source: str, cell: str, metric: Metric, legs: Sequence[Measurement]
) -> Measured | None:
    blocks: dict[int, list[float]] = {}
    for leg in legs:
        if leg.run and LEAST_AMOUNT < (value := _value(leg.run, metric)) < MOST_AMOUNT:
            blocks.setdefault(leg.block, []).append(value)
    if not blocks:
        return None
    middles = [statistics.median(found) for found in blocks.values()]
    low, high = _interval(middles)
    recipe, gpu = (
        line(result.recipe or result.model or "no recipe"),
        line(result.host.get("gpu", "") or "not known"),
    )
    launches = len({(leg.block, leg.launch) for leg in legs})
    wheel, at = line(result.candidate.sha256), _at(result.began)
    return Measured(
        recipe, gpu, line(cell), metric, statistics.median(middles), low, high, len(blocks), launches, wheel, source, at
    )  # fmt: skip


def _at(began: float) -> str:
    # No calendar has other years, and a Result that nobody measured may hold any number.
    return (
        times.text(datetime.datetime.fromtimestamp(began, datetime.UTC))
        if 0 < began < 253_402_300_800
        else ""
    )


def _value(run: LoadResult, metric: Metric) -> float:
    return float(getattr(run, metric))


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean of their logarithms, as values."""
    from sparkwright.bench.statistics.student import mean_interval

    if len(values) < MIN_INTERVAL:
        return None, None
    low, high = mean_interval([math.log(one) for one in values])
    # Two launches that are nothing alike give an interval that holds everything, and says nothing.
    bounded = math.log(LEAST_AMOUNT) < low and high < math.log(MOST_AMOUNT)
    return (math.exp(low), math.exp(high)) if bounded else (None, None)
