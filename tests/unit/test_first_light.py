"""The page of a first run: what its steps found for the open questions, the quick A/B, and logs without secrets."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.support import refserved
from tests.support.fake_openai_server import Behaviour
from tests.support.thread_load import ThreadLoad

from sparkwright.bench import quick_look
from sparkwright.bench.load import vllm_bench
from sparkwright.cli import main, options
from sparkwright.cli.first_light import LAUNCHES, FirstSteps
from sparkwright.core.errors import CommandError
from sparkwright.core.store import Store
from sparkwright.gates.core.verdict import Check, Verdict, not_run, passed
from sparkwright.lab import first_light
from sparkwright.lab.first_light import FirstLight, Step, StepRecord


def found(records: dict[str, StepRecord]) -> dict[str, tuple[str, str]]:
    return {one.question: (one.state, one.text) for one in first_light.open_questions(records)}


def verdict(gate: str, *checks: Check) -> StepRecord:
    return StepRecord("pass", "", (Verdict(gate, "", "", "", checks),))


def test_a_question_is_answered_by_its_check_alone() -> None:
    """A gate that ran without the check, or not at all, answers nothing."""
    probe, line = (
        passed("fp4-conversion", "0 numbers differ"),
        passed("kernels-moe", "cutlass in decode"),
    )
    answers = found(
        {
            "device": verdict("G2", probe),
            "serve": verdict("G3", line, not_run("log", "none", "log")),
        }
    )
    assert answers["Does the GPU run the native E2M1 conversion?"] == ("pass", "0 numbers differ")
    assert answers["Which backend serves?"] == ("pass", "kernels-moe: cutlass in decode")
    without = found(
        {"device": StepRecord("not-run", "no GPU"), "quick": StepRecord("not-run", "no model")}
    )
    assert {state for state, _ in without.values()} == {"not-run"}
    assert without["How noisy is the machine (A/A)?"] == ("not-run", "no model")


def test_the_quick_comparison_launches_ours_twice_and_the_baseline_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower baseline shows, beside the difference of two launches of one wheel; a stock wheel does not answer for an architecture."""
    (tmp_path / "toy").mkdir()
    monkeypatch.setattr(vllm_bench, "obtain", lambda *_, **__: ThreadLoad())
    monkeypatch.setattr(quick_look, "RUN_S", 0.2)
    pythons = [
        str(refserved.environment(tmp_path / name, Behaviour(ttft=0.01, tpot=tpot)))
        for name, tpot in (("ours", 0.004), ("stock", 0.012))
    ]
    words = [
        "first-light", "--root", str(refserved.project(tmp_path / "project")), "--cache-dir", str(tmp_path / "cache"), "--offline",
        "--serve", str(tmp_path / "toy"), "--python", pythons[0], "--baseline-python", pythons[1],
    ]  # fmt: skip
    arguments = main.parse(words)
    context = options.checkout(arguments)
    steps = FirstSteps(context, arguments, tmp_path / "out")
    light = FirstLight(context.store, tmp_path / "out")
    quick = next(step for step in steps.all() if step.name == "quick")
    light.run([quick._replace(needs=str)])

    record = light.records["quick"]
    assert (record.state, tuple(record.looks)) == ("measured", LAUNCHES)
    answers = found(light.records)
    state, text = answers["Is our wheel faster than the baseline?"]
    assert state == "measured"
    assert -80 < float(text.split()[3].replace("−", "-")) < -40, text
    assert answers["Is code for 12.1f faster than for 12.0f?"][0] == "not-run"
    assert light.write({"stack": "2026.11"}, {}).is_file()
    assert "Quick looks" in (tmp_path / "out" / first_light.PAGE).read_text()


def test_a_step_that_fails_is_recorded_tried_again_and_stops_no_other(tmp_path: Path) -> None:
    calls = []

    def fail() -> StepRecord:
        calls.append("fail")
        raise CommandError("command-failed", "It broke.")

    def work() -> StepRecord:
        calls.append("work")
        return StepRecord("pass", "done")

    def run() -> FirstLight:
        light = FirstLight(Store(tmp_path / "store"), tmp_path / "out")
        steps = [
            Step(name, "", first_light.NOT_MEASURED, step, inputs=lambda: 1)
            for name, step in (("one", fail), ("two", work))
        ]
        light.run([*steps, Step("three", "", first_light.NOT_MEASURED, work, lambda: "no GPU")])
        return light

    run()
    light = run()
    assert calls == ["fail", "work", "fail"]
    assert [record.state for record in light.records.values()] == ["fail", "pass", "not-run"]
    with refusal("first-light-failed") as refused:
        light.raise_for_state({})
    assert refused.value.what == "2 of 3 steps did not pass."
    del light.records["one"]
    with refusal("first-light-incomplete") as refused:
        light.raise_for_state({})
    assert (refused.value.exit_code, refused.value.details) == (4, ("three: not-run: no GPU",))


@pytest.mark.parametrize(
    ("log", "kept"),
    [
        ("GET https://me:pw@host.example/x", "GET https://host.example/x"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=***"),
        ('"api_key": "sk-1234"', '"api_key": "***"'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("key ghp_abcdefghijklmnop here", "key *** here"),
        ("the value is swordfish-9", "the value is ***"),
        (
            "output token throughput: 12 tok/s, max_tokens=5",
            "output token throughput: 12 tok/s, max_tokens=5",
        ),
    ],
)
def test_a_log_keeps_no_secret(log: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "swordfish-9")
    assert first_light.redacted(log) == kept


def test_a_log_names_neither_home_nor_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "spark")
    assert (
        first_light.redacted(f"spark: {Path.home()}/models of sparkwright +spark.2026")
        == "HOST: ~/models of sparkwright +spark.2026"
    )
