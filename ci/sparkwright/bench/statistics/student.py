"""
Student's t on a few values: the interval of a mean, and what A/A blocks (a wheel against itself)
say of a machine's noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from sparkwright.bench.statistics.eprocess import NoiseModel, log_evidence

#: Values behind an interval; two give one that is a hundred times wider than they are.
MIN_INTERVAL = 3


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """
    Return Student's t-interval of the mean of independent *values*, one per launch.

    Raises:
        ValueError: There are fewer than two values, or one is not a finite number.
    """
    from scipy.stats import t

    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"{len(values)} values, or one that is not finite, give no interval")
    error = statistics.stdev(values) / math.sqrt(len(values))
    low, high = t.interval(confidence, len(values) - 1, statistics.fmean(values), error or 1e-300)
    return float(low), float(high)


def noise_model(blocks: Iterable[tuple[float, float]], half_life: float, most: float) -> NoiseModel:
    """
    Return the noise of A/A *blocks*, given as age in days and difference.

    A block's weight halves every *half_life* days, and all together weigh at most *most*, so that a
    calibration ages instead of vanishing and the gate's own blocks soon outweigh a wrong one.

    Raises:
        ValueError: A difference is not a finite number.
    """
    weighted = [(2 ** -(max(0.0, age) / half_life), difference) for age, difference in blocks]
    if not all(math.isfinite(difference) for _, difference in weighted):
        raise ValueError("a difference is not a finite number")
    total = math.fsum(weight for weight, _ in weighted)
    share = min(1.0, most / total) if total else 0.0
    squares = share * math.fsum(weight * difference**2 for weight, difference in weighted)
    return NoiseModel(squares, share * total)


def agrees(noise: NoiseModel, difference: float, level: float = 0.01) -> bool:
    """Return whether a new A/A *difference* is as small as *noise* lets one expect (t-test)."""
    from scipy.stats import t

    if not noise.sigma:
        return True
    return bool(2 * t.sf(abs(difference) / noise.sigma, noise.freedom) >= level)


def expected_blocks(
    noise: NoiseModel, gap: float, threshold: float, blocks: tuple[int, int], series: int = 1
) -> int | None:
    """
    Return after how many blocks half of all gates reach *threshold*; None if not within *blocks*.

    Args:
        gap: Distance of the true difference from the bound to refute, as a logarithm.
        threshold: Of the evidence (1/α).
        blocks: The fewest and the most that are measured.
        series: That have to reach it all, each with noise of its own.
    """
    import numpy as np
    from scipy.special import ndtri

    sigma, count = noise.sigma or 0.0, np.arange(blocks[0], blocks[1] + 1)
    mean = gap - float(ndtri(0.5 ** (1 / series))) * sigma / np.sqrt(count)
    squares = noise.squares + count * mean**2 + (count - 1) * sigma**2
    reached = log_evidence(count, count * mean, squares, noise.freedom) >= math.log(threshold)
    return int(count[reached][0]) if reached.any() else None
