"""
Whether something grows: the slope of a noisy series with an interval, by ranks.

Memory of a server jumps when a cache fills and spikes when a request is large, so a least-squares line follows the accidents. The
Theil–Sen slope, the median of the slopes between all pairs of points, is right as long as fewer than 29 % of the points are outliers
(Theil 1950; Sen 1968).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist, median

import msgspec
import numpy as np

#: Points of which all pairs are taken: 200 have 19,900 slopes.
MOST_POINTS = 200
#: Fewer points say nothing about a slope.
FEWEST_POINTS = 12


class Slope(msgspec.Struct, frozen=True):
    """A slope in units per second: the median, and the interval around it."""

    low: float
    middle: float
    high: float


def thinned(series: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most *most* points: the medians of equal stretches of *series*, which also makes neighbours less dependent."""
    if len(series) <= most:
        return list(series)
    edges = [round(at * len(series) / most) for at in range(most + 1)]
    pieces = [series[begin:end] for begin, end in itertools.pairwise(edges)]
    return [(median(time for time, _ in piece), median(value for _, value in piece)) for piece in pieces]


def slope(series: Sequence[tuple[float, float]], confidence: float = 0.95) -> Slope | None:
    """
    Return the Theil–Sen slope of *series* (seconds, value) with Sen's interval; None for fewer than `FEWEST_POINTS` or a single moment.

    Sen (1968): under no trend the number of rising pairs less that of falling ones has variance n(n−1)(2n+5)/18, and the slopes at the
    ranks that far from the middle bound the slope. Values that tie make the interval wider than it need be.
    """
    points = thinned(series)
    count = len(points)
    if count < FEWEST_POINTS:
        return None
    times, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    first, second = np.triu_indices(count, 1)
    apart = times[second] - times[first]
    slopes = np.sort((values[second] - values[first])[apart > 0] / apart[apart > 0])
    if not len(slopes):
        return None
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return Slope(float(slopes[low]), float(np.median(slopes)), float(slopes[high]))
