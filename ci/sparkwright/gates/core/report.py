"""The verdicts in a terminal, and the error that a ladder without a pass ends with."""

from __future__ import annotations

from collections.abc import Mapping

from sparkwright.core.console import console, duration
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.core.ladder import Ladder
from sparkwright.gates.core.verdict import State

#: Samples shown of a check that failed; ``--json`` prints all.
SHOWN = 3

_ERRORS: Mapping[State, tuple[str, str]] = {
    "fail": ("gate-failed", "failed"),
    "invalid": ("measurement-invalid", "invalid"),
    "inconclusive": ("gate-inconclusive", "inconclusive"),
    "not-run": ("gate-not-run", "not run"),
}


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
                rows = [[one.case, one.expected or "–", one.actual or "–"] for one in samples]
                title = f"{check.name}, {len(check.samples)} sample(s)"
                console.table(title, ["case", "expected", "actual"], rows, result=True)
    states = "  ".join(f"{verdict.label} {verdict.state}" for verdict in ladder.verdicts)
    console.result(f"{_subject(ladder)}: {ladder.state}   {states}")


def _subject(ladder: Ladder) -> str:
    return ladder.wheel.file if ladder.wheel else f"stack {ladder.stack}"


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
    raise GateError(reference, f"{_subject(ladder)}: {count} check(s) {word}.", details=details)
