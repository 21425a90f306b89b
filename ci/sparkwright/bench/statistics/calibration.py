"""What blocks of a wheel against itself (A/A) tell of a machine: its spread, whether that still holds, and what margin it supports."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import msgspec

from sparkwright.bench.statistics.decision import Rule
from sparkwright.bench.statistics.evidence import checked

#: A/A blocks that a gate wants before it believes a spread.
ENOUGH = 30
#: Error rate of `band`: a machine that has not changed is found out of band once in a hundred nights, which costs a gate some blocks.
LEVEL = 0.01
#: Equal builds that pass within the blocks, of the margin that is recommended.
POWER = 0.95
#: Simulated gates behind a recommended margin, and the seed of their noise.
GATES, SEED = 20_000, 1


class Band(msgspec.Struct, frozen=True):
    """
    Whether a machine's newest A/A blocks agree with its older ones.

    Attributes:
        holds: They do, at the level `LEVEL`.
        spread: p-value of "the newest do not spread more"; 1 where there is only one. *mean*: of "their mean is the older ones'".
            *centre*: of "the mean of all is 0".
        says: It in a sentence.
    """

    holds: bool
    spread: float
    mean: float
    centre: float
    says: str


def upper_sigma(differences: Sequence[float], confidence: float = 0.95) -> float:
    """
    Return the upper confidence bound of the spread of a block's difference: s·√((n − 1)/χ²) with the quantile of χ² at 1 − *confidence*.

    s is taken about the blocks' mean, though an A/A block should have the mean 0: a side that is favoured is a fault of the
    measurement, which `band` looks for; hidden in a greater spread it would still break the bets, whose mean it moves.

    Raises:
        ValueError: There are fewer than two, all are equal (no measurement is that good), or one is no finite number.
    """
    from scipy.stats import chi2

    if len(differences) < 2 or not 0 < confidence < 1:
        raise ValueError(f"{len(differences)} A/A blocks at {confidence} give no spread")
    spread = statistics.stdev(checked(differences))
    if not spread > 0:
        raise ValueError("all A/A blocks have the same difference; they are no measurements")
    return spread * math.sqrt((len(differences) - 1) / float(chi2.ppf(1 - confidence, len(differences) - 1)))


def band(older: Sequence[float], newest: Sequence[float], level: float = LEVEL) -> Band:
    """
    Return whether *newest* A/A blocks look like *older* ones of the same machine; the two do not overlap.

    Three exact tests of normal samples, each at a third of *level*: F for a greater spread (a lesser one does no harm), t for another
    mean, and t for a mean of all that is not 0, which would favour a side.

    Raises:
        ValueError: There are fewer than two older ones or no newest one, or a difference is no finite number.
    """
    from scipy.stats import f, t

    before, now = checked(older), checked(newest)
    if len(before) < 2 or not now:
        raise ValueError(f"{len(before)} older and {len(now)} newest A/A blocks cannot be compared")
    freedom = len(before) + len(now) - 2
    ratio = statistics.variance(now) / statistics.variance(before) if len(now) > 1 else 1.0
    spread = float(f.sf(ratio, len(now) - 1, len(before) - 1)) if len(now) > 1 else 1.0
    pooled = math.sqrt((_squares(before) + _squares(now)) / freedom)
    shift = statistics.fmean(now) - statistics.fmean(before)
    mean = 2 * float(t.sf(abs(shift) / (pooled * math.sqrt(1 / len(before) + 1 / len(now))), freedom))
    middle = statistics.fmean(before + now)
    error = statistics.stdev(before + now) / math.sqrt(freedom + 2)
    centre = 2 * float(t.sf(abs(middle) / error, freedom + 1))
    holds = min(spread, mean, centre) >= level / 3
    says = (
        f"spread × {math.sqrt(ratio):.2f} (p {spread:.2g}), mean moved by {100 * shift:+.2f} % (p {mean:.2g}), "
        f"mean of all {100 * middle:+.2f} % (p {centre:.2g})"
    )
    return Band(holds, spread, mean, centre, says)


def in_band(older: Sequence[float], newest: Sequence[float], level: float = LEVEL) -> bool:
    """Return whether `band` holds."""
    return band(older, newest, level).holds


def smallest_margin(sigma: float, alpha: float, blocks: int, *, least: int = 3, series: int = 1, power: float = POWER) -> float:
    """
    Return the smallest margin that an equal build passes with the probability *power*: the one to promise on this machine.

    Args:
        sigma: `upper_sigma`, taken as the true spread, which is on the safe side.
        blocks: The most that are measured. *least*: before which nothing passes.
        series: That have to pass, each with blocks of its own noise.

    Raises:
        ValueError: *sigma* is not above 0, or the rest is no rule.
    """
    if not 0 < sigma < math.inf or series < 1 or not 0 < power < 1:
        raise ValueError(f"a spread of {sigma}, {series} series and a power of {power} give no margin")
    return math.expm1(sigma * _distance(alpha, blocks, least, power ** (1 / series)))


@functools.lru_cache
def _distance(alpha: float, blocks: int, least: int, power: float) -> float:
    """
    Return that margin in standard deviations, where neither unit nor spread matters any more, to 0.1 %.

    By halving, on the same `GATES` paths of normal noise for every distance that is tried: more distance passes more of them, but for
    the few that rounding decides.
    """
    import numpy as np

    from sparkwright.bench.statistics import many

    rule = Rule(1.0, alpha, least, blocks)
    noise = np.random.default_rng(SEED).normal(size=(GATES, blocks))
    low, high = 0.0, 100.0
    while high > low * 1.001 + 1e-6:
        middle = (low + high) / 2
        settled = many.crossings(many.evidence(middle - noise, middle, np.ones(GATES)), rule)
        low, high = (low, middle) if (settled <= blocks).mean() >= power else (middle, high)
    return high


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squares about the mean."""
    return statistics.variance(values) * (len(values) - 1) if len(values) > 1 else 0.0
