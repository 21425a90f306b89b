"""The time of a night: the plan has every step, a budget of four hours reaches throughput on a Spark, and only what is still true is finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support import refserved, standin, wheels
from tests.support.fake_openai_server import Behaviour
from tests.unit.conftest import ROOT

from sparkwright.audit.wheel import read_subject
from sparkwright.bench.recipes import preflight
from sparkwright.core import strict_yaml
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project
from sparkwright.gates.core import night
from sparkwright.gates.core.ladder import GATES, SERVED, VerdictFile
from sparkwright.gates.core.night import ENVIRONMENTS, REFERENCE, Night, NightStep
from sparkwright.gates.core.server_under_test import GateOptions, Pace
from sparkwright.gates.core.verdict import Ladder, Verdict, failed, invalid, passed
from sparkwright.gates.soak import SoakPolicy

#: A Spark with 23 GB of weights.
SPARK = night.assumed_pace(23)
RECIPE = "qwen3-30b-a3b-nvfp4"

Tonight = Callable[..., Night]


@pytest.fixture(name="tonight")
def _tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tonight:
    """Return a function that makes the night of a small wheel by changes of its options."""
    monkeypatch.setattr(preflight, "both_fit", lambda *_: True)
    wheel, model = wheels.plain(tmp_path, "tiny", "1.0"), standin.model(tmp_path / "model")
    pythons = tuple(refserved.environment(tmp_path / name, Behaviour()) for name in ("ours", "stock"))

    def make(output: str = "dist", hours: float | None = None, **changes: object) -> Night:
        context = RunContext(Project(ROOT, "2026.11"), Store(tmp_path / "store"), (), tmp_path / output, offline=True)
        options = replace(GateOptions(wheel=wheel, serve=model, recipe=RECIPE, task="gsm8k"), **changes)
        return Night(context, options, "0" * 64, (pythons[0], pythons[1]), hours=hours)

    return make


@pytest.mark.parametrize(("hours", "start", "slower"), [(4, 98, 1.0), (4, 98, 1.1), (4.5, 900, 1.0), (5, 98, 1.3)])
def test_a_budget_reaches_throughput(hours: float, start: float, slower: float, tonight: Tonight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server starts within G3, and as late or answers as slowly as it may: the soak takes what is left, and G8 still begins."""
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(Night, "_measured_pace", SPARK)
    ours = Pace(start, SPARK.prefill_tokens_s / slower, SPARK.decode_tokens_s / slower, SPARK.requests_s / slower)
    made = tonight(hours=hours)
    soak = made._policies.soak
    for name in made._order:
        assert made._reason_not_to_begin(name) is None, name
        expected = made.estimate(name)[0]
        if name not in SERVED:
            seconds = expected
        elif name == "G7":
            load = min(soak.seconds, made.left_s(name))
            assert load >= soak.shortest
            seconds = load + slower * (expected - soak.shortest)
        else:
            pace = made._own_pace or SPARK
            seconds = expected if pace == ours else slower * made._gate_seconds(name) + start
        clock += seconds
        made._steps[name] = NightStep(name, "pass", "", seconds, expected)
        if name == "G3":
            made._own_pace = ours
    assert clock <= hours * 3600


def test_the_first_plan_is_of_a_spark_and_has_every_step(tonight: Tonight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured: the model's bytes and a stated pace, with the answers of the stock wheel, and a start for each turn without room for two."""
    plan = {name: (seconds, source) for name, _, seconds, source in tonight().plan()}
    assert [*plan] == [ENVIRONMENTS, "G0", "G1", "G2", REFERENCE, *SERVED]
    assert plan[ENVIRONMENTS] == (0.0, "done")
    # The first gate of our server waits for its start, too.
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "soak.yaml", SoakPolicy)
    load = policy.stock * len(policy.load.concurrencies)
    assert plan[REFERENCE][0] == pytest.approx(load + sum(plan[gate][0] for gate in ("G3", "G4", "G5", "G6")))
    assert {source for name, (_, source) in plan.items() if name in SERVED} == {"a Spark, assumed"}
    with (tmp_path / "model" / "more.safetensors").open("wb") as file:
        file.truncate(50 * 10**9)
    assert tonight().estimate(REFERENCE)[0] == pytest.approx(plan[REFERENCE][0] + 50, abs=1)
    assert tonight(workload=("1024/256 c1",)).estimate("G8")[0] < 0.6 * plan["G8"][0]
    monkeypatch.setattr(preflight, "both_fit", lambda *_: False)
    assert tonight().estimate("G8")[0] > plan["G8"][0] + 4 * 3 * SPARK.start_s
    for profile, most in (("random", 0.05), ("learnt", 0.05), ("fluent", 1.0)):
        assert tonight(profile=profile).estimate("G4")[0] < most * plan["G4"][0], profile
        assert tonight(profile=profile).estimate(REFERENCE)[0] < plan[REFERENCE][0]
    (tmp_path / "stock" / "bin" / "python").unlink()
    assert tonight().estimate(ENVIRONMENTS)[0] > 0


@pytest.mark.parametrize("reason", ["machine-busy", "gpu-shared", "machine-unsteady", "step-unreachable", "disk-full", "program-fault"])
def test_what_the_machine_spoiled_is_tried_again_also_after_a_kill(reason: str, tonight: Tonight, tmp_path: Path) -> None:
    """A kill leaves a night that has not ended, in which a failure of the wheel is finished."""
    made, subject = tonight(), read_subject(tmp_path / "tiny-1.0-py3-none-any.whl")
    file = VerdictFile(made._context.store, tmp_path / "dist", subject, "2026.11")
    for name, cause in (("G4", "reply-empty"), ("G5", reason)):
        checks = (passed("legs", ""), invalid("measured", "", cause))
        verdict = Verdict(name, GATES[name], subject.sha256, "", checks, RECIPE)
        file.store(Ladder("2026.11", subject, (verdict,)))
        made._finish(NightStep(name, "invalid", "", 60.0, 60.0, verdict))
    again = tonight()
    assert [again.estimate(name)[1] == "done" for name in ("G4", "G5")] == [True, False]


def test_gates_that_ran_one_by_one_count_together(tonight: Tonight, tmp_path: Path) -> None:
    """The last of them says what publish will say (seen on a GPU: "G0 not asked for", which had passed)."""
    made, subject = tonight(only=("G8",)), read_subject(tmp_path / "tiny-1.0-py3-none-any.whl")
    file = VerdictFile(made._context.store, tmp_path / "dist", subject, "2026.11")

    def finish(name: str, recipe: str) -> Verdict:
        verdict = Verdict(name, GATES[name], subject.sha256, "", (passed("check", ""),), recipe, model="m" if recipe else "")
        file.store(Ladder("2026.11", subject, (verdict,)))
        return verdict

    for name in GATES:
        if name not in ("G6", "G8"):
            finish(name, RECIPE if name in SERVED else "")
    finish("G6", "another-recipe")
    made._finish(NightStep("G8", "pass", "", 60.0, 60.0, finish("G8", RECIPE)))
    assert made.answer == f"Not verified for {RECIPE}: G6 not asked for."
    finish("G6", RECIPE)
    assert made.answer.endswith(f"every gate passed for {RECIPE}.")
    assert [step.name for step in made._done] == [*GATES]


@pytest.mark.parametrize("change", ["nothing", "ours", "stock", "output", "later", "workload", "texts", "server_user"])
def test_a_finished_gate_counts_as_long_as_it_is_true(change: str, tonight: Tonight, tmp_path: Path) -> None:
    """Of the same packages on both sides, and with its verdict beside the wheel; a later one of a single gate replaces it."""
    made, subject = tonight(), read_subject(tmp_path / "tiny-1.0-py3-none-any.whl")
    checks = passed("replies", "12 of 12"), failed("replies", "11 of 12", "reply-empty")
    first, later = (Verdict("G4", GATES["G4"], subject.sha256, "", (check,), RECIPE) for check in checks)
    file = VerdictFile(made._context.store, tmp_path / "dist", subject, "2026.11")
    file.store(Ladder("2026.11", subject, (first,)))
    made._finish(NightStep("G4", "pass", "", 60.0, 60.0, first))
    if change in ("ours", "stock"):
        (site,) = (tmp_path / change).glob("lib/python3.*/site-packages")
        (site / "torch-2.14.1.dist-info").mkdir()
        (site / "torch-2.14.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.14.1\n")
    if change == "later":
        file.store(Ladder("2026.11", subject, (later,)))
    (texts := tmp_path / "texts.jsonl").write_text("{}")
    asked = {"workload": ("rehearsal",), "texts": texts, "server_user": "nobody"}
    again = tonight(
        output="other" if change == "output" else "dist", **{name: value for name, value in asked.items() if name == change}
    )
    assert (again.estimate("G4")[1] == "done") is (change == "nothing")
