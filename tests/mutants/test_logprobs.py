"""Mutants of a real server that still reads well: each dies at G5 by its distributions, or at G6 by the questions that it loses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from tests.mutants.conftest import Kill
from tests.server.broken import GATES, Broken
from tests.server.taught import _context, _taught, _trained, patient
from tests.support.serving import _vllm_python

from sparkwright.core import strict_yaml
from sparkwright.forks.context import RunContext
from sparkwright.gates.accuracy import gate as accuracy
from sparkwright.gates.accuracy import harness
from sparkwright.gates.accuracy.gate import AccuracyPolicy
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.logprobs import distributions as recorded
from sparkwright.gates.logprobs import gate as distributions
from sparkwright.gates.logprobs.distributions import LogprobsPolicy

__all__ = ["_context", "_taught", "_trained", "_vllm_python"]

pytestmark = [pytest.mark.mutants, pytest.mark.server]

#: The limits are the real ones; fewer and shorter texts, as a processor has to score them.
POLICY = msgspec.structs.replace(
    strict_yaml.load(GATES / "logprobs.yaml", LogprobsPolicy), texts=16, tokens=256, decode_texts=8, decode_prompt=64
)
OFFICIAL = ServerIdentity("a" * 64, "m" * 64, {}, ("--enforce-eager",), {})
#: The servers of the tests have no prefix cache.
CANDIDATE = ServerIdentity("c" * 64, "m" * 64, {}, ("--no-enable-prefix-caching",), {})
TASKS = strict_yaml.load(GATES / "accuracy.yaml", AccuracyPolicy)

#: What is wrong → the fault, its options, and a check that must be among those that notice.
MUTANTS: Mapping[str, tuple[str, dict[str, object], str]] = {
    "1 % of tokens random": ("random-tokens", {"rate": 0.01}, "divergence"),
    # One projection alone that is 5 % too large moves this model by 0.0007 nat, which the limits (0.01 nat) let pass.
    "the scales of one layer 5 % too large": ("wrong-scale", {"layer": "layers.0.", "factor": 1.05}, "best-token"),
    "a projection's scale twice too large": ("wrong-scale", {"factor": 2}, "divergence"),
    "temperature 1.2 left in the logits": ("scale-logits", {"factor": 1 / 1.2}, "divergence"),
    "one token again and again": ("repetition", {}, "divergence"),
    "NaN in 1 % of the rows of logits": ("nan-logits", {"rate": 0.01}, "candidate"),
    "wrong global scale with a right-looking prefill": ("wrong-scale", {"factor": 2, "depth": 0}, "decode-greedy"),
    "5 % of the generated tokens random": ("random-tokens", {"rate": 0.05, "depth": 0}, "decode-sampled"),
}
LOSSES: Mapping[str, tuple[str, dict[str, object]]] = {
    "8 % of answers wrong": ("random-tokens", {"rate": 0.08}),
    "the scales of one layer twice too large": ("wrong-scale", {"layer": "layers.0.", "factor": 2}),
}


def distances(taught: Broken, known: Path) -> tuple[Check, ...]:
    return distributions.run(POLICY, patient(taught.url), known, served=CANDIDATE)


@pytest.fixture(scope="module", name="known")
def _known(taught: Broken, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the reference, recorded from the server before it is broken."""
    path = tmp_path_factory.mktemp("reference") / "logprobs.json"
    recorded.save(distributions.record(POLICY, patient(taught.url), OFFICIAL), path)
    return path


@pytest.fixture(scope="module", name="sound")
def _sound(taught: Broken, known: Path) -> tuple[Check, ...]:
    """Return what the gate says of the server before it is broken."""
    return distances(taught, known)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_server_that_still_reads_well_dies(kill: Kill, taught: Broken, known: Path, sound: tuple[Check, ...], mutant: str) -> None:
    """The check that is made for the fault fails."""
    fault, options, name = MUTANTS[mutant]
    with taught.fault(fault, **options):
        checks = distances(taught, known)

    kill(mutant=mutant, gate="G5", sound=sound, mutant_checks=checks)
    assert {check.name: check.state for check in checks}[name] == "fail"


@pytest.fixture(scope="module", name="before")
def _before(taught: Broken, context: RunContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recorded answers of the server before it is broken."""
    path = tmp_path_factory.mktemp("before") / "largest.json"
    result = harness.ask(context, "largest", TASKS.tasks["largest"], taught.client(), ServerIdentity("b" * 64))
    path.write_bytes(msgspec.json.encode(result))
    return path


def answered(taught: Broken, context: RunContext, before: Path) -> tuple[Check, ...]:
    """Return the checks of G6."""
    return accuracy.run(TASKS, "largest", context, taught.client(), before, identity=ServerIdentity("a" * 64), floor=0.8)


@pytest.fixture(scope="module", name="equal")
def _equal(taught: Broken, context: RunContext, before: Path) -> tuple[Check, ...]:
    """Return what G6 says of the server before it is broken, asked a second time."""
    return answered(taught, context, before)


@pytest.mark.parametrize("mutant", LOSSES)
def test_a_server_that_loses_questions_dies(
    kill: Kill, taught: Broken, context: RunContext, before: Path, equal: tuple[Check, ...], mutant: str
) -> None:
    """Eight points of 1000 questions are beyond the margin of 2.8; the baseline knows nearly all of them."""
    fault, options = LOSSES[mutant]
    with taught.fault(fault, **options):
        checks = answered(taught, context, before)

    kill(mutant=mutant, gate="G6", sound=equal, mutant_checks=checks)
    assert {check.name: check.state for check in checks}["largest-paired"] == "fail"
