"""The throughput gate with real vLLM servers on the CPU: equal ones do not fail, and one that is slower is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server import slowed
from tests.support import refserved
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.results import Result
from sparkwright.cli import main, options
from sparkwright.gates.throughput import gate
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec

pytestmark = pytest.mark.server

#: Seconds of sleep in each step, beside which the computation of the toy is short, also on a busy machine.
STEP = 0.03


def result_of(tmp_path: Path, vllm_python: Path, model: Path, candidate_step: float) -> Result:
    """Return the result of a gate on a machine without a calibration."""
    sides = [
        slowed.environment(tmp_path / name, vllm_python, step)
        for name, step in (("candidate", candidate_step), ("baseline", STEP))
    ]
    folder = refserved.project(tmp_path / "project", min_blocks=3, max_blocks=7)
    arguments = [
        "bench",
        "--root",
        str(folder),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--output",
        str(tmp_path / "out"),
    ]
    spec = ExperimentSpec(
        "gate", Environment(sides[0]), Environment(sides[1]), model=model, recipe=recipes.load(folder, "toy-cpu"),
        workloads=("16/32 c1",), at_once=True,
    )  # fmt: skip
    return Experiment(options.checkout(main.parse(arguments)), spec, ThreadLoad()).result()


def test_an_equal_server_does_not_fail(tmp_path: Path, vllm_python: Path, toy: Path) -> None:
    """Two equal environments: the gate may stay undecided on a noisy machine, but neither is slower than the other."""
    result = result_of(tmp_path, vllm_python, toy, STEP)
    assert result.state in ("pass", "inconclusive"), result.says


def test_a_server_that_is_slower_fails(tmp_path: Path, vllm_python: Path, toy: Path) -> None:
    """A server whose every step sleeps twice as long is found, and the row says by how much."""
    result = result_of(tmp_path, vllm_python, toy, 2 * STEP)
    assert result.state == "fail", result.says
    row = next(check for check in gate.checks(result) if check.name == "tpot-16-32-c1")
    change = next(figure.value for figure in row.figures if figure.name == "change")
    assert change > 30
