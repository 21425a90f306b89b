"""From a question to its result: real launches of servers with known times, through qualification, legs, journal, verdict and report."""

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
from sparkwright.cli import gate, main, options
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.verdict import worst
from sparkwright.gates.throughput import calibration, published_figures
from sparkwright.gates.throughput import gate as throughput
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec
from sparkwright.gates.throughput.records import Result

TRUE = Behaviour(ttft=0.02, tpot=0.004)
CELLS = ("8/16 c1",)


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    """A checkout whose gates do not mind a busy machine."""
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return refserved.project(tmp_path / "project", least=3, most=4, quads=1)


def context(place: Path) -> RunContext:
    words = ["bench", "--root", str(place), "--cache-dir", str(place.parent / "cache"), "--output", str(place.parent / "out")]
    return options.checkout(main.parse(words))


def environment(place: Path, name: str, behaviour: Behaviour = TRUE) -> Environment:
    return Environment(refserved.environment(place.parent / name, behaviour))


def question(place: Path, **changes: object) -> ExperimentSpec:
    candidate = changes.pop("candidate", None) or environment(place, "candidate")
    plain = ExperimentSpec("bench", candidate, model=place.parent / "toy", workloads=CELLS, resident="both")  # type: ignore[arg-type]  # see above
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
    path = gate.keep_result(context(place), result)
    assert msgspec.json.decode(path.read_bytes(), type=Result) == result


@pytest.mark.server
@pytest.mark.launches
def test_a_much_slower_candidate_fails_by_signs_alone(place: Path) -> None:
    """Not calibrated, the signs of the blocks decide; with a factor of two, each of them points the same way."""
    refserved._edit(place / "ci" / "gates" / "throughput.yaml", most=8)
    slow = environment(place, "slow", Behaviour(ttft=0.04, tpot=0.008))
    result = answered(place, question(place, kind="gate", candidate=slow, baseline=environment(place, "base")))
    assert (result.state, ratio(result) > 1.3) == ("fail", True), result.says
    assert result.culprits
    assert worst(check.state for check in throughput.checks(result) if check.required) == "fail"
    assert {check.reason for check in throughput.checks(result) if check.state == "fail"} == {"slower"}


@pytest.mark.server
@pytest.mark.launches
def test_taking_turns_gives_the_same_answer(place: Path) -> None:
    """One server at a time, four launches a block: the same true ratio is found."""
    slow = environment(place, "slow", Behaviour(ttft=0.04, tpot=0.008))
    asked = question(place, kind="gate", candidate=slow, baseline=environment(place, "base"), resident="turns")
    result = answered(place, asked)
    assert 1.3 < ratio(result) < 3
    assert len({(leg.side, leg.launch) for leg in result.legs}) == 4 * len(result.cells[0].series[0].differences)


def test_a_server_that_does_not_start_makes_the_result_invalid(place: Path) -> None:
    """It ends by itself; nothing is measured, and the row says with which words."""
    asked = question(place, kind="gate", baseline=environment(place, "base"), variables={"REFERENCE": "starts-never"})
    result = answered(place, asked)
    assert result.state == "invalid"
    assert "(server-died)" in result.says
    checks = throughput.checks(result)
    assert (checks[0].state, checks[0].reason) == ("invalid", "server-died")


@pytest.mark.parametrize(("fault", "reference"), [("dies", "server-died"), ("short", "answer-other"), ("prefix-hits", "prefix-cached")])
def test_a_candidate_that_is_wrong_under_load_is_invalid(place: Path, fault: str, reference: str) -> None:
    """A bad leg ends the gate; it is never averaged, and never a pass."""
    wrong = msgspec.convert({**msgspec.to_builtins(TRUE), "faults": {fault: 5}}, Behaviour)
    asked = question(place, kind="gate", candidate=environment(place, "wrong", wrong), baseline=environment(place, "base"))
    result = answered(place, asked)
    assert result.state == "invalid"
    references = {reason.reference for leg in result.legs for reason in leg.reasons}
    assert reference in references


@pytest.mark.server
@pytest.mark.launches
def test_a_calibration_is_kept_for_this_machine_and_used(place: Path) -> None:
    """A/A blocks are kept with the machine's fingerprint; the gate then decides by e-values of that spread."""
    refserved._edit(place / "ci" / "gates" / "throughput.yaml", calibration=4)
    base = environment(place, "base")
    made = answered(place, question(place, kind="calibration", candidate=base, baseline=base, blocks=4))
    assert len(made.calibration) == 2
    assert all(len(one.differences) == 4 for one in made.calibration)
    gate = answered(place, question(place, kind="gate", candidate=environment(place, "other"), baseline=base))
    assert {one.metric: one.sigma is not None for one in gate.cells[0].series} == {"tpot": True, "ttft": True, "rate": False}
    found = context(place)
    what = calibration.about(Experiment(found, question(place, candidate=base), ThreadLoad())._model, "0.33.0", "both", 1, ThreadLoad().name)
    assert not calibration.stored(found.store, {"driver": "another"}, what).series


@pytest.mark.launches
def test_a_killed_gate_goes_on(place: Path) -> None:
    """Killed with -9 in the middle, the next run keeps the whole blocks, and no server is left behind."""
    slow, base = environment(place, "slow", Behaviour(ttft=0.04, tpot=0.008)), environment(place, "base")
    program = (
        "import sys, msgspec; from pathlib import Path\n"
        "from tests.unit.test_answer import *\n"
        "place = Path(sys.argv[1])\n"
        "one, other = Environment(Path(sys.argv[2])), Environment(Path(sys.argv[3]))\n"
        "ask = ExperimentSpec('gate', one, other, model=place.parent / 'toy', workloads=CELLS, resident='both')\n"
        "answered(place, ask)\n"
    )
    words = [sys.executable, "-c", program, str(place), str(slow.python), str(base.python)]
    child = subprocess.Popen(words, cwd=Path(__file__).parents[2], start_new_session=True, stderr=subprocess.DEVNULL)
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
    # Minutes later the generator is still the same, and the machine still warm.
    assert journal[0].read_text().count('"type":"qualified"') == 1
    assert len(result.cells[0].series[0].differences) >= 3
    assert [leg.block for leg in result.legs if leg.counts].count(0) == 4


def test_a_recipe_says_how_both_are_served(place: Path) -> None:
    """A recipe of another release is refused before anything starts."""
    asked = question(place, recipe=recipes.load(place, "toy-cpu"))
    assert "--enforce-eager" in asked.launches({"candidate": "0.33.0"})["candidate"].flags
    with refusal("recipe-unfit"):
        asked.launches({"candidate": "0.16.0"})


@pytest.mark.parametrize(("recipe", "name"), [("toy-cpu", "toy"), ("qwen3-30b-a3b-nvfp4", "nvidia/Qwen3-30B-A3B-NVFP4")])
def test_servers_have_the_models_own_name(place: Path, recipe: str, name: str) -> None:
    """Both sides of a gate count NaN logits, as for its other gates; a bench serves as users would."""
    plan, base = recipes.load(place, recipe), environment(place, "base")
    both: dict[Side, str] = {"candidate": "0.33.0", "baseline": "0.33.0"}
    for kind, counts in (("gate", "1"), ("calibration", "1"), ("bench", None)):
        launches = question(place, kind=kind, recipe=plan, baseline=base).launches(both)
        assert {one.name for one in launches.values()} == {name}
        assert {one.variables.get("VLLM_COMPUTE_NANS_IN_LOGITS") for one in launches.values()} == {counts}
    assert question(place, recipe=plan, name="mine").launches(both)["candidate"].name == "mine"


def test_prefix_caching_is_always_off(place: Path) -> None:
    """Whatever the recipe says, servers that are measured keep no prefixes."""
    assert "--no-enable-prefix-caching" in question(place).launches({"candidate": "0.33.0"})["candidate"].flags


def test_a_question_names_what_it_needs(place: Path) -> None:
    """A comparison without a baseline, a server beside an environment, and an environment without a model are refused."""
    one = environment(place, "one")
    for wrong in ({"kind": "gate"}, {"url": "http://127.0.0.1:1"}, {"model": None}):
        with refusal("usage"):
            question(place, candidate=one, **wrong)


def test_a_server_that_runs_is_measured_as_it_is(place: Path) -> None:
    """``--server`` measures one launch that somebody else made; nothing is started."""
    with started(TRUE) as server:
        result = answered(place, ExperimentSpec("bench", url=server.url, name="reference", workloads=CELLS, blocks=1))
    assert result.candidate.label == server.url
    assert [leg.launch for leg in result.legs] == [0]
    assert result.cells[0].series[0].candidate


def test_two_measurements_do_not_measure_each_other(place: Path) -> None:
    """While one runs, another one with the same store is refused at once."""
    with context(place).store.lock("measuring"), refusal("store-busy"):
        answered(place, question(place))


@pytest.mark.launches
def test_a_claim_is_held_against_what_was_measured(place: Path) -> None:
    """A figure that others published holds, is exceeded, or is not reached; without enough launches it is open."""
    plain = recipes.load(place, "qwen3-next-80b-nvfp4-marlin")
    result = answered(place, question(place, workloads=("128/128 c1",)))
    found = published_figures.held(plain, result, 0.05)
    assert found
    assert {one.agreement for one in found if one.metric == "tpot"} == {"faster"}
    assert all(one.source for one in found)
    assert published_figures.only(question(place, workloads=()), plain).workloads


def test_the_gate_verb_shows_it_as_a_gate(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """G8 without its baseline is a row that did not run, and says what it needs."""
    words = ["gate", "--json", "--only", "G8", "--root", str(place), "--cache-dir", str(place.parent / "cache")]
    assert main.main(words) == 4
    document = json.loads(capfd.readouterr().out)
    assert document["ladder"]["verdicts"][0]["checks"][0]["message"].endswith("name the --baseline-python to compare with")
