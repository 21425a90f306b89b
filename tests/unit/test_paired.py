"""The arithmetic of the tasks gate: how often a wrong verdict comes out, reckoned exactly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkwright.gates.accuracy import mcnemar
from sparkwright.gates.accuracy.mcnemar import Pairs

Z, MARGIN = 2.33, 0.02

counts = st.integers(0, 500)
some = st.builds(Pairs, counts, counts, counts, counts).filter(lambda pairs: pairs.count > 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=50))
def test_every_question_is_counted_once(answers: list[tuple[bool, bool]]) -> None:
    """The difference of the pairs is the difference of the two scores."""
    pairs = mcnemar.pairs([one for one, _ in answers], [other for _, other in answers])

    assert pairs.count == len(answers)
    assert pairs.difference == pytest.approx((sum(other for _, other in answers) - sum(one for one, _ in answers)) / len(answers))


@given(some)
def test_exchanging_the_sides_turns_the_interval_round(pairs: Pairs) -> None:
    """What is a gain for one side is a loss for the other, with the same error and the same chance."""
    other = Pairs(pairs.both, pairs.lost, pairs.gained, pairs.neither)

    assert other.difference == -pairs.difference
    assert other.error == pytest.approx(pairs.error)
    assert other.chance == pairs.chance
    low, high = pairs.limits(Z)
    assert other.limits(Z) == pytest.approx((-high, -low))


@given(some)
def test_the_interval_holds_the_difference_of_many_questions(pairs: Pairs) -> None:
    """The half questions that are added move the interval's middle by less than its reach."""
    low, high = pairs.limits(Z)

    assert low <= pairs.difference <= high or pairs.count < 10


def test_the_error_is_the_one_of_the_formula() -> None:
    """√(n₁₀ + n₀₁ − (n₁₀ − n₀₁)²/n)/n, by hand: 20 gained, 30 lost of 1000."""
    assert Pairs(700, 20, 30, 250).error == pytest.approx(math.sqrt(50 - 100 / 1000) / 1000)


def test_few_questions_that_all_agree_decide_nothing() -> None:
    """Ten questions without a difference have no error by the plain formula; here they do not prove that two points are not lost."""
    assert Pairs(8, 0, 0, 2).error == 0
    assert Pairs(8, 0, 0, 2).limits(Z)[0] < -MARGIN
    assert Pairs(300, 0, 0, 100).limits(Z)[0] > -MARGIN


def chance_of(verdict: str, count: int, loses: float, gains: float) -> float:
    """Return how often *count* questions give *verdict* where each is lost or gained with those chances, summed over all outcomes."""
    total = 0.0
    for changed in range(count + 1):
        of_changed = _binomial(count, changed, loses + gains)
        if of_changed < 1e-7:
            continue
        for lost in range(changed + 1):
            low, high = Pairs(count - changed, changed - lost, lost, 0).limits(Z)
            if (verdict == "pass" and low > -MARGIN) or (verdict == "fail" and high < -MARGIN):
                total += of_changed * _binomial(changed, lost, loses / (loses + gains))
    return total


def _binomial(count: int, hits: int, chance: float) -> float:
    logs = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    if chance in (0, 1):
        return float(hits == count * chance)
    return math.exp(logs + hits * math.log(chance) + (count - hits) * math.log(1 - chance))


@pytest.mark.parametrize("count", [400, 1319])
@pytest.mark.parametrize("changes", [0.03, 0.06, 0.12])
def test_a_candidate_at_the_limit_hardly_ever_passes(count: int, changes: float) -> None:
    """Where two points are truly lost, about one of a hundred passes, whatever part of the answers changes; never more than 2 %."""
    assert chance_of("pass", count, (changes + MARGIN) / 2, (changes - MARGIN) / 2) < 0.02


@pytest.mark.parametrize("changes", [0.03, 0.06])
def test_a_candidate_at_the_limit_hardly_ever_fails(changes: float) -> None:
    """The other limit holds as well: a loss of just two points is inconclusive, not a failure."""
    assert chance_of("fail", 1319, (changes + MARGIN) / 2, (changes - MARGIN) / 2) < 0.02


def test_an_equal_candidate_passes_and_five_points_fail() -> None:
    """With GSM8K's 1319 questions and 4 % of answers changed by chance, equal wheels pass and a loss of 5 points fails, nearly always."""
    assert chance_of("pass", 1319, 0.02, 0.02) > 0.88
    assert chance_of("fail", 1319, 0.06, 0.01) > 0.97


def test_uneven_changes_are_less_likely_by_chance() -> None:
    """McNemar's exact p-value: 1 where nothing changed, 2/1024 for ten of ten on one side."""
    assert Pairs(10, 0, 0, 10).chance == 1
    assert Pairs(10, 5, 5, 10).chance == 1
    assert Pairs(90, 0, 10, 0).chance == pytest.approx(2 / 1024)


@given(st.integers(1, 2000), st.integers(0, 2000))
def test_a_part_lies_within_its_limits(count: int, right: int) -> None:
    """Wilson's interval holds the part that was seen and stays between 0 and 1."""
    right = min(right, count)
    low, high = mcnemar.wilson(right, count, Z)

    assert 0 <= low <= right / count + 1e-12
    assert right / count - 1e-12 <= high <= 1
