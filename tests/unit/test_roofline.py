"""What memory allows, and what a measured rate says about it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.model import roofline
from sparkwright.bench.model.roofline import GB10, Bandwidth
from sparkwright.core.store import Store

experts = st.integers(1, 1024).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


@given(experts, st.integers(1, 512))
def test_more_tokens_read_more_experts_and_never_more_than_there_are(each: tuple[int, int], tokens: int) -> None:
    """One token reads those that it takes; more read more, each adds no more than its own, and none beyond the last."""
    count, taken = each
    now, more = roofline.distinct(count, taken, tokens), roofline.distinct(count, taken, tokens + 1)

    assert math.isclose(roofline.distinct(count, taken, 1), taken)
    assert now <= more * (1 + 1e-12)
    assert more - now <= taken * (1 + 1e-9)
    assert now <= count * (1 + 1e-12)


def test_the_expected_experts_are_those_of_the_formula() -> None:
    """E·(1−(1−k/E)^N) for 8 of 256 experts and 32 tokens, and exhaustively for two tokens that take 1 of 3."""
    assert math.isclose(roofline.distinct(256, 8, 32), 256 * (1 - (1 - 8 / 256) ** 32))
    assert math.isclose(roofline.distinct(3, 1, 2), sum(len({a, b}) for a in range(3) for b in range(3)) / 9)


@pytest.mark.parametrize("each", [(4, 0, 1), (4, 5, 1), (0, 0, 1), (4, 2, 0), (4, -1, 1)])
def test_impossible_experts_are_refused(each: tuple[int, int, int]) -> None:
    """None, more than there are, and no token at all."""
    with pytest.raises(ValueError, match="experts"):
        roofline.distinct(*each)


def test_the_ceiling_is_bandwidth_by_bytes() -> None:
    """Llama-3.3-70B in NVFP4 reads 40.61 GB for a token: 6.72 tokens per second on a GB10's nominal bandwidth, times the batch in all."""
    found = roofline.ceiling(40.61e9, 4, GB10)

    assert (round(found.one, 2), round(found.together, 2)) == (6.72, 26.89)


def test_a_rate_above_the_ceiling_is_invalid_and_never_a_pass() -> None:
    """47.1 tokens per second under a claimed ceiling of 46 is 102 % of memory: the claim or the rate is wrong."""
    found = roofline.check("decode", 273e9 / 46, 47.1, 273)

    assert (found.state, found.reason) == ("invalid", "above-roofline")
    assert found.reason in roofline.REASONS
    assert round(found.figures[0].value) == 102


def test_speculation_gives_several_tokens_for_one_reading() -> None:
    """At 2.4 accepted tokens per step the same rate needs a third; a low use is told and is no failure."""
    assert roofline.check("decode", 6e9, 100, 273).state == "invalid"
    found = roofline.check("decode", 6e9, 100, 273, accepted=2.4)
    assert (found.state, round(found.figures[0].value)) == ("pass", 92)
    assert roofline.check("decode", 6e9, 1, 273).state == "pass"


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 1, 1), (-1, 1, 1, 1), (1, 0, 1, 1), (1, math.nan, 1, 1), (1, 1, 0, 1), (1, 1, math.inf, 1), (1, 1, 1, 0.5)],
)
def test_a_number_that_is_none_makes_the_check_invalid(numbers: tuple[float, float, float, float]) -> None:
    """No bytes, no rate, no bandwidth, and fewer tokens than one in a step cannot give a use."""
    step, rate, bandwidth, accepted = numbers
    with pytest.raises(ValueError, match="tokens in a step"):
        roofline.use(step, rate, bandwidth, accepted=accepted)
    assert roofline.check("decode", step, rate, bandwidth, accepted=accepted).reason == "roofline-unknown"


@given(st.floats(1, 1e13), st.floats(0.01, 1e5), st.floats(1, 1e5), st.floats(1, 16))
def test_a_rate_is_possible_exactly_up_to_the_ceiling(step: float, rate: float, bandwidth: float, accepted: float) -> None:
    """The use is the rate's share of the ceiling."""
    top = roofline.ceiling(step, 1, Bandwidth(bandwidth, "given")).one * accepted

    assert math.isclose(roofline.use(step, rate, bandwidth, accepted=accepted), rate / top, rel_tol=1e-9)


def test_only_what_was_measured_counts_as_measured(store: Store) -> None:
    """Nothing is known at first; what is kept is found again; a figure that is nominal or no number is not taken for a measurement."""
    assert roofline.stored(store) is None
    for wrong in (GB10, Bandwidth(0.0, "measured"), Bandwidth(-3.0, "measured")):
        roofline.keep(store, wrong)
        assert roofline.stored(store) is None
    roofline.keep(store, Bandwidth(232.5, "measured", "GB10"))
    assert roofline.stored(store) == Bandwidth(232.5, "measured", "GB10")
