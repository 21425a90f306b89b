"""The words gate on real servers: one whose model knows the answers, one of random weights, and streams that break on the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.server.broken import WORDS, Broken, _broken, _learnt
from tests.server.proxy import Proxy
from tests.support.serving import _vllm_python

from sparkwright.bench.server.client import Client
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.gates.core.verdict import Check, worst
from sparkwright.gates.generation import gate as words
from sparkwright.gates.generation import policy as prompts
from sparkwright.gates.generation.checks import Said

__all__ = ["_broken", "_learnt", "_vllm_python"]

pytestmark = pytest.mark.server

POLICY = strict_yaml.load(WORDS, prompts.GenerationPolicy)
#: Three prompts and short answers, for tests that are about the way and not about the words.
SHORT = replace(
    POLICY, tokens=24, batch=0, prompts=POLICY.prompts[:3], logprobs=prompts.Logprobs(0, 0),
    profiles={name: replace(profile, answers=0) for name, profile in POLICY.profiles.items()},
)  # fmt: skip


def named(checks: tuple[Check, ...]) -> dict[str, Check]:
    """Return *checks* by name; every reference among them is explained."""
    assert {check.reason for check in checks} - {""} <= set(words.REASONS)
    return {check.name: check for check in checks}


def test_a_model_that_knows_the_answers_passes_every_check(broken: Broken) -> None:
    """Twelve prompts of 200 tokens, twice: nothing is left out, and every required check is a pass."""
    checks = named(words.run(POLICY, broken.client(), "learnt"))

    assert {name: check.state for name, check in checks.items() if check.required} == dict.fromkeys(
        [
            "prompts", "streams", "token-count", "identical-reruns", "nan-tokens", "same-token-run", "top-token-share", "distinct-4-grams",
            "zlib-ratio", "replacement-characters", "answer-length", "entropy", "answers", "corrupted-requests",
        ],
        "pass",
    )  # fmt: skip
    assert checks["answers"].figures[0].value == 12


def test_what_a_profile_leaves_out_is_no_pass(broken: Broken) -> None:
    """For a model that knows no facts the answers are not run, with the policy's reason, and the gate is not a pass."""
    checks = named(words.run(SHORT, broken.client(), "random"))

    assert {name for name, check in checks.items() if check.reason == "policy-skips"} == set(POLICY.profiles["random"].not_run)
    assert worst(check.state for check in checks.values() if check.required) == "not-run"


def test_prompts_that_do_not_fit_are_invalid(broken: Broken) -> None:
    """A long prompt beyond the model's length is named, and the others are judged all the same."""
    profile = replace(POLICY.profiles["learnt"], long=4000, answers=0)
    policy = replace(SHORT, prompts=(POLICY.prompts[0], POLICY.prompts[-1]), profiles={"long": profile})
    checks = named(words.run(policy, broken.client(), "long"))

    assert (checks["prompts"].state, checks["prompts"].reason) == ("invalid", "prompt-too-long")
    assert [sample.case for sample in checks["prompts"].samples] == ["long-needle"]
    assert checks["token-count"].state == "pass"


def test_an_end_that_the_model_has_cuts_the_words(broken: Broken) -> None:
    """A text that is one token of the model ends its answers; one that is not is passed over."""
    client = broken.client()
    said = client.complete(POLICY.prompts[0].text, max_tokens=24, ignore_eos=True)
    once = next(token for token in said.tokens if said.tokens.count(token) == 1 and "\ufffd" not in client.detokenize([token]))
    profile = replace(POLICY.profiles["learnt"], answers=0, ends=(client.detokenize([once]), "<|no such token|>"))
    policy = replace(SHORT, prompts=POLICY.prompts[:1], profiles={"ending": profile})

    checks = named(words.run(policy, client, "ending"))

    assert checks["answer-length"].figures[0].value == said.tokens.index(once)


@pytest.mark.parametrize(("fault", "reference"), [
    ("truncate", "stream-truncated"), ("truncate-inside", "stream-truncated"), ("html-after", "server-html"),
    ("error-after", "stream-error"), ("other-model", "model-mismatch"), ("drop-usage", "usage-mismatch"),
    ("wrong-usage", "usage-mismatch"), ("drop-done", "stream-truncated"), ("garbage", "answer-unreadable"),
])  # fmt: skip
def test_streams_that_break_are_invalid(broken: Broken, fault: str, reference: str) -> None:
    """Whatever comes in place of an answer is no answer, and nothing is judged by half of one."""
    with Proxy(broken.url, fault) as proxy:
        checks = named(words.run(SHORT, Client(proxy.url), "learnt"))

    assert (checks["streams"].state, checks["streams"].reason) == ("invalid", reference)
    assert {checks[name].state for name in ("token-count", "identical-reruns", "nan-tokens", "answers")} == {"not-run"}


def test_a_server_that_is_not_there_is_invalid() -> None:
    """The first question that finds nobody ends the gate."""
    checks = words.run(POLICY, Client("http://127.0.0.1:9"), "learnt")

    assert [(check.state, check.reason) for check in checks] == [("invalid", "server-unreachable")]


def test_a_server_that_breaks_every_answer_is_given_up(broken: Broken) -> None:
    """Three answers in a row that do not count are enough; the rest is not asked for."""
    with Proxy(broken.url, "truncate") as proxy:
        checks = named(words.run(replace(POLICY, tokens=24), Client(proxy.url), "learnt"))

    assert len(checks["streams"].samples) == words.MOST_SILENT


def test_a_run_from_the_prefix_cache_is_compared_with_another_such(broken: Broken) -> None:
    """Where the cache was used, a first run that differs only informs; a second and a third that differ are a failure."""
    client = broken.client()
    with console.progress("words", 9) as progress:
        asking = words._Asking(client, progress)
        fitted = [prompts.fit(prompt, "{prompt}", 600, lambda text: len(client.tokenize(text))) for prompt in SHORT.prompts]
        answers = [asking.ask(one, SHORT.tokens) for one in fitted]
        assert all(answers)
        other = [replace(answer, tokens=(1, *answer.tokens[1:])) for answer in answers if answer]
        said = [Said(one, first, second) for one, first, second in zip(fitted, other, answers, strict=True)]

        warm, cold = words._reruns(SHORT, asking, said, {words.CACHED: -1.0})
        assert (warm.name, warm.state) == ("identical-reruns", "pass")
        assert (cold.name, cold.state, cold.required) == ("cold-and-cached", "fail", False)
        (uncached,) = words._reruns(SHORT, asking, said, client.metrics())
        assert (uncached.name, uncached.state, uncached.required) == ("identical-reruns", "fail", True)
        with broken.fault("random-tokens", rate=0.3):
            assert words._reruns(SHORT, asking, said, {words.CACHED: -1.0})[0].state == "fail"
