"""
The policy of the throughput gate, and the series that it decides by: one paired difference per
block, metric and cell, held against the machine's noise in A/A blocks.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Count, Metric, Share, Side
from sparkwright.bench.results import CellResult, History, Measurement, Series
from sparkwright.bench.statistics import (
    MIN_INTERVAL,
    Bounds,
    Decision,
    DecisionRule,
    MetricSeries,
    NoiseModel,
    agrees,
    expected_blocks,
    mean_interval,
    noise_model,
)

#: The kind of record in the store that holds a `History`.
STORED = "aa-blocks"

Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/throughput.yaml``, which gives the source of each number.

    Attributes:
        bounds: By metric: the margin that a pass excludes, and the slowdown that never fails.
        alpha: Probability of each kind of wrong verdict, over all gates of one wheel together.
        min_blocks, max_blocks: Blocks before a decision, and after which there is none.
        launches: Of a bench or a verification, which compare nothing.
        workloads: The set of ``workloads.yaml`` that decides.
        warmups: Requests before each measurement that do not count.
        prefix_hits: Share of prompt tokens from a prefix cache that makes a measurement invalid.
        cooldown_retries: Cool-downs before a discarded measurement is repeated.
        timeout_s: Of one measurement.
        ceiling_min_bytes: Bytes of a decode step below which caches may answer for memory.
        calibration_blocks: A/A blocks that a calibration measures.
        half_life_days: Age at which an A/A block weighs half.
        calibration_weight: Fresh blocks that all A/A blocks are worth together, at most.
        published_tolerance: Share by which a published figure may be off and still hold.
    """

    bounds: Annotated[dict[Metric, Bounds], Meta(min_length=3)]
    alpha: Annotated[float, Meta(gt=0, lt=0.5)]
    min_blocks: Count
    max_blocks: Count
    launches: Count
    workloads: str
    warmups: Annotated[int, Meta(ge=0)]
    prefix_hits: Share
    cooldown_retries: Count
    timeout_s: Seconds
    ceiling_min_bytes: Annotated[float, Meta(ge=0)]
    calibration_blocks: Count
    half_life_days: Seconds
    calibration_weight: Annotated[float, Meta(ge=1)]
    published_tolerance: Share


def extended(history: History, at: float, differences: Mapping[str, float]) -> History:
    """Return *history* with an A/A block, measured *at* seconds since 1970, at its end."""
    measured = {
        name: [*history.get(name, ()), (day(at), value)] for name, value in differences.items()
    }
    return {**history, **measured}


def day(at: float) -> str:
    """Return the day of *at* seconds since 1970, in UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat()


def series_name(cell: str, metric: Metric) -> str:
    """Return the name of a series."""
    return f"{cell}: {METRICS[metric][0]}"


def series_names(cell: WorkloadCell) -> list[str]:
    """Return the names of the deciding series of *cell*."""
    return [series_name(cell.name, metric) for metric in cell.primary]


def difference(
    measurements: Iterable[Measurement], cell: str, block: int, metric: Metric
) -> float | None:
    """
    Return ln(other side / baseline) of a block, positive where the other side is worse.

    It is (B1 + B2 - A1 - A2) / 2 in logarithms, in which a linear drift cancels. None if the cell
    was not measured in that block, since it was settled before.
    """
    logarithms = [
        (leg.side, math.log(getattr(leg.run, metric)))
        for leg in measurements
        if leg.cell == cell and leg.block == block and leg.counts
    ]
    baseline = [value for side, value in logarithms if side == "baseline"]
    other = [value for side, value in logarithms if side != "baseline"]
    if len(baseline) != 2 or len(other) != 2:
        return None
    sign = -1 if METRICS[metric][3] else 1
    return sign * (sum(other) - sum(baseline)) / 2


def aa_block(
    measurements: Sequence[Measurement], cells: Iterable[WorkloadCell], block: int
) -> dict[str, float]:
    """Return the differences of the A/A block number *block*, by deciding series."""
    return {
        series_name(cell.name, metric): value
        for cell in cells
        for metric in cell.primary
        if (value := difference(measurements, cell.name, block, metric)) is not None
    }


def noise_of(
    values: Sequence[tuple[str, float]], today: str, policy: ThroughputPolicy
) -> NoiseModel:
    """
    Return the noise of a series.

    If its newest A/A block does not agree with the earlier ones, the machine changed, and the
    newest block alone counts.
    """
    end = datetime.date.fromisoformat(today)
    ages = [(float((end - datetime.date.fromisoformat(on)).days), value) for on, value in values]
    half, most = policy.half_life_days, policy.calibration_weight
    if not ages or agrees(noise_model(ages[:-1], half, most), ages[-1][1]):
        return noise_model(ages, half, most)
    return replace(noise_model(ages[-1:], half, most), agrees=False)


def metric_series(
    cells: Iterable[WorkloadCell],
    measurements: Sequence[Measurement],
    blocks: Collection[int],
    history: History,
    policy: ThroughputPolicy,
    today: str,
) -> list[MetricSeries]:
    """Return the deciding series over complete *blocks*; *history* holds the A/A blocks."""
    result = []
    for cell in cells:
        for metric in cell.primary:
            name = series_name(cell.name, metric)
            noise = noise_of(history.get(name, ()), today, policy)
            values = _differences(measurements, cell.name, blocks, metric)
            result.append(MetricSeries(name, values, policy.bounds[metric], noise))
    return result


def _differences(
    measurements: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> tuple[float, ...]:
    values = (difference(measurements, cell, block, metric) for block in sorted(blocks))
    return tuple(value for value in values if value is not None)


def outlook(series: Sequence[MetricSeries], rule: DecisionRule) -> str:
    """Return, in words, what the noise of *series* supports and how many blocks it will take."""
    span, count = (rule.min_blocks, rule.max_blocks), len(series)
    parts = []
    for each in series:
        margin, slow = each.bounds.margin, 1.5 * each.bounds.margin
        high, gap = math.log1p(margin), math.log1p(slow) - math.log1p(each.bounds.tolerated)
        passing = expected_blocks(each.noise, high, 1 / rule.alpha, span, count)
        failing = expected_blocks(each.noise, gap, count / rule.alpha, span)
        equal = (
            f"an equal wheel passes after about {passing} blocks"
            if passing
            else f"the noise does not support a margin of {100 * margin:g} % in "
            f"{rule.max_blocks} blocks"
        )
        verdict = f"fails after about {failing}" if failing else "stays undecided"
        parts.append(
            f"{each.name}: a block spreads by {100 * (each.noise.sigma or 0):.2g} %; {equal}; "
            f"one slower by {100 * slow:g} % {verdict}."
        )
    return " ".join(parts)


def cell_results(
    cells: Iterable[WorkloadCell],
    measurements: Iterable[Measurement],
    blocks: Collection[int],
    series: Sequence[MetricSeries],
    decision: Decision | None,
) -> tuple[CellResult, ...]:
    """Return the result of each cell over complete *blocks*."""
    counted = [leg for leg in measurements if leg.counts and leg.block in blocks]
    deciding = {each.name: each for each in series}
    decided = {each.name: each for each in decision.series} if decision else {}
    results = []
    for cell in cells:
        own = [leg for leg in counted if leg.cell == cell.name]
        rows = []
        for metric in METRICS:
            name, row = series_name(cell.name, metric), _series(own, cell.name, blocks, metric)
            if name in decided:
                row = replace(
                    row, pass_evidence=decided[name].pass_evidence,
                    fail_evidence=decided[name].fail_evidence, state=decided[name].state,
                    conclusion=decided[name].conclusion, sigma=deciding[name].noise.sigma,
                    in_band=deciding[name].noise.agrees, margin=deciding[name].bounds.margin,
                    tolerated=deciding[name].bounds.tolerated,
                )  # fmt: skip
            rows.append(replace(row, primary=name in deciding))
        shape = (cell.prompt, cell.answer, cell.concurrency)
        results.append(CellResult(cell.name, *shape, tuple(rows)))
    return tuple(results)


def _series(
    own: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> Series:
    """Return the series of *metric* in *own*, the measurements of *cell*, without a decision."""
    values: dict[Side, dict[int, list[float]]] = {"baseline": {}, "candidate": {}}
    for leg in own:
        values[leg.side].setdefault(leg.block, []).append(getattr(leg.run, metric))
    medians = {side: list(map(statistics.median, of.values())) for side, of in values.items()}
    differences = _differences(own, cell, blocks, metric)
    logarithms = differences or tuple(map(math.log, medians["candidate"]))
    low, high = None, None
    if len(logarithms) >= MIN_INTERVAL:
        sign = -1 if differences and METRICS[metric][3] else 1
        low, high = sorted(math.exp(sign * end) for end in mean_interval(logarithms))
    baseline, candidate = (statistics.median(of) if of else None for of in medians.values())
    return Series(
        metric, False, differences, baseline=baseline, candidate=candidate, low=low, high=high,
        launches=len({leg.launch for leg in own if leg.side == "candidate"}),
    )  # fmt: skip
