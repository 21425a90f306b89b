"""G4 on real servers: one whose model knows the answers, and replies that break on the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.server.broken import WORDS, Broken, _broken, _learnt
from tests.server.proxy import Proxy
from tests.support.serving import _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.gates.core.verdict import Check, worst
from sparkwright.gates.generation import gate as generation
from sparkwright.gates.generation.checks import GenerationPolicy

__all__ = ["_broken", "_learnt", "_vllm_python"]

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(WORDS, GenerationPolicy)
#: Three prompts and short answers, for tests of the way to the answers.
SHORT = replace(
    POLICY, tokens=24, prompts=POLICY.prompts[:3], profiles={name: replace(kind, answers=0) for name, kind in POLICY.profiles.items()}
)


def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name; every reason among them is declared."""
    assert {check.reason for check in checks} - {""} <= set(generation.REASONS)
    return {check.name: check for check in checks}


def test_a_model_that_knows_the_answers_passes(broken: Broken) -> None:
    """Answers, facts in a long text and a long generation; a base model has no chat, and nothing is drafted."""
    checks = named(generation.run(POLICY, broken.client(), "learnt"))
    chats = set(generation.ABILITIES.values())

    assert {name: check.message for name, check in checks.items() if check.state != "pass" and name not in {*chats, "speculation"}} == {}
    assert {checks[name].reason for name in chats} == {"not-asked"}
    assert checks["speculation"].reason == "no-speculation"
    assert checks["answers"].figures[0].value == len(POLICY.prompts)


def test_a_profile_that_leaves_checks_out_is_no_pass(broken: Broken) -> None:
    """For a model that knows no facts the answers are not run, with the policy's reason."""
    checks = named(generation.run(SHORT, broken.client(), "random", quick=True))

    assert {name for name, check in checks.items() if check.reason == "policy-skips"} == set(POLICY.profiles["random"].not_run)
    assert worst(check.state for check in checks.values() if check.required) == "not-run"


def test_replies_that_break_are_invalid(broken: Broken) -> None:
    """Nothing is judged by half of an answer; the client's reason for each fault is in test_contract.py."""
    with Proxy(broken.url, "truncate") as proxy:
        checks = named(generation.run(SHORT, Client(proxy.url), "learnt", quick=True))

    assert (checks["replies"].state, checks["replies"].reason) == ("invalid", "stream-truncated")
    assert {checks[name].state for name in ("token-count", "identical-reruns", "nan-tokens", "answers")} == {"not-run"}
