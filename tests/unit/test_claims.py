"""Does a published figure hold here? And the exact intervals behind the answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparkwright.gates.statistics import bounds, claims
from sparkwright.gates.verdict import State

CLAIM = (73.0, 76.0)

figures = st.lists(st.floats(50, 100), min_size=3, max_size=10)


@pytest.mark.parametrize(
    ("values", "state", "says"),
    [
        ((74.1, 74.3, 74.2, 74.4), "pass", "the claim holds: 74.25 tok/s"),
        ((80.1, 80.3, 80.2, 80.4), "pass", "better than claimed"),
        ((60.1, 60.3, 60.2, 60.4), "fail", "does not hold"),
        ((70.0, 76.0, 73.0), "inconclusive", "neither way"),
        ((74.0, 74.1), "not-run", "2 launches"),
        ((), "not-run", "0 launches"),
    ],
)
def test_a_claim_is_held_against_an_interval(values: tuple[float, ...], state: State, says: str) -> None:
    """It holds where the interval is at its low end or above, not where it is below, and else nobody knows."""
    found, sentence = claims.judge(CLAIM, values, unit="tok/s")

    assert found == state
    assert says in sentence


def test_the_sentence_has_figures_interval_launches_and_claim() -> None:
    """A figure without its spread is not believed."""
    _, says = claims.judge(CLAIM, (74.1, 74.3, 74.2, 74.4), unit="tok/s")

    assert says == "the claim holds: 74.25 tok/s (95 % interval 74.04 to 74.46 tok/s, 4 launches); 73 to 76 tok/s claimed"


@given(figures, st.floats(40, 100), st.floats(1, 1.3))
def test_times_are_the_mirror_image_of_rates(values: list[float], low: float, width: float) -> None:
    """A claim of tokens per second, and the same as seconds per token, are answered alike."""
    high = low * width
    ends = [math.exp(one) for one in bounds.mean_interval([math.log(one) for one in values])]
    # On the edge itself the last bit decides, and a reciprocal has another one.
    assume(all(abs(end / claim - 1) > 1e-9 for end in ends for claim in (low, high)))
    rates = claims.judge((low, high), values)
    times = claims.judge((1 / high, 1 / low), [1 / one for one in values], more_is_better=False)

    assert times[0] == rates[0]
    assert times[1].split(":")[0] == rates[1].split(":")[0]


@given(figures, st.floats(40, 100), st.floats(0, 20), st.floats(0.5, 0.99))
def test_promising_less_never_breaks_a_claim(values: list[float], low: float, width: float, confidence: float) -> None:
    """A claim with a lower low end is at least as well kept."""
    order: tuple[State, ...] = ("fail", "inconclusive", "pass")
    bold, modest = (claims.judge((end, low + width), values, confidence)[0] for end in (low, 0.9 * low))

    assert order.index(modest) >= order.index(bold)


@pytest.mark.parametrize(
    ("claim", "values"), [((0.0, 1.0), (1.0,) * 3), ((2.0, 1.0), (1.0,) * 3), ((1.0, math.inf), (1.0,) * 3), ((1.0, 2.0), (1.0, 0.0, 1.0))]
)
def test_what_is_no_claim_is_refused(claim: tuple[float, float], values: tuple[float, ...]) -> None:
    """Ends above 0 and in order, and figures above 0."""
    with pytest.raises(ValueError, match="above 0"):
        claims.judge(claim, values)
    with pytest.raises(ValueError, match="above 0"):
        claims.judge((1.0, 2.0), (1.0, math.nan, 1.0))


def test_clopper_pearson_is_that_of_the_tables() -> None:
    """None of 20: 0 to 16.84 %; 10 of 20: 27.20 to 72.80 %; and mirrored."""
    assert bounds.clopper_pearson(0, 20) == pytest.approx((0.0, 0.16843), abs=1e-5)
    assert bounds.clopper_pearson(10, 20) == pytest.approx((0.27196, 0.72804), abs=1e-5)
    assert bounds.clopper_pearson(20, 20) == pytest.approx((1 - 0.16843, 1.0), abs=1e-5)


@given(st.floats(0.001, 0.999))
def test_clopper_pearson_is_never_too_short(truth: float) -> None:
    """Whatever the probability, the interval of 20 trials holds it in at least 95 % of all outcomes, counted exactly."""
    held = 0.0
    for hits in range(21):
        low, high = bounds.clopper_pearson(hits, 20)
        held += math.comb(20, hits) * truth**hits * (1 - truth) ** (20 - hits) * (low <= truth <= high)

    assert held >= 0.95


def test_the_interval_of_a_mean_is_students() -> None:
    """1, 2, 3: 2 ± 4.3027 · 1/√3 (the 97.5 % quantile of t with two degrees of freedom)."""
    assert bounds.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))


@pytest.mark.parametrize(("hits", "count", "confidence"), [(-1, 5, 0.95), (6, 5, 0.95), (0, 0, 0.95), (1, 5, 1.0)])
def test_impossible_counts_are_refused(hits: int, count: int, confidence: float) -> None:
    """No share of nothing, and none above 1."""
    with pytest.raises(ValueError, match="no count"):
        bounds.clopper_pearson(hits, count, confidence)
    with pytest.raises(ValueError, match="no interval"):
        bounds.mean_interval([1.0])
    with pytest.raises(ValueError, match="finite"):
        bounds.mean_interval([1.0, math.nan])
