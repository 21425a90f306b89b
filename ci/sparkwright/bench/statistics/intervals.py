"""Exact intervals: of a probability, from counts, and of a mean, from a few normal values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sparkwright.bench.statistics.evidence import checked


def clopper_pearson(hits: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """
    Return the two-sided interval of a probability of which *hits* of *count* trials were seen; exact, never too short (Clopper and
    Pearson, 1934).

    Raises:
        ValueError: *hits* is not between 0 and *count*, or *count* is 0, or *confidence* is not between 0 and 1.
    """
    from scipy.stats import beta

    if not 0 <= hits <= count or count < 1 or not 0 < confidence < 1:
        raise ValueError(f"{hits} of {count} at {confidence} is no count with a confidence")
    rest = (1 - confidence) / 2
    low = float(beta.ppf(rest, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - rest, hits + 1, count - hits)) if hits < count else 1.0
    return low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """
    Return the two-sided t-interval of the mean of *values*, which are taken as independent and normal: one figure per launch, not per
    request.

    Raises:
        ValueError: There are fewer than two, one is no finite number, or *confidence* is not between 0 and 1.
    """
    from scipy.stats import t

    if len(values) < 2 or not 0 < confidence < 1:
        raise ValueError(f"{len(values)} values at {confidence} give no interval")
    middle, spread = statistics.fmean(checked(values)), statistics.stdev(values)
    reach = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * spread / math.sqrt(len(values))
    return middle - reach, middle + reach
