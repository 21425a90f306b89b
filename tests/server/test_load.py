"""The load generator on a real server of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.bench.load import vllm_bench
from sparkwright.bench.load.vllm_bench import LoadSpec
from sparkwright.bench.server.launch import Server
from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store

pytestmark = [pytest.mark.server, pytest.mark.network]

ROOT = Path(__file__).parents[2]


def test_a_measurement_is_what_was_ordered(server: Server, toy: Path) -> None:
    """Each request has the ordered tokens, prompt and answer, and the server's counters grow by those of all requests."""
    client = server.client()
    before = client.metrics()
    spec = LoadSpec(server.url, server.plan.name, 96, 32, 4, 8, warmups=2, seed=3, tokenizer=toy)
    result = vllm_bench.obtain(ROOT, "2026.11", Store(default_cache()), offline=False).measure(spec)
    after = client.metrics()
    assert [(one.prompt_tokens, one.output_tokens, one.error) for one in result.requests] == [(96, 32, "")] * 8
    assert all(0 < one.ttft < one.latency for one in result.requests)
    assert result.itl_p50
    assert result.itl_p99
    assert 0 < result.itl_p50 <= result.itl_p99
    for counter, count in (("vllm:prompt_tokens_total", 10 * 96), ("vllm:generation_tokens_total", 10 * 32)):
        assert after[counter] - before.get(counter, 0.0) == count
