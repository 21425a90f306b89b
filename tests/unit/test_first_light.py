"""The page of a first run: what its steps found for the open questions, the quick A/B, and logs without secrets."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import refserved
from tests.support.fake_openai_server import Behaviour
from tests.support.thread_load import ThreadLoad

from sparkwright.bench import quick_look
from sparkwright.bench.load import vllm_bench
from sparkwright.bench.quick_look import QuickFigure, QuickLook
from sparkwright.cli import doctor, first_light, gate, main, options
from sparkwright.cli.doctor import MachineCheck
from sparkwright.cli.first_light import FirstSteps, StepRecord
from sparkwright.core.errors import CommandError
from sparkwright.forks.stack import SourceError
from sparkwright.gates.core.verdict import Check, Verdict, not_run, passed

#: A step that did not run.
ABSENT = StepRecord("not-run", "no GPU")


def verdict(gate: str, *checks: Check) -> StepRecord:
    return StepRecord("pass", "", (Verdict(gate, "", "", "", checks),))


def test_a_question_is_answered_by_its_check_alone() -> None:
    """A gate that ran without the check, or not at all, answers nothing."""
    probe, line = passed("fp4-conversion", "0 numbers differ"), passed("kernels-moe", "cutlass in decode")
    optional = replace(not_run("backends", "no reference", "reference-unnamed"), required=False)
    served = verdict("G3", line, not_run("log", "none", "log"), optional)
    answers = first_light.open_questions({"device": verdict("G2", probe), "serve": served, "quick": ABSENT})
    assert answers["Does the GPU run the native E2M1 conversion?"] == ("pass", "fp4-conversion: 0 numbers differ")
    assert answers["Which backend serves?"] == ("pass", "kernels-moe: cutlass in decode; backends: no reference")
    without = first_light.open_questions({"device": verdict("G2", line), "serve": ABSENT, "quick": ABSENT})
    assert {state for state, _ in without.values()} == {"not-run"}


def test_changes_between_quick_looks_are_answers() -> None:
    """Of our wheel against the stock one, and of a second launch of ours against the first."""
    times = {"candidate": 4.0, "baseline": 16.0, "candidate again": 5.0}
    looks = {
        launch: QuickLook(16, 8, 2, 1.0, "g", (QuickFigure("time per token", "ms", mean),), None, ()) for launch, mean in times.items()
    }
    answers = first_light.open_questions({"device": ABSENT, "serve": ABSENT, "quick": StepRecord("measured", "", looks=looks)})
    shown = {question: text.partition(":")[0] for question, (state, text) in answers.items() if state == "measured"}
    assert shown == {
        "How noisy is the machine (A/A)?": "time per token +25.00 %",
        "Is our wheel faster than the stock one?": "time per token -75.00 %",
    }


def test_a_spark_with_a_model_is_measured_and_a_failed_step_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The stock wheel is measured beside two launches of ours; what failed is tried again, and what is done is not.
    """
    (tmp_path / "toy").mkdir()
    monkeypatch.setattr(vllm_bench, "obtain", lambda *_, **__: ThreadLoad())
    monkeypatch.setattr(quick_look, "RUN_S", 0.2)
    pythons = [str(refserved.environment(tmp_path / name, Behaviour(ttft=0.01, tpot=0.004))) for name in ("ours", "stock")]
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    wheel.touch()
    words = [
        "first-light", str(wheel), "--root", str(refserved.project(tmp_path / "project")), "--cache-dir", str(tmp_path / "cache"),
        "--output", str(tmp_path / "out"), "--offline", "--serve", str(tmp_path / "toy"), "--python", pythons[0], "--baseline-python", pythons[1],
    ]  # fmt: skip
    arguments = main.parse(words)
    steps = FirstSteps(options.checkout(arguments), arguments, tmp_path / "out")
    monkeypatch.setattr(doctor, "machine", lambda _: {"checks": [MachineCheck("GPU", "ready", "NVIDIA GB10")]})
    tried = []

    def climb(*arguments: Any) -> None:
        tried.append(arguments[1].only)
        if arguments[1].only == ("G1",):
            raise SourceError("offline", "It is not in the store.")
        raise CommandError("command-failed", "It broke.")

    monkeypatch.setattr(gate, "climb", climb)
    records = steps.run()
    assert [name for name, record in records.items() if record.state == "fail"] == ["audit", "device", "serve"]
    assert (records["numerics"].state, records["numerics"].message) == ("not-run", "It is not in the store.")
    assert "command-failed: It broke." in records["serve"].message
    assert (records["quick"].state, list(records["quick"].looks)) == (
        "measured",
        ["candidate", "baseline", "candidate again"],
    )
    assert first_light.open_questions(records)["Is our wheel faster than the stock one?"][0] == "measured"
    assert tried == [("G0",), ("G1",), ("G2",), ("G3", "G4")]
    capsys.readouterr()
    with refusal("first-light-failed"):
        main.run(words)
    assert len(tried) == 8
    assert capsys.readouterr().err.count("not repeated") == 2  # install and quick


@pytest.mark.parametrize(
    ("log", "kept"),
    [
        ("GET https://me:pw@host.example/x", "GET https://host.example/x"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=***"),
        ('"api_key": "sk-1234"', '"api_key": "***"'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("key ghp_abcdefghijklmnop here", "key *** here"),
        ("the value is swordfish-9", "the value is ***"),
        ("output token throughput: 12 tok/s, max_tokens=5", "output token throughput: 12 tok/s, max_tokens=5"),
        ("spark: HOME/models of sparkwright +spark.2026", "HOST: ~/models of sparkwright +spark.2026"),
    ],
)
def test_a_log_keeps_no_secret_and_names_neither_home_nor_machine(log: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "swordfish-9")
    monkeypatch.setattr(platform, "node", lambda: "spark")
    assert first_light.redacted(log.replace("HOME", str(Path.home()))) == kept
