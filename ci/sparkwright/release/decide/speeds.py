"""
G8 once more, from the legs: differences, spread, evidence and decision are computed again, and what was written is held against that.

A Result says what was measured, leg by leg; everything else in it follows, so nothing else in it has to be believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.results import CONTROL_BLOCK, CellResult, Measurement, Result, Series
from sparkwright.bench.statistics.eprocess import (
    Bounds,
    Decision,
    DecisionRule,
    attempt_alpha,
    decide,
)
from sparkwright.gates.core.verdict import Verdict
from sparkwright.gates.throughput import gate, paired_differences
from sparkwright.release.decide.policy import ReleasePolicy, Speeds
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest.records import Missing, line

#: Machines round logarithms differently in the last digit.
NEAR = 1e-9


def check(verdict: Verdict | None, result: Result | None, policy: ReleasePolicy) -> None:
    """
    Do nothing where the pass *verdict* of G8 follows from the legs of *result*.

    Raises:
        verdict-hollow: There is no result, it holds too little, or something in it does not follow from its legs.
    """
    if policy.speeds is None:
        raise ReleaseError("verdict-hollow", "The policy does not say what a throughput gate promises.")
    faults = ["there is no throughput.json of its recipe"] if result is None or verdict is None else list(_faults(verdict, result, policy.speeds))
    if faults:
        raise ReleaseError("verdict-hollow", "The pass of G8 does not follow from what was measured.", details=faults[:30])


def _faults(verdict: Verdict, result: Result, asked: Speeds) -> Iterator[str]:
    if result.kind != "gate" or result.state != "pass":
        yield f"the result is a {result.kind}, and says {result.state}"
        return
    if result.baseline is None or not result.baseline.sha256 or result.baseline.sha256 == result.candidate.sha256:
        yield "nothing is compared: there is no baseline, or it is the candidate itself"
    if not result.qualified:
        yield "nothing says that the load generator was qualified"
    if bare := [leg for leg in result.legs if leg.discarded and not leg.reasons]:
        yield f"{len(bare)} legs were set aside, and nothing says why"
        return
    try:
        yield from _recomputed(result, asked)
        yield from _of_rows(verdict, result)
    # A Result that nobody measured may hold any numbers.
    except (ValueError, ArithmeticError, LookupError) as error:
        yield f"the legs cannot be reckoned with: {error}"


def _of_rows(verdict: Verdict, result: Result) -> Iterator[str]:
    """Yield which rows of the measurement the verdict lacks, or tells otherwise."""
    told = {one.name: one.state for one in verdict.checks}
    for one in gate.checks(result):
        if told.get(one.name) != one.state:
            yield f"{one.name}: the verdict says {told.get(one.name, 'nothing')}, the result {one.state}"


def _recomputed(result: Result, asked: Speeds) -> Iterator[str]:
    shaped, primary = [_cell(one) for one in result.cells], _primary(result)
    own = {one.metric: Bounds(one.margin, one.tolerated) for one in primary}
    policy = replace(asked.policy, bounds={**asked.policy.bounds, **own})
    counted = [leg for leg in result.legs if leg.counts]
    blocks = sorted({leg.block for leg in counted if leg.block >= 0})
    if len(blocks) < policy.min_blocks or blocks != list(range(len(blocks))):
        yield f"{len(blocks)} blocks count, one after the other; at least {policy.min_blocks} are asked for"
        return
    yield from _of_legs(counted, shaped)
    history = result.calibration
    aa_block = paired_differences.aa_block(counted, shaped, CONTROL_BLOCK)
    control = paired_differences.extended({}, result.began, aa_block)
    names = [name for cell in shaped for name in paired_differences.series_names(cell)]
    if any(not control.get(name) or control[name] != list(history.get(name, ()))[-1:] for name in names):
        yield "the newest A/A block of a series is not the one of this gate, whose differences are in its legs"
    today = paired_differences.day(result.began)
    found = paired_differences.metric_series(shaped, counted, blocks, history, policy, today)
    rule = DecisionRule(result.alpha, policy.min_blocks, max(result.blocks, policy.min_blocks))
    decision = decide(rule, found)
    if decision.state != "pass":
        yield f"the legs say: {decision.message}"
    sigmas = {one.name: one.noise.sigma for one in found}
    for cell in result.cells:
        for one in cell.series:
            if one.primary:
                yield from _of_series(cell, one, counted, blocks, sigmas, decision)


def _primary(result: Result) -> list[Series]:
    return [one for cell in result.cells for one in cell.series if one.primary]


def _cell(one: CellResult) -> WorkloadCell:
    """Return the shape of *one*, whose name must say the same as its numbers."""
    shape = WorkloadCell.parse(one.name)
    if (shape.prompt, shape.answer, shape.concurrency) != (one.prompt, one.answer, one.concurrency):
        raise ValueError(f"{one.name} is measured as {one.prompt}/{one.answer} c{one.concurrency}")
    return WorkloadCell(one.prompt, one.answer, one.concurrency, 0, shape.texts, tuple(series.metric for series in one.series if series.primary))


def _of_legs(counted: Sequence[Measurement], shaped: Sequence[WorkloadCell]) -> Iterator[str]:
    """Yield what legs say that count and should not; the gate sees more of them, while they run."""
    answers = {cell.name: cell.answer for cell in shaped}
    for leg in counted:
        requests = leg.run.requests if leg.run else ()
        wrong = [one for one in requests if one.error or one.output_tokens != answers.get(leg.cell) or not 0 < one.ttft <= one.latency]
        if not requests or wrong:
            yield f"{leg.cell}, block {leg.block}, {leg.side}: {len(wrong)} of {len(requests)} requests are not what was ordered"


def _of_series(
    cell: CellResult, one: Series, counted: Sequence[Measurement], blocks: Sequence[int],
    sigmas: Mapping[str, float | None], decision: Decision,
) -> Iterator[str]:  # fmt: skip
    name = paired_differences.series_name(cell.name, one.metric)
    found = (paired_differences.difference(counted, cell.name, block, one.metric) for block in blocks)
    differences = [value for value in found if value is not None]
    if not _near(one.differences, differences):
        yield f"{name}: its differences are not those of its legs"
    sigma = sigmas[name]
    if not _near([one.sigma] if one.sigma else [], [sigma] if sigma else []):
        yield f"{name}: its spread is not that of the A/A blocks"
    shown = next(series for series in decision.series if series.name == name)
    if one.state != shown.state or not _near(one.pass_evidence, shown.pass_evidence) or not _near(one.fail_evidence, shown.fail_evidence):
        yield f"{name}: its evidence is not that of its differences"


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-6, abs_tol=NEAR) for a, b in zip(one, other, strict=True))


def missing(result: Result, policy: ReleasePolicy) -> Iterator[Missing]:
    """Yield why a pass that is sound is not one of what the policy asks for: wider margins, or cells that were left out."""
    asked = policy.speeds
    assert asked is not None
    bounds = asked.policy.bounds
    rate = attempt_alpha(asked.policy.alpha, result.attempt)
    primary = _primary(result)
    wide = [one for one in primary if one.margin > bounds[one.metric].margin]
    if wide or result.alpha > rate * (1 + NEAR):
        text = f"margins of {[one.margin for one in primary]} and an error rate of {result.alpha:g}; asked for: {rate:g} and those of the policy"
        yield Missing("G8", "invalid", "margin-wider", line(text))
    had = {(cell.name, one.metric) for cell in result.cells for one in cell.series if one.primary}
    if lacking := [f"{cell.name} {metric}" for cell in asked.cells for metric in cell.primary if (cell.name, metric) not in had]:
        yield Missing("G8", "invalid", "cells-missing", line(f"series that decide were not measured: {', '.join(lacking)}"))
