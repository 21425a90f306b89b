"""Change points: found where a level moved, and hardly ever where none did."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.wheels import ROOT

from sparkwright.operate.site import changes, policy
from sparkwright.operate.site.changes import Point

POLICY = policy.load(ROOT).changes


def _history(random: Any, count: int, between: float, within: float, blocks: int = 6) -> list[Point]:
    """Return a history without a change; errors are estimated from *blocks* launches, as those of sessions are."""
    errors = within * np.sqrt(random.chisquare(blocks - 1, count) / (blocks - 1))
    values = random.normal(0, between, count) + random.normal(0, within, count)
    return [Point(float(value), float(error)) for value, error in zip(values, errors, strict=True)]


def _moved(points: Sequence[Point], at: int, step: float) -> list[Point]:
    return [Point(one.value + (step if index >= at else 0.0), one.error) for index, one in enumerate(points)]


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.004), (0.01, 0.004), (0.02, 0.002), (0.003, 0.02)])
@pytest.mark.parametrize(("count", "runs"), [(8, 500), (12, 500), (30, 400), (120, 60)])
def test_a_history_without_a_change_is_hardly_ever_said_to_have_one(count: int, runs: int, between: float, within: float) -> None:
    """Over simulated histories without a change (fixed seed), alarms are as rare as the policy promises, within the simulation's error."""
    random = np.random.default_rng(20261122)
    alarms = sum(bool(changes.find(_history(random, count, between, within), POLICY).changes) for _ in range(runs))
    assert alarms <= runs * POLICY.alarm + 3 * math.sqrt(runs * POLICY.alarm)


@pytest.mark.parametrize(("count", "at"), [(12, 6), (20, 10), (60, 30), (60, 57)])
def test_a_change_of_ten_times_the_noise_is_found_where_it_is(count: int, at: int) -> None:
    """A large step is found, at its place, with its size, and no second one beside it."""
    random = np.random.default_rng(5)
    exact = 0
    for _ in range(40):
        found = changes.find(_moved(_history(random, count, 0.01, 0.004), at, 0.11), POLICY).changes
        exact += [one.at for one in found] == [at] and found[0].low < math.exp(0.11) < found[0].high
    assert exact >= 32


def test_two_changes_are_both_found() -> None:
    """A step down and, later, one back up are two changes, with opposite directions."""
    points = _moved(_moved(_history(np.random.default_rng(3), 60, 0.005, 0.003), 20, -0.06), 45, 0.06)
    found = changes.find(points, POLICY).changes
    assert [one.at for one in found] == [20, 45]
    assert found[0].ratio < 1 < found[1].ratio


def test_one_bad_night_is_no_change() -> None:
    """A single point far from all others, at the end too, is no change of level."""
    quiet = _history(np.random.default_rng(9), 20, 0.005, 0.003)
    for at in (0, 7, 19):
        bad = [Point(one.value - (0.2 if index == at else 0), one.error) for index, one in enumerate(quiet)]
        assert not [one for one in changes.find(bad, POLICY).changes if one.at in (0, 19)]


def test_a_noisy_session_weighs_less() -> None:
    """A step that only sessions with wide intervals show is not found; the same step in good ones is."""
    random = np.random.default_rng(11)
    good = _moved(_history(random, 20, 0.004, 0.003), 14, 0.05)
    wide = [Point(one.value, one.error if index < 14 else 0.08) for index, one in enumerate(good)]
    assert [one.at for one in changes.find(good, POLICY).changes] == [14]
    assert not changes.find(wide, POLICY).changes


def test_with_few_points_nothing_is_said() -> None:
    """Below the least number of points it is said that nobody looked, which is not the same as nothing found."""
    points = _moved(_history(np.random.default_rng(1), POLICY.least - 1, 0.001, 0.001), 3, 1.0)
    assert changes.find(points, POLICY) == changes.Found(False)
    assert changes.find([], POLICY) == changes.Found(False)


def test_points_without_an_interval_take_part() -> None:
    """A session of two launches has no interval, and its figure still counts, with the error that sessions have on the whole."""
    points = _moved(_history(np.random.default_rng(2), 24, 0.004, 0.003), 12, 0.08)
    bare = [Point(one.value, None if index % 3 else one.error) for index, one in enumerate(points)]
    assert [one.at for one in changes.find(bare, POLICY).changes] == [12]


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0.2, 5)), min_size=4, max_size=9), st.floats(0.5, 20), st.integers(1, 3)
)  # fmt: skip
def test_no_partition_is_better_than_the_one_that_is_found(rows: list[tuple[float, float]], beta: float, side: int) -> None:
    """Among all partitions of a short history none has a lower cost than the found one: brute force is the oracle."""
    values, weights = [value for value, _ in rows], [weight for _, weight in rows]

    def cost(cuts: Sequence[int]) -> float:
        ends = [0, *cuts, len(values)]
        total = beta * len(cuts)
        for first, last in itertools.pairwise(ends):
            w, y = np.array(weights[first:last]), np.array(values[first:last])
            total += float((w * (y - np.average(y, weights=w)) ** 2).sum())
        return total

    if len(values) < side:
        return
    every = [
        cuts
        for size in range(len(values))
        for cuts in itertools.combinations(range(1, len(values)), size)
        if all(last - first >= side for first, last in itertools.pairwise([0, *cuts, len(values)]))
    ]
    assert cost(changes._cuts(values, weights, beta, side)) <= min(map(cost, every)) + 1e-9


@given(st.floats(-5, 5), st.integers(0, 2**32 - 1))
def test_the_unit_does_not_matter(shift: float, seed: int) -> None:
    """The same history in another unit (a constant in logarithms) has the same changes."""
    points = _moved(_history(np.random.default_rng(seed), 16, 0.004, 0.003), 8, 0.05)
    places = [[one.at for one in changes.find(_moved(points, 0, by), POLICY).changes] for by in (0.0, shift)]
    assert places[0] == places[1]
