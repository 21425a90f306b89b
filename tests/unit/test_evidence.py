"""Evidence block by block: what a bet may gain, that it is fair where it has to be, and who is named."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.gates.statistics import evidence
from sparkwright.gates.statistics.evidence import Quad

DELTA = math.log1p(0.02)

logs = st.floats(-5, 5)
small = st.floats(-0.2, 0.2)
paths = st.lists(small, max_size=12)
spreads = st.floats(1e-4, 0.1)


def quad(baseline: float, candidate: float, drift: float, at: float, outer: str) -> Quad:
    """Return a quad at a time on a machine that drifts along a straight line, with *outer* (A or B) first and last."""
    times = {"A": (0, 3), "B": (1, 2)} if outer == "A" else {"B": (0, 3), "A": (1, 2)}
    legs = {side: [level + drift * (at + place) for place in times[side]] for side, level in (("A", baseline), ("B", candidate))}
    return (legs["A"][0], legs["A"][1]), (legs["B"][0], legs["B"][1])


@given(logs, small, small, st.lists(st.sampled_from("AB"), min_size=1, max_size=5))
def test_a_straight_drift_cancels_in_either_order(level: float, slower: float, drift: float, orders: list[str]) -> None:
    """A B B A and B A A B have both sides at the same mean time."""
    quads = [quad(level, level + slower, drift, 4.0 * number, outer) for number, outer in enumerate(orders)]

    assert evidence.block_difference(quads) == pytest.approx(slower, abs=1e-9)


def test_one_spoilt_quad_of_three_changes_nothing() -> None:
    """The median sheds a quad in which the machine was slow for a leg."""
    good, spoilt = ((0.0, 0.0), (0.01, 0.01)), ((0.0, 0.0), (0.01, 0.41))

    assert evidence.block_difference([good, spoilt, good]) == pytest.approx(0.01)


@pytest.mark.parametrize("quads", [[], [((0.0, math.nan), (0.0, 0.0))], [((0.0, 0.0), (math.inf, 0.0))]])
def test_a_block_without_measurements_is_refused(quads: list[Quad]) -> None:
    """Neither nothing nor a NaN is a difference."""
    with pytest.raises(ValueError, match=r"quad|finite"):
        evidence.block_difference(quads)


def test_the_evidence_is_the_product_of_the_formula() -> None:
    """∏ exp(λ·min(δ − d, 4σ) − λ²σ²/2), by hand, with λ = δ/σ² and with λ = 3/σ."""
    for sigma, bet in ((0.01, DELTA / 0.01**2), (0.001, 3 / 0.001)):
        steps = [math.exp(bet * min(DELTA - one, 4 * sigma) - bet**2 * sigma**2 / 2) for one in (0.001, 0.019)]

        assert evidence.passing([0.001, 0.019], delta=DELTA, sigma=sigma) == pytest.approx((steps[0], steps[0] * steps[1]))


@given(paths, spreads)
def test_failing_is_passing_seen_from_the_other_end(differences: list[float], sigma: float) -> None:
    """What is gained by d against "not worse" is gained by δ − d against "worse by δ"."""
    mirrored = [DELTA - one for one in differences]

    assert evidence.failing(differences, delta=DELTA, sigma=sigma) == pytest.approx(
        evidence.passing(mirrored, delta=DELTA, sigma=sigma), rel=1e-6, abs=1e-12
    )
    assert evidence.failing_signs(differences) == evidence.signs([-one for one in differences], threshold=0.0)


@given(paths, spreads, st.integers(0, 12))
def test_nothing_looks_ahead(differences: list[float], sigma: float, blocks: int) -> None:
    """The evidence after some blocks does not depend on later ones."""
    whole, part = differences, differences[:blocks]

    assert evidence.passing(whole, delta=DELTA, sigma=sigma)[:blocks] == evidence.passing(part, delta=DELTA, sigma=sigma)
    assert evidence.signs(whole, threshold=DELTA)[:blocks] == evidence.signs(part, threshold=DELTA)


@given(st.floats(0.05, 30), st.floats(0.05, 1), st.floats(0, 3))
def test_a_bet_against_the_truth_gains_nothing_on_average(distance: float, part: float, beyond: float) -> None:
    """While θ ≥ δ and the spread is σ or less, a factor's expectation is at most 1: by a fine sum over the normal density."""
    sigma, delta = 1.0, distance
    steps = [(number + 0.5) / 50 - 9 for number in range(900)]
    density = [math.exp(-step * step / 2) / math.sqrt(2 * math.pi) / 50 for step in steps]
    gained = [evidence.passing([delta + beyond + part * step], delta=delta, sigma=sigma)[0] for step in steps]

    assert sum(chance * value for chance, value in zip(density, gained, strict=True)) <= 1 + 1e-6


def test_a_gain_is_capped_and_a_loss_is_not() -> None:
    """A gain of 4 standard deviations is as good as one of 40, a loss of 40 is worse than one of 4."""
    assert evidence.passing([DELTA - 0.04], delta=DELTA, sigma=0.01) == evidence.passing([DELTA - 0.4], delta=DELTA, sigma=0.01)
    assert evidence.passing([DELTA + 0.04], delta=DELTA, sigma=0.01) > evidence.passing([DELTA + 0.4], delta=DELTA, sigma=0.01)


def test_a_block_gives_at_most_e_to_the_7_5() -> None:
    """However quiet the machine, three blocks are not one."""
    assert evidence.passing([-1.0], delta=DELTA, sigma=1e-9)[0] == pytest.approx(math.exp(7.5))


def test_much_evidence_stays_a_number() -> None:
    """A thousand blocks neither overflow nor turn into NaN."""
    for found in (evidence.passing([-9.0] * 1000, delta=DELTA, sigma=1e-6), evidence.signs([-9.0] * 2000, threshold=0)):
        assert all(math.isfinite(one) for one in found)
        assert found[-1] > 1e300
    assert evidence.passing([1e300, 1e308, -1.0], delta=DELTA, sigma=1e-300)[1:] == (0.0, 0.0)


@pytest.mark.parametrize(("alpha", "blocks"), [(0.05, 6), (0.01, 8)])
def test_signs_decide_after_six_blocks_or_eight(alpha: float, blocks: int) -> None:
    """1.8^6 exceeds 20 and 1.8^8 exceeds 100, and not one block sooner."""
    found = evidence.signs([0.0] * blocks, threshold=DELTA)

    assert found[-1] >= 1 / alpha > found[-2]


def test_signs_that_fall_like_a_coin_gain_exactly_nothing() -> None:
    """Over all 2^8 paths, each as probable, the mean is 1 after every block."""
    found = [evidence.signs(path, threshold=0.5) for path in itertools.product((0.0, 1.0), repeat=8)]

    assert [sum(column) / 256 for column in zip(*found, strict=True)] == pytest.approx([1.0] * 8)


def test_a_tie_is_a_sign_lost() -> None:
    """A difference of exactly the margin speaks neither for passing nor, at 0, for failing."""
    assert evidence.signs([DELTA], threshold=DELTA) == pytest.approx((0.2,))
    assert evidence.failing_signs([0.0]) == pytest.approx((0.2,))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    """A comparison with NaN is false without a word, and infinity decides alone."""
    with pytest.raises(ValueError, match="finite"):
        evidence.passing([0.0, value], delta=DELTA, sigma=0.01)
    with pytest.raises(ValueError, match="finite"):
        evidence.failing([value], delta=DELTA, sigma=0.01)
    with pytest.raises(ValueError, match="finite"):
        evidence.signs([value], threshold=DELTA)


@pytest.mark.parametrize(("delta", "sigma"), [(0.0, 0.01), (-0.1, 0.01), (0.02, 0.0), (0.02, -1.0), (0.02, math.nan), (math.inf, 1.0)])
def test_a_margin_and_a_spread_are_above_0(delta: float, sigma: float) -> None:
    """A spread of 0 would make any difference a proof."""
    with pytest.raises(ValueError, match="above 0"):
        evidence.passing([0.0], delta=delta, sigma=sigma)


evalues = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.floats(0, 1e6), max_size=8)


@given(evalues, st.sampled_from([0.01, 0.05, 0.5]))
def test_e_bh_names_the_greatest_set_that_supports_itself(values: dict[str, float], alpha: float) -> None:
    """Of all sets in which each has K/(α·size) or more, it is the greatest, strongest first."""
    sizes = [k for k in range(1, len(values) + 1) if sum(one >= len(values) / (alpha * k) for one in values.values()) >= k]
    named = evidence.e_bh(values, alpha)

    assert len(named) == max(sizes, default=0)
    assert len(set(named)) == len(named)
    assert [values[name] for name in named] == sorted(values.values(), reverse=True)[: len(named)]


@given(evalues.filter(bool), st.data())
def test_more_evidence_never_takes_a_name_away(values: dict[str, float], data: st.DataObject) -> None:
    """e-BH is monotone."""
    name = data.draw(st.sampled_from(sorted(values)))
    raised = {**values, name: values[name] * 2 + 1}

    assert set(evidence.e_bh(values, 0.05)) <= set(evidence.e_bh(raised, 0.05))


def test_the_price_of_many_series() -> None:
    """One of six is named from 6/α on; six together are from 1/α on."""
    rest = dict.fromkeys("bcdef", 0.5)

    assert evidence.e_bh({"a": 119.9, **rest}, 0.05) == ()
    assert evidence.e_bh({"a": 120.1, **rest}, 0.05) == ("a",)
    assert len(evidence.e_bh(dict.fromkeys("abcdef", 20.1), 0.05)) == 6
    assert evidence.e_bh({}, 0.05) == ()


@pytest.mark.parametrize(("values", "alpha"), [({"a": 1.0}, 0.0), ({"a": 1.0}, 1.0), ({"a": math.nan}, 0.05), ({"a": -1.0}, 0.05)])
def test_e_bh_refuses_what_is_no_evidence(values: dict[str, float], alpha: float) -> None:
    """Neither an error rate of 0 or 1 nor a NaN."""
    with pytest.raises(ValueError, match=r"error rate|e-value"):
        evidence.e_bh(values, alpha)
