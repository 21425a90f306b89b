"""
Make series of measurements: one paired difference per block, metric and cell; estimate the
machine's noise from A/A blocks; and decide by both.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Metric, Side
from sparkwright.bench.results import CellResult, History, Measurement, Series
from sparkwright.bench.statistics import (
    MIN_INTERVAL,
    Decision,
    DecisionRule,
    MetricSeries,
    NoiseModel,
    agrees,
    expected_blocks,
    mean_interval,
    noise_model,
)
from sparkwright.core.files import content_key
from sparkwright.gates.throughput.policy import ThroughputPolicy

#: A/A blocks of a series that are stored of a machine and model, the newest.
MAX_STORED = 200
#: The kind of record in the store that holds a `History`.
STORED = "aa-blocks"
#: Of the machine's fingerprint, what its noise is keyed by; driver, kernel and firmware are not.
_IDENTITY = ("gpu", "processor", "memory")


def calibration_key(host: Mapping[str, str], model: str, *, at_once: bool) -> str:
    """Return the key of the calibration of a machine and model: nothing of the wheel is in it."""
    return content_key(STORED, [{name: host.get(name, "") for name in _IDENTITY}, model, at_once])


def extended(
    history: History, at: float, differences: Mapping[str, float]
) -> dict[str, list[tuple[str, float]]]:
    """Return *history* with an A/A block, measured *at* seconds since 1970, at its end."""
    result = {name: list(values) for name, values in history.items()}
    for name, value in differences.items():
        result[name] = [*result.get(name, []), (day(at), value)][-MAX_STORED:]
    return result


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
    measurements: Iterable[Measurement],
    cell: str,
    block: int,
    metric: Metric,
    side: Side = "candidate",
) -> float | None:
    """
    Return ln(*side* / baseline) of a block, positive where *side* is worse.

    It is (B1 + B2 - A1 - A2) / 2 in logarithms, in which a linear drift cancels. None if the cell
    was not measured in that block, since it was settled before.
    """
    values: dict[Side, list[float]] = {"baseline": [], side: []}
    for one in measurements:
        if one.cell == cell and one.block == block and one.counts and one.side in values:
            values[one.side].append(math.log(getattr(one.run, metric)))
    if [len(group) for group in values.values()] != [2, 2]:
        return None
    sign = -1 if METRICS[metric][3] else 1
    return sign * (sum(values[side]) - sum(values["baseline"])) / 2


def aa_block(
    measurements: Sequence[Measurement],
    cells: Iterable[WorkloadCell],
    block: int,
    side: Side = "control",
) -> dict[str, float]:
    """Return the differences of the A/A block number *block*, by deciding series."""
    return {
        series_name(cell.name, metric): value
        for cell in cells
        for metric in cell.primary
        if (value := difference(measurements, cell.name, block, metric, side)) is not None
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
    earlier = noise_model(ages[:-1], half, most)
    if not ages or agrees(earlier, ages[-1][1]):
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
    for one in series:
        margin, slow = one.bounds.margin, 1.5 * one.bounds.margin
        high, gap = math.log1p(margin), math.log1p(slow) - math.log1p(one.bounds.tolerated)
        passing = expected_blocks(one.noise, high, 1 / rule.alpha, span, count)
        failing = expected_blocks(one.noise, gap, count / rule.alpha, span)
        equal = f"an equal wheel passes after about {passing} blocks"
        if not passing:
            equal = (
                f"the noise does not support a margin of {100 * margin:g} % in "
                f"{rule.max_blocks} blocks"
            )
        verdict = f"fails after about {failing}" if failing else "stays undecided"
        parts.append(
            f"{one.name}: a block spreads by {100 * (one.noise.sigma or 0):.2g} %; {equal}; "
            f"one slower by {100 * slow:g} % {verdict}."
        )
    return " ".join(parts)


def cell_results(
    cells: Iterable[WorkloadCell],
    measurements: Iterable[Measurement],
    blocks: Collection[int],
    series: Sequence[MetricSeries],
    decision: Decision | None,
    *,
    compared: bool,
) -> tuple[CellResult, ...]:
    """Return the result of each cell over complete *blocks*; *compared*: there is a baseline."""
    counted = [one for one in measurements if one.counts and one.block in blocks]
    deciding = {one.name: one for one in series}
    results = []
    for cell in cells:
        own = [one for one in counted if one.cell == cell.name]
        rows = tuple(
            _series(
                own, blocks, metric, compared, decision,
                deciding.get(series_name(cell.name, metric)),
            )
            for metric in METRICS
        )  # fmt: skip
        results.append(CellResult(cell.name, cell.prompt, cell.answer, cell.concurrency, rows))
    return tuple(results)


def _series(
    own: Sequence[Measurement],
    blocks: Collection[int],
    metric: Metric,
    compared: bool,
    decision: Decision | None,
    deciding: MetricSeries | None,
) -> Series:
    """Return the series of *metric* in the measurements of a cell; *deciding*: if it decides."""
    values: dict[Side, dict[int, list[float]]] = {"baseline": {}, "candidate": {}}
    for one in own:
        values[one.side].setdefault(one.block, []).append(getattr(one.run, metric))
    medians = {side: list(map(statistics.median, of.values())) for side, of in values.items()}
    differences = _differences(own, own[0].cell, blocks, metric) if compared and own else ()
    logarithms = differences or tuple(map(math.log, medians["candidate"]))
    low, high = None, None
    if len(logarithms) >= MIN_INTERVAL:
        sign = -1 if compared and METRICS[metric][3] else 1
        low, high = sorted(math.exp(sign * end) for end in mean_interval(logarithms))
    baseline, candidate = (
        statistics.median(of) if of else None for of in (medians["baseline"], medians["candidate"])
    )
    launches = len({one.launch for one in own if one.side == "candidate"})
    series = Series(
        metric, deciding is not None, differences, baseline=baseline, candidate=candidate,
        low=low, high=high, launches=launches,
    )  # fmt: skip
    shown = {one.name: one for one in decision.series} if decision else {}
    if deciding is None or deciding.name not in shown:
        return series
    row = shown[deciding.name]
    return replace(
        series, pass_evidence=row.pass_evidence, fail_evidence=row.fail_evidence,
        state=row.state, conclusion=row.conclusion, sigma=deciding.noise.sigma,
        in_band=deciding.noise.agrees,
        margin=deciding.bounds.margin, tolerated=deciding.bounds.tolerated,
    )  # fmt: skip
