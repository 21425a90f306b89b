"""
Verdicts for people: a line per check, what a failure saw, and the error that a ladder without a pass ends with.
"""

from __future__ import annotations

from sparkwright.core.console import console, duration
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.core.ladder import Ladder
from sparkwright.gates.core.verdict import Check, State, Verdict

#: Samples shown of a check that failed; ``--json`` holds all that were kept.
SHOWN = 3

_ERRORS: dict[State, tuple[str, str]] = {
    "fail": ("gate-failed", "failed"),
    "invalid": ("measurement-invalid", "invalid"),
    "inconclusive": ("gate-inconclusive", "inconclusive"),
    "not-run": ("gate-not-run", "not run"),
}


def show(ladder: Ladder) -> None:
    """Print every verdict, and one line that sums them up."""
    for verdict in ladder.verdicts:
        took = f", {duration(verdict.seconds)}" if verdict.seconds else ""
        rows = [[check.name, _mark(check), check.message] for check in verdict.checks]
        console.table(f"{verdict.gate} {verdict.title}: {verdict.state}{took}", ["check", "state", "what was seen"], rows, result=True)
        for check in verdict.checks:
            if check.state in ("fail", "invalid") and check.samples:
                _samples(check)
    states = "  ".join(f"{verdict.gate} {verdict.state}" for verdict in ladder.verdicts)
    about = f"{ladder.wheel.file}: " if ladder.wheel else ""
    console.result(f"{about}{ladder.state}   {states}")


def _mark(check: Check) -> str:
    return f"{check.state} ({check.reason})" if check.reason else check.state


def _samples(check: Check) -> None:
    rows = [[sample.case, sample.expected or "–", sample.actual or "–"] for sample in check.samples[:SHOWN]]
    console.table(f"{check.name}, {len(check.samples)} sample(s)", ["case", "expected", "found"], rows, result=True)


def raise_for_state(ladder: Ladder) -> None:
    """
    Do nothing when every verdict of *ladder* is a pass.

    Raises:
        gate-failed, measurement-invalid, gate-inconclusive, gate-not-run: As the worst state is; the details are the checks in it.
    """
    if ladder.state == "pass":
        return
    reference, word = _ERRORS[ladder.state]
    found = [(verdict, check) for verdict in ladder.verdicts for check in _deciding(verdict, ladder.state)]
    about = ladder.wheel.file if ladder.wheel else f"stack {ladder.stack}"
    # A missing GPU is one fact, however many rows it stops.
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for verdict, check in found:
        grouped.setdefault((verdict.gate, check.reason, check.message), []).append(check.name)
    details = [f"{gate} {_names(names)} ({reason}): {says}" for (gate, reason, says), names in grouped.items()]
    raise GateError(reference, f"{about}: {len(found)} check(s) {word}.", details=details)


def _names(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _deciding(verdict: Verdict, state: State) -> list[Check]:
    return [check for check in verdict.checks if check.required and check.state == state]
