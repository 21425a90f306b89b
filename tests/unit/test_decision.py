"""Pass, fail or go on: what decides, what no longer does, and that the error rates hold."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.statistics import intervals, many
from sparkwright.bench.statistics.decision import Decision, Rule, Track, decide

RULE = Rule(margin=0.02, alpha=0.05, least=3, most=12)
DELTA = RULE.delta
SIGMA = 0.01

differences = st.lists(st.floats(-0.05, 0.07), max_size=14).map(tuple)
tracks = st.lists(st.builds(Track, st.just(""), differences, st.sampled_from([None, 0.004, 0.01, 0.02]), st.booleans()), max_size=4).map(
    lambda made: [Track(f"series {number}", one.differences, one.sigma, one.in_band) for number, one in enumerate(made)]
)


def equal(name: str, blocks: int = 12, sigma: float | None = SIGMA, in_band: bool = True) -> Track:
    """Return a series that is exactly as good."""
    return Track(name, (0.0,) * blocks, sigma, in_band)


def slower(name: str, by: float, blocks: int = 12, sigma: float | None = SIGMA, in_band: bool = True) -> Track:
    """Return a series that is worse by *by* in every block."""
    return Track(name, (by,) * blocks, sigma, in_band)


def upto(made: list[Track], blocks: int) -> list[Track]:
    """Return what was known after *blocks*."""
    return [Track(one.name, one.differences[:blocks], one.sigma, one.in_band) for one in made]


def test_an_equal_candidate_passes_as_soon_as_every_series_has() -> None:
    """At δ = 1.98 σ a block without a difference gives e^1.96; three reach 20, and the least is three."""
    found = decide(RULE, [equal("a"), equal("b")])

    assert (found.state, found.culprits, found.open) == ("pass", (), ())
    assert [one.settled for one in found.found] == [3, 3]
    assert "2 series passed within 3 blocks" in found.says


def test_a_slower_candidate_fails_and_the_series_is_named() -> None:
    """One of three is 5 % slower: it is the culprit, alone."""
    found = decide(RULE, [equal("a"), slower("b", 0.05), equal("c")])

    assert (found.state, found.culprits) == ("fail", ("b",))
    assert {one.name: one.state for one in found.found} == {"a": "pass", "b": "fail", "c": "pass"}
    assert "b by +5.13 %" in found.says


def test_twelve_blocks_in_between_decide_nothing() -> None:
    """At half a margin both kinds of evidence stand still."""
    found = decide(RULE, [equal("a"), slower("b", DELTA / 2)])

    assert (found.state, found.culprits, found.open) == ("inconclusive", (), ())
    assert "b (+1.00 %)" in found.says
    assert "a " not in found.says.split(":")[1]


def test_going_on_names_the_series_that_need_another_block() -> None:
    """One that has passed needs none."""
    found = decide(RULE, [equal("a", 5), slower("b", DELTA / 2, 5), Track("c", (), SIGMA)])

    assert (found.state, found.open) == (None, ("b", "c"))
    assert [one.state for one in found.found] == ["pass", "inconclusive", "not-run"]


def test_nothing_is_decided_before_the_least() -> None:
    """Two blocks of a candidate that is twice as slow or as fast go on."""
    for difference in (0.7, -0.7):
        found = decide(RULE, [slower("a", difference, 2)])

        assert (found.state, found.open) == (None, ("a",))


def test_no_series_is_no_pass() -> None:
    """What was not measured is not run."""
    assert decide(RULE, []).state == "not-run"
    assert decide(RULE, [Track("a", (), SIGMA)]).state is None


def test_later_blocks_of_a_series_that_has_passed_are_not_looked_at() -> None:
    """It passed after three; that it turns bad afterwards neither names it nor moves its evidence."""
    turned = Track("a", (0.0,) * 3 + (0.5,) * 9, SIGMA)
    found = decide(RULE, [turned, equal("b")])

    assert found.state == "pass"
    assert len(found.found[0].fail_evidence) == 3


def test_slower_within_the_margin_passes_on_a_quiet_machine() -> None:
    """Evidence for "slower" and for "within the margin" at once: the margin says that this passes."""
    found = decide(RULE, [slower("a", DELTA / 2, sigma=0.002)])

    assert found.found[0].fail_evidence[-1] > 1 / RULE.alpha
    assert found.state == "pass"


def test_blocks_beyond_the_most_are_not_looked_at() -> None:
    """Who measures on until it passes does not pass."""
    undecided = Track("a", (DELTA / 2,) * 12 + (-0.05,) * 10, SIGMA)

    assert decide(RULE, [undecided]).state == "inconclusive"


@pytest.mark.parametrize(("difference", "state"), [(0.0, "pass"), (0.05, "fail")])
def test_without_a_calibration_the_signs_decide(difference: float, state: str) -> None:
    """Six blocks of one sign reach 20, either way."""
    made = [slower("a", difference, sigma=None)]

    assert decide(RULE, upto(made, 5)).state is None
    found = decide(RULE, made)
    assert found.state == state
    assert len(found.found[0].pass_evidence) == 6


@pytest.mark.parametrize(("difference", "state"), [(0.0, "pass"), (0.05, "fail")])
def test_out_of_band_the_signs_have_to_agree(difference: float, state: str) -> None:
    """Where three blocks decide in band, six are needed."""
    made = [slower("a", difference, in_band=False)]

    assert decide(RULE, upto([slower("a", difference)], 3)).state == state
    assert decide(RULE, upto(made, 5)).state is None
    assert decide(RULE, upto(made, 6)).state == state


def test_out_of_band_a_spread_that_is_far_too_small_does_not_decide_alone() -> None:
    """Blocks that fall on both sides of the margin pass by a wrong σ; their signs do not."""
    both = (-0.02, 0.025, -0.02, 0.021, -0.03, 0.025, -0.02, 0.021, -0.02, 0.025, -0.02, 0.021)

    assert decide(RULE, [Track("a", both, 0.008)]).state == "pass"
    assert decide(RULE, [Track("a", both, 0.008, in_band=False)]).state == "inconclusive"


@given(tracks)
def test_asking_after_every_block_gives_the_same_as_asking_once(made: list[Track]) -> None:
    """The first decision stands: resuming, or blocks that were under way, change nothing."""
    once = decide(RULE, made)
    whole = max((len(one.differences) for one in made), default=0)
    steps = [decide(RULE, upto(made, blocks)) for blocks in range(whole + 1)]
    first = next((one for one in steps if one.state is not None), steps[-1])

    assert first == once


@given(tracks)
def test_a_decision_is_consistent_in_itself(made: list[Track]) -> None:
    """Culprits only with a failure, something open only while it goes on, and each settled series at 1/α."""
    found = decide(RULE, made)

    assert (found.state == "fail") == bool(found.culprits)
    assert (found.state is None) == bool(found.open)
    assert {one.name for one in found.found if one.state == "fail"} == set(found.culprits)
    for one in found.found:
        assert one.settled is None or (one.settled >= RULE.least and one.pass_evidence[-1] >= 1 / RULE.alpha)


@given(tracks, st.randoms(use_true_random=False))
def test_the_order_of_the_series_does_not_matter(made: list[Track], shuffler: random.Random) -> None:
    """State, and who is named, stay."""

    def seen(found: Decision) -> tuple[object, set[str], set[str]]:
        return found.state, set(found.culprits), set(found.open)

    shuffled = list(made)
    shuffler.shuffle(shuffled)

    assert seen(decide(RULE, shuffled)) == seen(decide(RULE, made))


@pytest.mark.parametrize("in_band", [True, False])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("series", [1, 6])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_many_gates_at_once_are_decided_like_each_alone(alpha: float, series: int, calibrated: bool, in_band: bool) -> None:
    """State, culprits and blocks of the vectorised path, on gates of all slownesses, are those of `decide`."""
    rule = Rule(0.02, alpha, 3, 12)
    numbers = np.random.default_rng([series, calibrated, in_band])
    noise = numbers.normal(numbers.choice([0, 0.5, 1, 1.5, 3], (100, series, 1)) * DELTA, 0.01, (100, series, 12))
    sigma = numbers.uniform(0.004, 0.02, (100, series)) if calibrated else None
    found = many.decide(rule, noise, sigma, in_band=in_band)
    for gate in range(100):
        spreads = [float(one) for one in sigma[gate]] if sigma is not None else [None] * series
        alone = decide(rule, [Track(str(at), tuple(map(float, noise[gate, at])), spreads[at], in_band) for at in range(series)])
        assert many.STATES[found.states[gate]] == alone.state
        assert {str(at) for at in np.flatnonzero(found.named[gate])} == set(alone.culprits)
        assert found.measured[gate] == sum(len(one.pass_evidence) for one in alone.found)
        assert found.blocks[gate] == max(len(one.pass_evidence) for one in alone.found)


@pytest.mark.parametrize("series", [1, 6])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_error_rates_hold(series: int, factor: float) -> None:
    """Of 10,000 gates with normal noise, no more than α pass with a series at the margin, and no more fail without one above 0."""
    noise = np.random.default_rng(series).normal(0, SIGMA, (10_000, series, 12))
    sigma = np.full((10_000, series), SIGMA * factor)
    failed = int((many.decide(RULE, noise, sigma).states == many.STATES.index("fail")).sum())
    noise[:, 0] += DELTA
    passed = int((many.decide(RULE, noise, sigma).states == many.STATES.index("pass")).sum())

    for wrong in (failed, passed):
        assert intervals.clopper_pearson(wrong, 10_000)[1] <= RULE.alpha


def test_two_series_of_one_name_are_refused() -> None:
    """The culprit would be ambiguous."""
    with pytest.raises(ValueError, match="one name"):
        decide(RULE, [equal("a"), equal("a")])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_difference_that_is_no_number_is_refused(value: float) -> None:
    """It is neither a pass nor a loss."""
    with pytest.raises(ValueError, match="finite"):
        decide(RULE, [Track("a", (0.0, 0.0, 0.0, value), SIGMA)])


@pytest.mark.parametrize(
    ("margin", "alpha", "least", "most"),
    [(0.0, 0.05, 3, 12), (0.02, 0.0, 3, 12), (0.02, 1.0, 3, 12), (0.02, 0.05, 0, 12), (0.02, 0.05, 5, 4), (math.nan, 0.05, 3, 12)],
)
def test_a_rule_that_promises_nothing_is_refused(margin: float, alpha: float, least: int, most: int) -> None:
    """Margins above 0, error rates between 0 and 1, and blocks that can be reached."""
    with pytest.raises(ValueError, match="margin"):
        Rule(margin, alpha, least, most)
