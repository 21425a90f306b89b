"""
The decision: what is shown of a wheel, and what it lacks for ``verified``.

It is a pure function of bytes, verdicts and policy, and total: what is not shown is in
`Proof.missing`, and the wheel is verified exactly if that is empty. Verdicts about something else,
or a pass without the checks behind it, are a fault and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace

from sparkwright.bench.results import CellResult, Result, Series
from sparkwright.client.records import GateResult, Missing, Proof, Speed, line
from sparkwright.core.states import State
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, SERVED
from sparkwright.gates.core.verdict import ORDER, Check, Ladder, Verdict, declarations
from sparkwright.release import throughput_recheck
from sparkwright.release.errors import ReleaseError
from sparkwright.release.gate_results import GateResults, require_subject
from sparkwright.release.policy import ForkRule, GateRule, ReleasePolicy
from sparkwright.release.wheel_facts import WheelFacts

#: The references that the decision itself gives; those of gates are their own.
REASONS: Mapping[str, str] = {
    "not-climbed": "The gate was not run with these bytes.",
    "policy-other": "The gate was judged by another policy than the reviewed one of today.",
    "checks-other": "The gate passed without the checks that the policy wants.",
    "machine-other": "The gate ran on another machine or GPU than the policy names.",
    "margin-wider": "The throughput gate promised less than the policy asks for.",
    "cells-missing": "The throughput gate left out workloads that decide.",
    "source-unresolved": "The lock names the source by a short commit only; run `fetch` where its "
    "host is reachable, and build again.",
    "sbom-missing": "The wheel has no SBOM.",
    "not-isolated": "There is no record that the compilation had no network.",
    "companion-unbound": "The verdicts of the wheel that serves do not say with which build of "
    "this one it ran.",
    "companion-other": "The wheel that serves was gated with another build of this one.",
    "fork-unknown": "ci/release.yaml does not say what a wheel of this fork must show.",
}


def decide_all(
    wheels: Sequence[WheelFacts], results: Mapping[str, GateResults], policy: ReleasePolicy
) -> dict[str, Proof]:
    """
    Return what is shown of each wheel of a release, by file name.

    Args:
        results: The results of the gates by file name of the wheel.

    Raises:
        verdict-foreign, verdict-hollow: As `decide`.
    """
    ladders = {
        (wheel.source.name, wheel.machine): results[wheel.name].ladder
        for wheel in wheels
        if wheel.name in results
    }

    def serving(wheel: WheelFacts) -> Ladder | None:
        rule = policy.file.forks.get(wheel.source.name)
        if not rule or not rule.served_by:
            return None
        matching = [ladder for (fork, _), ladder in ladders.items() if fork == rule.served_by]
        own = ladders.get((rule.served_by, wheel.machine))
        return own or (matching[0] if wheel.machine == "any" and len(matching) == 1 else None)

    return {
        wheel.name: decide(wheel, results.get(wheel.name, GateResults()), policy, serving(wheel))
        for wheel in wheels
    }


def decide(
    wheel: WheelFacts,
    results: GateResults,
    policy: ReleasePolicy,
    serving: Ladder | None = None,
) -> Proof:
    """
    Return what is shown of *wheel*.

    Args:
        serving: The verdicts about the release's wheel of `ForkRule.served_by`.

    Raises:
        verdict-foreign: The results are about other bytes.
        verdict-hollow: A pass does not have the checks or the measurements that it rests on.
    """
    require_subject(wheel, results)
    ladder, throughput = results.ladder, results.throughput
    if ladder:
        _require_checks(ladder, policy)
    verdicts = {(entry.gate, entry.recipe): entry for entry in ladder.verdicts} if ladder else {}
    measured = verdicts.get(("G8", throughput.recipe if throughput else ""))
    if ladder and measured and measured.state not in ("pass", "not-run"):
        # The measurement beside the wheel belongs to a recipe whose G8 is no pass, so it replaced
        # those of other recipes, and nothing shows their passes any more.
        own = [entry for entry in ladder.verdicts if (entry.gate, entry.state) != ("G8", "pass")]
        ladder = replace(ladder, verdicts=tuple(own))
        verdicts = {(entry.gate, entry.recipe): entry for entry in ladder.verdicts}
    if any(entry.gate == "G8" and entry.state == "pass" for entry in verdicts.values()):
        throughput_recheck.require(measured, throughput, policy)
    rule = policy.file.forks.get(wheel.source.name)
    recipes: tuple[str, ...] = ()
    if rule:
        gates = _Gates(wheel, rule, verdicts, policy)
        missing = [*gates.missing(measured, throughput), *_wheel(wheel, rule)]
        missing += _companion(wheel, rule, serving)
        recipes = gates.recipes
    else:
        text = f"there is no rule for {wheel.source.name}"
        missing = [Missing("policy", "not-run", "fork-unknown", text)]
    states = ladder.states if ladder else {}
    baseline = throughput.baseline if throughput else None
    return Proof(
        policy=policy.digest,
        missing=tuple(
            sorted(set(missing), key=lambda entry: (entry.gate, entry.reference, entry.says))
        ),
        gates=tuple(
            _gate_result(name, states.get(name), verdicts.values(), policy)
            for name in GATES
            if name in states or (rule and name in rule.gates)
        ),
        recipes=recipes,
        speeds=_speeds(throughput),
        baseline=line(f"{baseline.label} ({baseline.sha256[:16]})") if baseline else "",
        margin=throughput.margin if throughput else None,
        host={line(name): line(value) for name, value in (ladder.host if ladder else {}).items()},
    )


class _Gates:
    """
    What the gates that *rule* requires lack.

    Attributes:
        recipes: The recipes of the policy for which no gate of a served model lacks anything.
    """

    def __init__(
        self,
        wheel: WheelFacts,
        rule: ForkRule,
        verdicts: Mapping[tuple[str, str], Verdict],
        policy: ReleasePolicy,
    ) -> None:
        self._wheel, self._rule, self._verdicts, self._policy = wheel, rule, verdicts, policy
        self._served = [name for name in rule.gates if name in SERVED and name != "G8"]
        self._groups = policy.file.recipes if self._served else {}
        named = dict.fromkeys(recipe for group in self._groups.values() for recipe in group)
        self._by_recipe = {recipe: self._of(self._served, recipe) for recipe in named}
        self.recipes = tuple(recipe for recipe, lacks in self._by_recipe.items() if not lacks)

    def missing(self, measured: Verdict | None, throughput: Result | None) -> Iterator[Missing]:
        """
        Yield what is missing.

        Of each group of recipes one has to be shown; if none is, the one that lacks least counts.
        The throughput counts for any recipe of the policy.

        Args:
            measured: The verdict of G8 to which the measurement *throughput* belongs.
        """
        yield from self._of([name for name in self._rule.gates if name not in SERVED])
        for group in self._groups.values():
            yield from min((self._by_recipe[recipe] for recipe in group), key=len)
        if "G8" in self._rule.gates:
            # A pass counts only with its measurement.
            compared = [measured] if measured else []
            compared += [
                verdict
                for (gate, _), verdict in self._verdicts.items()
                if gate == "G8" and verdict.state != "pass" and verdict != measured
            ]
            counts = next((entry for entry in compared if entry.recipe in self._by_recipe), None)
            yield from self._lacks("G8", counts, counts.recipe if counts else "")
            if counts and counts.state == "pass" and throughput:
                yield from throughput_recheck.missing(throughput, self._policy)
        for recipe in self._policy.file.faulty if self._served else ():
            for name in self._served:
                verdict = self._verdicts.get((name, recipe))
                if verdict is None or verdict.state in ("pass", "not-run"):
                    yield from self._lacks(name, verdict, recipe)
        for verdict in self._verdicts.values():
            stops = verdict.state in ("fail", "invalid") and not _excuse(verdict, self._policy)
            if stops and verdict.gate in self._rule.gates:
                yield Missing(verdict.gate, verdict.state, *_reason(verdict))

    def _of(self, names: Iterable[str], recipe: str = "") -> list[Missing]:
        return [
            missing
            for name in names
            for missing in self._lacks(name, self._verdicts.get((name, recipe)), recipe)
        ]

    def _lacks(self, name: str, verdict: Verdict | None, recipe: str) -> Iterator[Missing]:
        if verdict is None:
            served = f" and the recipe {recipe}" if recipe else ""
            text = f"{name} was not run with these bytes{served}: {GATES[name]}"
            yield Missing(name, "not-run", "not-climbed", line(text))
        elif verdict.state != "pass":
            yield Missing(name, verdict.state, *_reason(verdict))
        else:
            yield from self._other(verdict)

    def _other(self, verdict: Verdict) -> Iterator[Missing]:
        """Yield why a pass is not the one that the policy asks for."""
        rule = self._policy.file.gates[verdict.gate]
        expected = self._policy.expected_digest(verdict.gate, self._wheel.stack, verdict.recipe)
        if expected and verdict.policy != expected:
            text = f"judged by policy {verdict.policy[:16] or 'none'}, not by {expected[:16]}"
            yield Missing(verdict.gate, "invalid", "policy-other", line(text))
        names = {check.name for check in verdict.checks if check.required}
        if lacking := [name for name in rule.wanted if name not in names]:
            text = f"it did not make {', '.join(lacking)}"
            yield Missing(verdict.gate, "invalid", "checks-other", line(text))
        gpu, machine = verdict.host.get("gpu", "none"), verdict.host.get("architecture", "")
        other = f"(SM {self._policy.file.gpu})" not in gpu
        if rule.gpu and (other or self._wheel.machine not in ("any", machine)):
            expected = f"SM {self._policy.file.gpu} ({self._wheel.machine})"
            text = f"it ran on {gpu} ({machine or 'unknown'}), not on {expected}"
            yield Missing(verdict.gate, "invalid", "machine-other", line(text))


def _require_checks(ladder: Ladder, policy: ReleasePolicy) -> None:
    """
    Require that every pass of *ladder* rests on the checks that the policy names.

    Raises:
        verdict-hollow: A pass does not, or a gate has two verdicts.
    """
    labels = [verdict.label for verdict in ladder.verdicts]
    faults = [f"{label}: it has two verdicts" for label in set(labels) if labels.count(label) > 1]
    for verdict in ladder.verdicts:
        if verdict.state == "pass":
            rule = policy.file.gates.get(verdict.gate)
            faults += _faults(verdict, rule) if rule else [f"{verdict.gate}: there is no such gate"]
    if faults:
        raise ReleaseError(
            "verdict-hollow",
            f"A pass of {ladder.wheel.file if ladder.wheel else 'a server'} has no evidence.",
            details=faults[:30],
        )


def _faults(verdict: Verdict, rule: GateRule) -> Iterator[str]:
    """Yield what the pass *verdict* lacks."""
    checks: dict[str, Check] = {}
    for check in verdict.checks:
        if check.name in checks:
            yield f"{verdict.gate}: {check.name} is there twice"
        checks[check.name] = check
    for pattern in rule.checks:
        matching = [check for name, check in checks.items() if fnmatchcase(name, pattern)]
        if not any(check.required for check in matching):
            yield f"{verdict.gate}: no required check {pattern}"
        for check in matching:
            # A check that only a pattern with * finds may also only inform.
            if check.state != "pass" and (check.required or "*" not in pattern):
                yield f"{verdict.gate}: {check.name} is {check.state}"
    table = gate_policy.declared(verdict.gate)
    for name, check in checks.items():
        declared = declarations(table, name)
        if not declared:
            yield f"{verdict.gate}: no such check is declared: {name}"
        for fault in filter(None, (entry.fault(check) for entry in declared)):
            yield f"{verdict.gate}: {name}: {fault}"


def _wheel(wheel: WheelFacts, rule: ForkRule) -> Iterator[Missing]:
    """Yield what the wheel itself lacks."""
    if rule.record and not wheel.source.resolved:
        text = f"{wheel.source.origin}: pinned by {wheel.source.pin} only"
        yield Missing("source", "not-run", "source-unresolved", line(text))
    if rule.sbom and not wheel.sbom:
        yield Missing("sbom", "not-run", "sbom-missing", "the wheel holds no SBOM")
    if rule.isolated and wheel.isolated is not True:
        text = "the compilation could have used the network"
        yield Missing("isolation", "not-run", "not-isolated", text)


def _companion(wheel: WheelFacts, rule: ForkRule, serving: Ladder | None) -> Iterator[Missing]:
    """Yield why the verdicts of the wheel that serves are not about this one, too."""
    if not rule.served_by:
        return
    bound = serving.host.get(f"content {wheel.project}") if serving and serving.wheel else None
    if not bound:
        text = f"no verdict of {rule.served_by} says that it ran with this build of {wheel.project}"
        yield Missing("set", "not-run", "companion-unbound", text)
    elif bound != wheel.content:
        text = f"{rule.served_by} was gated with another build of {wheel.project}"
        yield Missing("set", "invalid", "companion-other", text)


def _reason(verdict: Verdict) -> tuple[str, str]:
    """Return reference and text of the check that makes *verdict* no pass."""
    checks = [check for check in verdict.checks if check.required and check.state != "pass"]
    worst = min(checks, key=lambda check: ORDER.index(check.state), default=None)
    if worst is None:
        return "not-climbed", f"{verdict.gate} made no required check"
    return line(worst.reason), line(f"{worst.name}: {worst.message}")


def _gate_result(
    name: str, state: State | None, verdicts: Iterable[Verdict], policy: ReleasePolicy
) -> GateResult:
    if state is None:
        return GateResult(name, GATES[name], "not-run", "it was not run")
    own = [entry for entry in verdicts if (entry.gate, entry.state) == (name, state)]
    # A fault of our own says more than one of the official wheel.
    shown = min(own, key=lambda entry: bool(_excuse(entry, policy)))
    says = "" if state == "pass" else _reason(shown)[1]
    if excuse := _excuse(shown, policy):
        says = line(f"{shown.recipe}: {says}; {excuse}")
    return GateResult(name, GATES[name], state, says)


def _excuse(verdict: Verdict, policy: ReleasePolicy) -> str:
    """Return why the fail *verdict* is one of the official wheel; empty if it is not."""
    fault = policy.file.upstream_faults.get(verdict.label)
    failing = {check.name for check in verdict.checks if check.state in ("fail", "invalid")}
    return (
        fault.reason if fault and verdict.state == "fail" and failing <= set(fault.checks) else ""
    )


def _speeds(throughput: Result | None) -> tuple[Speed, ...]:
    """Return the series of a throughput gate; only those that decide have a state."""
    if throughput is None or throughput.kind != "gate":
        return ()
    return tuple(_speed(cell, series) for cell in throughput.cells for series in cell.series)


def _speed(cell: CellResult, series: Series) -> Speed:
    figures: dict[str, float | None] = {"low": series.low, "high": series.high}
    if series.candidate is not None and series.baseline:
        figures["ratio"] = series.candidate / series.baseline
    finite = {
        name: value for name, value in figures.items() if value is not None and math.isfinite(value)
    }
    state = series.state if series.primary else "not-run"
    return replace(Speed(line(cell.name), series.metric, state), **finite)
