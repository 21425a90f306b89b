"""G3 and the client with a real server: sound as it is, and behind a proxy that breaks its replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.server.proxy import FAULTS, Proxy

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.bench.server.launch import Server
from sparkwright.core import strict_yaml
from sparkwright.gates.contract import gate, kernel_trace
from sparkwright.gates.contract.gate import ObservedServer
from sparkwright.gates.contract.kernel_trace import BackendTable
from sparkwright.gates.contract.policy import ContractPolicy
from sparkwright.gates.core.server_under_test import ServerIdentity
from sparkwright.gates.core.verdict import Check

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "contract.yaml", ContractPolicy)
CPU = recipes.load(ROOT, "toy-cpu")


def observed(server: Server) -> ObservedServer:
    """Return a server with a profile of one request."""
    return gate.observe(server, server.log.parent / "profiles")


def shown(checks: Sequence[Check]) -> list[str]:
    return [f"{check.name} {check.state} {check.reason}: {check.message}" for check in checks]


def test_real_server_fulfils_its_contract(server: Server, tmp_path: Path) -> None:
    """Every required check passes, the kernels of a profile and those of a recorded baseline among them."""
    own = observed(server)
    assert own.trace
    table = kernel_trace.kernels(kernel_trace.read(own.trace), POLICY, CPU.contract)
    kernel_trace.save(BackendTable(ServerIdentity(wheel="a" * 64), CPU.name, table), tmp_path / "backends.json")
    checks = gate.run(POLICY, CPU, own, baseline=tmp_path / "backends.json")
    assert {check.state for check in checks if check.required} == {"pass"}, shown(checks)
    passed = {check.name for check in checks if check.state == "pass"}
    assert {"server", "kernels-attention", "kernels-linear", "backends", "version", "kv-cache"} <= passed
    assert table == {
        f"{phase} {kind}": kernel
        for phase in kernel_trace.PHASES
        for kind, kernel in (("attention", "_C::cpu_attention_with_kv_cache"), ("linear", table["decode linear"]))
    }


def test_the_client_agrees_with_the_server(server: Server) -> None:
    """Tokens, text, scores and counters of one prompt are told alike by every way to ask for them."""
    client = server.client()
    text = "The capital of France is 東京, not Paris."
    tokens = client.tokenize(text)
    assert client.detokenize(tokens) == text
    answer = client.complete(text, max_tokens=24, ignore_eos=True, logprobs=5)
    again = client.complete(tokens, max_tokens=24, ignore_eos=True, logprobs=5)
    assert (answer.tokens, answer.logprobs, answer.usage.prompt_tokens) == (again.tokens, again.logprobs, len(tokens))
    assert answer.tokens == tuple(max(found, key=found.__getitem__) for found in answer.logprobs), "the likeliest is chosen"
    assert client.detokenize(answer.tokens) == answer.text
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
        "prompt-unreadable": [("\ud800", 5, 0)],
    }
    for reference, prompts in cases.items():
        for prompt, tokens, top in prompts:
            with pytest.raises(ServerInvalid) as caught:
                client.complete(prompt, max_tokens=tokens, logprobs=top or None)
            assert caught.value.reason == reference, (prompt[:20], caught.value.message)


#: The client's reason for a reply that a proxy spoiled.
SPOILED = {
    "truncate": "stream-truncated",
    "html": "server-html",
    "abort": "stream-error",
    "other-model": "model-mismatch",
    "wrong-usage": "usage-mismatch",
    "garbage": "answer-unreadable",
}


def test_a_spoiled_reply_of_a_real_server_is_refused(server: Server) -> None:
    """Each fault has its reference, and without a fault the proxy changes nothing."""
    with Proxy(server.url) as proxy:
        client = Client(proxy.url)
        sound = client.complete("One, two,", max_tokens=12, ignore_eos=True)
        assert sound.tokens == server.client().complete("One, two,", max_tokens=12, ignore_eos=True).tokens
        assert set(SPOILED) | {"none", "random-tokens"} == set(FAULTS)
        for fault, reference in SPOILED.items():
            proxy.fault = fault
            with pytest.raises(ServerInvalid) as caught:
                client.complete("One, two,", max_tokens=12, ignore_eos=True)
            assert caught.value.reason == reference, (fault, caught.value.message)
        proxy.fault, proxy.rate = "random-tokens", 0.5
        assert client.complete("One, two,", max_tokens=12, ignore_eos=True).tokens != sound.tokens, "no client can see this; G4 does"


def test_the_environment_is_the_wheel_that_it_was_installed_from(server: Server) -> None:
    """What the installer wrote is the wheel of the package index, byte for byte."""
    (wheel,) = (server.plan.python.parents[1] / "wheel").iterdir()
    assert wheel_identity.mismatches(server.plan.python, wheel) == ()
