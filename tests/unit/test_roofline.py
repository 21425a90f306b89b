"""What memory allows, and the share of it that a measured rate needs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.model.decode_bytes import (
    GB10,
    Bandwidth,
    bandwidth_use,
    distinct_experts,
    store_bandwidth,
    stored_bandwidth,
)
from sparkwright.core.store import Store

experts = st.integers(1, 1024).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


@given(experts, st.integers(1, 512))
def test_more_tokens_read_more_experts_up_to_all(each: tuple[int, int], tokens: int) -> None:
    count, taken = each
    now, more = distinct_experts(count, taken, tokens), distinct_experts(count, taken, tokens + 1)
    assert math.isclose(distinct_experts(count, taken, 1), taken)
    assert now <= more * (1 + 1e-12)
    assert more - now <= taken * (1 + 1e-9)
    assert now <= count * (1 + 1e-12)


def test_distinct_experts_follow_the_formula() -> None:
    """For 8 of 256 experts and 32 tokens, and exhaustively for two tokens that take 1 of 3."""
    assert math.isclose(distinct_experts(256, 8, 32), 256 * (1 - (1 - 8 / 256) ** 32))
    assert math.isclose(distinct_experts(3, 1, 2), sum(len({a, b}) for a in range(3) for b in range(3)) / 9)
    for each in ((4, 0, 1), (4, 5, 1), (0, 0, 1), (4, 2, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="experts"):
            distinct_experts(*each)


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 1, 1), (-1, 1, 1, 1), (1, 0, 1, 1), (1, math.nan, 1, 1), (1, 1, 0, 1), (1, 1, math.inf, 1), (1, 1, 1, 0.5)],
)
def test_use_of_impossible_numbers_is_refused(numbers: tuple[float, float, float, float]) -> None:
    step, rate, bandwidth, accepted = numbers
    with pytest.raises(ValueError, match="tokens in a step"):
        bandwidth_use(step, rate, bandwidth, accepted=accepted)


def test_use_counts_the_steps_that_speculation_saves() -> None:
    assert bandwidth_use(2e9, 50, 200) == 0.5
    assert bandwidth_use(2e9, 150, 200, accepted=3) == 0.5


def test_only_a_measured_bandwidth_counts_as_measured(store: Store) -> None:
    assert stored_bandwidth(store) is None
    for wrong in (GB10, Bandwidth(0.0, "measured"), Bandwidth(-3.0, "measured")):
        store_bandwidth(store, wrong)
        assert stored_bandwidth(store) is None
    store_bandwidth(store, Bandwidth(232.5, "measured", "GB10"))
    assert stored_bandwidth(store) == Bandwidth(232.5, "measured", "GB10")
