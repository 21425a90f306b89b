"""The decision: verified exactly where everything is shown, never better for a worse verdict, no pass without what is behind it, and requests that are refused in seconds."""

import dataclasses
import fnmatch
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from tests.refusals import outcome, refusal
from tests.support import publisher, verdicts as made, wheels

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.results import Result
from sparkwright.cli import main, options
from sparkwright.client.records import Proof, Release
from sparkwright.core.states import State
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.gates import throughput
from sparkwright.gates.core import policy as gate_policy
from sparkwright.gates.core.ladder import GATES, SERVED, TRANSIENT, verdict_digest
from sparkwright.gates.core.verdict import (
    ORDER,
    Attempt,
    Check,
    Ladder,
    Verdict,
    declarations,
    not_run,
)
from sparkwright.release import decision, policy, request, wheel_facts


class Case(NamedTuple):
    """A wheel of vLLM with everything that it needs, and a companion of it."""

    served: wheel_facts.WheelFacts
    ladder: Ladder
    result: Result
    companion: wheel_facts.WheelFacts
    audited: Ladder


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a release whose every gate passes."""
    paths = wheels.release(tmp_path_factory.mktemp("release"), judged=False)
    _, companion, served = wheel_facts.read_all(paths)
    ladder = made.ladder(paths[2], companions=paths[:2])
    return Case(served, ladder, made.result(paths[2]), companion, made.ladder(paths[1]))


def decided(
    case: Case, ladder: Ladder | None = None, result: Result | None = None, **changed: Any
) -> Proof:
    """Decide about the case's wheel, with something changed."""
    wheel, rules = changed.pop("wheel", case.served), changed.pop("rules", made.release_policy())
    return decision.decide(
        wheel, decision.GateResults(ladder or case.ladder, result or case.result), rules, **changed
    )


def lacking(proved: Proof) -> list[tuple[str, str]]:
    """Return gate and reference of what is missing."""
    return [(one.gate, one.reference) for one in proved.missing]


def with_gate(ladder: Ladder, name: str, change: Callable[[Verdict], Verdict]) -> Ladder:
    """Return *ladder* with one verdict changed."""
    return replace(
        ladder, verdicts=tuple(change(one) if one.gate == name else one for one in ladder.verdicts)
    )


def test_everything_shown_is_verified(case: Case) -> None:
    """A wheel whose every gate passes on a Spark lacks nothing, and its proof says so, with the speeds against the stock wheel."""
    proved = decided(case)
    assert (proved.missing, proved.recipes) == ((), (made.RECIPE,))
    assert [(one.name, one.state) for one in proved.gates] == [(name, "pass") for name in GATES]
    assert proved.baseline == f"stock vLLM 0.33.0 ({wheels.hexed('base', '0.33.0')[:16]})"
    deciding = [one for one in proved.speeds if one.state == "pass"]
    assert len(deciding) == 4
    assert all(one.low < one.ratio < one.high for one in deciding)  # type: ignore[operator]


def worse(case: Case, states: Mapping[str, State | None]) -> Ladder:
    """Return the ladder with those states; None for a gate that nobody climbed."""

    def edit(verdict: Verdict) -> Verdict:
        state = states.get(verdict.gate, "pass")
        if state in ("pass", None):
            return verdict
        first = verdict.checks[0]
        return replace(
            verdict,
            checks=(Check(first.name, state, "made worse", "made-up"), *verdict.checks[1:]),
        )

    climbed = tuple(
        edit(one) for one in case.ladder.verdicts if states.get(one.gate, "pass") is not None
    )
    return replace(case.ladder, verdicts=climbed)


STATES = st.dictionaries(st.sampled_from(list(GATES)), st.sampled_from([*ORDER, None]))


@settings(max_examples=50)
@given(states=STATES)
def test_verified_exactly_where_every_gate_passes(
    case: Case, states: dict[str, State | None]
) -> None:
    """What is missing are the gates that do not pass, each with its state and reason; and nothing is where all do."""
    proved = decided(case, worse(case, states))
    expected = {gate: state or "not-run" for gate, state in states.items() if state != "pass"}
    assert {one.gate: one.state for one in proved.missing} == expected
    assert all(one.says and one.reference for one in proved.missing)
    assert {one.name: one.state for one in proved.gates} == {
        gate: expected.get(gate, "pass") for gate in GATES
    }


REFUSED: dict[str, Callable[[Case], dict[str, Any]]] = {
    "two verdicts of one gate": lambda case: {
        "ladder": replace(case.ladder, verdicts=(*case.ladder.verdicts, case.ladder.verdicts[0]))
    },
    "verdicts of another wheel": lambda case: {"ladder": case.audited},
    "one verdict of another wheel": lambda case: {
        "ladder": with_gate(case.ladder, "G3", lambda one: replace(one, wheel="ab" * 32))
    },
    "verdicts of no wheel": lambda case: {"ladder": replace(case.ladder, wheel=None)},
    "verdicts of another stack": lambda case: {"ladder": replace(case.ladder, stack="2026.05")},
    "throughput of another wheel": lambda case: {
        "result": replace(case.result, candidate=replace(case.result.candidate, sha256="12" * 32)),
    },
    "throughput of no wheel": lambda case: {
        "result": replace(case.result, candidate=replace(case.result.candidate, sha256=""))
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_judged_elsewhere_or_twice_is_refused(case: Case, name: str) -> None:
    """Verdicts and measurements about something else are refused, not passed over."""
    with refusal("verdict-hollow" if "two" in name else "verdict-foreign") as caught:
        decided(case, **REFUSED[name](case))
    assert caught.value.details


@pytest.mark.parametrize("informs", [False, True])
def test_each_check_that_a_pass_rests_on(case: Case, informs: bool) -> None:
    """Without any of the checks that the policy names, a pass is hollow; so it is when they only inform."""

    def hollow(verdict: Verdict, pattern: str) -> Verdict:
        rest = [one for one in verdict.checks if not fnmatch.fnmatchcase(one.name, pattern)]
        others = [replace(one, required=False) for one in verdict.checks if one not in rest]
        return replace(verdict, checks=(*rest, *(others if informs else ())))

    for gate, rule in made.release_policy().file.gates.items():
        for change in (functools.partial(hollow, pattern=pattern) for pattern in rule.checks):
            with refusal("verdict-hollow"):
                decided(case, with_gate(case.ladder, gate, change))


def test_each_check_that_measures(case: Case) -> None:
    """A pass of a check that measures, without a figure or a sample, is hollow."""
    for verdict in case.ladder.verdicts:
        for check in (check for check in verdict.checks if check.state == "pass"):
            if any(one.measured for one in declarations(gate_policy.declared(verdict.gate), check.name)):
                checks = tuple(replace(each, figures=(), samples=()) if each == check else each for each in verdict.checks)
                verdicts = tuple(replace(each, checks=checks) if each == verdict else each for each in case.ladder.verdicts)
                with refusal("verdict-hollow", match="has no evidence"):
                    decided(case, replace(case.ladder, verdicts=verdicts))


def test_a_pass_of_g8_without_its_measurement(case: Case) -> None:
    """A pass of G8 without throughput.json, or with one that says something else, is hollow; a verdict that is worse needs none."""
    for result in (None, replace(case.result, state="inconclusive")):
        with refusal("verdict-hollow", match="no measurement"):
            decision.decide(case.served, decision.GateResults(case.ladder, result), made.release_policy())
    ladder = worse(case, {"G8": "inconclusive"})
    assert lacking(decision.decide(case.served, decision.GateResults(ladder), made.release_policy())) == [
        ("G8", "made-up")
    ]


@pytest.mark.parametrize("state", ["pass", "inconclusive"])
def test_a_second_recipe_leaves_the_pass_of_g8_of_the_first(
    case: Case, tmp_path: Path, state: State
) -> None:
    """Each has its own file of measurements; that of a pass, and of a recipe that the policy names, is published."""
    store, path = Store(tmp_path / "store"), tmp_path / case.served.path.name
    toy, checks = for_recipe(case, TOY)[-1], (Check("tpot", "inconclusive", "noise", "undecided"),)
    results = (case.result, replace(case.result, recipe=TOY, state=state))
    files = [throughput.write_result(store, tmp_path, each) for each in results]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    first = replace(case.ladder.verdicts[-1], evidence=digests[0])
    second = replace(toy, evidence=digests[1], checks=toy.checks if state == "pass" else checks)
    made.write(path, replace(case.ladder, verdicts=(*case.ladder.verdicts[:-1], first, second)))
    found = decision.read_results(path, recipes=[made.RECIPE])
    assert found.files["throughput"] == files[0].read_bytes()
    assert lacking(decision.decide(case.served, found, made.release_policy())) == []


def test_a_pass_of_g8_of_another_recipe_than_the_measurement_does_not_count(case: Case) -> None:
    """
    The only file beside the wheel is of a recipe that no group names: another pass has no measurement, whether that one passed or not.
    """
    toy = for_recipe(case, TOY)[-1]
    undecided = replace(toy, checks=(Check("tpot", "inconclusive", "noise", "undecided"),))
    both, later = (
        replace(case.ladder, verdicts=(*case.ladder.verdicts, one)) for one in (toy, undecided)
    )
    assert lacking(decided(case, both)) == []
    assert lacking(decided(case, both, replace(case.result, recipe=TOY))) == [("G8", "not-climbed")]
    proved = decided(case, later, replace(case.result, recipe=TOY, state="inconclusive"))
    assert lacking(proved) == [("G8", "not-climbed")]
    assert [one.state for one in proved.gates if one.name == "G8"] == ["inconclusive"]


LACKS: dict[str, tuple[Callable[[Case], dict[str, Any]], list[tuple[str, str]]]] = {
    "an unresolved source": (
        lambda case: {"wheel": replace(case.served, source=replace(case.served.source, resolved=False))}, [("source", "source-unresolved")]
    ),
    "no SBOM": (lambda case: {"wheel": replace(case.served, sbom=b"")}, [("sbom", "sbom-missing")]),
    "a build with a network": (lambda case: {"wheel": replace(case.served, wheel=replace(case.served.wheel, isolated=False))}, [("isolation", "not-isolated")]),
    "another policy of a gate": (
        lambda case: {"ladder": with_gate(case.ladder, "G4", lambda one: replace(one, policy="12" * 32))}, [("G4", "policy-other")]
    ),
    "another GPU": (
        lambda case: {"ladder": with_gate(case.ladder, "G5", lambda one: replace(one, host={**one.host, "gpu": "NVIDIA H100 (SM 9.0)"}))},
        [("G5", "machine-other")],
    ),
    "another machine": (
        lambda case: {"ladder": with_gate(case.ladder, "G7", lambda one: replace(one, host={**one.host, "architecture": "riscv64"}))},
        [("G7", "machine-other")],
    ),
    "a gate without a GPU elsewhere": (
        lambda case: {"ladder": with_gate(case.ladder, "G1", lambda one: replace(one, host={"gpu": "none"}))}, []
    ),
    "another task": (
        lambda case: {"ladder": with_gate(case.ladder, "G6", lambda one: replace(one, checks=tuple(
            replace(each, name=each.name.replace("gsm8k", "largest")) for each in one.checks)))},
        [("G6", "checks-other")],
    ),
    "a fork without a rule": (
        lambda case: {"wheel": replace(case.served, source=replace(case.served.source, name="other"))}, [("policy", "fork-unknown")]
    ),
    "another policy of the throughput": (
        lambda case: {"ladder": with_gate(case.ladder, "G8", lambda one: replace(one, policy="12" * 32))}, [("G8", "policy-other")]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), LACKS.values(), ids=LACKS)
def test_what_else_is_missing(case: Case, change: Callable[[Case], dict[str, Any]], expected: list[tuple[str, str]]) -> None:
    """Each further thing that the policy asks for is missing by its own reference where it is not shown."""
    assert lacking(decided(case, **change(case))) == expected


def test_a_slower_wheel_lacks_g8(case: Case) -> None:
    result = made.result(case.served.path, slower=0.05)
    wheel = (one for one in case.ladder.verdicts[-1].checks if one.name.endswith("-wheel"))
    ladder = with_gate(case.ladder, "G8", lambda one: replace(one, checks=(*throughput.checks(result), *wheel)))
    assert lacking(decided(case, ladder, result)) == [("G8", "slower")]


def test_a_baseline_that_is_not_the_official_wheel_is_named(case: Case) -> None:
    """Speeds against another build show nothing about the stock wheel, unless the policy says why that is enough."""
    assert case.result.baseline
    result = replace(case.result, baseline=replace(case.result.baseline, sha256=wheels.hexed("other")))
    assert lacking(decided(case, result=result)) == [("G8", "baseline-other")]
    rules = made.release_policy()
    trimmed = replace(rules, file=replace(rules.file, other_baseline="it is trimmed"))
    assert lacking(decided(case, result=result, rules=trimmed)) == []


def test_a_companion_is_bound_to_the_ladder_of_what_serves(case: Case) -> None:
    """FlashInfer is verified by its own audit, and where vLLM's ladder was climbed with this very build of it."""

    def lacks(serving: Ladder | None) -> list[tuple[str, str]]:
        results = decision.GateResults(case.audited)
        return lacking(decision.decide(case.companion, results, made.release_policy(), serving))

    def served(content: str) -> Ladder:
        verdicts = (
            replace(one, host={**one.host, "content flashinfer-python": content})
            for one in case.ladder.verdicts
        )
        return replace(case.ladder, verdicts=tuple(verdicts))

    assert lacks(case.ladder) == []
    assert lacks(None) == lacks(served("")) == [("set", "companion-unbound")]
    assert lacks(served("12" * 32)) == [("set", "companion-other")]


OTHER, TOY = "qwen3-30b-a3b-nvfp4", "toy-cpu"


def for_recipe(case: Case, name: str, states: tuple[tuple[str, State], ...] = ()) -> list[Verdict]:
    """Return the verdicts of the served gates as those of the recipe *name*, some of them no pass."""
    changed = dict(states)
    own = [one for one in case.ladder.verdicts if one.gate in SERVED]
    policies = made.release_policy()
    own = [
        replace(
            one,
            recipe=name,
            policy=policies.expected_digest(one.gate, wheels.STACK, name) or one.policy,
        )
        for one in own
    ]
    return [replace(one, checks=(Check(one.checks[0].name, changed[one.gate], "made up", "made-up"), *one.checks[1:]))
            if one.gate in changed else one for one in own]  # fmt: skip


def test_verified_names_the_recipes_that_it_was_shown_for(case: Case) -> None:
    """Of each group one recipe has to pass; a further one may be undecided, and must not fail; a recipe of no group shows nothing."""
    rest = [one for one in case.ladder.verdicts if one.gate not in SERVED]
    own = [one for one in case.ladder.verdicts if one.gate in SERVED]

    whole = made.release_policy()
    groups = {"fp4-moe": (made.RECIPE, OTHER), "speculative": (made.RECIPE,)}
    rules = replace(whole, file=replace(whole.file, recipes=groups))

    def shown(*served: Verdict) -> Proof:
        return decided(case, replace(case.ladder, verdicts=(*rest, *served)), rules=rules)

    undecided = shown(*own, *for_recipe(case, OTHER, (("G5", "inconclusive"),))[:5])
    assert (undecided.recipes, undecided.missing) == ((made.RECIPE,), ())
    assert lacking(shown(*own, *for_recipe(case, OTHER, (("G4", "fail"),))[:5])) == [
        ("G4", "made-up")
    ]
    # The other recipe has FP4 experts and drafts nothing: what lacks is the speculative one, of which the throughput is there.
    partly = shown(*for_recipe(case, OTHER)[:5], own[-1])
    assert partly.recipes == (OTHER,)
    assert lacking(partly) == [(gate, "not-climbed") for gate in SERVED[:-1]]
    only_toy = replace(case.ladder, verdicts=(*rest, *for_recipe(case, TOY)))
    proved = decided(case, only_toy, replace(case.result, recipe=TOY))
    assert lacking(proved) == [(gate, "not-climbed") for gate in SERVED]
    # A pass that is none, of a recipe that the policy does not name, proves nothing and stops nothing.
    short = [replace(one, checks=one.checks[:1]) for one in for_recipe(case, TOY)[:5]]
    assert not lacking(decided(case, replace(case.ladder, verdicts=(*case.ladder.verdicts, *short))))


BESIDE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an HTML page": (lambda _: b"<!DOCTYPE html><title>Log in</title>", "evidence-invalid"),
    "nothing": (lambda _: b"", "evidence-invalid"),
    "cut off": (lambda data: data[: len(data) // 2], "evidence-invalid"),
    "another kind": (lambda _: b'{"kind": "gate"}', "evidence-invalid"),
    "not UTF-8": (lambda data: data.replace(b"GB10", b"\xff\xff10"), "evidence-invalid"),
    "nested without end": (lambda _: b'{"a":' * 100_000, "evidence-invalid"),
    "a gate that says another state than its checks": (
        lambda data: data.replace(b'\n   "state": "pass"', b'\n   "state": "fail"', 1), "verdict-hollow",
    ),
    "a state that does not follow": (lambda data: data.replace(b'\n "state": "pass"', b'\n "state": "fail"'), "verdict-hollow"),
    "another format": (lambda data: data.replace(b'"format": 2', b'"format": 9'), "verdict-hollow"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "kind"), BESIDE.values(), ids=BESIDE)
def test_files_that_are_no_verdicts(case: Case, tmp_path: Path, edit: Callable[[bytes], bytes], kind: str) -> None:
    """What lies beside a wheel and is not what a gate writes, or does not agree with itself, is refused."""
    path = tmp_path / case.served.path.name
    file = made.write(path, case.ladder)
    before = file.read_bytes()
    file.write_bytes(edit(before))
    assert file.read_bytes() != before
    with refusal(kind):
        decision.read_results(path)


#: What a careless hand does to a document and its log, whose digest is computed again.
FORGERIES: dict[str, Callable[[Ladder, list[bytes]], tuple[Ladder, list[bytes]]]] = {
    "a better verdict": lambda ladder, lines: (replace(ladder, verdicts=(better(ladder.verdicts[0]), *ladder.verdicts[1:])), lines),
    "a better verdict, named by its attempt": lambda ladder, lines: (agreeing(ladder, better(ladder.verdicts[0])), lines),
    "2099": lambda ladder, lines: written(made.logged(replace(ladder, attempts=(), verdicts=(later(ladder.verdicts[0]), *ladder.verdicts[1:])))),
    "the first lines of the log": lambda ladder, lines: (ladder, lines[2:]),
    "the first attempt, in both": lambda ladder, lines: (replace(ladder, attempts=ladder.attempts[2:]), lines[2:]),
    "an attempt in the middle, in both": lambda ladder, lines: (
        replace(ladder, attempts=(*ladder.attempts[:2], *ladder.attempts[4:])), [*lines[:2], *lines[4:]],
    ),
    "the last attempt, in the document": lambda ladder, lines: (replace(ladder, attempts=ladder.attempts[:-2]), lines),
    "all attempts, in the document": lambda ladder, lines: (replace(ladder, attempts=()), lines),
    "no log": lambda ladder, lines: (ladder, []),
}  # fmt: skip


def better(verdict: Verdict) -> Verdict:
    """Return *verdict* with figures that look better."""
    return replace(verdict, seconds=1.0)


def later(verdict: Verdict) -> Verdict:
    """Return *verdict* as of 2099."""
    return replace(verdict, began=4_070_908_800.0)


def agreeing(ladder: Ladder, verdict: Verdict) -> Ladder:
    """Return *ladder* with *verdict* in the place of the first, and its digest in the attempt that ended with it."""
    begun, ended, *rest = ladder.attempts
    ended = replace(ended, verdict=verdict_digest(verdict))
    return replace(ladder, verdicts=(verdict, *ladder.verdicts[1:]), attempts=(begun, ended, *rest))


def written(ladder: Ladder) -> tuple[Ladder, list[bytes]]:
    """Return *ladder* and the lines of its log."""
    return ladder, msgspec.json.Encoder().encode_lines(ladder.attempts).splitlines(keepends=True)


@pytest.mark.parametrize("forgery", ["none", *FORGERIES])
def test_verdicts_that_are_not_those_of_the_attempt_log_are_refused(case: Case, tmp_path: Path, forgery: str) -> None:
    """Document and log are written as the gates do, and then one or both are changed, with a digest that fits."""
    path = tmp_path / case.served.path.name
    ladder, lines = written(made.logged(case.ladder))
    if forgery != "none":
        ladder, lines = FORGERIES[forgery](ladder, lines)
    made.write(path, case.ladder).with_name(f"{path.name.removesuffix('.whl')}.attempts.jsonl").write_bytes(b"".join(lines))
    with outcome("" if forgery == "none" else "verdict-unlogged", match="attempt log"):
        decision.require_logged(path, None, ladder)


#: Ends of the attempts at G4 before the pass → whether the pass counts.
TRIES: dict[tuple[State | None, ...], bool] = {
    (): True, ("fail", "fail"): True, ("fail", "fail", "fail"): False, ("fail", "inconclusive", None): False,
    ("invalid", "not-run", "invalid", "fail"): True, ("pass", "pass", "pass", "pass"): True,
}  # fmt: skip


@pytest.mark.parametrize("tries", TRIES, ids=str)
def test_pass_after_too_many_attempts_is_none(case: Case, tries: tuple[State | None, ...]) -> None:
    """Failed, undecided and interrupted attempts count, of this gate and recipe alone; the proof shows them all."""
    ladder = made.logged(case.ladder)
    earlier = [
        Attempt(1, case.served.wheel.sha256, "G4", recipe, float(number), state)
        for recipe, ends in ((made.RECIPE, tries), ("another", ("fail",) * 5))
        for number, end in enumerate(ends)
        for state in ({None, end} if end else {None})
    ]
    ladder = replace(ladder, attempts=(*sorted(earlier, key=lambda line: line.order), *ladder.attempts))
    proved = decided(case, ladder)
    assert (("G4", "attempts-many") not in {(lack.gate, lack.reference) for lack in proved.missing}) == TRIES[tries]
    [shown] = [gate.attempts for gate in proved.gates if gate.name == "G4"]
    ends = ", ".join([end or "interrupted" for end in tries] + ["pass"])
    assert f"{made.RECIPE} {ends}" in shown


def test_files_elsewhere(case: Case, tmp_path: Path) -> None:
    """Verdicts may lie in a folder of their own; where there are none, there are none."""
    path = case.served.path
    assert decision.read_results(path) == decision.GateResults()
    made.write(tmp_path / path.name, case.ladder)
    made.write_result(tmp_path / path.name, case.result)
    found = decision.read_results(path, tmp_path)
    assert (found.ladder, found.throughput) == (made.logged(case.ladder), case.result)
    others = ((replace(case.result, began=1.0), "verdict-hollow"), (replace(case.result, format=9), "evidence-invalid"))
    for other, reference in others:
        made.write_result(tmp_path / path.name, other)
        with refusal(reference):
            decision.read_results(path, tmp_path)


def test_the_policy_of_the_repository() -> None:
    """ci/release.yaml asks for the whole ladder of what serves, and its digest follows the policies of the gates."""
    rules = policy.load(wheels.ROOT)
    assert rules.file.forks["vllm"].gates == tuple(GATES)
    groups = {
        group: [recipes.load(wheels.ROOT, name) for name in names]
        for group, names in rules.file.recipes.items()
    }
    for recipe in groups["fp4-moe"]:
        assert "FP4" in recipe.model.quantization
        assert "weight-only" not in recipe.contract.serves["moe"]
    assert all(recipe.speculation for recipe in groups["speculative"])
    # Without a floor of the task G6 refuses the recipe at the start.
    wanted = rules.file.gates["G6"].wanted
    tasks = {name.removesuffix("-floor") for name in wanted if name.endswith("-floor")}
    assert all(tasks <= set(recipe.floors) for group in groups.values() for recipe in group)
    other = replace(rules, digests={**rules.digests, f"G4 {made.RECIPE}": "0" * 64})
    assert other.digest != rules.digest


@pytest.mark.parametrize("gate", GATES)
def test_the_policy_names_checks_that_the_gate_emits(gate: str) -> None:
    """
    Every check that a pass rests on is one that the gate's own code can make and pass, and every check that a gate declares
    is required or stands among those that need not be there.
    """
    rule = made.release_policy().file.gates[gate]
    # With the names that the repository's own converters, recipes and tasks give to the declared patterns.
    given = {
        name: one
        for one in gate_policy.declared(gate)
        if one.role == "decides"
        for name in made.names(gate, one.name)
    }
    named = (*rule.checks, *rule.wanted, *rule.optional)
    assert [pattern for pattern in named if not fnmatch.filter(given, pattern)] == []
    assert [
        name for name in given if not any(fnmatch.fnmatchcase(name, pattern) for pattern in named)
    ] == []


@pytest.mark.parametrize(
    ("reference", "old", "new", "says"),
    [
        ("policy-unknown-check", "gpu, cubins, fp4", "gpu, kernels, fp4", "G2: kernels"),
        (
            "policy-unknown-check",
            '"*-answers", "*-paired"',
            '"*-answers", "*-pairs"',
            "G6: *-pairs",
        ),
        ("policy-unknown-check", "gsm8k-floor]", "gsm8k-ceiling]", "G6: gsm8k-ceiling"),
        ("policy-unknown-check", "[observed, ", "[seen, ", "G3: seen"),
        ("policy-unknown-check", 'optional: ["tpot-*",', 'optional: ["itl-*",', "G8: itl-*"),
        ("file-invalid", 'url: ""', 'url: "http://example.org/"', "$.url"),
        ("file-invalid", "gates: [G0, G1,", "gates: [G0, G9,", "no gate G9"),
        ("file-invalid", "served_by: vllm", "served_by: wllm", "no fork wllm"),
        ("file-invalid", 'requires: ["ray>=2.60"]', 'requires: ["--index-url=https://x/"]', "$.sets"),
        ("file-invalid", 'requires: ["ray>=2.60"]', 'requires: ["ray @ https://x/"]', "names no version"),
        ("file-invalid", "days: 30", "days: 0", "days"),
        ("file-invalid", 'root: ""', 'root: "abc"', "root"),
        ("file-invalid", "threshold: 1}", "threshold: 0}", "threshold"),
        ("file-invalid", "retain: 12", "retains: 12", "retains"),
        ("file-invalid", "recipes:\n  fp4-moe: [", "recipes: {}\nsets: {}\nx: [", "x"),
        ("usage", "  fp4-moe: [", "  fp4-moe: [no-such-recipe, ", "no-such-recipe"),
        ("file-invalid", "retain: 12", "retain: 12\ndigests: {G1: abc}", "digests"),
    ],
)
def test_a_policy_with_a_fault_is_refused(
    tmp_path: Path, reference: str, old: str, new: str, says: str
) -> None:
    """A name that no gate declares, or one that never passes, would keep every wheel from being verified."""
    text = (wheels.ROOT / "ci" / "release.yaml").read_text()
    assert old in text
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "release.yaml").write_text(text.replace(old, new, 1))
    with refusal(reference, says=says):
        policy.load(tmp_path)


# The policy of SM 9.0 and that of the Spark: neither takes the wheels, indexes or verdicts of the other.

#: Evidence of the rehearsal: what `gate` wrote on an H100, and the signed record of the release.
REHEARSAL = wheels.ROOT / "docs" / "rehearsal"


def test_wheels_and_indexes_of_another_gpu_are_refused(
    owner: publisher.IndexOwner, new: list[Path], tmp_path: Path
) -> None:
    """A Spark's wheel does not pass the policy of SM 9.0, not even as a candidate; an index stays with its GPU."""
    rules = owner.publisher().policy
    other = dataclasses.replace(
        owner.publisher(), policy=replace(rules, file=replace(rules.file, gpu="9.0"))
    )
    with refusal("release-gpu-foreign", match=r"SM 9\.0"):
        other.promote("2026.11.1", tmp_path)
    other = dataclasses.replace(other, folder=tmp_path / "new")
    with refusal("release-gpu-foreign"):
        other.publish(new, "candidate", url=owner.url)
    assert not other.folder.exists()


def test_real_verdicts_of_an_h100_are_read_and_judged_by_the_policies_of_today() -> None:
    """They want more since 2026-11-29, so that another wheel has to climb for them; the SBOM lies in the index."""
    release = msgspec.json.decode((REHEARSAL / "release.json").read_bytes(), type=Release)
    wheel = next(wheel for wheel in release.wheels if wheel.fork == "vllm")
    source = next(fork for fork in release.forks if fork.name == "vllm")
    path = REHEARSAL / wheel.path
    facts = wheel_facts.WheelFacts(path=path, wheel=wheel, source=source, stack=release.stack)
    results = decision.read_results(facts.path, REHEARSAL)
    with refusal("verdict-hollow"):
        decision.decide(facts, results, policy.load(wheels.ROOT, "9.0a"))
    assert results.ladder
    assert {entry.gate for entry in results.ladder.verdicts} == {*GATES}


# A request to gate: what is refused in seconds, and when verdicts are still those of today.

#: One of each group of the repository's policy.
NAMES = made.RECIPES
SPARK = ("12.1",)


@pytest.fixture(name="context")
def _context(tmp_path: Path) -> RunContext:
    """Return this checkout with a store of its own."""
    words = ["--root", str(wheels.ROOT), "--cache-dir", str(tmp_path / "cache"), "--stack", "2026.11"]
    return options.checkout(main.parse(["gate", "--offline", *words]))


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> Path:
    """Return a folder of models, of which none is a recipe's."""
    for name in NAMES:
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path / "models"


def test_everything_that_is_missing_is_said_at_once(context: RunContext, models: Path) -> None:
    """Another GPU, a kernel's log that is hidden, a model that is not the recipe's, and none at all; of these a candidate is refused for the models alone."""
    with refusal("request-unfit") as caught:
        request.require(context, NAMES, "verified", gpus=("9.0",), kernel_log=False, models=models)
    said = "\n".join(caught.value.details)
    assert "(kernel-log-hidden)" in said
    assert "GPU of SM 12.1; the machine has 9.0 (machine-other)" in said
    assert said.count("(model-missing)") == len(NAMES)
    for folder in (models, models / "none"):
        with refusal("request-unfit", hides="machine-other") as caught:
            request.require(context, NAMES, "candidate", gpus=("9.0",), models=folder)
        assert "\n".join(caught.value.details).count("(model-missing)") == len(NAMES)
    asked = request.require(context, NAMES, "candidate", gpus=("9.0",))
    assert [entry.reference for entry in asked.missing] == ["machine-other"]
    assert request.require(context, (), "verified", gpus=SPARK).recipes == NAMES


def gated(models: Path) -> list[Verdict]:
    """Return a verdict of every gate and recipe by the policy of today; one of them could not be judged."""
    rules, verdicts = policy.load(wheels.ROOT), list[Verdict]()
    checks = (not_run("server", "no kernel was seen", "unseen"),)
    for gate in sorted(rules.file.required):
        # One recipe is enough for G8.
        for name in NAMES[gate == "G8" :] if gate >= "G3" else ("",):
            digest = rules.expected_digest(gate, "2026.11", name)
            model = model_digest(models / name) if name else ""
            verdicts.append(Verdict(gate, "", "0" * 64, digest, checks, name, host=dict(made.HOST), model=model))
    return verdicts


def test_a_night_is_settled_until_something_changes(context: RunContext, models: Path) -> None:
    """Not-run verdicts settle it, too, unless another night may end otherwise; a verdict less, another policy, a driver, or a model on the disk unsettle it. The audit has a machine of its own."""
    asked = request.require(context, NAMES, "verified", gpus=SPARK)
    rules, verdicts = policy.load(wheels.ROOT), gated(models)
    host = dict(made.HOST)
    assert request.settled(verdicts, asked, rules, host, models)
    for verdict in verdicts:
        rest = [other for other in verdicts if other is not verdict]
        elsewhere = replace(verdict, host={**made.HOST, "driver": "1"})
        assert not request.settled(rest, asked, rules, host, models), verdict.label
        counts = rules.file.gates[verdict.gate].gpu
        assert request.settled([*rest, elsewhere], asked, rules, host, models) is not counts, verdict.label
        if verdict.policy:
            assert not request.settled([*rest, replace(verdict, policy="1" * 64)], asked, rules, host, models), verdict.label
    for reason in TRANSIENT:
        short = replace(verdicts[-1], checks=(not_run("ladder", "no time, or no network", reason),))
        assert not request.settled([*verdicts[:-1], short], asked, rules, host, models)
    (models / NAMES[0] / "model.safetensors").write_bytes(b"new")
    assert not request.settled(verdicts, asked, rules, host, models)
