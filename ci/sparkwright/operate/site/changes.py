"""
Change points: where the level of a history of a few noisy figures moved.

The figures are logarithms with known standard errors (from launches of one session). Sessions differ by more than that, so the spread
between them is estimated from neighbours, which a change of level touches in one difference only. Levels are then fitted by weighted least
squares over all ways to cut the history, each cut at a price: optimal partitioning (Jackson et al., 2005, "An algorithm for optimal
partitioning of data on an interval"), of which PELT is the quick form for long histories. The price is the square of a quantile of t, so
that a history without a change is cut with at most the probability that the policy allows.

It says what moved over months. Whether a wheel may be published is the gate's question, and has another answer.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec

from sparkwright.operate.site.policy import Changes

#: Of a normal distribution: standard deviation / median absolute deviation.
_NORMAL = 1.4826


class Point(msgspec.Struct, frozen=True):
    """A logarithm and its standard error within its session; None where one launch or two give none."""

    value: float
    error: float | None


class Change(msgspec.Struct, frozen=True):
    """
    A change of level.

    Attributes:
        at: Index of the first point at the new level.
        ratio: New level / old one; *low*, *high*: about 95 % of the noise. The place was chosen by the data, so it is a little too narrow.
    """

    at: int
    ratio: float
    low: float
    high: float


class Found(msgspec.Struct, frozen=True):
    """
    What was found in a history.

    Attributes:
        looked: Whether there were points enough. *changes*: in their order.
        between: Estimated relative spread between sessions; None where nothing was looked at.
    """

    looked: bool
    changes: tuple[Change, ...] = ()
    between: float | None = None


def find(points: Sequence[Point], policy: Changes) -> Found:
    """Return the changes of level in *points*, which come in the order of time."""
    if len(points) < max(policy.least, 2 * policy.side):
        return Found(False)
    variances = _within(points)
    values = [one.value for one in points]
    between = _between(values, variances, policy.floor)
    weights = [1 / (variance + between * between) for variance in variances]
    cuts = _cuts(values, weights, price(len(points), policy), policy.side)
    ends = [0, *cuts, len(points)]
    levels = [_level(values, weights, first, last) for first, last in itertools.pairwise(ends)]
    made = tuple(_change(at, old, new) for at, old, new in zip(cuts, levels, levels[1:], strict=False))
    return Found(True, made, between)


def price(count: int, policy: Changes) -> float:
    """
    Return what a cut costs, in units of a squared standardised difference.

    A cut may lie at each of *count* - 2 *side* + 1 places; each gets its share of the alarm rate (Bonferroni), and t stands for the normal
    distribution because the spread between sessions is estimated.
    """
    from scipy.stats import t

    places = count - 2 * policy.side + 1
    return float(t.isf(policy.alarm / (2 * places), max(1.5, policy.freedom * (count - 1))) ** 2)


def _within(points: Sequence[Point]) -> list[float]:
    """
    Return the variance of each point within its session, at least the mean of all.

    A variance from three launches is now and then far too small by luck, and that point would outweigh all others.
    """
    known = [one.error**2 for one in points if one.error is not None]
    mean = statistics.fmean(known) if known else 0.0
    return [max(mean, one.error**2 if one.error is not None else mean) for one in points]


def _between(values: Sequence[float], variances: Sequence[float], floor: float) -> float:
    """Return the standard deviation between sessions: of neighbours' differences, without what sessions have within."""
    spread = _NORMAL * statistics.median(abs(b - a) for a, b in itertools.pairwise(values))
    return math.sqrt(max(floor**2, spread**2 / 2 - statistics.median(variances)))


def _cuts(values: Sequence[float], weights: Sequence[float], beta: float, side: int) -> list[int]:
    """Return the beginnings of all segments but the first, of the partition with the least squares and *beta* for each cut."""
    import numpy as np

    count, w = len(values), np.asarray(weights)
    # Around their mean, or the squares would lose the digits that matter.
    y = np.asarray(values) - float(np.average(values, weights=w))
    sums = [np.concatenate([[0.0], np.cumsum(part)]) for part in (w, w * y, w * y * y)]
    best, last = np.full(count + 1, np.inf), np.zeros(count + 1, int)
    best[0] = -beta
    for end in range(side, count + 1):
        begins = np.arange(end - side + 1)
        weight, linear, square = (one[end] - one[begins] for one in sums)
        total = best[begins] + np.maximum(square - linear * linear / weight, 0.0) + beta
        last[end] = int(np.argmin(total))
        best[end] = total[last[end]]
    cuts, end = list[int](), count
    while (end := int(last[end])) > 0:
        cuts.append(end)
    return cuts[::-1]


def _level(values: Sequence[float], weights: Sequence[float], first: int, last: int) -> tuple[float, float]:
    """Return the weighted mean of a segment, and its variance."""
    total = math.fsum(weights[first:last])
    return math.fsum(w * y for w, y in zip(weights[first:last], values[first:last], strict=True)) / total, 1 / total


def _change(at: int, old: tuple[float, float], new: tuple[float, float]) -> Change:
    step, reach = new[0] - old[0], 1.96 * math.sqrt(old[1] + new[1])
    return Change(at, math.exp(step), math.exp(step - reach), math.exp(step + reach))
