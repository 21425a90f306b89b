"""G6 from end to end: lm-eval asks a real server, and servers that answer nonsense or never, within its limits."""

import contextlib
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.server.broken import GATES, Broken
from tests.support.badserver import Listener, Say, completing, endless, head, silent, whole

from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.gates import accuracy, core

# lm-eval has 66 wheels.
pytestmark = [pytest.mark.server, pytest.mark.network]

POLICY = strict_yaml.load(GATES / "accuracy.yaml", accuracy.AccuracyPolicy)
CANDIDATE, BASELINE = core.server_under_test.ServerIdentity("a" * 64, "m" * 64), core.server_under_test.ServerIdentity("b" * 64, "m" * 64)

#: Writes a data set of GSM8K's form as the hub's library keeps it once it was loaded.
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


def saved(result: accuracy.TaskResult, folder: Path) -> Path:
    path = folder / "baseline.json"
    path.write_bytes(msgspec.json.encode(result))
    return path


def checked(context: RunContext, url: str, baseline: Path, name: str = "largest", policy: accuracy.AccuracyPolicy = POLICY) -> dict[str, core.verdict.Check]:
    checks = accuracy.run(policy, name, context, Client(url), baseline, identity=CANDIDATE, floor=0.8)
    assert {check.reason for check in checks} - {""} <= set(accuracy.REASONS)
    return {check.name.removeprefix(f"{name}-"): check for check in checks}


def test_gsm8k_runs_if_its_data_is_here(broken: Broken, context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lm-eval's own task runs offline from the hub cache; without the data it is not run, before any server is asked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    missing = checked(context, "http://127.0.0.1:9", tmp_path / "none", "gsm8k")
    assert (missing["baseline"].state, missing["baseline"].reason) == ("not-run", "task-data-missing")

    subprocess.run([accuracy.obtain_harness(context), "-I", "-c", PREPARE, tmp_path / "datasets"], check=True)
    few = replace(POLICY.tasks["gsm8k"], questions=400, tokens=8, fewshot=2)
    before = accuracy.ask(context, "gsm8k", few, broken.client(), BASELINE)
    checks = checked(context, broken.url, saved(before, tmp_path), "gsm8k", replace(POLICY, tasks={"gsm8k": few}))
    assert (checks["baseline"].reason, "of 400 questions" in checks["baseline"].message) == ("task-uninformative", True)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (whole(b"<html>welcome</html>"), "harness-failed"),
        (whole({"choices": []}), "harness-failed"),
        (whole({"choices": [{"index": 0, "text": None}]}), "harness-failed"),
        (endless(b" " * (1 << 20), head(length=8 << 30)), "harness-failed"),
        (endless(b"no " * (1 << 20), head(length=900 << 20, status="500 Error")), "harness-failed"),
        (silent, "harness-slow"),
    ],
    ids=["page", "empty", "null", "8 GB", "long error", "silent"],
)
def test_nonsense_ends_the_task(context: RunContext, tmp_path: Path, reply: bytes | Say, reason: str) -> None:
    """Invalid, within the limits of time, memory and files."""
    seconds = 20 if reason == "harness-slow" else 600
    policy = replace(POLICY, tasks={"largest": replace(POLICY.tasks["largest"], seconds=seconds)})
    keys = tuple(f"{number:016x}" for number in range(1000))
    settings = accuracy.settings_digest(context, "largest", policy.tasks["largest"])
    path = saved(accuracy.TaskResult(BASELINE, settings, "largest", keys, "1" * 1000), tmp_path)
    with contextlib.closing(Listener(completing(reply))) as server:
        checks = checked(context, server.url, path, policy=policy)

    assert (checks["answers"].state, checks["answers"].reason) == ("invalid", reason)
    assert sum(len(sample.actual) for sample in checks["answers"].samples) < 10_000
