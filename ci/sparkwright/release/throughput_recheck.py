"""
The throughput gate once more, from its legs.

A `Result` records every leg of the measurement. Differences, spread, evidence, decision and the
figures that a release shows are computed again from the legs, so nothing else of it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.results import CellResult, Result
from sparkwright.bench.statistics import (
    Bounds,
    DecisionRule,
    attempt_alpha,
    decide,
)
from sparkwright.client.records import Missing, line
from sparkwright.gates.core.verdict import Verdict
from sparkwright.gates.throughput import gate, paired_differences
from sparkwright.release.errors import ReleaseError
from sparkwright.release.policy import ThroughputRule

#: Machines round logarithms differently in the last digit.
TOLERANCE = 1e-9


def recompute(
    verdict: Verdict, result: Result | None, rule: ThroughputRule | None
) -> tuple[CellResult, ...]:
    """
    Return the cells of *result* as its legs give them, and require that the pass *verdict* of G8
    follows from these.

    Raises:
        verdict-hollow: There is no result, it holds too little, or something in it does not follow.
    """
    try:
        if result is None or rule is None:
            raise ValueError("there is no throughput.json of its recipe, or no rule for it")
        cells = _recomputed(result, rule)
        rows = {check.name: check.state for check in verdict.checks}
        for check in gate.checks(result):
            if rows.get(check.name) != check.state:
                states = f"{rows.get(check.name, 'nothing')}, the result {check.state}"
                raise ValueError(f"{check.name}: the verdict says {states}")
    # A made-up result may hold any numbers.
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ReleaseError(
            "verdict-hollow",
            "The pass of G8 does not follow from what was measured.",
            details=[f"{type(error).__name__}: {error}"],
        ) from error
    return cells


def missing(result: Result, rule: ThroughputRule) -> Iterator[Missing]:
    """Yield why a sound pass is not the one that the policy asks for: margins and workloads."""
    alpha = attempt_alpha(rule.policy.alpha, result.attempt)
    primary = {
        (cell.name, series.metric): series
        for cell in result.cells
        for series in cell.series
        if series.primary
    }
    bounds = rule.policy.bounds
    wide = any(series.margin > bounds[metric].margin for (_, metric), series in primary.items())
    if wide or result.alpha > alpha * (1 + TOLERANCE):
        margins = [series.margin for series in primary.values()]
        text = f"margins {margins} and error rate {result.alpha:g}; asked for: {alpha:g}"
        yield Missing("G8", "invalid", "margin-wider", line(text))
    wanted = [(cell.name, metric) for cell in rule.cells for metric in cell.primary]
    if lacking := [f"{cell} {metric}" for cell, metric in wanted if (cell, metric) not in primary]:
        text = f"series that decide were not measured: {', '.join(lacking)}"
        yield Missing("G8", "invalid", "cells-missing", line(text))


def _recomputed(result: Result, rule: ThroughputRule) -> tuple[CellResult, ...]:
    """Return the cells that the legs give; raise ValueError if they do not give a pass."""
    if result.kind != "gate" or result.state != "pass":
        raise ValueError(f"the result is a {result.kind}, and says {result.state}")
    baseline = result.baseline
    if not baseline or not baseline.sha256 or baseline.sha256 == result.candidate.sha256:
        raise ValueError("there is no baseline, or it is the candidate itself")
    if bare := [leg for leg in result.legs if leg.discarded and not leg.reasons]:
        raise ValueError(f"{len(bare)} legs were discarded without a reason")
    cells, bounds = [], dict(rule.policy.bounds)
    for written in result.cells:
        primary = [series for series in written.series if series.primary]
        metrics = tuple(series.metric for series in primary)
        cells.append(replace(WorkloadCell.parse(written.name), primary=metrics))
        bounds |= {series.metric: Bounds(series.margin, series.tolerated) for series in primary}
    policy = replace(rule.policy, bounds=bounds)
    counted = [leg for leg in result.legs if leg.counts]
    blocks = sorted({leg.block for leg in counted if leg.block >= 0})
    if len(blocks) < policy.min_blocks or blocks != list(range(len(blocks))):
        raise ValueError(
            f"{len(blocks)} consecutive blocks count; at least {policy.min_blocks} have to"
        )
    answers = {cell.name: cell.answer for cell in cells}
    for leg in counted:
        requests = leg.run.requests if leg.run else ()
        if not requests or any(
            request.error
            or request.output_tokens != answers.get(leg.cell)
            or not 0 < request.ttft <= request.latency
            for request in requests
        ):
            where = f"{leg.cell}, block {leg.block}, {leg.side}"
            raise ValueError(f"{where}: not all requests are of the workload")
    series = paired_differences.metric_series(cells, counted, blocks, policy)
    if missing_blocks := [each.name for each in series if each.aa is None]:
        raise ValueError(f"no A/A block of {missing_blocks[0]} is among this gate's legs")
    least = policy.min_blocks
    decision = decide(DecisionRule(result.alpha, least, max(result.blocks, least)), series)
    if decision.state != "pass":
        raise ValueError(f"the legs say: {decision.message}")
    return paired_differences.cell_results(cells, counted, blocks, series, decision)
