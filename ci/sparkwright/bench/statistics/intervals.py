"""The interval of a mean, from a few values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """
    Return Student's t-interval of the mean of independent *values*: one per launch, not per request.

    Raises:
        ValueError: There are fewer than two values, or one is not a finite number.
    """
    from scipy.stats import t

    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"{len(values)} values, or one that is not finite, give no interval")
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half
