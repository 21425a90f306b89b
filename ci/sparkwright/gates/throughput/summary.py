"""From a course's legs and decision to the result that is kept, shown and published."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.statistics.decision import Found
from sparkwright.bench.statistics.intervals import mean_interval
from sparkwright.gates.core.verdict import State
from sparkwright.gates.throughput import paired_differences
from sparkwright.gates.throughput.paired_differences import NoiseModel
from sparkwright.gates.throughput.records import CellResult, Kind, Measurement, Series
from sparkwright.gates.throughput.runner import RunOutcome

#: Blocks or launches behind an interval; two of them give one that is a hundred times wider than they are apart.
LEAST = 3


def state(kind: Kind, outcome: RunOutcome) -> tuple[State, str]:
    """Return the verdict of a course, and it in a sentence."""
    if outcome.stopped:
        return "invalid", f"{outcome.stopped.says} ({outcome.stopped.reference})"
    if kind != "gate":
        count = len({leg.launch for leg in outcome.legs if leg.counts and leg.side == "candidate"})
        return "not-run", f"{count} launches were measured; nothing is judged"
    if outcome.decision is None or outcome.decision.state is None:
        return "inconclusive", "no block is whole"
    return outcome.decision.state, outcome.decision.says


def cells(asked: Sequence[WorkloadCell], outcome: RunOutcome, known: Mapping[str, NoiseModel], compared: bool) -> tuple[CellResult, ...]:
    """
    Return what came of each cell.

    Args:
        compared: Whether there is a baseline.
    """
    legs = [leg for leg in outcome.legs if leg.counts and leg.block in outcome.blocks]
    found = {one.name: one for one in outcome.decision.found} if outcome.decision else {}
    made = []
    for cell in asked:
        mine = [leg for leg in legs if leg.cell == cell.name]
        series = tuple(_series(cell, metric, mine, outcome.blocks, found, known, compared) for metric in METRICS)
        made.append(CellResult(cell.name, cell.prompt, cell.answer, cell.concurrency, series))
    return tuple(made)


def _series(
    cell: WorkloadCell, metric: Metric, legs: Sequence[Measurement], blocks: frozenset[int], found: Mapping[str, Found],
    known: Mapping[str, NoiseModel], compared: bool,
) -> Series:  # fmt: skip
    name = paired_differences.name(cell.name, metric)
    candidate, baseline = (paired_differences.by_block(legs, cell.name, side, metric) for side in ("candidate", "baseline"))
    differences = tuple(d for block in sorted(blocks) if (d := paired_differences.difference(legs, cell.name, block, metric)) is not None)
    low, high = _interval(differences if compared else tuple(map(math.log, candidate.values())), METRICS[metric][3] and compared)
    said = found.get(name)
    return Series(
        metric, metric in cell.primary, differences if compared else (),
        said.pass_evidence if said else (), said.fail_evidence if said else (), said.sign_evidence if said else (),
        said.state if said else "not-run", known[name].sigma if name in known else None,
        _median(baseline), _median(candidate), low, high, len({leg.launch for leg in legs if leg.side == "candidate"}),
    )  # fmt: skip


def _median(values: Mapping[int, float]) -> float | None:
    return statistics.median(values.values()) if values else None


def _interval(logarithms: Sequence[float], turned: bool) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean of *logarithms*, as a factor; *turned* where they stand for the inverse."""
    if len(logarithms) < LEAST:
        return None, None
    low, high = mean_interval(logarithms)
    return (math.exp(-high), math.exp(-low)) if turned else (math.exp(low), math.exp(high))
