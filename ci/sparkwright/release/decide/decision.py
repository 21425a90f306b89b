"""
The decision: what is proved of a wheel, and what it lacks for ``verified``. A pure function of bytes, verdicts and policy.

It is total: whatever is not shown is in `Proved.missing`, and the wheel is verified exactly where that is empty. Verdicts that are about
something else, or claim a pass with nothing behind it, are no lack but a fault, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from sparkwright.bench.results import Result, Subject
from sparkwright.core.states import State
from sparkwright.gates.core.ladder import GATES, SERVED
from sparkwright.gates.core.verdict import ORDER, Ladder, Verdict
from sparkwright.release.decide import hollow
from sparkwright.release.decide.facts import Inspected
from sparkwright.release.decide.policy import ForkRule, ReleasePolicy
from sparkwright.release.decide.verdicts import Judged, check_subject
from sparkwright.release.evidence.judged import speeds as speeds_of
from sparkwright.release.manifest.records import Gate, Missing, Proved, line

#: References that the decision itself gives; those of gates are their own.
REASONS: Mapping[str, str] = {
    "not-climbed": "Nobody climbed this gate with these bytes.",
    "policy-other": "The gate was judged by another policy than the reviewed one of today.",
    "checks-other": "The gate passed, but asked something else than the policy wants.",
    "machine-other": "The gate was climbed on another machine than a Spark.",
    "margin-wider": "The throughput gate promised less than the policy asks for.",
    "cells-missing": "The throughput gate left out workloads that decide.",
    "source-unresolved": "The lock names the source by a short commit only; run `fetch` where its host is reachable, and build again.",
    "sbom-missing": "The wheel has no SBOM.",
    "not-isolated": "Nothing says that what was compiled was kept from the network.",
    "companion-unbound": "The ladder of the wheel that serves does not say which build of this one it ran with.",
    "companion-other": "The ladder of the wheel that serves was climbed with another build of this one.",
    "fork-unknown": "ci/release.yaml does not say what a wheel of this fork must show.",
}


def decide(
    inspected: Inspected, ladder: Ladder | None, result: Result | None, policy: ReleasePolicy, *, served: Ladder | None = None
) -> Proved:
    """
    Return what is proved of a wheel, without the evidence, which is made of it.

    Args:
        ladder, result: About the wheel; None where there are none.
        served: The ladder of the release's wheel of `ForkRule.served_by`.

    Raises:
        verdict-foreign: They are about other bytes.
        verdict-hollow: A pass has nothing behind it.
    """
    wheel = inspected.wheel
    check_subject(wheel, inspected.stack, ladder, result)
    if ladder:
        hollow.check(ladder, policy)
    verdicts = {(one.gate, one.recipe): one for one in ladder.verdicts} if ladder else {}
    measured = verdicts.get(("G8", result.recipe if result else ""))
    if ladder and measured and measured.state not in ("pass", "not-run"):
        # The measurement of an earlier recipe's pass was overwritten: that pass is not shown.
        ladder = replace(ladder, verdicts=tuple(one for one in ladder.verdicts if (one.gate, one.state) != ("G8", "pass")))
        verdicts = {(one.gate, one.recipe): one for one in ladder.verdicts}
    if any(one.gate == "G8" and one.state == "pass" for one in verdicts.values()):
        # The plain installation, which verifies, lacks NumPy.
        from sparkwright.release.decide import speeds

        speeds.check(measured, result, policy)
    rule = policy.forks.get(wheel.fork)
    lacking = [Missing("policy", "not-run", "fork-unknown", f"there is no rule for {wheel.fork}")]
    shown: tuple[str, ...] = ()
    if rule:
        gates, shown = _gates(inspected, rule, verdicts, measured, result, policy)
        lacking = [*gates, *_wheel(inspected, rule), *_companion(inspected, rule, served)]
    states = ladder.states if ladder else {}
    return Proved(
        wheel=wheel.sha256, policy=policy.digest, missing=tuple(sorted(lacking, key=lambda one: (one.gate, one.reference))),
        gates=tuple(_shown(verdicts, name, states.get(name)) for name in GATES if name in states or (rule and name in rule.gates)),
        recipes=shown, speeds=speeds_of(result) if result else (), baseline=_named(result.baseline) if result and result.baseline else "",
        margin=result.margin if result else None, host={line(name): line(value) for name, value in (ladder.host if ladder else {}).items()},
    )  # fmt: skip


def _named(baseline: Subject) -> str:
    """Return what a baseline is called, with the beginning of its wheel's sha256 where it was a wheel: labels alone say nothing."""
    return line(f"{baseline.label} ({baseline.sha256[:16]})" if baseline.sha256 else baseline.label)


def decide_all(inspected: Sequence[Inspected], judged: Mapping[str, Judged], policy: ReleasePolicy) -> tuple[Proved, ...]:
    """
    Return what is proved of each wheel of one release.

    Args:
        judged: File name of a wheel → what lies beside it.
    """
    none = Judged()
    ladders: dict[tuple[str, str], Ladder | None] = {
        (one.wheel.fork, one.wheel.machine): judged.get(one.wheel.filename, none).ladder for one in inspected
    }

    def served(one: Inspected) -> Ladder | None:
        rule = policy.forks.get(one.wheel.fork)
        return _serving(rule.served_by, one.wheel.machine, ladders) if rule and rule.served_by else None

    found = ((one, judged.get(one.wheel.filename, none)) for one in inspected)
    return tuple(decide(one, said.ladder, said.result, policy, served=served(one)) for one, said in found)


def _serving(fork: str, machine: str, ladders: Mapping[tuple[str, str], Ladder | None]) -> Ladder | None:
    """Return the ladder of the wheel of *fork* for *machine*; of a wheel for any machine, that of the only one there is."""
    own = ladders.get((fork, machine))
    others = [one for (name, _), one in ladders.items() if name == fork]
    return own or (others[0] if machine == "any" and len(others) == 1 else None)


def _gates(
    inspected: Inspected, rule: ForkRule, verdicts: Mapping[tuple[str, str], Verdict], measured: Verdict | None, result: Result | None,
    policy: ReleasePolicy,
) -> tuple[list[Missing], tuple[str, ...]]:  # fmt: skip
    """
    Return what the gates of *rule* lack, and the recipes of the policy that they lack nothing for.

    Of each group of recipes one has to be shown; what is missing is that of the recipe that lacks least. G8 counts for any of them.
    """

    def lacks(names: Iterable[str], recipe: str = "") -> list[Missing]:
        return [one for name in names for one in _lacks(inspected, name, verdicts.get((name, recipe)), recipe, policy)]

    lacking = lacks(name for name in rule.gates if name not in SERVED)
    served = [name for name in rule.gates if name in SERVED and name != "G8"]
    groups = policy.recipes if served else {}
    by_recipe = {recipe: lacks(served, recipe) for group in groups.values() for recipe in group}
    for group in groups.values():
        least: list[Missing] = min((by_recipe[recipe] for recipe in group), key=len)
        lacking += least
    if "G8" in rule.gates:
        # A pass counts with its measurement alone, and a wheel has one: that of the last recipe.
        compared = [one for (gate, _), one in verdicts.items() if gate == "G8"]
        compared = [measured, *(one for one in compared if one.state != "pass")] if measured else compared
        counts = next((one for one in compared if one.recipe in by_recipe), None)
        lacking += _lacks(inspected, "G8", counts, counts.recipe if counts else "", policy)
        from sparkwright.release.decide import speeds

        lacking += speeds.missing(result, policy) if counts and counts.state == "pass" and result else ()
    worse = (one for one in verdicts.values() if one.gate in rule.gates and one.state in ("fail", "invalid"))
    lacking += [Missing(one.gate, one.state, *_why(one)) for one in worse]
    return list(dict.fromkeys(lacking)), tuple(recipe for recipe, one in by_recipe.items() if not one)


def _lacks(inspected: Inspected, name: str, verdict: Verdict | None, recipe: str, policy: ReleasePolicy) -> Iterator[Missing]:
    if verdict is None:
        says = f"nobody ran {name} with these bytes{f' and the recipe {recipe}' if recipe else ''}: {GATES[name]}"
        yield Missing(name, "not-run", "not-climbed", line(says))
    elif verdict.state != "pass":
        yield Missing(name, verdict.state, *_why(verdict))
    else:
        yield from _sound(inspected, verdict, policy)


def _sound(inspected: Inspected, verdict: Verdict, policy: ReleasePolicy) -> Iterator[Missing]:
    """Yield why the pass *verdict* is none of what is asked for."""
    asked = policy.judged_by(verdict.gate, inspected.stack, verdict.recipe)
    if asked and verdict.policy != asked:
        says = f"judged by policy {verdict.policy[:16] or 'none'}, asked for: {asked[:16]}"
        yield Missing(verdict.gate, "invalid", "policy-other", line(says))
    made = {one.name for one in verdict.checks if one.required}
    if lacking := [name for name in policy.gates[verdict.gate].wanted if name not in made]:
        yield Missing(verdict.gate, "invalid", "checks-other", line(f"it did not make {', '.join(lacking)}"))
    if policy.gates[verdict.gate].gpu:
        gpu, machine = verdict.host.get("gpu", "none"), verdict.host.get("architecture", "")
        if f"(SM {policy.gpu})" not in gpu or inspected.wheel.machine not in ("any", machine):
            says = f"climbed on {gpu} ({machine or 'unknown'}), asked for: SM {policy.gpu} ({inspected.wheel.machine})"
            yield Missing(verdict.gate, "invalid", "machine-other", line(says))


def _wheel(inspected: Inspected, rule: ForkRule) -> Iterator[Missing]:
    """Yield what the wheel itself lacks."""
    if rule.record and not inspected.fork.resolved:
        yield Missing("source", "not-run", "source-unresolved", line(f"{inspected.fork.origin}: pinned by {inspected.fork.pin} only"))
    if rule.sbom and not inspected.sbom:
        yield Missing("sbom", "not-run", "sbom-missing", "the wheel holds no SBOM")
    if rule.isolated and inspected.isolated is not True:
        yield Missing("isolation", "not-run", "not-isolated", "what was compiled could have used the network")


def _companion(inspected: Inspected, rule: ForkRule, served: Ladder | None) -> Iterator[Missing]:
    """Yield why the gates of the wheel that serves say nothing of this one."""
    if not rule.served_by:
        return
    project, by = inspected.wheel.project, rule.served_by
    found = served.host.get(f"content {project}", "") if served and served.wheel else ""
    if not found:
        yield Missing("set", "not-run", "companion-unbound", f"no ladder of {by} says that it ran with this build of {project}")
    elif found != inspected.wheel.content:
        yield Missing("set", "invalid", "companion-other", f"the ladder of {by} was climbed with another build of {project}")


def _why(verdict: Verdict) -> tuple[str, str]:
    """Return reference and reason of the check that makes *verdict* no pass."""
    checks = [one for one in verdict.checks if one.required and one.state != "pass"]
    worst = min(checks, key=lambda one: ORDER.index(one.state), default=None)
    if worst is None:
        return "not-climbed", f"{verdict.gate} made no check that it depends on"
    return line(worst.reason), line(f"{worst.name}: {worst.message}")


def _shown(verdicts: Mapping[tuple[str, str], Verdict], name: str, state: State | None) -> Gate:
    if state is None:
        return Gate(name, GATES[name], "not-run", "nobody climbed it")
    shown = next(one for (gate, _), one in verdicts.items() if gate == name and one.state == state)
    return Gate(name, GATES[name], state, "" if state == "pass" else _why(shown)[1])
