"""From legs to the series that are decided on: one number for each block, metric and cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sparkwright.bench.load.load_spec import LoadResult
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.statistics.decision import Track
from sparkwright.gates.throughput.records import Measurement


class NoiseModel(msgspec.Struct, frozen=True):
    """What a calibration of this host says of a series: the spread of a block's difference, and whether it still holds."""

    sigma: float
    in_band: bool = True


def name(cell: str, metric: Metric) -> str:
    """Return the name of a series."""
    return f"{cell}: {METRICS[metric][0]}"


def names(cell: WorkloadCell) -> list[str]:
    """Return the names of the series of *cell* that decide."""
    return [name(cell.name, metric) for metric in cell.primary]


def value(run: LoadResult, metric: Metric) -> float:
    """Return a run's *metric* in the unit of the record: seconds, or tokens per second."""
    return {"tpot": run.tpot, "ttft": run.ttft, "rate": run.rate}[metric]


def worse(run: LoadResult, metric: Metric) -> float:
    """Return y: the logarithm of the metric, with the sign that makes more of it worse."""
    found = math.log(value(run, metric))
    return -found if METRICS[metric][3] else found


def of(cells: Sequence[WorkloadCell], legs: Iterable[Measurement], closed: Iterable[int], known: Mapping[str, NoiseModel]) -> list[Track]:
    """Return the series that decide, over the blocks that are *closed*."""
    counted = [leg for leg in legs if leg.counts]
    blocks = sorted(closed)
    found = []
    for cell in cells:
        for metric in cell.primary:
            title = name(cell.name, metric)
            differences = tuple(d for block in blocks if (d := difference(counted, cell.name, block, metric)) is not None)
            said = known.get(title)
            found.append(Track(title, differences, said.sigma if said else None, said.in_band if said else True))
    return found


def difference(legs: Iterable[Measurement], cell: str, block: int, metric: Metric) -> float | None:
    """
    Return d of a block: the median over its quads of (B1 + B2 - A1 - A2) / 2 in logarithms, positive where the candidate is worse.

    None where the cell was not measured in that block, as it was settled before.
    """
    quads: dict[int, dict[str, list[float]]] = {}
    for leg in legs:
        if leg.cell == cell and leg.block == block and leg.counts and leg.run:
            quads.setdefault(leg.quad, {"baseline": [], "candidate": []})[leg.side].append(worse(leg.run, metric))
    whole = [quad for quad in quads.values() if len(quad["baseline"]) == len(quad["candidate"]) == 2]
    if not whole or len(whole) != len(quads):
        return None
    return statistics.median((sum(quad["candidate"]) - sum(quad["baseline"])) / 2 for quad in whole)


def by_block(legs: Iterable[Measurement], cell: str, side: str, metric: Metric) -> dict[int, float]:
    """Return the median of a side's legs in each block, in the unit of the record."""
    found: dict[int, list[float]] = {}
    for leg in legs:
        if leg.cell == cell and leg.side == side and leg.counts and leg.run:
            found.setdefault(leg.block, []).append(value(leg.run, metric))
    return {block: statistics.median(values) for block, values in sorted(found.items())}
