"""Verdicts and the ladder: how states combine, where it stops, and what its document promises."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.audit.report import AuditedWheel
from sparkwright.gates.core import ladder
from sparkwright.gates.core.ladder import GATES, Gate, Ladder, climb
from sparkwright.gates.core.policy import declared
from sparkwright.gates.core.verdict import (
    ORDER,
    Check,
    Figure,
    Sample,
    State,
    Verdict,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
    worst,
)

WHEEL = AuditedWheel("vllm-0.33.0-cp38-abi3-linux_aarch64.whl", "0" * 64, 1, "vllm", "0.33.0", ("linux_aarch64",))
MAKERS = {
    "pass": passed("one", "it holds"),
    "fail": failed("one", "it does not hold", "broken"),
    "invalid": invalid("one", "half of it is missing", "stream-truncated"),
    "inconclusive": inconclusive("one", "too few", "too-few"),
    "not-run": not_run("one", "no GPU is here", "gpu-missing"),
}
states = st.sampled_from(ORDER)
page = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gates_page.py"))))


def gate(name: str, *checks: Check) -> Gate:
    """Return a gate that gives *checks*, under the first name that it declares."""
    first = declared(name)[0].name.replace("*", "any")
    named = tuple(msgspec.structs.replace(check, name=first, figures=(Figure("looked at", 1),)) for check in checks)
    return Gate(name, "", lambda: named)


def states_of(made: Ladder) -> dict[str, str]:
    return {verdict.gate: verdict.state for verdict in made.verdicts}


@given(st.lists(states), st.lists(states))
def test_the_worst_state_wins(one: list[State], other: list[State]) -> None:
    """Combining in parts gives what combining at once gives, in any order, and nothing at all is not a pass."""
    assert worst([*one, *other]) == worst([*other, *one])
    assert worst([*one, worst([*one, *other])]) == worst([*one, *other])
    assert (worst(one) == "pass") == (bool(one) and set(one) == {"pass"})


@given(st.lists(st.tuples(states, st.booleans())))
def test_only_required_checks_decide(rows: list[tuple[State, bool]]) -> None:
    """A row that only informs changes nothing, and a verdict of such rows alone is not a pass."""
    checks = [msgspec.structs.replace(MAKERS[state], required=required) for state, required in rows]
    verdict = Verdict("G1", "", "", "", tuple(checks))

    assert verdict.state == worst(state for state, required in rows if required)


@pytest.mark.parametrize("state", ORDER)
def test_every_state_but_pass_names_its_reason(state: State) -> None:
    """A check cannot fail without a reference, nor pass with one."""
    with pytest.raises(ValueError, match="reason"):
        Check("one", state, "it is so", "" if state != "pass" else "reason")


def test_samples_are_few() -> None:
    """A sweep with millions of disagreements keeps twenty."""
    assert len(failed("sweep", "all differ", "differs", samples=[Sample(str(i)) for i in range(500)]).samples) == 20
    with pytest.raises(ValueError, match="samples"):
        Check("sweep", "fail", "all differ", "differs", samples=tuple(Sample(str(i)) for i in range(21)))


@pytest.mark.parametrize("state", ["fail", "invalid"])
def test_the_ladder_stops_at_the_first_failure(state: str) -> None:
    """What comes after is listed as not run, for that reason, and is not tried."""

    def never() -> tuple[Check, ...]:
        raise AssertionError("tried after a failure")

    made = climb([gate("G0", MAKERS["pass"]), gate("G1", MAKERS[state]), Gate("G2", "", never), Gate("G3", "", never)], stack="2026.11")

    assert states_of(made) == {"G0": "pass", "G1": state, "G2": "not-run", "G3": "not-run"}
    assert {check.reason for verdict in made.verdicts[2:] for check in verdict.checks} == {"earlier-failed"}
    assert made.state == state


@pytest.mark.parametrize("state", ["inconclusive", "not-run"])
def test_what_could_not_be_decided_stops_nothing_and_is_no_pass(state: str) -> None:
    """A gate without its machine lets the next be tried; the ladder as a whole is no pass."""
    made = climb([gate("G1", MAKERS["pass"]), gate("G2", MAKERS[state]), gate("G4", MAKERS["pass"])], stack="2026.11")

    assert states_of(made) == {"G1": "pass", "G2": state, "G4": "pass"}
    assert made.state == state


def test_going_on_does_not_make_it_better() -> None:
    """With keep_going later gates run, and the failure stays."""
    made = climb([gate("G0", MAKERS["fail"]), gate("G1", MAKERS["pass"])], stack="2026.11", keep_going=True)

    assert states_of(made) == {"G0": "fail", "G1": "pass"}
    assert made.state == "fail"


def test_what_was_measured_outlives_a_fault() -> None:
    """After each gate the verdicts so far are handed out, so that a crash in the next loses none."""
    kept: list[Ladder] = []

    def breaks() -> tuple[Check, ...]:
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError):
        climb([gate("G0", MAKERS["pass"]), Gate("G1", "", breaks)], stack="2026.11", wheel=WHEEL, keep=kept.append)

    assert [states_of(one) for one in kept] == [{"G0": "pass"}]


def test_complete_means_every_gate_about_a_wheel() -> None:
    """Neither a ladder of some gates nor one about no wheel is complete."""
    gates = [gate(name, MAKERS["pass"]) for name in GATES]

    assert climb(gates, stack="2026.11", wheel=WHEEL).complete
    assert not climb(gates[:-1], stack="2026.11", wheel=WHEEL).complete
    assert not climb(gates, stack="2026.11").complete


def test_every_verdict_is_bound_to_the_bytes() -> None:
    """The wheel's digest and its device code stand in each verdict, also in those that were not tried."""
    made = climb([gate("G0", MAKERS["fail"]), gate("G1")], stack="2026.11", wheel=WHEEL, device_code=lambda: "d" * 64)

    assert {verdict.wheel for verdict in made.verdicts} == {WHEEL.sha256}
    assert {verdict.device_code for verdict in made.verdicts} == {made.device_code} == {"d" * 64}


def example(checks: Sequence[Check] = tuple(MAKERS.values())) -> Ladder:
    return climb([gate("G0", MAKERS["pass"]), gate("G1", *checks)], stack="2026.11", wheel=WHEEL, host={"GPU": "none"})


def test_a_document_comes_back_as_it_was() -> None:
    """The JSON document holds the whole record."""
    made = example()

    assert ladder.read(json.dumps(ladder.document(made)).encode()) == made


@pytest.mark.parametrize(
    ("place", "value"),
    [(("state",), "pass"), (("complete",), True), (("verdicts", 1, "state"), "pass"), (("format",), 2)],
)
def test_a_document_that_says_more_than_its_checks_is_refused(place: tuple[str | int, ...], value: object) -> None:
    """Whoever edits the state of a verdict must edit the checks too, which the wheel's digest is bound to."""
    document = ladder.document(example())
    inner = document
    for step in place[:-1]:
        inner = inner[step]  # type: ignore[index]  # a list or a dict of JSON
    inner[place[-1]] = value  # type: ignore[index]  # as above

    with pytest.raises(ValueError, match=r"document|format"):
        ladder.read(json.dumps(document).encode())


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"format": 1}', "[" * 100_000])
def test_what_is_no_document_is_refused(text: str) -> None:
    """Anything else than verdicts is refused without harm."""
    with pytest.raises((ValueError, RecursionError)):
        ladder.read(text.encode())


def test_what_was_installed_beside_the_wheel_is_told_only_where_gates_agree() -> None:
    """Two runs with different companions prove nothing of either; gates that use no environment have no say."""

    def run(name: str, **host: str) -> Ladder:
        facts = {key.replace("_", " "): value for key, value in host.items()}
        return climb([gate(name, MAKERS["pass"])], stack="2026.11", wheel=WHEEL, host=facts)

    made = ladder.merged(run("G0", gpu="none"), run("G4", gpu="GB10", content_flashinfer="a"))
    assert made.host == {"gpu": "GB10", "content flashinfer": "a"}
    assert [one.host["gpu"] for one in made.verdicts] == ["none", "GB10"]
    assert ladder.merged(made, run("G5", gpu="GB10", content_flashinfer="a")).host["content flashinfer"] == "a"
    assert "content flashinfer" not in ladder.merged(made, run("G5", gpu="GB10", content_flashinfer="b")).host
    assert "content flashinfer" not in ladder.merged(made, run("G5", gpu="GB10")).host
    assert ladder.merged(made, run("G4", content_flashinfer="b")).host["content flashinfer"] == "b"


def test_a_gate_that_could_not_run_replaces_no_verdict() -> None:
    """A run on a machine without what the gate needs says nothing of an earlier pass."""
    passed = climb([gate("G2", MAKERS["pass"])], stack="2026.11", wheel=WHEEL)
    missing = climb([gate("G2", MAKERS["not-run"])], stack="2026.11", wheel=WHEEL)

    assert ladder.merged(passed, missing).verdicts == passed.verdicts
    assert ladder.merged(missing, passed).verdicts == passed.verdicts


def test_only_verdicts_of_the_same_wheel_and_stack_are_merged() -> None:
    """Verdicts about other bytes are never taken for this wheel's."""
    one = climb([gate("G0", MAKERS["pass"])], stack="2026.11", wheel=WHEEL)
    built_anew = msgspec.structs.replace(WHEEL, sha256="1" * 64)
    for other in (climb([], stack="2026.05", wheel=WHEEL), climb([], stack="2026.11", wheel=built_anew)):
        with pytest.raises(ValueError, match="different"):
            ladder.merged(one, other)


def test_the_schema_is_the_published_one() -> None:
    """`docs/verdict.schema.json` is what `ladder.schema` says; `python tests/unit/gates_page.py` writes it."""
    assert json.loads(page.SCHEMA.read_text("utf-8")) == json.loads(json.dumps(ladder.schema()))


def test_the_page_of_reasons_is_up_to_date() -> None:
    """docs/gates.md says what the gates say."""
    assert page.PAGE.read_text("utf-8") == page.page()


def test_a_document_follows_the_schema() -> None:
    """Every field of a real document is in the schema, and every field that the schema requires is there."""
    document, schema = ladder.document(example()), ladder.schema()

    def check(value: object, rule: dict[str, object]) -> None:
        if isinstance(reference := rule.get("$ref"), str):
            rule = schema["$defs"][reference.rpartition("/")[2]]
        if isinstance(value, dict) and "properties" in rule:
            properties = rule["properties"]
            assert isinstance(properties, dict)
            assert set(value) <= set(properties)
            assert set(rule["required"]) <= set(value)  # type: ignore[call-overload]  # JSON
            for name, one in value.items():
                check(one, properties[name])
        elif isinstance(value, list) and isinstance(rule.get("items"), dict):
            for one in value:
                check(one, rule["items"])  # type: ignore[arg-type]  # JSON
        elif "enum" in rule:
            assert value in rule["enum"]  # type: ignore[operator]  # JSON

    check(document, schema)
