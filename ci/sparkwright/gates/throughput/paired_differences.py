"""
From measurements to series: one paired difference per block, metric and cell, the machine's noise
from A/A blocks, and what both say of a wheel.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sparkwright.bench.load.vllm_bench import LoadResult
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Metric, Side
from sparkwright.bench.statistics import student
from sparkwright.bench.statistics.eprocess import (
    Decision,
    DecisionRule,
    MetricSeries,
    NoiseModel,
)
from sparkwright.bench.statistics.student import mean_interval
from sparkwright.core.files import content_key
from sparkwright.core.store import Store
from sparkwright.gates.throughput.records import (
    CONTROL_BLOCK,
    Calibrated,
    CellResult,
    Measurement,
    Series,
    ThroughputPolicy,
)

#: Blocks or launches behind an interval; two give one that is a hundred times wider than they are.
MIN_INTERVAL = 3
#: A/A blocks that are stored of a machine and model, the newest.
MAX_STORED = 200
#: Of the machine's fingerprint, what its noise is keyed by; driver, kernel and firmware are not.
_IDENTITY = ("gpu", "processor", "memory")
_STORE = "calibrations"

#: By series: day (``2026-11-22``) and difference of each A/A block, oldest first.
History = Mapping[str, Sequence[tuple[str, float]]]


class AABlock(msgspec.Struct, frozen=True):
    """The differences of an A/A block, by series; *mode*: see `runner.ServerMode`."""

    at: float
    mode: str
    differences: dict[str, float]


class Calibration(msgspec.Struct, frozen=True):
    """The A/A blocks of a machine and model, oldest first."""

    blocks: tuple[AABlock, ...] = ()

    def history(self, mode: str) -> dict[str, list[tuple[str, float]]]:
        """Return the blocks of *mode* by series."""
        series: dict[str, list[tuple[str, float]]] = {}
        for block in self.blocks:
            for name, value in block.differences.items() if block.mode == mode else ():
                series.setdefault(name, []).append((day(block.at), value))
        return series


def calibration_key(host: Mapping[str, str], model: str) -> str:
    """Return the key of the calibration of a machine and model: nothing of the wheel is in it."""
    return content_key(_STORE, [{name: host.get(name, "") for name in _IDENTITY}, model])


def stored_calibration(store: Store, key: str) -> Calibration:
    """Return the A/A blocks under *key*, none if there are none."""
    return store.get(_STORE, key, Calibration) or Calibration()


def add_blocks(store: Store, key: str, blocks: Iterable[AABlock]) -> Calibration:
    """Add *blocks* that are not stored yet, and return the calibration."""
    found = stored_calibration(store, key).blocks
    new = [one for one in blocks if one.differences and one.at not in {old.at for old in found}]
    result = Calibration(tuple(sorted((*found, *new), key=lambda one: one.at)[-MAX_STORED:]))
    store.put(_STORE, key, result)
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


def _value(run: LoadResult, metric: Metric) -> float:
    return {"tpot": run.tpot, "ttft": run.ttft, "rate": run.rate}[metric]


def difference(
    measurements: Iterable[Measurement],
    cell: str,
    block: int,
    metric: Metric,
    side: Side = "candidate",
) -> float | None:
    """
    Return ln(*side* / baseline) of a block, positive where *side* is worse.

    It is the median over quads of (B1 + B2 - A1 - A2) / 2 in logarithms, in which a linear drift
    cancels. None if the cell was not measured in that block, since it was settled before.
    """
    sign = -1 if METRICS[metric][3] else 1
    quads: dict[int, dict[str, list[float]]] = {}
    for one in measurements:
        if one.cell == cell and one.block == block and one.counts and one.run:
            sides = quads.setdefault(one.quad, {"baseline": [], side: []})
            sides.setdefault(one.side, []).append(sign * math.log(_value(one.run, metric)))
    pairs = [(quad["baseline"], quad[side]) for quad in quads.values()]
    if not pairs or any(len(before) != 2 or len(after) != 2 for before, after in pairs):
        return None
    return statistics.median((sum(after) - sum(before)) / 2 for before, after in pairs)


def aa_block(
    measurements: Sequence[Measurement],
    cells: Iterable[WorkloadCell],
    block: int,
    mode: str,
    side: Side = "control",
) -> AABlock:
    """Return the A/A block number *block* of *measurements*."""
    at = min((one.began for one in measurements if one.block == block), default=0.0)
    differences = {
        series_name(cell.name, metric): value
        for cell in cells
        for metric in cell.primary
        if (value := difference(measurements, cell.name, block, metric, side)) is not None
    }
    return AABlock(at, mode, differences)


def with_control(history: History, control: AABlock) -> dict[str, list[tuple[str, float]]]:
    """Return *history* with the gate's own A/A block at the end of each series."""
    names = {*history, *control.differences}
    own = {name: [(day(control.at), value)] for name, value in control.differences.items()}
    return {name: [*history.get(name, ()), *own.get(name, [])] for name in sorted(names)}


def noise_of(
    values: Sequence[tuple[str, float]], today: str, policy: ThroughputPolicy
) -> tuple[NoiseModel, bool]:
    """
    Return the noise of a series, and whether its newest A/A block agrees with the earlier ones.

    Where it does not, the machine changed, and the newest block alone counts.
    """
    end = datetime.date.fromisoformat(today)
    ages = [
        (float((end - datetime.date.fromisoformat(when)).days), value) for when, value in values
    ]
    half, most = policy.half_life_days, policy.calibration_weight
    earlier = student.noise_model(ages[:-1], half, most)
    agrees = not ages or student.agrees(earlier, ages[-1][1])
    return student.noise_model(ages if agrees else ages[-1:], half, most), agrees


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
            values = (
                difference(measurements, cell.name, block, metric) for block in sorted(blocks)
            )
            noise, _ = noise_of(history.get(name, ()), today, policy)
            known = tuple(value for value in values if value is not None)
            result.append(MetricSeries(name, known, policy.bounds[metric], noise))
    return result


def outlook(series: Sequence[MetricSeries], rule: DecisionRule) -> str:
    """Return, in words, what the noise of *series* supports and how many blocks it will take."""
    span, count = (rule.min_blocks, rule.max_blocks), len(series)
    parts = []
    for one in series:
        high, low = math.log1p(one.bounds.margin), math.log1p(one.bounds.tolerated)
        slow = math.log1p(1.5 * one.bounds.margin)
        passing = student.expected_blocks(one.noise, high, 1 / rule.alpha, span, count)
        failing = student.expected_blocks(one.noise, slow - low, count / rule.alpha, span)
        text = f"{one.name}: a block spreads by {100 * (one.noise.sigma or 0):.2g} %"
        if passing:
            text += f"; an equal wheel passes after about {passing} blocks"
        else:
            text += (
                f"; this does not support a margin of {100 * one.bounds.margin:g} % in "
                f"{rule.max_blocks} blocks"
            )
        text += f"; one slower by {150 * one.bounds.margin:g} % fails after about {failing}"
        parts.append(
            text if failing else text.replace(" fails after about None", " stays undecided")
        )
    return ". ".join(parts) + "."


def calibrated(
    cells: Iterable[WorkloadCell], history: History, policy: ThroughputPolicy, today: str
) -> tuple[Calibrated, ...]:
    """Return the A/A history of the deciding series, for the result."""
    result = []
    for cell in cells:
        for metric in cell.primary:
            values = history.get(series_name(cell.name, metric), ())
            noise, agrees = noise_of(values, today, policy)
            if noise.sigma:
                days, numbers = zip(*values, strict=True)
                result.append(Calibrated(cell.name, metric, numbers, days, noise.sigma, agrees))
    return tuple(result)


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
    noises = {one.name: one.noise for one in series}
    decided = {one.name: one for one in decision.series} if decision else {}
    bounds = {one.name: one.bounds for one in series}
    results = []
    for cell in cells:
        own = [one for one in counted if one.cell == cell.name]
        rows = []
        for metric in METRICS:
            name = series_name(cell.name, metric)
            row = _series(cell, metric, own, blocks, compared=compared)
            if (shown := decided.get(name)) is not None:
                row = msgspec.structs.replace(
                    row, pass_evidence=shown.pass_evidence, fail_evidence=shown.fail_evidence,
                    state=shown.state, conclusion=shown.conclusion, sigma=noises[name].sigma,
                    margin=bounds[name].margin, tolerated=bounds[name].tolerated,
                )  # fmt: skip
            rows.append(row)
        shape = cell.prompt, cell.answer, cell.concurrency
        results.append(CellResult(cell.name, *shape, tuple(rows)))
    return tuple(results)


def _series(
    cell: WorkloadCell,
    metric: Metric,
    own: Sequence[Measurement],
    blocks: Collection[int],
    *,
    compared: bool,
) -> Series:
    values: dict[str, dict[int, list[float]]] = {"baseline": {}, "candidate": {}, "control": {}}
    for one in own:
        if one.run:
            values[one.side].setdefault(one.block, []).append(_value(one.run, metric))
    medians = {
        side: [statistics.median(group) for group in groups.values()]
        for side, groups in values.items()
    }
    found = (difference(own, cell.name, block, metric) for block in sorted(blocks))
    differences = tuple(one for one in found if one is not None) if compared else ()
    sign = -1 if compared and METRICS[metric][3] else 1
    logarithms = differences or tuple(math.log(one) for one in medians["candidate"])
    enough = len(logarithms) >= MIN_INTERVAL
    ends = (
        sorted(math.exp(sign * end) for end in mean_interval(logarithms))
        if enough
        else (None, None)
    )
    baseline, candidate = (
        statistics.median(medians[side]) if medians[side] else None
        for side in ("baseline", "candidate")
    )
    launches = len({one.launch for one in own if one.side == "candidate"})
    return Series(
        metric, metric in cell.primary, differences, baseline=baseline, candidate=candidate,
        low=ends[0], high=ends[1], launches=launches,
    )  # fmt: skip


def control_history(
    history: History,
    measurements: Sequence[Measurement],
    cells: Sequence[WorkloadCell],
    mode: str,
) -> dict[str, list[tuple[str, float]]]:
    """Return *history* with the A/A block of *measurements*."""
    return with_control(history, aa_block(measurements, cells, CONTROL_BLOCK, mode))
