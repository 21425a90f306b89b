"""A/A blocks: how wide a machine spreads, whether it still does, and what margin that allows."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.bench.statistics import calibration, intervals, many
from sparkwright.bench.statistics.decision import Rule

SIGMA = 0.008


def nights(count: int, blocks: int, seed: int = 1) -> list[list[float]]:
    """Return A/A blocks of many machines that spread by SIGMA."""
    return [[float(one) for one in row] for row in np.random.default_rng(seed).normal(0, SIGMA, (count, blocks))]


def test_the_bound_of_thirty_blocks_is_1_28_times_the_spread() -> None:
    """s·√(29/χ²), with the 5 % quantile of χ² with 29 degrees of freedom, 17.708 (a table's)."""
    blocks = nights(1, 30)[0]

    assert calibration.upper_sigma(blocks) == pytest.approx(statistics.stdev(blocks) * math.sqrt(29 / 17.708), rel=1e-4)


def test_the_bound_is_above_the_truth_nineteen_times_of_twenty() -> None:
    """2,000 calibrations of 30 blocks: 95 % within the bounds of chance."""
    above = sum(calibration.upper_sigma(blocks) >= SIGMA for blocks in nights(2000, 30))
    low, high = intervals.clopper_pearson(above, 2000, 0.999)

    assert low <= 0.95 <= high


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=40).filter(lambda blocks: max(blocks) - min(blocks) > 1e-6), st.floats(-1, 1))
def test_the_bound_moves_with_the_spread_and_not_with_the_mean(blocks: list[float], shift: float) -> None:
    """A favoured side is not hidden in a greater spread."""
    bound = calibration.upper_sigma(blocks)

    assert bound >= statistics.stdev(blocks)
    assert calibration.upper_sigma([one + shift for one in blocks]) == pytest.approx(bound, rel=1e-6)
    assert calibration.upper_sigma([2 * one for one in blocks]) == pytest.approx(2 * bound)


@pytest.mark.parametrize("blocks", [[], [0.1], [0.01] * 30, [0.1, math.nan]])
def test_what_gives_no_spread_is_refused(blocks: list[float]) -> None:
    """Too few, all alike, or no numbers."""
    with pytest.raises(ValueError, match=r"spread|measurements|finite"):
        calibration.upper_sigma(blocks)


@pytest.mark.parametrize("newest", [1, 5])
def test_a_machine_that_has_not_changed_is_rarely_out_of_band(newest: int) -> None:
    """2,000 machines: at most one in a hundred nights, within the bounds of chance."""
    out = sum(not calibration.in_band(blocks[newest:], blocks[:newest]) for blocks in nights(2000, 30 + newest))

    assert intervals.clopper_pearson(out, 2000, 0.999)[0] <= calibration.LEVEL


@pytest.mark.parametrize(
    ("change", "which"),
    [(lambda one: 3 * one, "spread"), (lambda one: one + 3 * SIGMA, "mean")],
    ids=["three times the spread", "another mean"],
)
def test_a_machine_that_has_changed_is_out_of_band(change: object, which: str) -> None:
    """Ten new blocks show it on more than nine machines of ten, and the sentence says what."""
    assert callable(change)
    machines = nights(200, 40)
    found = [calibration.band(blocks[:30], [change(one) for one in blocks[30:]]) for blocks in machines]

    assert sum(not one.holds for one in found) > 180
    assert sum(getattr(one, which) < calibration.LEVEL / 3 for one in found) > 180
    assert which in found[0].says


def test_a_favoured_side_is_out_of_band() -> None:
    """Blocks whose mean is not 0, old and new alike, judge builds by where they stand."""
    blocks = [one + SIGMA for one in nights(1, 35)[0]]
    found = calibration.band(blocks[:30], blocks[30:])

    assert not found.holds
    assert found.centre < 0.001


def test_a_machine_that_became_quieter_is_in_band() -> None:
    """A spread that is too large is on the safe side."""
    blocks = nights(1, 30)[0]

    assert calibration.in_band(blocks, [one / 20 for one in nights(1, 5, 2)[0]])


def test_one_night_far_off_is_enough() -> None:
    """A single newest block is held against what the older ones predict."""
    blocks = nights(1, 30)[0]

    assert calibration.in_band(blocks, [SIGMA])
    assert not calibration.in_band(blocks, [6 * SIGMA])


@pytest.mark.parametrize(("older", "newest"), [([], [0.0]), ([0.1], [0.0]), ([0.1, 0.2], []), ([0.1, math.inf], [0.0])])
def test_nothing_is_not_compared(older: list[float], newest: list[float]) -> None:
    """Two older ones and a newest one at least."""
    with pytest.raises(ValueError, match=r"compared|finite"):
        calibration.in_band(older, newest)


@pytest.mark.parametrize(("alpha", "series"), [(0.05, 1), (0.01, 1), (0.01, 6)])
def test_the_smallest_margin_is_the_smallest(alpha: float, series: int) -> None:
    """On other noise, 95 % of equal builds pass with it, and clearly fewer with one that is a tenth smaller."""
    margin = calibration.smallest_margin(SIGMA, alpha, 12, series=series)
    noise = np.random.default_rng(99).normal(0, SIGMA, (10_000, series, 12))
    sigma = np.full((10_000, series), SIGMA)

    def passing(of: float) -> tuple[float, float]:
        found = many.decide(Rule(of, alpha, 3, 12), noise, sigma).states == many.STATES.index("pass")
        return intervals.clopper_pearson(int(found.sum()), 10_000, 0.99)

    low, high = passing(margin)
    assert low - 0.01 <= calibration.POWER <= high + 0.01
    assert passing(0.9 * margin)[1] < calibration.POWER


@pytest.mark.parametrize(("spread", "published"), [(0.005, 0.010), (0.008, 0.015), (0.015, 0.030)])
def test_the_margins_are_those_that_were_found_before(spread: float, published: float) -> None:
    """gates.md §2.4: 1 % at 0.5 %, 1.5 % at 0.8 %, 3 % at 1.5 %; α = 1 %, 12 blocks, a spread known from 30 A/A blocks, rounded up."""
    found = calibration.smallest_margin(1.28 * spread, 0.01, 12)

    assert 0.85 * published < found <= published


@pytest.mark.parametrize(("sigma", "alpha", "blocks"), [(0.0, 0.05, 12), (math.nan, 0.05, 12), (0.01, 0.0, 12), (0.01, 0.05, 2)])
def test_no_margin_without_a_spread_or_a_rule(sigma: float, alpha: float, blocks: int) -> None:
    """A margin of a machine that was not measured is none."""
    with pytest.raises(ValueError, match=r"margin|spread"):
        calibration.smallest_margin(sigma, alpha, blocks)
