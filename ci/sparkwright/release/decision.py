"""
The decision: what is shown of a wheel by the files that the gates wrote of it, and what it lacks
for ``verified``.

The files are read as untrusted: bounded, typed, and consistent. The decision is a pure function of
bytes, verdicts and policy, and total: what is not shown is in `Proof.missing`, and the wheel is
verified exactly if that is empty. Verdicts about something else, or a pass without the checks
behind it, are a fault and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright.bench.results import CellResult, Result, Series
from sparkwright.client.records import (
    LARGEST_EVIDENCE,
    GateResult,
    Missing,
    Proof,
    Speed,
    line,
)
from sparkwright.core.files import read_bytes
from sparkwright.core.states import State
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, SERVED, read_verdicts, require_evidence
from sparkwright.gates.core.verdict import ORDER, Check, Ladder, Verdict, declarations
from sparkwright.release import throughput_recheck
from sparkwright.release.errors import ReleaseError, TrustError
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


class GateResults(msgspec.Struct, frozen=True):
    """
    The verdicts and the throughput measurement of a wheel.

    Attributes:
        files: What the files hold: ``verdicts`` or ``throughput`` → bytes.
    """

    ladder: Ladder | None = None
    throughput: Result | None = None
    files: dict[str, bytes] = {}


def read_results(wheel: Path, folder: Path | None = None) -> GateResults:
    """
    Return the results in *folder*, or beside *wheel*, under the name of the wheel.

    Raises:
        evidence-invalid: A file is not what the gates write.
        verdict-hollow: A file states what does not follow from its own checks, or G8 was measured
            by another file than the one that lies there.
    """
    stem, failure = wheel.name.removesuffix(".whl"), partial(TrustError, "evidence-invalid")
    files = {
        kind: read_bytes(path, limit=LARGEST_EVIDENCE, failure=failure)
        for kind in ("verdicts", "throughput")
        if (path := (folder or wheel.parent) / f"{stem}.{kind}.json").exists()
    }
    try:
        ladder = read_verdicts(files["verdicts"]) if "verdicts" in files else None
        data = files.get("throughput")
        throughput = msgspec.json.decode(data, type=Result) if data is not None else None
        if ladder and throughput and ladder.states.get("G8", "not-run") != "not-run":
            require_evidence(ladder, files["throughput"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"A file of the gates about {wheel.name} is not what `sparkwright gate` writes."
        raise failure(what, details=[str(error)]) from error
    except ValueError as error:
        what = f"The files of the gates about {wheel.name} do not agree with themselves."
        raise ReleaseError("verdict-hollow", what, details=[str(error)]) from error
    return GateResults(ladder, throughput, files)


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
    proofs = {}
    for wheel in wheels:
        rule = policy.file.forks.get(wheel.source.name)
        serving = [
            results[other.name].ladder
            for other in wheels
            if rule
            and rule.served_by == other.source.name
            # A wheel for any machine goes with the only one that serves.
            and wheel.machine in ("any", other.machine)
        ]
        proofs[wheel.name] = decide(
            wheel, results[wheel.name], policy, serving[0] if len(serving) == 1 else None
        )
    return proofs


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
    _require_subject(wheel, results)
    ladder, throughput = results.ladder, results.throughput
    verdicts = ladder.verdicts if ladder else ()
    _require_checks(wheel, verdicts, policy)
    if ladder and throughput:
        # The measurement of a later recipe replaces the file of an earlier one, of whose pass
        # nothing is left.
        verdicts = tuple(
            verdict
            for verdict in verdicts
            if verdict.recipe == throughput.recipe
            or (verdict.gate, verdict.state) != ("G8", "pass")
        )
        ladder = replace(ladder, verdicts=verdicts)
    for verdict in verdicts:
        if (verdict.gate, verdict.state) == ("G8", "pass"):
            throughput_recheck.require(verdict, throughput, policy)
    rule = policy.file.forks.get(wheel.source.name)
    recipes: tuple[str, ...] = ()
    if rule:
        gates = _Gates(wheel, rule, verdicts, policy)
        missing = [*gates.missing(throughput), *_wheel(wheel, rule)]
        missing += _companion(wheel, rule, serving)
        recipes = gates.recipes
    else:
        text = f"there is no rule for {wheel.source.name}"
        missing = [Missing("policy", "not-run", "fork-unknown", text)]
    states = ladder.states if ladder else {}
    baseline = throughput.baseline if throughput else None
    compared = throughput if throughput and throughput.kind == "gate" else None
    return Proof(
        policy=policy.digest,
        missing=tuple(
            sorted(set(missing), key=lambda entry: (entry.gate, entry.reference, entry.says))
        ),
        gates=tuple(
            _gate_result(name, states.get(name), verdicts, policy)
            for name in GATES
            if name in states or (rule and name in rule.gates)
        ),
        recipes=recipes,
        speeds=tuple(
            _speed(cell, series)
            for cell in (compared.cells if compared else ())
            for series in cell.series
        ),
        baseline=line(f"{baseline.label} ({baseline.sha256[:16]})") if baseline else "",
        margin=throughput.margin if throughput else None,
        host={line(name): line(value) for name, value in (ladder.host if ladder else {}).items()},
    )


def _require_subject(wheel: WheelFacts, results: GateResults) -> None:
    """
    Require that *results* are about *wheel*.

    Raises:
        verdict-foreign: They are about other bytes, other device code, or of another stack.
    """
    about: dict[str, str] = {}
    faults = []
    if ladder := results.ladder:
        about["the verdicts"] = ladder.wheel.sha256 if ladder.wheel else ""
        about |= {verdict.gate: verdict.wheel for verdict in ladder.verdicts}
        # Only G0 reads device code.
        audited = ladder.device_code or any(verdict.gate == "G0" for verdict in ladder.verdicts)
        if audited and ladder.device_code != wheel.device_code:
            codes = f"{ladder.device_code or 'none'}, of the wheel: {wheel.device_code or 'none'}"
            faults.append(f"device code: {codes}")
        if wheel.stack and ladder.stack != wheel.stack:
            faults.append(f"judged as of stack {ladder.stack}, built from {wheel.stack}")
    if results.throughput:
        about["the throughput"] = results.throughput.candidate.sha256
    faults += [
        f"{what}: {sha256 or 'no wheel'}"
        for what, sha256 in about.items()
        if sha256 != wheel.sha256
    ]
    if faults:
        raise ReleaseError(
            "verdict-foreign",
            f"The verdicts are not about {wheel.name} ({wheel.sha256}).",
            details=faults[:20],
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
        verdicts: Sequence[Verdict],
        policy: ReleasePolicy,
    ) -> None:
        self._wheel, self._rule, self._policy = wheel, rule, policy
        self._verdicts: dict[tuple[str, str | None], Verdict] = {
            (verdict.gate, verdict.recipe): verdict for verdict in verdicts
        }
        self._served = [name for name in rule.gates if name in SERVED and name != "G8"]
        self._groups = policy.file.recipes if self._served else {}
        self._by_recipe = {
            recipe: [lack for name in self._served for lack in self._lacks(name, recipe)]
            for group in self._groups.values()
            for recipe in group
        }
        self.recipes = tuple(recipe for recipe, lacks in self._by_recipe.items() if not lacks)

    def missing(self, throughput: Result | None) -> Iterator[Missing]:
        """
        Yield what is missing.

        Of each group of recipes one has to be shown; if none is, the one that lacks least counts.
        The throughput counts for any recipe of the policy.
        """
        for name in self._rule.gates:
            if name not in SERVED:
                yield from self._lacks(name)
        for group in self._groups.values():
            yield from min((self._by_recipe[recipe] for recipe in group), key=len)
        if "G8" in self._rule.gates:
            compared = {
                verdict.state: verdict
                for verdict in self._verdicts.values()
                if verdict.gate == "G8" and verdict.recipe in self._by_recipe
            }
            best = max(compared, key=ORDER.index, default=None)
            yield from self._lacks("G8", compared[best].recipe if best else None)
            if best == "pass" and throughput:
                yield from throughput_recheck.missing(throughput, self._policy)
        for recipe in self._policy.file.faulty if self._served else ():
            for name in self._served:
                # A fail is looked at below.
                verdict = self._verdicts.get((name, recipe))
                if verdict is None or verdict.state in ("pass", "not-run"):
                    yield from self._lacks(name, recipe)
        for verdict in self._verdicts.values():
            stops = verdict.state in ("fail", "invalid") and not _excuse(verdict, self._policy)
            if stops and verdict.gate in self._rule.gates:
                yield Missing(verdict.gate, verdict.state, *_reason(verdict))

    def _lacks(self, name: str, recipe: str | None = "") -> Iterator[Missing]:
        """Yield why the gate *name* is not the pass that the policy asks for with *recipe*."""
        verdict = self._verdicts.get((name, recipe))
        if verdict is None:
            served = f" and the recipe {recipe}" if recipe else ""
            text = f"{name} was not run with these bytes{served}: {GATES[name]}"
            yield Missing(name, "not-run", "not-climbed", line(text))
            return
        if verdict.state != "pass":
            yield Missing(name, verdict.state, *_reason(verdict))
            return
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


def _require_checks(wheel: WheelFacts, verdicts: Iterable[Verdict], policy: ReleasePolicy) -> None:
    """
    Require that every pass of *verdicts* rests on the checks that the policy names.

    Raises:
        verdict-hollow: A pass does not, or a gate has two verdicts.
    """
    labels = [verdict.label for verdict in verdicts]
    faults = [f"{label}: it has two verdicts" for label in set(labels) if labels.count(label) > 1]
    for verdict in verdicts:
        if verdict.state == "pass":
            rule = policy.file.gates.get(verdict.gate)
            faults += _faults(verdict, rule) if rule else [f"{verdict.gate}: there is no such gate"]
    if faults:
        what = f"A pass of {wheel.name} has no evidence."
        raise ReleaseError("verdict-hollow", what, details=faults[:30])


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
    excused = fault and verdict.state == "fail" and failing <= set(fault.checks)
    return fault.reason if fault and excused else ""


def _speed(cell: CellResult, series: Series) -> Speed:
    """Return *series* as the record of the release has it; only one that decides has a state."""
    ratio = None
    if series.candidate is not None and series.baseline:
        ratio = series.candidate / series.baseline
    state = series.state if series.primary else "not-run"
    return Speed(line(cell.name), series.metric, state, ratio, series.low, series.high)
