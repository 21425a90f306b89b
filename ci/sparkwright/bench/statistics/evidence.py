"""
Evidence block by block, that may be looked at after every block without an error rate growing.

An e-process is a bet against a hypothesis: it starts at 1, and while the hypothesis is true no strategy of stopping makes its expectation
more than 1. By Ville's inequality it then ever reaches 1/α with a probability of at most α (Ramdas et al., Game-theoretic statistics and
safe anytime-valid inference, 2023). Differences are ln(candidate / baseline) of a time, so above 0 the candidate is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

#: A gain counts for at most this many standard deviations; a bet is at most BET of them. See `passing`.
CAP, BET = 4.0, 3.0
#: The part of what one has that is bet on each sign.
STAKE = 0.8
#: ln of the greatest value that is returned, below what a float holds.
MOST = 700.0


def passing(differences: Sequence[float], *, delta: float, sigma: float) -> tuple[float, ...]:
    """
    Return, after each block, the evidence against "the candidate is worse by *delta* or more".

    E_n = ∏ exp(λ·min(δ − d_i, 4σ) − λ²σ²/2) with λ = min(δ/σ², 3/σ). For normal (or sub-Gaussian) differences of spread σ or less, each
    factor has an expectation of at most 1 while θ ≥ δ. Capping a gain makes a factor smaller, so it stays valid; capping a loss would
    not. The cap and the bound of the bet keep one outlier of a heavy tail from deciding: a block gives e^7.5 at most.

    Args:
        sigma: An upper bound of the spread of a block's difference, from A/A blocks; see `sparkwright.bench.statistics.calibration`.

    Raises:
        ValueError: *delta* or *sigma* is not above 0, or a difference is no finite number.
    """
    return _path([delta - one for one in checked(differences)], _wager(delta, sigma))


def failing(differences: Sequence[float], *, delta: float, sigma: float) -> tuple[float, ...]:
    """Return, after each block, the evidence against "the candidate is not worse at all" (θ ≤ 0); else as `passing`."""
    return _path(checked(differences), _wager(delta, sigma))


def signs(differences: Sequence[float], *, threshold: float) -> tuple[float, ...]:
    """
    Return, after each block, the evidence against "half of the differences or more are *threshold* or above".

    E_n = ∏ (1 + 0.8·s_i), s_i = +1 where d_i < threshold, else −1. It needs no σ and no form of the distribution: only that each block is
    below the threshold with a probability of at most ½, whatever came before, while its median is not below.

    Raises:
        ValueError: A difference is no finite number.
    """
    return _path(checked(differences), lambda one: math.log1p(STAKE if one < threshold else -STAKE))


def failing_signs(differences: Sequence[float]) -> tuple[float, ...]:
    """Return, after each block, the evidence against "half of the differences or more are 0 or below": `signs` the other way round."""
    return signs([-one for one in differences], threshold=0.0)


def e_bh(values: Mapping[str, float], alpha: float) -> tuple[str, ...]:
    """
    Return the names whose hypotheses are rejected together, strongest evidence first: those of the k greatest, with the greatest k for
    which the k-th is at least K/(α·k).

    Of what is named, a share of at most α is named wrongly on average, whatever the dependence between *values* (Wang and Ramdas, False
    discovery rate control with e-values, 2022). Where all hypotheses are true, that is the probability that anything is named.

    Raises:
        ValueError: *alpha* is not between 0 and 1, or a value is negative or no number.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"an error rate is between 0 and 1, not {alpha}")
    if not all(value >= 0 for value in values.values()):
        raise ValueError("an e-value is 0 or more")
    ranked = sorted(values, key=lambda name: values[name], reverse=True)
    rejected = [rank for rank, name in enumerate(ranked, 1) if values[name] >= len(values) / (alpha * rank)]
    return tuple(ranked[: max(rejected, default=0)])


def checked(differences: Iterable[float]) -> list[float]:
    """Return *differences*; raises ValueError where one is no finite number, as a comparison with it would be silently false."""
    found = list(differences)
    if not all(math.isfinite(one) for one in found):
        raise ValueError("a difference is no finite number; a leg without a measurement is no block")
    return found


def _wager(delta: float, sigma: float) -> Callable[[float], float]:
    """Return what a gain adds to ln of the evidence; in standard deviations, the bet is λσ."""
    if not (math.isfinite(delta) and delta > 0 and math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"the margin and the spread are above 0, not {delta} and {sigma}")
    bet = min(delta / sigma, BET)
    return lambda gain: bet * min(gain / sigma, CAP) - bet**2 / 2


def _path(gains: Iterable[float], wager: Callable[[float], float]) -> tuple[float, ...]:
    """Return the product after each gain, reckoned as a sum of logarithms."""
    total, found = 0.0, []
    for gain in gains:
        total += wager(gain)
        found.append(math.exp(min(total, MOST)))
    return tuple(found)
