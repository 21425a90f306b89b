"""
The policy of the throughput gate, and the series that it decides by: one paired difference per
block, metric and cell, held against the machine's noise in A/A blocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadResult
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Count, Metric, Share, Side
from sparkwright.bench.results import CONTROL_BLOCK, CellResult, Measurement, Series
from sparkwright.bench.statistics import (
    MIN_INTERVAL,
    Bounds,
    Decision,
    MetricSeries,
    mean_interval,
)

Seconds = Annotated[float, Meta(gt=0, le=1e6)]
#: Seconds that every time of a request exceeds.
SHORTEST_S = 1e-9


class ThroughputPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/throughput.yaml``, which gives the source of each number.

    Attributes:
        bounds: By metric: the margin that a pass excludes, and the slowdown that never fails.
        alpha: Probability of each kind of wrong verdict, over all gates of one wheel together.
        min_blocks, max_blocks: Blocks before a decision, and after which there is none.
        launches: How many launches a bench has, which compares nothing.
        workloads: The set of ``workloads.yaml`` that decides.
        generator: Stack whose official wheel of vLLM holds the load generator.
        warmups: Requests before each measurement that do not count.
        prefix_hits: Share of prompt tokens from a prefix cache that makes a measurement invalid.
        cooldown_retries: Cool-downs before a discarded measurement is repeated.
        timeout_s: Of one measurement.
        lag: Longest wait before a side's turn, in lengths of the turn before.
        own_error: Standard error of a measurement by itself, as a share of the margin, at which it
            is long enough.
        longest_s: Seconds of a load that has more than the fewest requests.
        slim_share: Of the gain that the bytes of a slimmer copy predict for one request, the share
            that has to be there.
    """

    bounds: Annotated[dict[Metric, Bounds], Meta(min_length=len(METRICS))]
    alpha: Annotated[float, Meta(gt=0, lt=0.5)]
    min_blocks: Count
    max_blocks: Count
    launches: Count
    workloads: str
    generator: str
    warmups: Annotated[int, Meta(ge=0)]
    prefix_hits: Share
    cooldown_retries: Count
    timeout_s: Seconds
    lag: Annotated[float, Meta(ge=0, le=4)]
    own_error: Share
    longest_s: Seconds
    slim_share: Share

    def needed(
        self, loads: Sequence[LoadResult], metrics: Sequence[Metric], *, paired: bool
    ) -> float:
        """
        Return the requests after which *metrics* of a cell are known well enough, by *loads* of as
        many requests each.

        The standard error of a mean of n requests is their spread by the square root of n; a
        median has 1.25 times as much.

        Args:
            paired: Whether all loads have the same prompts, by which both sides differ alike.
        """
        most, sets = 0.0, len(loads) - paired
        for metric in metrics:
            time = metric if metric in ("tpot", "ttft") else "latency"
            times = [[getattr(request, time) for request in load.requests] for load in loads]
            logarithms = np.log(np.maximum(times, SHORTEST_S))
            rest = logarithms - logarithms.mean(axis=1, keepdims=True)
            if paired:
                rest -= rest.mean(axis=0)
            freedom = max(1, sets * (rest.shape[1] - 1))
            target = self.own_error * math.log1p(self.bounds[metric].margin) / 1.25
            most = max(most, float((rest**2).sum()) / freedom / target**2)
        return min(most, self.longest_s * len(times[0]) / max(load.seconds for load in loads))


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
        (leg.side, math.log(value))
        for leg in measurements
        if leg.cell == cell and leg.block == block and leg.counts
        if (value := leg.value(metric)) is not None
    ]
    baseline = [value for side, value in logarithms if side == "baseline"]
    other = [value for side, value in logarithms if side != "baseline"]
    if len(baseline) != 2 or len(other) != 2:
        return None
    sign = -1 if METRICS[metric][3] else 1
    return sign * (sum(other) - sum(baseline)) / 2


def metric_series(
    cells: Iterable[WorkloadCell],
    measurements: Sequence[Measurement],
    blocks: Collection[int],
    policy: ThroughputPolicy,
) -> list[MetricSeries]:
    """Return the deciding series over complete *blocks*, beside the A/A block."""
    result = []
    for cell in cells:
        for metric in cell.primary:
            values = _differences(measurements, cell.name, blocks, metric)
            aa = difference(measurements, cell.name, CONTROL_BLOCK, metric)
            name = series_name(cell.name, metric)
            result.append(MetricSeries(name, values, policy.bounds[metric], aa))
    return result


def _differences(
    measurements: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> tuple[float, ...]:
    values = (difference(measurements, cell, block, metric) for block in sorted(blocks))
    return tuple(value for value in values if value is not None)


def cell_results(
    cells: Iterable[WorkloadCell],
    measurements: Iterable[Measurement],
    blocks: Collection[int],
    series: Sequence[MetricSeries],
    decision: Decision | None,
) -> tuple[CellResult, ...]:
    """Return each cell with the metrics that were compared over complete *blocks*, or decide."""
    counted = [leg for leg in measurements if leg.counts and leg.block in blocks]
    deciding = {each.name: each for each in series}
    decided = {each.name: each for each in decision.series} if decision else {}
    results = []
    for cell in cells:
        own = [leg for leg in counted if leg.cell == cell.name]
        rows = []
        for metric in METRICS:
            name, row = series_name(cell.name, metric), _series(own, cell.name, blocks, metric)
            if not row.differences and name not in deciding:
                continue
            if name in decided:
                own_series, verdict = deciding[name], decided[name]
                row = replace(
                    row, pass_evidence=verdict.pass_evidence, fail_evidence=verdict.fail_evidence,
                    state=verdict.state, conclusion=verdict.conclusion,
                    margin=own_series.bounds.margin,
                )  # fmt: skip
            rows.append(replace(row, primary=name in deciding))
        results.append(CellResult(cell.name, cell.concurrency, tuple(rows)))
    return tuple(results)


def _series(
    own: Sequence[Measurement], cell: str, blocks: Collection[int], metric: Metric
) -> Series:
    """Return the series of *metric* in *own*, the measurements of *cell*, without a decision."""
    values: dict[Side, dict[int, list[float]]] = {"baseline": {}, "candidate": {}}
    for leg in own:
        if (value := leg.value(metric)) is not None:
            values[leg.side].setdefault(leg.block, []).append(value)
    baseline, candidate = (
        statistics.median(map(statistics.median, of.values())) if of else None
        for of in values.values()
    )
    differences, low, high = _differences(own, cell, blocks, metric), None, None
    if len(differences) >= MIN_INTERVAL:
        sign = -1 if METRICS[metric][3] else 1
        low, high = sorted(math.exp(sign * end) for end in mean_interval(differences))
    return Series(
        metric, False, differences, baseline=baseline, candidate=candidate, low=low, high=high
    )
