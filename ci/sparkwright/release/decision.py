"""
Decide from the verdict files of a wheel what they prove, and what it lacks for ``verified``.

The files are read as untrusted: bounded, typed, and consistent. The decision is a pure function of
bytes, verdicts and policy, and total: what is not shown is in `Proof.missing`, and the wheel is
verified exactly if that is empty. Verdicts about something else, or a pass without the checks
behind it, are a fault and are refused.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.bench.results import Result
from sparkwright.client.records import (
    LARGEST_EVIDENCE,
    GateResult,
    Missing,
    Proof,
    Speed,
    line,
)
from sparkwright.core.files import canonical, list_folder, read_bytes, sha256_bytes
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
    ranks = dict[str, tuple[bool, bool]]()
    try:
        if (path := folder / f"{stem}.verdicts.json").exists():
            files["verdicts"] = read(path)
            ladder = read_verdicts(files["verdicts"])
            for verdict in ladder.verdicts:
                ranks[verdict.evidence] = (verdict.state == "pass", verdict.recipe in recipes)
            if (path := folder / f"{stem}.canary.json").exists():
                files["canary"] = canary.proved(path, ladder.verdicts)
        if measurements := list(map(read, list_folder(folder, f"{stem}.*throughput.json"))):
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


def decide(
    facts: WheelFacts,
    results: GateResults,
    policy: ReleasePolicy,
    serving: Ladder | None = None,
) -> Proof:
    """
    Return what is shown of the wheel of *facts*.

    Args:
        serving: The verdicts about the release's wheel of `ForkRule.served_by`.

    Raises:
        verdict-foreign: The results are about other bytes.
        verdict-hollow: A pass does not have the checks or the measurements that it rests on.
    """
    _require_subject(facts, results)
    ladder, throughput = results.ladder or Ladder(facts.stack, None, ()), results.throughput
    ladder = msgspec.structs.replace(
        ladder, verdicts=_sound_verdicts(facts, ladder.verdicts, throughput, policy)
    )
    rule = policy.file.forks.get(facts.source.name)
    required = rule or ForkRule(gates=())
    missing, recipes = _gates(facts, required, ladder, policy)
    missing += _wheel(facts, required, serving)
    if rule is None:
        missing.append(
            Missing(
                "policy", "not-run", "fork-unknown", f"there is no rule for {facts.source.name}"
            )
        )
    baseline, official = throughput.baseline if throughput else None, facts.source.base
    if baseline and official not in ("", baseline.sha256) and not policy.file.other_baseline:
        text = f"the baseline is {baseline.sha256[:16]}, the official wheel {official[:16]}"
        missing.append(Missing("G8", "invalid", "baseline-other", line(text)))
    return Proof(
        policy=policy.digest,
        missing=tuple(
            sorted(set(missing), key=lambda entry: (entry.gate, entry.reference, entry.says))
        ),
        gates=tuple(_gate_results(ladder, required.gates)),
        recipes=recipes,
        speeds=tuple(_speeds(throughput)) if throughput else (),
        baseline=line(f"{baseline.label} ({baseline.sha256[:16]})") if baseline else "",
        margin=throughput.margin if throughput else None,
        host={line(name): line(value) for name, value in ladder.host.items()},
    )


def _require_subject(facts: WheelFacts, results: GateResults) -> None:
    """
    Require that *results* are about the wheel of *facts*.

    Raises:
        verdict-foreign: They are about other bytes, or of another stack.
    """
    wheel, stated = facts.wheel, list[tuple[str, str, str]]()
    if ladder := results.ladder:
        sha256 = ladder.wheel.sha256 if ladder.wheel else ""
        stated += [("stack", ladder.stack, facts.stack), ("the verdicts", sha256, wheel.sha256)]
        for verdict in ladder.verdicts:
            stated.append((verdict.gate, verdict.wheel, wheel.sha256))
    if results.throughput:
        stated.append(("the throughput", results.throughput.candidate.sha256, wheel.sha256))
    faults = list[str]()
    for what, other, own in stated:
        if other != own:
            faults.append(f"{what}: about {other or 'none'}, and the wheel is {own or 'none'}")
    if faults:
        raise ReleaseError(
            "verdict-foreign",
            f"The verdicts are not about {wheel.name} ({wheel.sha256}).",
            details=faults[:20],
        )


def _sound_verdicts(
    facts: WheelFacts,
    verdicts: Iterable[Verdict],
    throughput: Result | None,
    policy: ReleasePolicy,
) -> tuple[Verdict, ...]:
    """
    Return *verdicts*, less the pass of G8 of another recipe than *throughput*, as a release has the
    measurements of one recipe, and less passes that lack something, of recipes that the policy does
    not name.

    Raises:
        verdict-hollow: A pass does not rest on the checks that the policy names, or on a
            measurement; or a gate has two verdicts.
    """
    labels, sound, faults, unmeasured = set[str](), list[Verdict](), list[str](), False
    recipes = set[str]().union(*policy.file.recipes.values())
    for verdict in verdicts:
        if verdict.label in labels:
            faults.append(f"{verdict.label}: it has two verdicts")
        labels.add(verdict.label)
        if verdict.state == "pass":
            rule = policy.file.gates.get(verdict.gate)
            hollow = list(_faults(verdict, rule)) if rule else [f"{verdict.gate}: no such gate"]
            if hollow and verdict.recipe and verdict.recipe not in recipes:
                continue
            faults += hollow
        if (verdict.gate, verdict.state) == ("G8", "pass"):
            if throughput and verdict.recipe != throughput.recipe:
                continue
            unmeasured = not (throughput and throughput.state == "pass" and throughput.cells)
        sound.append(verdict)
    if faults:
        raise ReleaseError(
            "verdict-hollow",
            f"A pass of {facts.wheel.name} has no evidence.",
            details=faults[:30],
        )
    if unmeasured:
        raise ReleaseError(
            "verdict-hollow",
            f"The pass of G8 of {facts.wheel.name} has no measurement that passed.",
        )
    return tuple(sound)


def _faults(verdict: Verdict, rule: GateRule) -> Iterator[str]:
    """Yield what the pass *verdict* lacks."""
    for pattern in rule.checks:
        required = False
        for check in verdict.checks:
            if fnmatchcase(check.name, pattern):
                required = required or check.required
                # A check that only a pattern with * finds may also only inform.
                if check.state != "pass" and (check.required or "*" not in pattern):
                    yield f"{verdict.gate}: {check.name} is {check.state}"
        if not required:
            yield f"{verdict.gate}: no required check {pattern}"
    table = gate_policy.declared(verdict.gate)
    for check in verdict.checks:
        declared = declarations(table, check.name)
        if not declared and check.required:
            yield f"{verdict.gate}: no such check is declared: {check.name}"
        bare = check.state == "pass" and not (check.figures or check.samples)
        if bare and any(entry.measured for entry in declared):
            yield f"{verdict.gate}: {check.name} passes without a figure or a sample"


def _gates(
    facts: WheelFacts,
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
    missing, served, by_recipe = list[Missing](), list[str](), dict[str, list[Missing]]()
    by_gate = {(verdict.gate, verdict.recipe): verdict for verdict in ladder.verdicts}
    lacks = partial(_lacks, facts, policy, ladder)
    for name in rule.gates:
        if name not in SERVED:
            missing += lacks(name, "", by_gate.get((name, "")))
        elif name != "G8":
            served.append(name)
    for group in policy.file.recipes.values() if served else ():
        for recipe in group:
            by_recipe[recipe] = []
            for name in served:
                by_recipe[recipe] += lacks(name, recipe, by_gate.get((name, recipe)))
        missing += by_recipe[min(group, key=lambda recipe: len(by_recipe[recipe]))]
    best: Verdict | None = None
    for verdict in ladder.verdicts:
        if verdict.gate == "G8" and verdict.recipe in by_recipe:
            best = max(verdict, best or verdict, key=lambda each: ORDER.index(each.state))
        if verdict.state in ("fail", "invalid") and verdict.gate in rule.gates:
            missing.append(Missing(verdict.gate, verdict.state, *_reason(verdict)))
    if "G8" in rule.gates:
        missing += lacks("G8", "", best)
    return missing, tuple(recipe for recipe, lacking in by_recipe.items() if not lacking)


def _lacks(
    facts: WheelFacts,
    policy: ReleasePolicy,
    ladder: Ladder,
    name: str,
    recipe: str,
    verdict: Verdict | None,
) -> Iterator[Missing]:
    """Yield why *verdict* of the gate *name* is not the pass that the policy asks for."""
    if verdict is None:
        served = f" and the recipe {recipe}" if recipe else ""
        text = line(f"{name} was not run with these bytes{served}: {GATES[name]}")
        yield Missing(name, "not-run", "not-climbed", text)
        return
    if verdict.state != "pass":
        yield Missing(name, verdict.state, *_reason(verdict))
        return
    rule = policy.file.gates[name]
    ends = ladder.outcomes(name).get(verdict.recipe, ())
    if rule.attempts is not None and sum(map(ends.count, SPENDING)) >= rule.attempts:
        text = f"{len(ends)} attempts: {', '.join(ends)}; {rule.attempts} are admitted"
        yield Missing(name, "invalid", "attempts-many", line(text))
    expected = policy.expected_digest(name, facts.stack, verdict.recipe)
    if expected and verdict.policy != expected:
        text = f"judged by policy {verdict.policy[:16] or 'none'}, not by {expected[:16]}"
        yield Missing(name, "invalid", "policy-other", line(text))
    names = {check.name for check in verdict.checks if check.required}
    if lacking := ", ".join(sorted(set(rule.wanted) - names)):
        yield Missing(name, "invalid", "checks-other", line(f"it did not make {lacking}"))
    gpu, machine = verdict.host.get("gpu", "none"), verdict.host.get("architecture", "")
    wanted, own = f"SM {policy.file.gpu}", facts.wheel.machine
    if rule.gpu and (f"({wanted})" not in gpu or own not in ("any", machine)):
        text = f"it ran on {gpu} ({machine or 'unknown'}), not on {wanted} ({own})"
        yield Missing(name, "invalid", "machine-other", line(text))


def _wheel(facts: WheelFacts, rule: ForkRule, serving: Ladder | None) -> Iterator[Missing]:
    """
    Yield what the wheel itself lacks, and why the verdicts of the wheel that serves do not cover it
    as well.
    """
    if not facts.source.resolved:
        text = line(f"{facts.source.origin}: pinned by {facts.source.pin} only")
        yield Missing("source", "not-run", "source-unresolved", text)
    if not (facts.sbom or facts.wheel.sbom):
        yield Missing("sbom", "not-run", "sbom-missing", "the wheel holds no SBOM")
    if rule.isolated and not facts.wheel.isolated:
        network = "the compilation could have used the network"
        yield Missing("isolation", "not-run", "not-isolated", network)
    fork, project = rule.served_by, facts.wheel.project
    bound = serving.host.get(f"content {project}") if serving and serving.wheel else None
    if fork and not bound:
        text = f"no verdict of {fork} says that it ran with this build of {project}"
        yield Missing("set", "not-run", "companion-unbound", text)
    elif fork and bound != facts.wheel.content:
        text = f"{fork} was gated with another build of {project}"
        yield Missing("set", "invalid", "companion-other", text)


def _reason(verdict: Verdict) -> tuple[str, str]:
    """Return reference and text of the check that makes *verdict* no pass."""
    worst = verdict.worst_check
    if worst is None:
        return "not-climbed", f"{verdict.gate} made no required check"
    return line(worst.reason), line(f"{worst.name}: {worst.message}")


def _gate_results(ladder: Ladder, required: Collection[str]) -> Iterator[GateResult]:
    """Yield the result of each gate that was run, or is *required*."""
    for name, title in GATES.items():
        state, attempts = ladder.states.get(name), list[str]()
        says = "" if state else "it was not run"
        for recipe, ends in sorted(ladder.outcomes(name).items()):
            attempts.append(f"{recipe} {', '.join(ends)}".strip())
        for verdict in ladder.verdicts:
            if (verdict.gate, verdict.state) == (name, state) and state != "pass":
                says = _reason(verdict)[1]
                break
        if state or name in required:
            yield GateResult(name, title, state or "not-run", says, line("; ".join(attempts)))


def _speeds(result: Result) -> Iterator[Speed]:
    """Yield the series as the release has them; only those that decide have a state."""
    for cell in result.cells:
        for series in cell.series:
            ratio, state = None, series.state if series.primary else "not-run"
            if series.candidate is not None and series.baseline:
                ratio = series.candidate / series.baseline
            yield Speed(line(cell.name), series.metric, state, ratio, series.low, series.high)
