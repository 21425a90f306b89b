"""
Whether a pass has something behind it. The gate's rule names the checks that it rests on, and which of them measure.

Nothing is added to what a gate judged: a gate that is no pass is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from sparkwright.gates.core.verdict import Check, Ladder, Verdict, declarations
from sparkwright.release.decide.policy import GateRule, ReleasePolicy
from sparkwright.release.errors import ReleaseError


def check(ladder: Ladder, policy: ReleasePolicy) -> None:
    """
    Do nothing where every pass of *ladder* rests on what the policy names.

    Raises:
        verdict-hollow: One does not, or a gate has two verdicts.
    """
    names = [verdict.label for verdict in ladder.verdicts]
    faults = [f"{name}: it has {names.count(name)} verdicts" for name in dict.fromkeys(names) if names.count(name) > 1]
    for verdict in ladder.verdicts:
        if verdict.state == "pass":
            rule = policy.gates.get(verdict.gate)
            faults += list(faults_of(verdict, rule)) if rule else [f"{verdict.gate}: there is no such gate"]
    if faults:
        about = ladder.wheel.file if ladder.wheel else "a server"
        raise ReleaseError("verdict-hollow", f"A pass of {about} has nothing behind it.", details=faults[:30])


def faults_of(verdict: Verdict, rule: GateRule) -> Iterator[str]:
    """Yield what the pass *verdict* lacks."""
    from sparkwright.gates.core import policy as gate_policy

    checks: dict[str, Check] = {}
    for one in verdict.checks:
        if one.name in checks:
            yield f"{verdict.gate}: {one.name} is there twice"
        checks[one.name] = one
    for pattern in rule.checks:
        matching = [one for name, one in checks.items() if fnmatchcase(name, pattern)]
        if not any(one.required for one in matching):
            yield f"{verdict.gate}: no check {pattern} that it would depend on"
        yield from (f"{verdict.gate}: {one.name} is {one.state}" for one in matching if one.state != "pass" and _named(one, pattern))
    table = gate_policy.declared(verdict.gate)
    for name, one in checks.items():
        if faults := [entry.fault(one) for entry in declarations(table, name)]:
            yield from (f"{verdict.gate}: {name}: {fault}" for fault in faults if fault)
        else:
            yield f"{verdict.gate}: no such check is declared: {name}"


def _named(one: Check, pattern: str) -> bool:
    """Must *one* pass? What a pattern with ``*`` finds may also only inform."""
    return one.required or "*" not in pattern
