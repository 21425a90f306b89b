"""The client and the load generator with a real server, and the wheel that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.vllm_bench import LoadSpec
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.bench.server.server_process import Server
from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store

pytestmark = pytest.mark.server


def test_the_client_agrees_with_the_server(server: Server) -> None:
    """Tokens, text, scores and counters of one prompt are told alike by every way to ask for them."""
    client = server.client()
    text = "The capital of France is 東京, not Paris."
    tokens = client.tokenize(text)
    answer = client.complete(text, max_tokens=24, ignore_eos=True, logprobs=5)
    again = client.complete(tokens, max_tokens=24, ignore_eos=True, logprobs=5)
    assert (answer.tokens, answer.logprobs) == (again.tokens, again.logprobs)
    assert answer.tokens == tuple(max(found, key=found.__getitem__) for found in answer.logprobs), "the likeliest is chosen"
    scores = client.complete((*tokens, *answer.tokens), max_tokens=1, prompt_logprobs=5).prompt_logprobs[len(tokens) - 1 :]
    for token, score, found in zip(answer.tokens, scores, answer.logprobs, strict=True):
        assert score[token] == pytest.approx(found[token], abs=0.05), "prefill and decoding are other sums of bfloat16"
    before = client.metrics()["vllm:generation_tokens_total"]
    client.complete(tokens, max_tokens=7, ignore_eos=True)
    assert client.metrics()["vllm:generation_tokens_total"] == before + 7
    assert client.max_model_len() == 1024
    assert client.version() == "0.32.0"


def test_prompts_that_the_server_cannot_hold_have_a_reference(server: Server) -> None:
    """Too long as text and as tokens, tokens that the model has not, more logprobs than allowed, no text at all."""
    client = server.client()
    cases: dict[str, list[tuple[str | list[int], int, int]]] = {
        "prompt-too-long": [([5] * 1020, 5, 0)],
        "server-refused": [("hello " * 5000, 5, 0), ([5, 99_999], 5, 0), ("x", 5, 50), ("", 5, 0), ([], 5, 0)],
    }
    for reference, prompts in cases.items():
        for prompt, tokens, top in prompts:
            with pytest.raises(ServerInvalid) as caught:
                client.complete(prompt, max_tokens=tokens, logprobs=top or None)
            assert caught.value.reason == reference, (prompt[:20], caught.value.message)


def test_the_environment_is_the_wheel_that_it_was_installed_from(server: Server) -> None:
    """What the installer wrote is the wheel of the package index, byte for byte."""
    (wheel,) = (server.plan.python.parents[1] / "wheel").iterdir()
    assert wheel_identity.mismatches(server.plan.python, wheel) == {}


@pytest.mark.network
def test_a_measurement_is_what_was_ordered(server: Server, toy: Path) -> None:
    """Each request has the ordered tokens, prompt and answer, and the server's counters grow by those of all requests."""
    client = server.client()
    before = client.metrics()
    spec = LoadSpec(server.url, server.plan.name, 96, 32, 4, 8, warmups=2, seed=3, tokenizer=toy)
    result = vllm_bench.obtain(Path(__file__).parents[2], "2026.11", Store(default_cache()), offline=False).measure(spec)
    after = client.metrics()
    assert [(one.prompt_tokens, one.output_tokens, one.error) for one in result.requests] == [(96, 32, "")] * 8
    assert all(0 < one.ttft < one.latency for one in result.requests)
    assert result.itl_p50
    assert result.itl_p90
    assert 0 < result.itl_p50 <= result.itl_p90
    for counter, count in (("vllm:prompt_tokens_total", 10 * 96), ("vllm:generation_tokens_total", 10 * 32)):
        assert after[counter] - before.get(counter, 0.0) == count
