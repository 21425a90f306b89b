"""
G8: is the candidate as fast as the baseline, with error rates that are known?

The verdict is that of the series together; each series, the load generator, the machine and memory's ceiling are rows of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.machine import state_checks
from sparkwright.bench.records import METRICS
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.core.console import console
from sparkwright.core.store import Store
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
from sparkwright.gates.throughput import measurement, runner
from sparkwright.gates.throughput.records import CellResult, Measurement, Result, Series

TITLE = "throughput, against a baseline"

CHECKS = (
    *declare(*(f"{metric}-*" for metric in METRICS), "legs", measured=True),
    *declare("candidate-wheel", "baseline-wheel"),
    *declare("roofline", measured=True, role="informs"),
    *declare("measured", role="reports"),
)

#: Of those of G3: why a server of ours ended.
_ENDED = ("server-died", "server-late", "graph-memory-negative", "log-unreadable")

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **{name: contract.REASONS[name] for name in _ENDED},
    **vllm_bench.REASONS,
    **state_checks.REASONS,
    **measurement.REASONS,
    runner.UNSTEADY: "The machine's own state spoiled a measurement again and again. Look at "
    "temperature, power and other load; then run it again, and it continues where it was.",
    "slower": "The candidate is slower than tolerated, by evidence that a wheel which is not gives "
    "with a probability of at most alpha.",
    "undecided": "Neither is a slowdown of the margin excluded, nor one above the tolerated shown: "
    "the machine's noise is too large for these blocks, or the truth lies between the two.",
    "interrupted": "The launch was interrupted; its measurements were repeated.",
    "roofline-unknown": "Bytes per token or the memory's bandwidth is not known, or the model is "
    "small enough for caches.",
}

_UNSAFE = re.compile(r"[^a-z0-9]+")
_UNSAFE_IN_FILE = re.compile(r"[^A-Za-z0-9._+-]+")


def write_result(store: Store, output: Path, result: Result) -> Path:
    """Write *result* to a file of its wheel, recipe or model in the folder *output*."""
    name = result.candidate.wheel.removesuffix(".whl") or result.recipe or result.model
    kind = "throughput" if result.kind == "gate" else result.kind
    return write_record(store, output, f"{name}.{kind}", result)


def write_record(store: Store, output: Path, name: str, record: Any) -> Path:
    """Write *record* as JSON to a file of that *name* in the folder *output*."""
    safe = _UNSAFE_IN_FILE.sub("-", name).strip("-.")
    data = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path = store.write(output / f"{safe}.json", data + b"\n")
    console.note(f"result: {path}")
    return path


def checks(result: Result) -> tuple[Check, ...]:
    """Return the checks of a gate's *result*."""
    counted = [one for one in result.legs if one.counts]
    rows = [_row(cell, one, result) for cell in result.cells for one in cell.series if one.primary]
    return (*_stopped(result), *rows, _measurements(result, counted), _roofline(result, counted))


def _stopped(result: Result) -> Iterator[Check]:
    """Yield why the run was given up, if it was."""
    message, _, reference = result.says.removesuffix(")").rpartition(" (")
    crashed = result.state == "fail" and not result.culprits
    if result.state != "invalid" and not crashed:
        return
    last = [one for one in result.legs if one.reasons][-1:]
    samples = [
        Sample(f"{one.cell}, {one.side}, block {one.block}", "", reason.says)
        for one in last
        for reason in one.reasons
    ]
    reason = reference if reference in REASONS else "counters-missing"
    make = failed if crashed else invalid
    yield make("measured", message or result.says, reason, samples=samples)


def _row(cell: CellResult, series: Series, result: Result) -> Check:
    title, unit, factor, _ = METRICS[series.metric]
    name = _UNSAFE.sub("-", f"{series.metric} {cell.name}".lower()).strip("-")
    blocks = len(series.differences)
    if series.baseline is None or series.candidate is None or not blocks:
        return not_run(name, f"{cell.name}: no complete block", "undecided")
    change = 100 * (series.candidate / series.baseline - 1)
    evidence = [path[-1] if path else 1.0 for path in (series.pass_evidence, series.fail_evidence)]
    figures = [
        Figure("baseline", series.baseline * factor, unit, blocks),
        Figure("candidate", series.candidate * factor, unit, blocks),
        Figure("change", change, "%", blocks, bound=100 * series.margin),
        Figure("evidence for pass", evidence[0], bound=1 / result.alpha),
        Figure("evidence for fail", evidence[1], bound=_series_count(result) / result.alpha),
    ]
    message = f"{title} {change:+.1f} % in {blocks} blocks: {series.conclusion}"
    samples = [
        Sample(f"block {block}", "", f"{100 * one:+.2f} %")
        for block, one in enumerate(series.differences)
    ]
    if series.state == "pass":
        return passed(name, message, figures=figures, samples=samples)
    if series.state == "fail":
        return failed(name, message, "slower", figures=figures, samples=samples)
    return inconclusive(name, message, "undecided", figures=figures, samples=samples)


def _series_count(result: Result) -> int:
    return sum(one.primary for cell in result.cells for one in cell.series)


def _measurements(result: Result, counted: Sequence[Measurement]) -> Check:
    again = [one for one in result.legs if one.discarded]
    launches = len({(one.side, one.launch) for one in result.legs})
    figures = [
        Figure("measurements", len(counted)),
        Figure("measured again", len(again)),
        Figure("launches", launches),
        Figure("gates of this wheel", result.attempt),
    ]
    samples = [
        Sample(f"{one.cell}, {one.side}, block {one.block}", "", one.reasons[0].says)
        for one in again
    ]
    if not counted:
        return not_run("legs", "no measurement counts", "interrupted")
    message = f"{len(counted)} measurements count, {len(again)} were repeated; {result.generator}"
    return passed("legs", message, figures=figures, samples=samples)


def _roofline(result: Result, counted: Sequence[Measurement]) -> Check:
    shares = [(one.roofline, one.cell, one.side) for one in counted if one.roofline is not None]
    if not shares or result.bandwidth is None:
        message = "bytes per token or bandwidth is not known, or caches answer"
        return not_run("roofline", message, "roofline-unknown", required=False)
    share, cell, side = max(shares)
    figure = Figure("bandwidth used", 100 * share, "%", len(shares), bound=100.0)
    message = f"{100 * share:.0f} % of {result.bandwidth.gigabytes:.1f} GB/s ({cell}, {side})"
    return passed("roofline", message, figures=[figure], required=False)
