"""G5 on a real server: its reference, its floor, and its own repetition."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.server.broken import Broken
from tests.server.taught import GATES, _taught, _trained, patient
from tests.support.serving import _server, _toy, _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import Server
from sparkwright.core import strict_yaml
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check, worst
from sparkwright.gates.logprobs import distributions
from sparkwright.gates.logprobs import gate as logprobs
from sparkwright.gates.logprobs.distributions import LogprobsPolicy

__all__ = ["_server", "_taught", "_toy", "_trained", "_vllm_python"]

pytestmark = pytest.mark.server

#: The limits are the real ones; fewer and shorter texts, as a processor has to score them.
POLICY = replace(strict_yaml.load(GATES / "logprobs.yaml", LogprobsPolicy), texts=12, tokens=256, decode_texts=8, decode_prompt=64)
OFFICIAL = ServerIdentity("a" * 64, "m" * 64, {}, ("--enforce-eager",), {})
#: The servers of the tests have no prefix cache.
CANDIDATE = ServerIdentity("c" * 64, "m" * 64, {}, ("--no-enable-prefix-caching",), {})


@pytest.fixture(scope="module", name="known")
def _known(taught: Broken, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the sound server's reference."""
    path = tmp_path_factory.mktemp("reference") / "logprobs.json"
    distributions.save(logprobs.record(POLICY, patient(taught.url), OFFICIAL), path)
    return path


def judged(client: Client, against: Path) -> dict[str, Check]:
    checks = logprobs.run(POLICY, client, against, served=CANDIDATE)
    assert all(check.reason in logprobs.REASONS for check in checks if check.state != "pass")
    return {check.name: check for check in checks}


def test_a_server_alone_repeats_itself(taught: Broken, known: Path) -> None:
    """Prefill has no floor on one machine, and generated tokens follow from their recomputation."""
    checks = judged(patient(taught.url), known)

    assert worst(check.state for check in checks.values() if check.required) == "pass"
    assert max(distributions.load(known).floors["divergence"]) < 1e-6
    assert checks["divergence"].figures[0].value < 1e-6


def test_another_model_is_not_compared(server: Server, known: Path) -> None:
    """A server of another model has another tokenizer: invalid, not a failure of the wheel."""
    checks = judged(patient(server.url), known)

    assert (checks["candidate"].state, checks["candidate"].reason) == ("invalid", "reference-other-model")


def test_logarithms_that_are_not_numbers_are_the_candidates_failure(taught: Broken, known: Path) -> None:
    """vLLM refuses to write a logarithm that is not a number; that is no fault of the connection."""
    with taught.fault("nan-logits", rate=0.01):
        checks = judged(patient(taught.url), known)

    assert (checks["candidate"].state, checks["candidate"].reason) == ("fail", "not-a-number")
