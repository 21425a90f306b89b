"""The throughput gate with real vLLM servers on the CPU: equal ones do not fail, and one that is slower is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server import slowed
from tests.support import refserved
from tests.support.thread_load import ThreadLoad

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.cli import main, options
from sparkwright.gates.throughput import gate
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec
from sparkwright.gates.throughput.records import Result

pytestmark = pytest.mark.server

FAULT = '{"fault": "slow", "share": 1.0, "longest": 5}'


def answered(tmp_path: Path, candidate: Path, baseline: Path, model: Path) -> Result:
    """Return the result of a gate on a machine without a calibration."""
    place = refserved.project(tmp_path / "project", min_blocks=3, max_blocks=7)
    words = ["bench", "--root", str(place), "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    asked = ExperimentSpec(
        "gate", Environment(candidate), Environment(baseline), model=model, recipe=recipes.load(place, "toy-cpu"),
        variables={"SPARKWRIGHT_TEST_FAULT": FAULT}, workloads=("16/32 c1",), at_once=True,
    )  # fmt: skip
    return Experiment(options.checkout(main.parse(words)), asked, ThreadLoad()).result()


def test_an_equal_server_does_not_fail(tmp_path: Path, vllm_python: Path, toy: Path) -> None:
    """The same environment on both sides: it may stay undecided on a noisy machine, but it is not slower than itself."""
    result = answered(tmp_path, vllm_python, vllm_python, toy)
    assert result.state in ("pass", "inconclusive"), result.says


def test_a_server_that_is_slower_fails(tmp_path: Path, vllm_python: Path, toy: Path) -> None:
    """A server whose every step takes twice as long is found, and the row says by how much."""
    slow = slowed.environment(tmp_path / "slow", vllm_python)
    result = answered(tmp_path, slow, vllm_python, toy)
    assert result.state == "fail", result.says
    row = next(check for check in gate.checks(result) if check.name == "tpot-16-32-c1")
    change = next(figure.value for figure in row.figures if figure.name == "change")
    assert change > 30
