"""An experiment on real launches of servers with known times: check, journal, verdict, calibration."""

from __future__ import annotations

import json
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
from tests.support.fake_openai_server import Behaviour, started
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.records import Side
from sparkwright.cli import bench, main, options
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.verdict import worst
from sparkwright.gates.throughput import experiment, paired_differences
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec
from sparkwright.gates.throughput.records import CONTROL_BLOCK, Result
from sparkwright.gates.throughput.runner import ServerMode

TRUE = Behaviour(ttft=0.02, tpot=0.004)
CELLS = ("8/16 c1",)


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    """A checkout whose gates do not mind a busy machine."""
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return refserved.project(tmp_path / "project", min_blocks=3, max_blocks=4, quads=1)


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
    plain = ExperimentSpec("bench", candidate, model=model, workloads=CELLS, mode="concurrent")
    return msgspec.structs.replace(plain, **changes)


def answered(place: Path, asked: ExperimentSpec) -> Result:
    return Experiment(context(place), asked, ThreadLoad()).result()


def ratio(result: Result, metric: str = "tpot") -> float:
    series = next(one for one in result.cells[0].series if one.metric == metric)
    assert series.baseline
    assert series.candidate
    return series.candidate / series.baseline


def test_a_bench_finds_the_true_times(place: Path) -> None:
    """Three launches; the times are those that the server has, within what a busy machine adds, and the result can be read again."""
    result = answered(place, question(place))
    assert result.state == "not-run"
    assert result.kind == "bench"
    found = {one.metric: one for one in result.cells[0].series}
    assert found["tpot"].candidate == pytest.approx(TRUE.tpot, rel=0.5)
    assert found["ttft"].candidate
    assert found["ttft"].candidate >= 0.9 * TRUE.ttft
    assert found["tpot"].launches == 3
    assert result.candidate.version == "0.33.0"
    assert result.qualified
    path = throughput.write_result(context(place).store, place, result)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result


@pytest.mark.server
@pytest.mark.launches
@pytest.mark.parametrize("mode", ["concurrent", "sequential"])
def test_a_much_slower_candidate_fails_in_three_blocks(place: Path, mode: ServerMode) -> None:
    """Without a calibration, and with one server at a time as with two."""
    slow = environment(place, "slow", Behaviour(ttft=0.08, tpot=0.016))
    base = environment(place, "base")
    result = answered(place, question(place, kind="gate", candidate=slow, baseline=base, mode=mode))
    assert (result.state, ratio(result) > 2) == ("fail", True), result.says
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


@pytest.mark.parametrize(
    ("fault", "state", "reference"),
    [
        ("dies", "fail", "candidate-crashed"),
        ("short", "invalid", "answer-other"),
        ("prefix-hits", "invalid", "prefix-cached"),
    ],
)
def test_a_candidate_that_is_wrong_under_load_never_passes(
    place: Path, fault: str, state: str, reference: str
) -> None:
    """A crash fails the gate; other wrong answers make it invalid."""
    wrong = msgspec.convert({**msgspec.to_builtins(TRUE), "faults": {fault: 5}}, Behaviour)
    candidate, base = environment(place, "wrong", wrong), environment(place, "base")
    result = answered(place, question(place, kind="gate", candidate=candidate, baseline=base))
    references = {reason.reference for leg in result.legs for reason in leg.reasons}
    assert reference in references
    assert result.state == state
    stopped = throughput.checks(result)[0]
    assert (stopped.name, stopped.state) == ("measured", state)


@pytest.mark.server
@pytest.mark.launches
def test_every_gate_adds_an_aa_block_and_spends_its_own_error_rate(place: Path) -> None:
    """Keyed by machine and model: a gate of another wheel finds the block; a second gate says so."""
    base = environment(place, "base")
    made = answered(
        place, question(place, kind="calibration", candidate=base, baseline=base, blocks=2)
    )
    assert all(len(one.differences) == 2 for one in made.calibration), made.says
    asked = question(place, kind="gate", candidate=environment(place, "other"), baseline=base)
    first, second = answered(place, asked), answered(place, asked)
    assert [len(one.differences) for one in second.calibration] == [4, 4]
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.alpha == pytest.approx(first.alpha / 4)
    assert any("gate number 2 of this wheel" in note for note in second.qualified)


def test_a_calibration_outlives_an_update_of_driver_and_wheel() -> None:
    """Its key holds the machine and the model, nothing else."""
    host = {
        "gpu": "GB10",
        "processor": "X925",
        "memory": "128 GB",
        "driver": "580",
        "kernel": "6.14",
    }
    key = paired_differences.calibration_key(host, "model")
    assert key == paired_differences.calibration_key(
        {**host, "driver": "590", "kernel": "7"}, "model"
    )
    assert key != paired_differences.calibration_key({**host, "gpu": "H200"}, "model")
    assert key != paired_differences.calibration_key(host, "another")


def test_attempts_are_counted_by_wheel(place: Path) -> None:
    """Each wheel has a count of its own."""
    store = context(place).store
    numbers = [experiment.next_attempt(store, {"candidate": name}) for name in ("a", "a", "b")]
    assert numbers == [1, 2, 1]


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
        "ask = ExperimentSpec('gate', one, other, model=place.parent / 'toy', workloads=CELLS, mode='concurrent')\n"
        "answered(place, ask)\n"
    )
    words = [sys.executable, "-c", program, str(place), str(slow.python), str(base.python)]
    child = subprocess.Popen(
        words, cwd=Path(__file__).parents[2], start_new_session=True, stderr=subprocess.DEVNULL
    )
    journal: list[Path] = []
    until = time.monotonic() + 120
    while time.monotonic() < until and not (journal and b'"closed"' in journal[0].read_bytes()):
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


def test_a_recipe_says_how_both_are_served(place: Path) -> None:
    """A recipe of another release is refused before anything starts."""
    asked = question(place, recipe=recipes.load(place, "toy-cpu"))
    assert "--enforce-eager" in asked.launches({"candidate": "0.33.0"})["candidate"].flags
    with refusal("recipe-unfit"):
        asked.launches({"candidate": "0.16.0"})


def test_a_launch_whose_log_is_gone_does_not_keep_the_contract(place: Path) -> None:
    """What cannot be read shows nothing; it is the candidate's fault only where the log says so."""
    asked = question(place, kind="gate", recipe=recipes.load(place, "toy-cpu"), baseline=environment(place, "base"))
    fault = Experiment(context(place), asked, ThreadLoad())._contract_fault(place / "no.log")
    assert fault
    assert fault.reference == "log-unreadable"


@pytest.mark.parametrize(
    ("recipe", "name"), [("toy-cpu", "toy"), ("qwen3-30b-a3b-nvfp4", "nvidia/Qwen3-30B-A3B-NVFP4")]
)
def test_servers_have_the_models_own_name(place: Path, recipe: str, name: str) -> None:
    """Both sides of a gate count NaN logits, as for its other gates; a bench serves as users would."""
    plan, base = recipes.load(place, recipe), environment(place, "base")
    both: dict[Side, str] = {"candidate": "0.33.0", "baseline": "0.33.0"}
    for kind, counts in (("gate", "1"), ("calibration", "1"), ("bench", None)):
        launches = question(place, kind=kind, recipe=plan, baseline=base).launches(both)
        assert {one.name for one in launches.values()} == {name}
        assert {one.variables.get("VLLM_COMPUTE_NANS_IN_LOGITS") for one in launches.values()} == {
            counts
        }
    assert question(place, recipe=plan, name="mine").launches(both)["candidate"].name == "mine"


def test_prefix_caching_is_always_off(place: Path) -> None:
    """Whatever the recipe says, servers that are measured keep no prefixes."""
    assert (
        "--no-enable-prefix-caching"
        in question(place).launches({"candidate": "0.33.0"})["candidate"].flags
    )


def test_a_question_names_what_it_needs(place: Path) -> None:
    """A comparison without a baseline, a server beside an environment, and an environment without a model are refused."""
    one = environment(place, "one")
    for wrong in ({"kind": "gate"}, {"url": "http://127.0.0.1:1"}, {"model": None}):
        with refusal("usage"):
            question(place, candidate=one, **wrong)


def test_cell_of_real_prompts_without_their_file_is_refused(place: Path) -> None:
    with refusal("usage", match="file of prompts"):
        answered(place, question(place, workloads=("sharegpt",)))


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


def test_two_measurements_do_not_measure_each_other(place: Path) -> None:
    """While one runs, another one with the same store is refused at once."""
    with context(place).store.lock("measuring"), refusal("store-busy"):
        answered(place, question(place))


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


def test_the_gate_verb_shows_it_as_a_gate(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """G8 without its baseline is a row that did not run, and says what it needs."""
    words = [
        "gate",
        "--json",
        "--only",
        "G8",
        "--root",
        str(place),
        "--cache-dir",
        str(place.parent / "cache"),
    ]
    assert main.main(words) == 4
    document = json.loads(capfd.readouterr().out)
    assert document["ladder"]["verdicts"][0]["checks"][0]["message"].endswith(
        "name a --baseline-python"
    )
