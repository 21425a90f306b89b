"""The distributions gate on a real server: its reference, its floor, and what it says of the same server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.server.broken import Broken
from tests.server.taught import GATES, _taught, _trained, patient
from tests.support.serving import _server, _toy, _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.bench.server.launch import Server
from sparkwright.core import strict_yaml
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check, worst
from sparkwright.gates.logprobs import gate as distributions
from sparkwright.gates.logprobs import reference
from sparkwright.gates.logprobs.gate import LogprobsPolicy
from sparkwright.gates.logprobs.reference import Reference

__all__ = ["_server", "_taught", "_toy", "_trained", "_vllm_python"]

pytestmark = pytest.mark.server

PARAGRAPHS = reference.load_corpus(GATES / "corpus.yaml")
REAL = strict_yaml.load(GATES / "logprobs.yaml", LogprobsPolicy)
TEXTS = 12
#: The limits are the real ones; fewer and shorter texts, as a processor has to score them.
POLICY = msgspec.structs.replace(REAL, texts=TEXTS, tokens=256, corpus=reference.digest_of(reference.corpus_texts(PARAGRAPHS, TEXTS)))


@pytest.fixture(scope="module", name="known")
def _known(taught: Broken) -> Reference:
    """Return what the sound server says."""
    return distributions.record(POLICY, PARAGRAPHS, patient(taught.url), ServerIdentity())


def judged(client: Client, against: Reference | Path) -> dict[str, Check]:
    checks = distributions.run(POLICY, client, against, paragraphs=PARAGRAPHS, served=ServerIdentity())
    assert all(check.reason in distributions.REASONS for check in checks if check.state != "pass")
    return {check.name: check for check in checks}


def test_a_server_alone_repeats_itself(taught: Broken, known: Reference) -> None:
    """Asked one text at a time, a server gives the same distributions again: the floor of this machine is 0, and it passes every check."""
    checks = judged(patient(taught.url), known)

    assert worst(check.state for check in checks.values()) == "pass"
    assert known.floor[:, 0].max() < 1e-6
    assert checks["divergence"].figures[0].value < 1e-6


def test_the_saved_reference_decides_alike(taught: Broken, known: Reference, tmp_path: Path) -> None:
    """A candidate can be judged when the reference's server is gone."""
    reference.save(known, tmp_path / "reference.json")

    assert judged(patient(taught.url), tmp_path / "reference.json") == judged(patient(taught.url), known)


def test_another_model_is_not_compared(server: Server, known: Reference) -> None:
    """A server of another model has another tokenizer: invalid, not a failure of the wheel."""
    checks = judged(patient(server.url), known)

    assert (checks["candidate"].state, checks["candidate"].reason) == ("invalid", "reference-other-model")


def test_numbers_that_are_none_are_the_candidates_failure(taught: Broken, known: Reference) -> None:
    """vLLM refuses to write a logarithm that is not a number; the gate knows its words, and calls it no fault of the connection."""
    with taught.fault("nan-logits", rate=0.01):
        checks = judged(patient(taught.url), known)

    assert (checks["candidate"].state, checks["candidate"].reason) == ("fail", "not-a-number")
