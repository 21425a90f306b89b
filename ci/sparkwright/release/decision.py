"""
Decide from the verdict files of a wheel what they prove, and what it lacks for ``verified``.

The files are read as untrusted: bounded, typed, and consistent. The decision is a pure function of
bytes, verdicts and policy, and total: what is not shown is in `Proof.missing`, and the wheel is
verified exactly if that is empty. Verdicts about something else, or a pass without the checks
behind it, are a fault and are refused.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from sparkwright.core.files import canonical, list_folder, read_bytes, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import read_lines
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, SERVED, read_verdicts, verdict_digest
from sparkwright.gates.core.verdict import ORDER, Attempt, Ladder, Verdict, declarations
from sparkwright.release import ReleaseError, canary
from sparkwright.release.policy import ForkRule, GateRule, ReleasePolicy
from sparkwright.release.wheel_facts import WheelFacts

#: Seconds by which the clocks of two machines may differ.
CLOCKS = 86_400

#: States of attempts that count against `GateRule.attempts`. An attempt that was killed, or ended
#: with the machine, counts, since the wheel may be the cause; one that was ended by Ctrl-C is
#: not-run and does not.
SPENDING = ("fail", "inconclusive", "interrupted")

#: The references that the decision itself gives; those of gates are their own.
REASONS: Mapping[str, str] = {
    "not-climbed": "The gate was not run with these bytes.",
    "attempts-many": "The gate was tried more often without a pass than the policy admits. These "
    "bytes stay a candidate; a fix is a new version (`label` in stack.yaml).",
    "policy-other": "The gate was judged by another policy than the reviewed one of today.",
    "checks-other": "The gate passed without the checks that the policy wants.",
    "machine-other": "The gate ran on another machine or GPU than the policy names.",
    "source-unresolved": "The lock names the source by a short commit only; run `fetch` where its "
    "host is reachable, and build again.",
    "sbom-missing": "The wheel has no SBOM.",
    "not-isolated": "There is no record that the compilation had no network.",
    "companion-unbound": "The verdicts of the wheel that serves do not say with which build of "
    "this one it ran.",
    "companion-other": "The wheel that serves was gated with another build of this one.",
    "baseline-other": "G8 compared with another build than the official wheel which this one was "
    "made from.",
    "fork-unknown": "ci/release.yaml does not say what a wheel of this fork must show.",
}


class GateResults(msgspec.Struct, frozen=True):
    """
    The verdicts and the throughput measurement of a wheel.

    Attributes:
        throughput: Of one recipe.
        files: What the files hold: ``verdicts``, ``throughput`` or ``canary`` → bytes.
    """

    ladder: Ladder | None = None
    throughput: Result | None = None
    files: dict[str, bytes] = {}


def read_results(
    wheel: Path, folder: Path | None = None, recipes: Collection[str] = ()
) -> GateResults:
    """
    Return the results in *folder*, or beside *wheel*, under the name of the wheel.

    Each recipe has a file of measurements. One of a pass is taken, and of these one of *recipes*.

    Raises:
        evidence-invalid: A file is not what the gates write.
        verdict-hollow: A file states what does not follow from its own checks, or G8 was measured
            by other files than those that lie there.
    """
    stem, failure = wheel.name.removesuffix(".whl"), partial(ReleaseError, "evidence-invalid")
    read = partial(read_bytes, limit=LARGEST_EVIDENCE, failure=failure)
    folder = folder or wheel.parent
    files, ladder, throughput = dict[str, bytes](), None, None
    if (path := folder / f"{stem}.verdicts.json").exists():
        files["verdicts"] = read(path)
    measurements = list(map(read, list_folder(folder, f"{stem}.*throughput.json")))
    try:
        if "verdicts" in files:
            ladder = read_verdicts(files["verdicts"])
        if ladder and (path := folder / f"{stem}.canary.json").exists():
            files["canary"] = canary.proved(path, ladder.verdicts)
        measured = [each for each in ladder.verdicts if each.evidence] if ladder else []
        ranks = {each.evidence: (each.state == "pass", each.recipe in recipes) for each in measured}
        if measurements:
            files["throughput"] = max(
                measurements, key=lambda data: ranks.get(sha256_bytes(data), ())
            )
            throughput = msgspec.json.decode(files["throughput"], type=Result)
            decided = ladder and ladder.states.get("G8", "not-run") != "not-run"
            if decided and sha256_bytes(files["throughput"]) not in ranks:
                raise ValueError("the measurements are not those that a verdict names")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise failure(
            f"A file of the gates about {wheel.name} is not what `sparkwright gate` writes.",
            details=[str(error)],
        ) from error
    except ValueError as error:
        raise ReleaseError(
            "verdict-hollow",
            f"The files of the gates about {wheel.name} do not agree with themselves.",
            details=[str(error)],
        ) from error
    return GateResults(ladder, throughput, files)


def require_logged(wheel: Path, folder: Path | None, ladder: Ladder) -> None:
    """
    Require that the attempts of *ladder* are those of the attempt log in *folder*, or beside
    *wheel*, and that its verdicts are the last of them.

    Who can write both files can also make them agree. This notices a verdict that was edited, or an
    attempt that was taken out, while the other file was left as it was.

    Raises:
        verdict-unlogged: They are not, or attempts are missing.
        file-invalid: The log has other contents.
    """
    sha256 = ladder.wheel.sha256 if ladder.wheel else ""
    log = (folder or wheel.parent) / f"{wheel.name.removesuffix('.whl')}.attempts.jsonl"
    lines = read_lines(log, Attempt, "attempt log") if log.exists() else []
    lines = sorted((entry for entry in lines if entry.wheel == sha256), key=lambda line: line.order)
    digests = {"", *(sha256_bytes(canonical(entry)) for entry in lines)}
    unshared = {*lines} ^ {*ladder.attempts}
    faults, last = list[str](), dict[tuple[str, str], str]()
    for entry in lines:
        # The document is written when a gate ends.
        if entry.after not in digests or (entry.state and entry in unshared):
            faults.append(
                f"{entry.gate} {entry.recipe}: around attempt {entry.number} lines differ"
            )
        if entry.state and entry.state != "not-run":
            last[entry.gate, entry.recipe] = entry.verdict
    if unshared - {*lines}:
        faults.append(f"{log.name} lacks attempts that the verdicts have")
    for verdict in ladder.verdicts:
        logged = last.get((verdict.gate, verdict.recipe))
        if verdict.state != "not-run" and logged != verdict_digest(verdict):
            faults.append(f"{verdict.label}: {log.name} has no such verdict, or a later one")
        if verdict.began > time.time() + CLOCKS:
            faults.append(f"{verdict.label}: it began in the future")
    if faults:
        raise ReleaseError(
            "verdict-unlogged",
            f"The verdicts about {wheel.name} are not those of its attempt log.",
            details=faults[:30],
        )


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
            # A wheel for any machine is proved by the wheel that serves it, if there is only one.
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
        # A release has the measurements of one recipe, and nothing of the pass of another one.
        verdicts = tuple(
            verdict
            for verdict in verdicts
            if verdict.recipe == throughput.recipe
            or (verdict.gate, verdict.state) != ("G8", "pass")
        )
        ladder = replace(ladder, verdicts=verdicts)
    cells = throughput.cells if throughput else ()
    passed = any((verdict.gate, verdict.state) == ("G8", "pass") for verdict in verdicts)
    if passed and not (throughput and throughput.state == "pass" and cells):
        raise ReleaseError(
            "verdict-hollow", f"The pass of G8 of {wheel.name} has no measurement that passed."
        )
    rule = policy.file.forks.get(wheel.source.name)
    required = rule or ForkRule(gates=())
    judged = ladder or Ladder(wheel.stack, None, ())
    missing, recipes = _gates(wheel, required, judged, policy)
    missing += [*_wheel(wheel, required), *_companion(wheel, required, serving)]
    if rule is None:
        missing.append(
            Missing(
                "policy", "not-run", "fork-unknown", f"there is no rule for {wheel.source.name}"
            )
        )
    states = judged.states
    baseline = throughput.baseline if throughput else None
    official = wheel.record.base if wheel.record else ""
    if baseline and official not in ("", baseline.sha256) and not policy.file.other_baseline:
        text = f"the baseline is {baseline.sha256[:16]}, the official wheel {official[:16]}"
        missing.append(Missing("G8", "invalid", "baseline-other", line(text)))
    return Proof(
        policy=policy.digest,
        missing=tuple(
            sorted(set(missing), key=lambda entry: (entry.gate, entry.reference, entry.says))
        ),
        gates=tuple(
            _gate_result(name, states.get(name), judged)
            for name in GATES
            if name in states or name in required.gates
        ),
        recipes=recipes,
        speeds=tuple(_speed(cell, series) for cell in cells for series in cell.series),
        baseline=line(f"{baseline.label} ({baseline.sha256[:16]})") if baseline else "",
        margin=throughput.margin if throughput else None,
        host={line(name): line(value) for name, value in judged.host.items()},
    )


def _require_subject(wheel: WheelFacts, results: GateResults) -> None:
    """
    Require that *results* are about *wheel*.

    Raises:
        verdict-foreign: They are about other bytes, or of another stack.
    """
    stated: list[tuple[str, str, str]] = []
    if ladder := results.ladder:
        sha256 = ladder.wheel.sha256 if ladder.wheel else ""
        stated += [("stack", ladder.stack, wheel.stack), ("the verdicts", sha256, wheel.sha256)]
        stated += [(entry.gate, entry.wheel, wheel.sha256) for entry in ladder.verdicts]
    if results.throughput:
        stated.append(("the throughput", results.throughput.candidate.sha256, wheel.sha256))
    faults = [
        f"{what}: about {other or 'none'}, and the wheel is {own or 'none'}"
        for what, other, own in stated
        if other != own
    ]
    if faults:
        raise ReleaseError(
            "verdict-foreign",
            f"The verdicts are not about {wheel.name} ({wheel.sha256}).",
            details=faults[:20],
        )


def _gates(
    wheel: WheelFacts,
    rule: ForkRule,
    ladder: Ladder,
    policy: ReleasePolicy,
) -> tuple[list[Missing], tuple[str, ...]]:
    """
    Return what the gates that *rule* requires lack, and the recipes of the policy for which no gate
    of a served model lacks anything.

    Of each group, one recipe must lack nothing; if each lacks something, that of the nearest one is
    returned. A pass of G8 with any recipe of the policy suffices.
    """
    verdicts = ladder.verdicts
    by_gate = {(verdict.gate, verdict.recipe): verdict for verdict in verdicts}

    def lacks(names: Iterable[str], recipe: str = "") -> Iterator[Missing]:
        for name in names:
            verdict = by_gate.get((name, recipe))
            yield from _lacks(wheel, policy, ladder, name, recipe, verdict)

    served = [name for name in rule.gates if name in SERVED and name != "G8"]
    groups = policy.file.recipes if served else {}
    by_recipe = {recipe: [*lacks(served, recipe)] for group in groups.values() for recipe in group}
    missing = [*lacks(name for name in rule.gates if name not in SERVED)]
    for group in groups.values():
        closest: list[Missing] = min((by_recipe[recipe] for recipe in group), key=len)
        missing += closest
    if "G8" in rule.gates:
        compared = {
            verdict.state: verdict
            for verdict in verdicts
            if verdict.gate == "G8" and verdict.recipe in by_recipe
        }
        best = compared[max(compared, key=ORDER.index)] if compared else None
        missing += _lacks(wheel, policy, ladder, "G8", "", best)
    missing += [
        Missing(verdict.gate, verdict.state, *_reason(verdict))
        for verdict in verdicts
        if verdict.state in ("fail", "invalid") and verdict.gate in rule.gates
    ]
    return missing, tuple(recipe for recipe, lacking in by_recipe.items() if not lacking)


def _lacks(
    wheel: WheelFacts,
    policy: ReleasePolicy,
    ladder: Ladder,
    name: str,
    recipe: str,
    verdict: Verdict | None,
) -> Iterator[Missing]:
    """Yield why *verdict* of the gate *name* is not the pass that the policy asks for."""
    if verdict is None:
        served = f" and the recipe {recipe}" if recipe else ""
        yield Missing(
            name,
            "not-run",
            "not-climbed",
            line(f"{name} was not run with these bytes{served}: {GATES[name]}"),
        )
        return
    if verdict.state != "pass":
        yield Missing(name, verdict.state, *_reason(verdict))
        return
    rule = policy.file.gates[name]
    ends = ladder.outcomes(name).get(verdict.recipe, ())
    spent = sum(end in SPENDING for end in ends)
    if rule.attempts is not None and spent >= rule.attempts:
        text = f"{len(ends)} attempts: {', '.join(ends)}; {rule.attempts} are admitted"
        yield Missing(name, "invalid", "attempts-many", line(text))
    expected = policy.expected_digest(name, wheel.stack, verdict.recipe)
    if expected and verdict.policy != expected:
        yield Missing(
            name,
            "invalid",
            "policy-other",
            line(f"judged by policy {verdict.policy[:16] or 'none'}, not by {expected[:16]}"),
        )
    names = {check.name for check in verdict.checks if check.required}
    if lacking := [check for check in rule.wanted if check not in names]:
        yield Missing(
            name, "invalid", "checks-other", line(f"it did not make {', '.join(lacking)}")
        )
    gpu, machine = verdict.host.get("gpu", "none"), verdict.host.get("architecture", "")
    other = f"(SM {policy.file.gpu})" not in gpu
    if rule.gpu and (other or wheel.machine not in ("any", machine)):
        expected = f"SM {policy.file.gpu} ({wheel.machine})"
        yield Missing(
            name,
            "invalid",
            "machine-other",
            line(f"it ran on {gpu} ({machine or 'unknown'}), not on {expected}"),
        )


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
        raise ReleaseError(
            "verdict-hollow", f"A pass of {wheel.name} has no evidence.", details=faults[:30]
        )


def _faults(verdict: Verdict, rule: GateRule) -> Iterator[str]:
    """Yield what the pass *verdict* lacks."""
    for pattern in rule.checks:
        matching = [check for check in verdict.checks if fnmatchcase(check.name, pattern)]
        if not any(check.required for check in matching):
            yield f"{verdict.gate}: no required check {pattern}"
        for check in matching:
            # A check that only a pattern with * finds may also only inform.
            if check.state != "pass" and (check.required or "*" not in pattern):
                yield f"{verdict.gate}: {check.name} is {check.state}"
    table = gate_policy.declared(verdict.gate)
    for check in verdict.checks:
        declared = declarations(table, check.name)
        if not declared and check.required:
            yield f"{verdict.gate}: no such check is declared: {check.name}"
        bare = check.state == "pass" and not (check.figures or check.samples)
        if bare and any(entry.measured for entry in declared):
            yield f"{verdict.gate}: {check.name} passes without a figure or a sample"


def _wheel(wheel: WheelFacts, rule: ForkRule) -> list[Missing]:
    """Return what the wheel itself lacks."""
    origin = line(f"{wheel.source.origin}: pinned by {wheel.source.pin} only")
    network = "the compilation could have used the network"
    lacks = (
        (rule.record and not wheel.source.resolved, "source", "source-unresolved", origin),
        (rule.sbom and not wheel.sbom, "sbom", "sbom-missing", "the wheel holds no SBOM"),
        (rule.isolated and not wheel.isolated, "isolation", "not-isolated", network),
    )
    return [
        Missing(name, "not-run", reason, text) for lacking, name, reason, text in lacks if lacking
    ]


def _companion(wheel: WheelFacts, rule: ForkRule, serving: Ladder | None) -> Iterator[Missing]:
    """Yield why the verdicts of the wheel that serves do not cover this wheel as well."""
    fork = rule.served_by
    bound = serving.host.get(f"content {wheel.project}") if serving and serving.wheel else None
    if fork and not bound:
        yield Missing(
            "set",
            "not-run",
            "companion-unbound",
            f"no verdict of {fork} says that it ran with this build of {wheel.project}",
        )
    elif fork and bound != wheel.content:
        yield Missing(
            "set",
            "invalid",
            "companion-other",
            f"{fork} was gated with another build of {wheel.project}",
        )


def _reason(verdict: Verdict) -> tuple[str, str]:
    """Return reference and text of the check that makes *verdict* no pass."""
    worst = verdict.worst_check
    if worst is None:
        return "not-climbed", f"{verdict.gate} made no required check"
    return line(worst.reason), line(f"{worst.name}: {worst.message}")


def _gate_result(name: str, state: State | None, ladder: Ladder) -> GateResult:
    outcomes = ladder.outcomes(name).items()
    texts = (f"{recipe} {', '.join(ends)}".strip() for recipe, ends in sorted(outcomes))
    attempts = line("; ".join(texts))
    if state is None:
        return GateResult(name, GATES[name], "not-run", "it was not run", attempts)
    shown = next(each for each in ladder.verdicts if (each.gate, each.state) == (name, state))
    says = "" if state == "pass" else _reason(shown)[1]
    return GateResult(name, GATES[name], state, says, attempts)


def _speed(cell: CellResult, series: Series) -> Speed:
    """Return *series* as the record of the release has it; only one that decides has a state."""
    ratio = None
    if series.candidate is not None and series.baseline:
        ratio = series.candidate / series.baseline
    state = series.state if series.primary else "not-run"
    return Speed(line(cell.name), series.metric, state, ratio, series.low, series.high)
