"""
How far two models are apart, from the few most likely tokens that servers report: arithmetic, no input or output.

A server tells the k most likely tokens of a position, not the whole distribution. What that proves about the Kullback-Leibler divergence
is a lower bound, by the data-processing inequality: whichever way the vocabulary is cut into groups, the divergence of the groups'
probabilities is at most that of the tokens'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

#: In the place of an id where a position has fewer than the row is wide.
NOTHING = -1

#: Probability that may be lost in adding up a list of float32 logarithms; a bucket below it is rounding, not evidence.
ROUNDING = 1e-6

#: Natural logarithm below which a probability is no probability: vLLM writes minus infinity as -9999, and a float32 softmax ends near -104.
IMPOSSIBLE = -1000.0

#: A list may add up to so much more than 1: float32 logarithms of a bfloat16 model, each rounded.
EXCESS = 1e-3


class Scores(msgspec.Struct, frozen=True):
    """
    Teacher-forced distributions of some positions, in order.

    Attributes:
        tokens: The token that is there, per position.
        logprobs: Its natural logarithm of probability.
        ids: A row per position: the reported tokens, the most likely first, `NOTHING` where there are fewer.
        tops: The logarithms that belong to them, minus infinity where there is nothing.
    """

    tokens: Ids
    logprobs: Floats
    ids: Ids
    tops: Floats

    def __len__(self) -> int:
        return len(self.tokens)


def scores(positions: Sequence[tuple[int, float, Mapping[int, float]]], width: int) -> Scores:
    """
    Return *positions* (token, its logarithm, id → logarithm) as arrays.

    Args:
        width: Entries kept of each position: k, and one for a token that is not among the k most likely.
    """
    ids = np.full((len(positions), width), NOTHING, np.int64)
    tops = np.full((len(positions), width), -np.inf)
    for row, (_, _, top) in enumerate(positions):
        # Not a number sorts anywhere; it is found by `unsound` before anything is computed from it.
        ranked = sorted(top.items(), key=lambda item: (-item[1], item[0]))[:width]
        ids[row, : len(ranked)] = [one for one, _ in ranked]
        tops[row, : len(ranked)] = [value for _, value in ranked]
    tokens = np.array([token for token, _, _ in positions], np.int64)
    return Scores(tokens, np.array([value for _, value, _ in positions], np.float64), ids, tops)


def unsound(of: Scores, top: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """
    Return which positions hold what no softmax gives: not a number or minus infinity; a sum or a part above 1; fewer than *top* tokens.

    The token that is there may be as unlikely as it likes, but not impossible.
    """
    there = of.ids != NOTHING
    # Written so that "not a number" is wrong: every comparison with it is false.
    wrong = ~(of.logprobs > IMPOSSIBLE) | (there & ~(of.tops > IMPOSSIBLE)).any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        above = (np.exp(np.where(there, of.tops, -np.inf)).sum(axis=1) > 1 + EXCESS) | (of.logprobs > EXCESS)
    return wrong, above, there.sum(axis=1) < top


def lower_bound(p: Scores, q: Scores, top: int) -> Floats:
    """
    Return a lower bound of KL(p ‖ q) in nat, per position.

    The groups are: each token that both lists hold, alone; M, the tokens that only p's list holds; N, those that only q's holds; and R, the
    rest of the vocabulary. Known are p and q of the single tokens, p(M), q(N), and with them a = p(N) + p(R) and b = q(M) + q(R). Not known
    are x = q(M) and y = p(N); but as each list holds the *top* most likely tokens, a token that it lacks is at most as likely as its
    last one, so x ≤ |M| · q_top and y ≤ |N| · p_top. The true x and y are somewhere in that box, and the divergence of the groups,

        Σ p ln(p/q) + p(M) ln(p(M)/x) + y ln(y/q(N)) + (a − y) ln((a − y)/(b − x)),

    is convex in them; so its least value over the box is a lower bound of the true one, which is one of KL(p ‖ q). The least value
    lies where both partial derivatives vanish, or on the edges x = x_max and y = y_max: four candidates. The first of them is the
    plain bound Σ p ln(p/q) + (1−Σp) ln((1−Σp)/(1−Σq)) over the tokens in both lists, which alone would say 0 of two lists without a
    common token.

    Masses of q below `ROUNDING` are taken for that much, which lowers the bound; what falls below 0 by rounding is 0.

    Args:
        p, q: The same positions; sound as `unsound` understands it.
        top: How many of each list are the most likely of all tokens; one more may be there, the token of the text.
    """
    shared_p, shared_q, common, only_p, only_q = _groups(p, q)
    rest_p, rest_q = 1 - shared_p.sum(axis=1), 1 - shared_q.sum(axis=1)
    mass_m, mass_n = only_p.sum(axis=1), only_q.sum(axis=1)
    count_m, count_n = (only_p > 0).sum(axis=1), (only_q > 0).sum(axis=1)
    a, b = np.maximum(rest_p - mass_m, 0), np.maximum(rest_q - mass_n, ROUNDING)
    x_most = np.where(count_m > 0, np.minimum(np.maximum(count_m * np.exp(q.tops[:, top - 1]), ROUNDING), b), 0)
    y_most = np.minimum(count_n * np.exp(p.tops[:, top - 1]), a)
    least = _least(mass_m, mass_n, a, b, x_most, y_most)
    with np.errstate(divide="ignore", invalid="ignore"):
        single = np.where(common, shared_p * (np.log(shared_p) - np.log(shared_q)), 0).sum(axis=1)
    return np.asarray(np.maximum(single + least, 0))


def _groups(p: Scores, q: Scores) -> tuple[Floats, Floats, NDArray[np.bool_], Floats, Floats]:
    """Return p and q of the common tokens at p's places, where those are, and p and q of what only one list holds (0 elsewhere)."""
    same = (p.ids[:, :, None] == q.ids[:, None, :]) & (p.ids != NOTHING)[:, :, None]
    common, common_q = same.any(axis=2), same.any(axis=1)
    chance_p = np.where(p.ids != NOTHING, np.exp(p.tops), 0)
    chance_q = np.where(q.ids != NOTHING, np.exp(q.tops), 0)
    shared_q = np.einsum("ijk,ik->ij", same.astype(np.float64), chance_q)
    # A probability that underflows to 0 is in nobody's list of float32 logarithms; it is lifted so that no quotient is infinite.
    shared_q = np.where(common, np.maximum(shared_q, 1e-300), 0)
    return np.where(common, chance_p, 0), shared_q, common, np.where(common, 0, chance_p), np.where(common_q, 0, chance_q)


def _term(mass: Floats, other: Floats) -> Floats:
    """Return mass · ln(mass / other), 0 for no mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mass > 0, mass * (np.log(mass) - np.log(other)), 0)


def _least(m: Floats, n: Floats, a: Floats, b: Floats, x_most: Floats, y_most: Floats) -> Floats:
    """Return the least of m ln(m/x) + y ln(y/n) + (a−y) ln((a−y)/(b−x)) for 0 ≤ x ≤ x_most and 0 ≤ y ≤ y_most."""

    def value(x: Floats, y: Floats) -> Floats:
        return _term(m, x) + _term(y, n) + _term(np.maximum(a - y, 0), np.maximum(b - x, ROUNDING))

    def x_at(y: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(m > 0, b * m / (m + a - y), 0)

    def y_at(x: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(n > 0, a * n / (n + b - x), 0)

    ratio = np.where(m + a > 0, (m + a) / (n + b), 1)
    candidates = [(m / ratio, ratio * n), (x_most, y_at(x_most)), (x_at(y_most), y_most), (x_most, y_most)]
    slack = 1 + 1e-12
    values = [np.where((x <= x_most * slack) & (y <= y_most * slack), value(x, y), np.inf) for x, y in candidates]
    return np.asarray(np.minimum.reduce(values))


def agreement(p: Scores, q: Scores) -> NDArray[np.bool_]:
    """
    Return at which positions both would say the same token.

    A bfloat16 model often has two most likely tokens to the bit; either of them is an agreement, as far as a list tells.
    """
    best_p, best_q = p.tops[:, :1], q.tops[:, :1]
    says_q, says_p = (p.ids == q.ids[:, :1]) & (p.tops >= best_p), (q.ids == p.ids[:, :1]) & (q.tops >= best_q)
    return np.asarray(says_q.any(axis=1) | says_p.any(axis=1))


def bootstrap(
    statistic: Callable[[Floats], Floats], blocks: Floats, *, confidence: float, times: int = 4000, seed: int = 20261121
) -> tuple[float, float]:
    """
    Return the one-sided lower and upper limits, each at *confidence*, of *statistic* by the percentile bootstrap over blocks.

    Positions of one text are not independent, texts are; so whole texts are drawn again (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13). The same numbers give the same limits.

    Args:
        statistic: From means over the drawn blocks (a row per drawing, a column per quantity) to a number per row.
        blocks: A row per text, a column per quantity that was averaged over it.
    """
    draws = np.random.default_rng(seed).multinomial(len(blocks), np.full(len(blocks), 1 / len(blocks)), size=times)
    values = statistic(draws @ blocks / len(blocks))
    low, high = np.quantile(values, [1 - confidence, confidence])
    return float(low), float(high)
