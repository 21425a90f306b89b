"""An experiment on real launches of servers with known times: check, journal, verdict, calibration."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.refusals import refusal
from tests.support import refserved
from tests.support.fake_openai_server import Behaviour, Fault, started
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.recipes import preflight
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.results import CONTROL_BLOCK, Result
from sparkwright.cli import bench, main, options
from sparkwright.core.files import sha256_file
from sparkwright.core.store import append_line
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import verdict_file
from sparkwright.gates.core.verdict import worst
from sparkwright.gates.core.verdict_file import Attempt
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec

TRUE = Behaviour(ttft=0.02, tpot=0.004)
CELLS = ("8/16 c1",)


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    """A checkout whose gates do not mind a busy machine."""
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return refserved.project(tmp_path / "project", min_blocks=3, max_blocks=4)


def context(place: Path) -> RunContext:
    words = [
        "bench",
        "--root",
        str(place),
        "--cache-dir",
        str(place.parent / "cache"),
        "--output",
        str(place.parent / "out"),
    ]
    return options.checkout(main.parse(words))


def environment(place: Path, name: str, behaviour: Behaviour = TRUE) -> Environment:
    return Environment(refserved.environment(place.parent / name, behaviour))


def question(place: Path, **changes: object) -> ExperimentSpec:
    candidate = changes.pop("candidate", None) or environment(place, "candidate")
    assert isinstance(candidate, Environment)
    model = place.parent / "toy"
    plain = ExperimentSpec("bench", candidate, model=model, workloads=CELLS, at_once=True)
    return msgspec.structs.replace(plain, **changes)


def answered(place: Path, asked: ExperimentSpec) -> Result:
    return Experiment(context(place), asked, ThreadLoad()).result()


def test_a_bench_finds_the_true_times(place: Path) -> None:
    """Three launches; the times are those that the server has, within what a busy machine adds, and the result can be read again."""
    true = Behaviour(ttft=0.04, tpot=0.02)
    result = answered(place, question(place, candidate=environment(place, "true", true)))
    assert (result.kind, result.state, result.candidate.version, bool(result.qualified)) == ("bench", "not-run", "0.33.0", True)
    found = {one.metric: one for one in result.cells[0].series}
    assert found["tpot"].candidate == pytest.approx(true.tpot, rel=0.5)
    assert found["ttft"].candidate
    assert found["ttft"].candidate >= 0.9 * true.ttft
    assert found["tpot"].launches == 3
    path = throughput.write_result(context(place).store, place, result)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result


@pytest.mark.server
@pytest.mark.launches
@pytest.mark.parametrize("at_once", [True, False])
def test_a_much_slower_candidate_fails_in_three_blocks(place: Path, at_once: bool) -> None:
    """Without a calibration, and with one server at a time as with two."""
    slow = environment(place, "slow", Behaviour(ttft=0.08, tpot=0.016))
    base = environment(place, "base")
    result = answered(
        place, question(place, kind="gate", candidate=slow, baseline=base, at_once=at_once)
    )
    assert result.state == "fail", result.says
    assert {leg.block for leg in result.legs} == {CONTROL_BLOCK, 0, 1, 2}
    checks = throughput.checks(result)
    assert worst(check.state for check in checks if check.required) == "fail"
    assert {check.reason for check in checks if check.state == "fail"} == {"slower"}
    assert "one above 0.5 % is shown" in next(
        c.message for c in checks if c.name.startswith("tpot")
    )


def test_a_server_that_does_not_start_makes_the_result_invalid(place: Path) -> None:
    """It ends by itself; nothing is measured, and the row says with which words."""
    asked = question(
        place,
        kind="gate",
        baseline=environment(place, "base"),
        variables={"REFERENCE": "starts-never"},
    )
    result = answered(place, asked)
    assert result.state == "invalid"
    assert "(server-died)" in result.says
    checks = throughput.checks(result)
    assert (checks[0].state, checks[0].reason) == ("invalid", "server-died")


@pytest.mark.parametrize(("fault", "state", "reference"), [("dies", "fail", "candidate-crashed"), ("prefix-hits", "invalid", "prefix-cached")])
def test_a_candidate_that_is_wrong_under_load_never_passes(place: Path, fault: Fault, state: str, reference: str) -> None:
    """A crash fails the gate; wrong answers make it invalid."""
    wrong = msgspec.structs.replace(TRUE, faults={fault: 5})
    candidate, base = environment(place, "wrong", wrong), environment(place, "base")
    result = answered(place, question(place, kind="gate", candidate=candidate, baseline=base))
    stopped = throughput.checks(result)[0]
    assert (stopped.name, stopped.state, stopped.reason) == ("measured", state, reference)


@pytest.mark.server
@pytest.mark.launches
def test_every_gate_adds_an_aa_block_and_spends_its_own_error_rate(place: Path) -> None:
    """Keyed by machine and model: a gate of another wheel finds the block; a second gate says so."""
    base = environment(place, "base")
    made = answered(
        place, question(place, kind="calibration", candidate=base, baseline=base, blocks=2)
    )
    assert [len(values) for values in made.calibration.values()] == [2, 2], made.says
    wheel = place.parent / "a.whl"
    wheel.write_bytes(b"wheel")
    other = Environment(environment(place, "other").python, wheel)
    asked = question(place, kind="gate", candidate=other, baseline=base)
    log, sha256 = verdict_file.attempt_log(place.parent / "out", wheel.name), sha256_file(wheel)
    append_line(log, Attempt(1, sha256, "G8", "another recipe"))
    append_line(log, Attempt(2, sha256, "G8"))
    first = answered(place, asked)
    append_line(log, Attempt(3, sha256, "G8"))
    second = answered(place, asked)
    assert [len(values) for values in second.calibration.values()] == [4, 4]
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.alpha == pytest.approx(first.alpha / 4)
    row = next(check for check in throughput.checks(second) if check.name == "legs")
    assert "gate number 2 of this wheel and recipe" in row.message


@pytest.mark.launches
def test_a_killed_gate_goes_on(place: Path) -> None:
    """Killed with -9 in the middle, the next run keeps the whole blocks, and no server is left behind."""
    slow, base = (
        environment(place, "slow", Behaviour(ttft=0.04, tpot=0.008)),
        environment(place, "base"),
    )
    program = (
        "import sys, msgspec; from pathlib import Path\n"
        "from tests.unit.test_experiment import *\n"
        "place = Path(sys.argv[1])\n"
        "one, other = Environment(Path(sys.argv[2])), Environment(Path(sys.argv[3]))\n"
        "ask = ExperimentSpec('gate', one, other, model=place.parent / 'toy', workloads=CELLS, at_once=True)\n"
        "answered(place, ask)\n"
    )
    words = [sys.executable, "-c", program, str(place), str(slow.python), str(base.python)]
    child = subprocess.Popen(
        words, cwd=Path(__file__).parents[2], start_new_session=True, stderr=subprocess.DEVNULL
    )
    journal: list[Path] = []
    until = time.monotonic() + 120
    while time.monotonic() < until and not (journal and b'"launch":{' in journal[0].read_bytes()):
        journal = list((place.parent / "cache" / "logs" / "throughput").glob("gate-*.jsonl"))
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    asked = question(place, kind="gate", candidate=slow, baseline=base)
    result = answered(place, asked)
    assert result.resumed == 1
    assert len(result.cells[0].series[0].differences) >= 3, result.says
    assert [leg.block for leg in result.legs if leg.counts].count(0) == 4
    assert result.attempt == 1


@pytest.mark.parametrize(
    ("recipe", "name"), [("toy-cpu", "toy"), ("qwen3-30b-a3b-nvfp4", "nvidia/Qwen3-30B-A3B-NVFP4")]
)
def test_a_recipe_says_how_both_sides_are_served(place: Path, recipe: str, name: str) -> None:
    """
    Under the model's own name, and never with a prefix cache; both sides of a gate count NaN
    logits, as for its other gates. A recipe of another release is refused before anything starts.
    """
    one, plan = environment(place, "one"), recipes.load(place, recipe)
    for kind, counts in (("gate", "1"), ("calibration", "1"), ("bench", None)):
        launch = question(place, kind=kind, recipe=plan).launch(one, "0.33.0")
        assert launch.name == name
        assert set(plan.flags(plan.variant("0.33.0"))) < set(launch.flags)
        assert "--no-enable-prefix-caching" in launch.flags
        assert launch.variables.get("VLLM_COMPUTE_NANS_IN_LOGITS") == counts
    assert question(place, recipe=plan, name="mine").launch(one, "0.33.0").name == "mine"
    with refusal("recipe-unfit"):
        question(place, recipe=plan).launch(one, "0.16.0")


def test_a_recipe_counts_only_as_it_is_served_and_profiled(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A launch of which there is no profile does not count, as nothing shows its kernels, not even a
    baseline's, which may have others; flags that the recipe does not have are recorded, and then
    nothing is shown for the recipe.
    """
    monkeypatch.setattr(preflight, "check", lambda *_, **__: ())  # of memory and checkpoint
    asked = question(
        place,
        kind="gate",
        recipe=recipes.load(place, "toy-cpu"),
        baseline=environment(place, "base"),
        flags=("--seed=7",),
    )
    result = answered(place, asked)
    assert result.state == "invalid", result.says
    assert result.stopped
    assert result.stopped.reference == "profile-missing"
    assert result.added == ("--seed=7",)
    assert result.baseline
    assert "--seed=7" in result.baseline.flags
    assert result.candidate.variables["VLLM_CPU_KVCACHE_SPACE"] == "1"
    states = {check.name: (check.state, check.reason) for check in throughput.checks(result)}
    assert states["measured"] == ("invalid", result.stopped.reference)
    assert states["flags"] == ("invalid", "flags-added")
    assert states["contract"] == ("invalid", result.stopped.reference)


def test_a_server_that_runs_is_measured_as_it_is(place: Path) -> None:
    """``--server`` measures one launch that somebody else made; nothing is started."""
    with started(TRUE) as server:
        result = answered(
            place,
            ExperimentSpec("bench", url=server.url, name="reference", workloads=CELLS, blocks=1),
        )
    assert result.candidate.label == server.url
    assert [leg.launch for leg in result.legs] == [0]
    assert result.cells[0].series[0].candidate


@pytest.mark.launches
def test_a_published_figure_that_is_not_reached_fails(place: Path) -> None:
    """Others measured far slower times, so all are exceeded; of three times the speed none is."""
    recipe = recipes.load(place, "qwen3-next-80b-nvfp4-marlin")
    result = answered(place, question(place, workloads=("128/128 c1",)))
    bench.compare_published(recipe, result, 0.05)
    (figure, *_) = (one for one in recipe.published[0].figures if one.cell == "128/128 c1")
    fast = msgspec.structs.replace(figure, metric="tpot", value=1e6, unit="tok/s", runs=None)
    report = msgspec.structs.replace(recipe.published[0], figures=(fast,))
    with refusal("gate-failed"):
        bench.compare_published(msgspec.structs.replace(recipe, published=(report,)), result, 0.05)
    with refusal("gate-not-run"):
        bench.compare_published(msgspec.structs.replace(recipe, published=()), result, 0.05)


@pytest.mark.parametrize(
    "words",
    [
        [], ["--serve", "m"], ["--serve", "m", "--python", "p", "--server", "http://127.0.0.1:1"], ["--rate", "1", "--server", "http://127.0.0.1:1"],
        ["--quick", "--server", "http://127.0.0.1:1", "--workload", "sharegpt"],
    ],
)  # fmt: skip
def test_bench_serves_a_model_or_asks_a_server(words: list[str]) -> None:
    """Neither, both, a model without an environment, and options of another measurement are refused before anything starts."""
    arguments = main.parse(["bench", *words])
    with refusal("usage"):
        arguments.run(arguments)


def test_cell_of_real_prompts_without_their_file_is_refused_and_a_file_that_no_cell_reads(place: Path) -> None:
    with refusal("usage", match="file of prompts"):
        answered(place, question(place, workloads=("sharegpt",)))
    with refusal("usage", match="not with the file of --texts"):
        answered(place, question(place, texts=place / "prompts.jsonl"))
