"""The load generators on a real server of vLLM: what they count is what was ordered, and what the server counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.load.client import Own

from sparkwright.bench.load import vllmrs
from sparkwright.bench.load.order import Generator, Order
from sparkwright.bench.server.serve import Server
from sparkwright.cli.options import default_cache
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = [pytest.mark.server, pytest.mark.network]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", name="context")
def _context(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return RunContext(Project(ROOT, "2026.11"), Store(default_cache()), ("vllm",), tmp_path_factory.mktemp("out"))


def _generator(context: RunContext, name: str) -> Generator:
    if name == "own":
        return Own()
    return vllmrs.obtain(context)


@pytest.mark.parametrize("name", ["own", "vllm-rs"])
def test_a_leg_is_what_was_ordered(server: Server, toy: Path, context: RunContext, name: str) -> None:
    """Each request has the tokens that were ordered, prompt and answer, and the server's counters grow by those of all requests."""
    client = server.client()
    before = client.metrics()
    order = Order(server.url, server.launch.name, 96, 32, 4, 8, warmups=2, seed=3, tokenizer=toy)
    run = _generator(context, name).measure(order)
    after = client.metrics()
    assert [(one.prompt, one.tokens, one.error) for one in run.requests] == [(96, 32, "")] * 8
    assert all(0 < one.ttft < one.seconds for one in run.requests)
    assert run.rate > 0
    for counter, count in (("vllm:prompt_tokens_total", 10 * 96), ("vllm:generation_tokens_total", 10 * 32)):
        assert after[counter] - before.get(counter, 0.0) == count


def test_the_probe_is_the_same_each_time(server: Server) -> None:
    """200 tokens at temperature 0, one request at a time, are the same tokens each time."""
    order = Order(server.url, server.launch.name, 16, 200, 1, 3, warmups=0, seed=5)
    first, *others = (Own().answers(order)[0].codes for _ in range(3))
    assert len(first) == 200
    assert others == [first, first]
