"""
Decide whether the candidate is as fast as the baseline, with known error rates (G8).

The verdict is that of the deciding series together; each series, the measurements, the kernel
contract and the flags are rows of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.machine import state_checks
from sparkwright.bench.recipes.workloads import RequestRule, WorkloadCell
from sparkwright.bench.records import METRICS
from sparkwright.bench.results import CellResult, Measurement, Result, Series
from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.statistics import evidence_path
from sparkwright.cherry_picks import effects
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.gates.contract import gate as contract
from sparkwright.gates.core.server_facts import Pace
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    decided,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.throughput import measurement, runner
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

CHECKS = (
    *declare(*(f"{metric}-*" for metric in METRICS), "effect-*", "legs", "contract", measured=True),
    *declare("flags", "candidate-wheel", "baseline-wheel"),
    *declare("measured", role="reports"),
)

#: Of those of G3: why a server of ours ended, and how a launch breaks the kernel contract.
_OF_LAUNCH = (
    "server-died", "server-late", "graph-memory-negative", "log-unreadable",
    "backend-refused", "emulation",
    "kernel-unseen", "kernel-forbidden", "profile-missing", "profile-unreadable",
)  # fmt: skip

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **{name: contract.REASONS[name] for name in _OF_LAUNCH},
    **vllm_bench.REASONS,
    **state_checks.REASONS,
    **measurement.REASONS,
    runner.CRASHED: "The candidate's server ended during the gate. Look at its log: the wheel "
    "fails.",
    state_checks.UNSTEADY: (
        "The machine's state spoiled a measurement repeatedly. Look at "
        "temperature, power and other load, and run again; it continues where "
        "it was."
    ),
    "slower": (
        "The candidate is slower than tolerated. A wheel that is not slower fails with "
        "a probability of at most alpha."
    ),
    "undecided": (
        "Neither bound is shown: the machine's noise is too large for these blocks, or the "
        "true difference lies between the bounds."
    ),
    "no-effect": "A change promises a gain in cherry_picks/effects.yaml that this wheel does not "
    "have over the stock wheel. Look whether it is still in use; drop it, or correct the promise.",
    "effect-unmeasured": "No cell that was measured has the concurrency and the figure of a "
    "promise in cherry_picks/effects.yaml. Name a --workload that has, or correct the promise.",
    "flags-added": (
        "Both servers had flags or variables beside the recipe's. Leave out "
        "--flag and --variable, or write them into the recipe."
    ),
}

#: Blocks in which a cell of an equal wheel is measured on a typical machine, without the A/A block
#: [measured by ci/bench/gate_simulation.py]; seconds around a load [measured: docs/rehearsal].
USUAL_BLOCKS, AROUND_S = 5, 8.0

_UNSAFE = re.compile(r"[^a-z0-9]+")
_UNSAFE_IN_FILE = re.compile(r"[^A-Za-z0-9._+-]+")


def estimate(
    policy: ThroughputPolicy,
    pace: Pace,
    cells: Sequence[WorkloadCell],
    rule: RequestRule,
    *,
    resident: bool = True,
    longest: bool = False,
) -> float:
    """
    Return the seconds that the gate takes for an equal wheel.

    Args:
        cells: Those that decide. *rule*: how many requests each has.
        resident: Whether both servers stay; else each turn has a start of its own.
        longest: Whether requests differ so much that each load takes as long as it may; else the
            fewest requests are enough.
    """
    first = later = 0.0
    for cell in cells:
        rounds = rule.requests(cell) / cell.concurrency
        loaded = rounds * pace.round(cell.prompt, cell.answer, cell.concurrency)
        warmups = policy.warmups * pace.round(cell.prompt, cell.answer)
        first += warmups + loaded + AROUND_S
        later += warmups + (max(loaded, policy.longest_s) if longest else loaded) + AROUND_S
    starts = (1 + USUAL_BLOCKS) * (1 if resident else 4) * pace.start_s
    return starts + 4 * (first + USUAL_BLOCKS * later) * (1 + policy.lag / 2)


def write_result(store: Store, output: Path, result: Result) -> Path:
    """Write *result* to a file of its wheel and recipe, or of its model, in the folder *output*."""
    kind = "throughput" if result.kind == "gate" else result.kind
    names = [result.candidate.wheel.removesuffix(".whl"), result.recipe]
    return write_record(
        store, output, ".".join([*filter(None, names)] or [result.model]) + f".{kind}", result
    )


def write_record(store: Store, output: Path, name: str, record: Any) -> Path:
    """Write *record* as JSON to a file of that *name* in the folder *output*."""
    safe = _UNSAFE_IN_FILE.sub("-", name).strip("-.")
    data = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path = store.write(output / f"{safe}.json", data + b"\n")
    console.note(f"result: {path}")
    return path


def checks(result: Result) -> tuple[Check, ...]:
    """Return the checks of a gate's *result*."""
    counted = [leg for leg in result.legs if leg.counts]
    rows = [
        _row(cell, series, result)
        for cell in result.cells
        for series in cell.series
        if series.primary
    ]
    return (
        *_stopped(result), *rows, _measurements(result, counted), *_served(result, counted),
    )  # fmt: skip


def _stopped(result: Result) -> Iterator[Check]:
    """Yield why the run was given up, if it was."""
    if result.stopped:
        judge = failed if result.state == "fail" else invalid
        yield judge("measured", result.stopped.message, result.stopped.reference)


def _row(cell: CellResult, series: Series, result: Result) -> Check:
    """Return the check of a deciding series."""
    title, unit, factor, _ = METRICS[series.metric]
    name = f"{series.metric}-{_UNSAFE.sub('-', cell.name.lower()).strip('-')}"
    blocks = len(series.differences)
    if series.baseline is None or series.candidate is None or not blocks:
        return not_run(name, f"{cell.name}: no complete block", "undecided")
    change = 100 * (series.candidate / series.baseline - 1)
    evidence = [path[-1] if path else 1.0 for path in (series.pass_evidence, series.fail_evidence)]
    count = sum(series.primary for other in result.cells for series in other.series)
    figures = [
        Figure("baseline", series.baseline * factor, unit, blocks),
        Figure("candidate", series.candidate * factor, unit, blocks),
        Figure("change", change, "%", blocks, bound=100 * series.margin),
        Figure("evidence for pass", evidence[0], bound=1 / result.alpha),
        Figure("evidence for fail", evidence[1], bound=count / result.alpha),
    ]
    message = f"{title} {change:+.1f} % in {blocks} blocks: {series.conclusion}"
    samples = [
        Sample(f"block {block}", "", f"{100 * value:+.2f} %")
        for block, value in enumerate(series.differences)
    ]
    state: State = series.state if series.state in ("pass", "fail") else "inconclusive"
    reasons: dict[State, str] = {"fail": "slower", "inconclusive": "undecided"}
    return decided(name, message, state, reasons, figures, samples)


def effect_checks(result: Result, root: Path) -> Iterator[Check]:
    """
    Yield whether the gate of *result* shows the gains that changes of its stack promise for its
    recipe, in the checkout *root*.

    It fails where less than the promise is shown, at the error rate of the gate, which all promises
    share. A gain that is neither shown nor excluded, or was not measured, decides nothing.
    """
    promises = effects.promises(root, result.candidate.stack, result.recipe)
    promised = [
        (name, promise, cell, series)
        for name, promise in promises.items()
        for cell in result.cells
        for series in cell.series
        if (cell.concurrency, series.metric) == (promise.concurrency, promise.metric)
        and series.differences
    ]
    for name in sorted({*promises} - {name for name, *_ in promised}):
        yield not_run(
            f"effect-{name}",
            "the concurrency or the figure of its promise was not measured",
            "effect-unmeasured",
            required=False,
        )
    for name, promise, cell, series in promised:
        gains = -np.array(series.differences)
        excluded, shown = (
            evidence_path(each)[-1] >= -math.log(result.alpha / len(promised))
            for each in (math.log(promise.gain) - gains, gains)
        )
        state: State = "fail" if excluded else "pass" if shown else "inconclusive"
        factor = math.exp(gains.mean())
        yield decided(
            f"effect-{name}-{_UNSAFE.sub('-', cell.name.lower()).strip('-')}",
            f"{cell.name}: {METRICS[series.metric][0]} is {factor:.3f} times as good as the "
            f"stock wheel's in {len(gains)} blocks; {name} promises {promise.gain:g}",
            state,
            {"fail": "no-effect", "inconclusive": "undecided"},
            [Figure("gain", factor, "", len(gains), bound=promise.gain)],
            required=bool(excluded),
        )


def _measurements(result: Result, counted: Sequence[Measurement]) -> Check:
    again = [leg for leg in result.legs if leg.discarded]
    figures = [
        Figure("measurements", len(counted)),
        Figure("measured again", len(again)),
        Figure("launches", len({leg.launch for leg in result.legs})),
        Figure("gates of this wheel and recipe", result.attempt),
        Figure("error rate", 100 * result.alpha, "%"),
    ]
    if not counted:
        return not_run("legs", "no measurement counts", "undecided")
    message = (
        f"{len(counted)} measurements count, {len(again)} were repeated; {result.generator}; gate "
        f"number {result.attempt} of this wheel and recipe, which spends an error rate of "
        f"{100 * result.alpha:.2g} %"
    )
    samples = [
        Sample(f"{leg.cell}, {leg.side}, block {leg.block}", "", reason.message)
        for leg in again
        for reason in leg.reasons
    ]
    return passed("legs", message, figures=figures, samples=samples)


def _served(result: Result, counted: Sequence[Measurement]) -> Iterator[Check]:
    """Yield whether both sides were served by the recipe: its flags, and its kernel contract."""
    if not result.recipe:
        yield not_run("contract", "to check it, name a --recipe", "not-asked", required=False)
        return
    if result.added:
        yield invalid("flags", f"both sides had {' '.join(result.added)} besides", "flags-added")
    else:
        ours, theirs = (
            {*side.flags} for side in (result.candidate, result.baseline or result.candidate)
        )
        own = f"; ours alone {sorted(ours - theirs)}, the stock wheel alone {sorted(theirs - ours)}"
        message = f"both sides had the flags and variables of {result.recipe}"
        yield passed("flags", message + own * (ours != theirs))
    if result.stopped or not counted:
        yield not_run("contract", "not every launch was profiled", "profile-missing")
        return
    yield passed(
        "contract",
        f"the candidate's kernels keep the contract of {result.recipe} in each launch",
        figures=[Figure("launches", len({leg.launch for leg in counted}))],
    )
