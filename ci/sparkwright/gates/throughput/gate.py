"""
G8: is the candidate as fast as the baseline, with error rates that are known?

The verdict is that of the series together; each series, the load generator, the machine and memory's ceiling are rows of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sparkwright.bench.load import load_spec
from sparkwright.bench.machine import state_checks
from sparkwright.bench.records import METRICS
from sparkwright.bench.server.openai_schema import REASONS as SERVER_REASONS
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.throughput import runner, validity
from sparkwright.gates.throughput.records import CellResult, Measurement, Result, Series

TITLE = "throughput, against a baseline"

CHECKS = (
    *declare(*(f"{metric}-*" for metric in METRICS), "legs", measured=True),
    *declare("candidate-wheel", "baseline-wheel"),
    *declare("roofline", measured=True, role="informs"),
    *declare("measured", "baseline", role="reports"),
)

#: Of those of G3: why a server of ours ended.
_ENDED = ("server-died", "server-late", "graph-memory-negative", "log-unreadable")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **{name: contract.REASONS[name] for name in _ENDED},
    **load_spec.REASONS,
    **state_checks.REASONS,
    **validity.REASONS,
    runner.UNSTEADY: "The machine's own state spoiled a leg again and again. Look at temperature, power and other load; then run it again, "
    "and it goes on where it was.",
    "slower": "The candidate is slower than the baseline, by evidence that an equal one gives with a probability of at most alpha.",
    "undecided": "The blocks decide neither way: the machine's noise is too large for the margin. Calibrate it, or measure more blocks.",
    "interrupted": "The launch was broken off; its legs were measured again.",
    "roofline-unknown": "Bytes per token or the memory's bandwidth is not known, or the model is small enough for caches.",
}

_UNSAFE = re.compile(r"[^a-z0-9]+")


def checks(result: Result) -> tuple[Check, ...]:
    """Return the rows of a gate's *result*."""
    stopped = [_stopped(result)] if result.state == "invalid" else []
    rows = [_row(cell, series, result) for cell in result.cells for series in cell.series if series.primary]
    return (*stopped, *rows, _legs(result), *_roofline(result))


def _stopped(result: Result) -> Check:
    says, _, reference = result.says.removesuffix(")").rpartition(" (")
    last = [leg for leg in result.legs if leg.reasons][-1:]
    samples = [Sample(f"{leg.cell}, {leg.side}, block {leg.block}", "", reason.says) for leg in last for reason in leg.reasons]
    return invalid("measured", says or result.says, reference if reference in REASONS else "counters-missing", samples=samples)


def _row(cell: CellResult, series: Series, result: Result) -> Check:
    title, unit, factor, _ = METRICS[series.metric]
    name = _UNSAFE.sub("-", f"{series.metric} {cell.name}".lower()).strip("-")
    if series.baseline is None or series.candidate is None or not series.differences:
        return not_run(name, f"{cell.name}: no whole block", "undecided")
    change = 100 * (series.candidate / series.baseline - 1)
    figures = [
        Figure("baseline", series.baseline * factor, unit, len(series.differences)),
        Figure("candidate", series.candidate * factor, unit, len(series.differences)),
        Figure("change", change, "%", len(series.differences), bound=100 * result.margin),
        Figure("evidence for pass", series.pass_evidence[-1] if series.pass_evidence else 1.0, bound=1 / result.alpha),
        Figure("evidence for fail", series.fail_evidence[-1] if series.fail_evidence else 1.0, bound=1 / result.alpha),
    ]
    says = f"{title} {change:+.1f} % in {len(series.differences)} blocks" + ("" if series.sigma else ", by signs (not calibrated)")
    samples = [Sample(f"block {block}", "", f"{100 * d:+.2f} %") for block, d in enumerate(series.differences)]
    if series.state == "pass":
        return passed(name, says, figures=figures, samples=samples)
    if series.state == "fail" or f"{cell.name}: {title}" in result.culprits:
        return failed(name, says, "slower", figures=figures, samples=samples)
    return inconclusive(name, says, "undecided", figures=figures, samples=samples)


def _legs(result: Result) -> Check:
    counted, again = sum(leg.counts for leg in result.legs), [leg for leg in result.legs if leg.discarded]
    launches = len({(leg.side, leg.launch) for leg in result.legs})
    figures = [Figure("legs", counted), Figure("measured again", len(again)), Figure("launches", launches)]
    samples = [Sample(f"{leg.cell}, {leg.side}, block {leg.block}", "", leg.reasons[0].says) for leg in again]
    says = f"{counted} legs count, {len(again)} were measured again; {result.generator}"
    if not counted:
        return not_run("legs", "no leg counts", "interrupted")
    return passed("legs", says, figures=figures, samples=samples)


def _roofline(result: Result) -> Iterator[Check]:
    told = [leg for leg in result.legs if leg.counts and leg.roofline is not None]
    if not told or result.bandwidth is None:
        yield not_run("roofline", "bytes per token or bandwidth is not known, or caches answer", "roofline-unknown", required=False)
        return
    most: Measurement = max(told, key=lambda leg: leg.roofline or 0.0)
    share = 100 * (most.roofline or 0.0)
    says = f"at most {share:.0f} % of {result.bandwidth.gigabytes:.1f} GB/s ({most.cell}, {most.side})"
    yield passed("roofline", says, figures=[Figure("bandwidth used", share, "%", len(told), bound=100.0)], required=False)
