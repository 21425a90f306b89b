"""
The ladder: gates run in order up to the first failure, and their verdicts in a terminal.

A gate after a failure is listed as not run. A gate that cannot run here stops nothing, but a
ladder with one is not a pass.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import psutil

from sparkwright.audit.report import AuditedWheel
from sparkwright.builder import host_info
from sparkwright.core.console import console, duration
from sparkwright.core.states import State
from sparkwright.gates.core.verdict import (
    Check,
    Declared,
    GateError,
    Ladder,
    Verdict,
    declarations,
    declare,
    not_run,
)
from sparkwright.gates.core.verdict_file import VerdictFile

#: The gates by name, and what each examines.
GATES: Mapping[str, str] = {
    "G0": "the bytes of the wheel",
    "G1": "numerics of the patched sources, without a GPU",
    "G2": "numerics of the wheel on the GPU",
    "G3": "the kernels that serve the recipe",
    "G4": "the text that the server generates",
    "G5": "the distributions behind the text",
    "G6": "accuracy, paired with a baseline",
    "G7": "hours of mixed load",
    "G8": "throughput against a baseline",
}

#: Gates that judge a served model, and so belong to a recipe.
SERVED = ("G3", "G4", "G5", "G6", "G7", "G8")

REASONS: Mapping[str, str] = {
    "earlier-failed": "An earlier gate failed or was invalid, and the ladder stops there. Fix that "
    "first, or continue with --keep-going.",
    "not-asked": (
        "The command line does not name a wheel, server, log, reference or baseline "
        "that the gate needs. The row names the option."
    ),
}

#: The check by which the ladder reports, for any gate, that an option or an earlier gate stops it.
STOPPED = declare("ladder", role="reports")

#: The check that binds what a server answers to the wheel that the verdict is about.
WHEEL_SERVED = declare("wheel-served")

#: Samples shown of a check that failed; ``--json`` prints all.
SHOWN = 3

_ERRORS: Mapping[State, tuple[str, str]] = {
    "fail": ("gate-failed", "failed"),
    "invalid": ("measurement-invalid", "invalid"),
    "inconclusive": ("gate-inconclusive", "inconclusive"),
    "not-run": ("gate-not-run", "not run"),
}


class Gate(msgspec.Struct, frozen=True):
    """
    One gate, ready to run.

    Attributes:
        policy: The sha256 of the policy that it judges by; empty if it has none.
        declared: The checks that it can emit.
        run: Return its checks; a failure of the set-up may raise.
        recipe: The recipe that is served; empty without one.
        blocked: Why it cannot run; None if it can.
        evidence: Return the sha256 of the file that holds its measurements, after it ran; empty
            without one.
    """

    name: str
    policy: str
    declared: tuple[Declared, ...]
    run: Callable[[], tuple[Check, ...]]
    recipe: str = ""
    blocked: Check | None = None
    evidence: Callable[[], str] = str


def machine_facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel, GPUs and driver; ``none`` without a GPU."""
    gpus = host_info.gpus()
    return {
        "processor": host_info.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "kernel": platform.release(),
        "gpu": ", ".join(f"{gpu.name} (SM {gpu.capability})" for gpu in gpus) or "none",
        "driver": gpus[0].driver if gpus else "none",
    }


def climb(
    gates: Sequence[Gate],
    *,
    stack: str,
    wheel: AuditedWheel | None = None,
    device_code: Callable[[], str] = str,
    host: Mapping[str, str] | None = None,
    keep_going: bool = False,
    file: VerdictFile | None = None,
) -> Ladder:
    """
    Run *gates* in order and return their verdicts.

    Args:
        device_code: Called after each gate, as the first of them computes it.
        host: Facts of the machine (`Verdict.host`).
        keep_going: Also run the gates after a failure.
        file: Gets the verdicts so far after each gate, so that hours of measuring survive a crash
            of the next gate.

    Raises:
        SparkwrightError: A gate could not be set up.
        ValueError: A gate emitted a check that it does not declare.
    """
    ladder = Ladder(stack, wheel, ())
    for gate in gates:
        stopped = next((v for v in ladder.verdicts if v.state in ("fail", "invalid")), None)
        began, clock = time.time(), time.monotonic()
        checks: tuple[Check, ...] = (gate.blocked,) if gate.blocked else ()
        if stopped and not keep_going:
            message = f"{stopped.gate} is {stopped.state}, and the ladder stops there"
            checks = (not_run("ladder", message, "earlier-failed"),)
        elif not gate.blocked:
            if file:
                file.log_line(gate.name, gate.recipe)
            with console.step(f"{gate.name}: {GATES[gate.name]}"):
                checks = gate.run()
        verdict = verdict_of(
            gate,
            checks,
            wheel,
            host=dict(host or {}),
            attempt=file.attempt if file else 1,
            evidence=gate.evidence(),
            began=began,
            seconds=time.monotonic() - clock,
        )
        console.note(f"{gate.name}: {verdict.state} after {duration(verdict.seconds)}")
        ladder = Ladder(stack, wheel, (*ladder.verdicts, verdict), device_code())
        if file:
            file.store(ladder)
    return ladder


def verdict_of(
    gate: Gate, checks: Sequence[Check], wheel: AuditedWheel | None, **facts: Any
) -> Verdict:
    """
    Return the verdict of *gate* about *wheel*.

    Args:
        facts: Further fields of the verdict.

    Raises:
        ValueError: A check is not as the gate declares it.
    """
    for check in checks:
        matching = declarations((*gate.declared, *STOPPED), check.name)
        if not matching:
            raise ValueError(f"{gate.name} does not declare the check {check.name}")
        if all(faults := [entry.fault(check) for entry in matching]):
            raise ValueError(f"{gate.name}: {check.name}: {faults[0]}")
    sha256 = wheel.sha256 if wheel else ""
    return Verdict(
        gate.name, GATES[gate.name], sha256, gate.policy, tuple(checks), gate.recipe, **facts
    )


def show(ladder: Ladder) -> None:
    """Print every verdict, and one line that sums them up."""
    for verdict in ladder.verdicts:
        rows = [
            [check.name, f"{check.state} ({check.reason})".replace(" ()", ""), check.message]
            for check in verdict.checks
        ]
        title = f"{verdict.label} {verdict.title}: {verdict.state}, {duration(verdict.seconds)}"
        console.table(title, ["check", "state", "result"], rows, result=True)
        for check in verdict.checks:
            if check.state in ("fail", "invalid") and check.samples:
                samples = check.samples[:SHOWN]
                rows = [
                    [sample.case, sample.expected or "–", sample.actual or "–"]
                    for sample in samples
                ]
                title = f"{check.name}, {len(check.samples)} sample(s)"
                console.table(title, ["case", "expected", "actual"], rows, result=True)
    states = "  ".join(f"{verdict.label} {verdict.state}" for verdict in ladder.verdicts)
    console.result(f"{ladder.subject}: {ladder.state}   {states}")


def raise_for_state(ladder: Ladder) -> None:
    """
    Raise unless every verdict of *ladder* is a pass.

    Raises:
        gate-failed, measurement-invalid, gate-inconclusive, gate-not-run: By the worst state; the
            details are the checks in it.
    """
    if ladder.state == "pass":
        return
    reference, word = _ERRORS[ladder.state]
    # A missing GPU is one fact, however many rows it stops.
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for verdict in ladder.verdicts:
        for check in verdict.checks:
            if check.required and check.state == ladder.state:
                cause = (verdict.label, check.reason, check.message)
                grouped.setdefault(cause, []).append(check.name)
    details = []
    for (label, reason, message), names in grouped.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        details.append(f"{label} {', '.join(names[:2])}{more} ({reason}): {message}")
    count = sum(map(len, grouped.values()))
    raise GateError(reference, f"{ladder.subject}: {count} check(s) {word}.", details=details)
