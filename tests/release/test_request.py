"""A request to gate: what is refused in seconds, and when verdicts are still those of today's policy, machine and models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import verdicts as made
from tests.support import wheels

from sparkwright.bench.model.checkpoint import model_digest
from sparkwright.cli import main
from sparkwright.cli.options import checkout
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.ladder import TRANSIENT
from sparkwright.gates.core.verdict import Verdict, not_run
from sparkwright.release import policy, request

#: One of each group of the repository's policy.
NAMES = made.RECIPES
SPARK = ("12.1",)


@pytest.fixture(name="context")
def _context(tmp_path: Path) -> RunContext:
    """Return this checkout with a store of its own."""
    words = ["--root", str(wheels.ROOT), "--cache-dir", str(tmp_path / "cache"), "--stack", "2026.11"]
    return checkout(main.parse(["gate", "--offline", *words]))


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> Path:
    """Return a folder of models, of which none is a recipe's."""
    for name in NAMES:
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path / "models"


def test_everything_that_is_missing_is_said_at_once(context: RunContext, models: Path) -> None:
    """Another GPU, a kernel's log that is hidden, a model that is not the recipe's, and none at all; of these a candidate is refused for the models alone."""
    with refusal("request-unfit") as caught:
        request.require(context, NAMES, "verified", gpus=("9.0",), kernel_log=False, models=models)
    said = "\n".join(caught.value.details)
    assert "(kernel-log-hidden)" in said
    assert "GPU of SM 12.1; the machine has 9.0 (machine-other)" in said
    assert said.count("(model-missing)") == len(NAMES)
    for reference, folder in (("model-missing", models), ("model-missing", models / "none")):
        with refusal("request-unfit") as caught:
            request.require(context, NAMES, "candidate", gpus=("9.0",), models=folder)
        said = "\n".join(caught.value.details)
        assert (said.count(f"({reference})"), "machine-other" in said) == (len(NAMES), False)
    asked = request.require(context, NAMES, "candidate", gpus=("9.0",))
    assert [entry.reference for entry in asked.missing] == ["machine-other"]
    assert request.require(context, (), "verified", gpus=SPARK).recipes == NAMES


def gated(models: Path) -> list[Verdict]:
    """Return a verdict of every gate and recipe by the policy of today; one of them could not be judged."""
    rules, verdicts = policy.load(wheels.ROOT), list[Verdict]()
    checks = (not_run("server", "no kernel was seen", "unseen"),)
    for gate in sorted(rules.file.required):
        # One recipe is enough for G8.
        for name in NAMES[gate == "G8" :] if gate >= "G3" else ("",):
            digest = rules.expected_digest(gate, "2026.11", name)
            model = model_digest(models / name) if name else ""
            verdicts.append(Verdict(gate, "", "0" * 64, digest, checks, name, host=dict(made.HOST), model=model))
    return verdicts


def test_a_night_is_settled_until_something_changes(context: RunContext, models: Path) -> None:
    """Not-run verdicts settle it, too, unless another night may end otherwise; a verdict less, another policy, a driver, or a model on the disk unsettle it. The audit has a machine of its own."""
    asked = request.require(context, NAMES, "verified", gpus=SPARK)
    rules, verdicts = policy.load(wheels.ROOT), gated(models)
    host = dict(made.HOST)
    assert request.settled(verdicts, asked, rules, host, models)
    for verdict in verdicts:
        rest = [other for other in verdicts if other is not verdict]
        elsewhere = replace(verdict, host={**made.HOST, "driver": "1"})
        assert not request.settled(rest, asked, rules, host, models), verdict.label
        counts = rules.file.gates[verdict.gate].gpu
        assert request.settled([*rest, elsewhere], asked, rules, host, models) is not counts, verdict.label
        if verdict.policy:
            assert not request.settled([*rest, replace(verdict, policy="1" * 64)], asked, rules, host, models), verdict.label
    for reason in TRANSIENT:
        short = replace(verdicts[-1], checks=(not_run("ladder", "no time, or no network", reason),))
        assert not request.settled([*verdicts[:-1], short], asked, rules, host, models)
    (models / NAMES[0] / "model.safetensors").write_bytes(b"new")
    assert not request.settled(verdicts, asked, rules, host, models)
