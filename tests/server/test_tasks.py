"""The tasks gate from end to end: lm-evaluation-harness asks a real server, and what it writes is paired."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.server.broken import Broken
from tests.server.taught import GATES, _context, _taught, _trained
from tests.support.serving import _vllm_python

from sparkwright.core import strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy import gate as tasks
from sparkwright.gates.accuracy import result as results
from sparkwright.gates.accuracy import runner
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.accuracy.result import TaskResult
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check, worst

__all__ = ["_context", "_taught", "_trained", "_vllm_python"]

pytestmark = [pytest.mark.server, pytest.mark.network]

POLICY = strict_yaml.load(GATES / "accuracy.yaml", AccuracyPolicy)
NAMES = ["baseline", "answers", "paired", "floor"]

#: Writes a data set as the hub's library keeps it once it was loaded: of GSM8K's form, with questions of ours.
PREPARE = """
import pathlib, sys, datasets
from datasets.arrow_writer import ArrowWriter
folder = pathlib.Path(sys.argv[1]) / "openai___gsm8k" / "main" / "0.0.0" / ("e" * 40)
folder.mkdir(parents=True)
splits = datasets.SplitDict(dataset_name="gsm8k")
for name, count in (("train", 20), ("test", 400)):
    rows = [{"question": f"Ada has {n} apples and eats one. How many are left?", "answer": f"{n} - 1 = {n - 1}\\n#### {n - 1}"}
            for n in range(10, 10 + count)]
    made = datasets.Dataset.from_list(rows)
    with ArrowWriter(path=str(folder / f"gsm8k-{name}.arrow"), features=made.features) as writer:
        for row in made:
            writer.write(row)
        writer.finalize()
    splits[name] = datasets.SplitInfo(name=name, num_examples=count, num_bytes=1, dataset_name="gsm8k")
datasets.DatasetInfo(features=made.features, builder_name="parquet", dataset_name="gsm8k", config_name="main", version="0.0.0",
                     splits=splits).write_to_directory(str(folder))
"""


@pytest.fixture(scope="module", name="before")
def _before(taught: Broken, context: RunContext) -> TaskResult:
    """Return the sound server's answers."""
    return tasks.answer(POLICY, "largest", context, runner.obtain(context), taught.url, ServerIdentity())


def judged(
    context: RunContext, url: str, before: TaskResult | Path | str, task: str = "largest", policy: AccuracyPolicy = POLICY
) -> dict[str, Check]:
    checks = tasks.run(policy, task, context, url, before, served=ServerIdentity())
    assert [check.name for check in checks] == [f"{task}-{name}" for name in NAMES]
    assert all(check.reason in tasks.REASONS for check in checks if check.state != "pass")
    return {check.name.removeprefix(f"{task}-"): check for check in checks}


def test_the_same_server_loses_nothing(taught: Broken, context: RunContext, before: TaskResult, tmp_path: Path) -> None:
    """A sound server paired with its own saved answers passes: 1000 questions, nothing gained, nothing lost, well above its floor."""
    results.save(before, tmp_path / "baseline.json")
    checks = judged(context, taught.url, tmp_path / "baseline.json")

    assert worst(check.state for check in checks.values()) == "pass"
    assert checks["paired"].figures[0].value == 0
    assert sum(before.answers) > 900


def test_a_server_that_hangs_is_ended_in_time(taught: Broken, context: RunContext, before: TaskResult) -> None:
    """The policy's seconds bound the harness, whatever the server does."""
    one = msgspec.structs.replace(POLICY.tasks["largest"], seconds=20)
    with taught.fault("stall", seconds=5):
        checks = judged(context, taught.url, before, policy=msgspec.structs.replace(POLICY, tasks={"largest": one}))

    assert (checks["answers"].state, checks["answers"].reason) == ("invalid", "harness-slow")


def test_gsm8k_runs_where_its_data_is(taught: Broken, context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The harness's own task runs from a hub cache, offline: here with 400 questions of ours, of which the small model knows none."""
    subprocess.run([runner.obtain(context), "-I", "-c", PREPARE, tmp_path / "datasets"], check=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    few = msgspec.structs.replace(POLICY.tasks["gsm8k"], questions=400, tokens=8, fewshot=2)
    checks = judged(context, taught.url, taught.url, "gsm8k", msgspec.structs.replace(POLICY, tasks={"gsm8k": few}))

    assert (checks["baseline"].state, checks["baseline"].reason) == ("invalid", "task-uninformative")
    assert checks["baseline"].figures[0].count == 400
