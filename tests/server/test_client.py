"""The client and the load generator and the canary with a real server, and the wheel that serves."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from sparkwright.audit.report import AuditedWheel
from sparkwright.bench import vllm_bench
from sparkwright.bench.server import server_process, wheel_identity
from sparkwright.bench.server.client import ServerInvalid
from sparkwright.cli.options import default_cache
from sparkwright.core import store, strict_yaml
from sparkwright.gates import logprobs
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Ladder, Verdict, passed
from sparkwright.release import canary

pytestmark = pytest.mark.server


def test_the_client_agrees_with_the_server(server: server_process.Server) -> None:
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


def test_prompts_that_the_server_cannot_hold_have_a_reference(server: server_process.Server) -> None:
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


def test_the_environment_is_the_wheel_that_it_was_installed_from(server: server_process.Server) -> None:
    """What the installer wrote is the wheel of the package index, byte for byte."""
    (wheel,) = (server.plan.python.parents[1] / "wheel").iterdir()
    assert wheel_identity.mismatches(server.plan.python, wheel) == {}


@pytest.mark.network
def test_a_measurement_is_what_was_ordered(server: server_process.Server, toy: Path) -> None:
    """Each request has the ordered tokens, prompt and answer, and the server's counters grow by those of all requests."""
    client = server.client()
    before = client.metrics()
    spec = vllm_bench.LoadSpec(server.url, server.plan.name, 96, 32, 4, 8, warmups=2, seed=3, tokenizer=toy)
    result = vllm_bench.obtain(Path(__file__).parents[2], "2026.11", store.Store(default_cache()), offline=False).measure(spec)
    after = client.metrics()
    assert [(one.prompt_tokens, one.output_tokens, one.error) for one in result.requests] == [(96, 32, "")] * 8
    assert all(0 < one.ttft < one.latency for one in result.requests)
    assert result.itl_p50
    assert result.itl_p90
    assert 0 < result.itl_p50 <= result.itl_p90
    for counter, count in (("vllm:prompt_tokens_total", 10 * 96), ("vllm:generation_tokens_total", 10 * 32)):
        assert after[counter] - before.get(counter, 0.0) == count


# The canary.

ROOT = Path(__file__).parents[2]


def test_real_server_answers_as_recorded_and_not_as_another(server: server_process.Server, tmp_path: Path) -> None:
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "logprobs.yaml", logprobs.LogprobsPolicy)
    policy = replace(policy, texts=8, tokens=64, decode_texts=8, decode_prompt=24, decode_tokens=16)
    client = server.client()
    reference = logprobs.record(policy, client, ServerIdentity("a" * 64, "d" * 64, {}, ()))
    (tmp_path / "logprobs.json").write_bytes(msgspec.json.encode(reference))
    wheel = AuditedWheel("vllm-1-py3-none-any.whl", "c" * 64, 1, "vllm", "1", ("any",))
    verdict = Verdict("G5", "", wheel.sha256, "", (passed("candidate", "made up"),), "toy-cpu", model="d" * 64)
    canary.write(store.Store(tmp_path / "store"), tmp_path, Ladder("s", wheel, (verdict,)), tmp_path, "random")
    (path,) = tmp_path.glob("*.canary.json")
    (own,) = canary.read(path).values()

    assert [*canary.differences(own, client, ROOT, "toy-cpu")] == []
    # One that is sure of every token of the texts.
    rows = [(token, {**dict.fromkeys(logits, -12.0), token: -1e-3}) for token, logits in own.reference.rows]
    other = replace(own, reference=replace(own.reference, rows=rows))
    assert any("from the distributions" in line for line in canary.differences(other, client, ROOT, "toy-cpu"))
