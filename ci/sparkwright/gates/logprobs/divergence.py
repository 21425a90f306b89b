"""
How far two next-token distributions are apart, given only their most probable tokens.

A server reports the k most probable tokens of a position, not the whole distribution. They prove a
lower bound of the Kullback-Leibler divergence, by the data-processing inequality: however the
vocabulary is partitioned, the divergence of the groups is at most that of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr
from scipy.stats import bootstrap

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

#: The id of an unused entry of a row.
PADDING = -1

#: Probability that may be lost in adding up a list of float32 logarithms.
ROUNDING = 1e-6

#: Below this logarithm a probability is zero: vLLM writes minus infinity as -9999, and a float32
#: softmax ends near -104.
IMPOSSIBLE = -1000.0

#: A list may add up to so much more than 1: float32 logarithms of a bfloat16 model, each rounded.
EXCESS = 1e-3


class Scores(msgspec.Struct, frozen=True):
    """
    The next-token distributions at some positions, in order.

    Attributes:
        tokens: The token that follows, per position.
        logprobs: The natural logarithm of its probability.
        ids: A row per position: the reported tokens, the most probable first, then `PADDING`.
        tops: Their logarithms; minus infinity for padding.
    """

    tokens: Ids
    logprobs: Floats
    ids: Ids
    tops: Floats


def scores(positions: Sequence[tuple[int, Mapping[int, float]]], width: int) -> Scores:
    """
    Return *positions*, each a token and the reported logarithms (its own among them), as arrays.

    Args:
        width: Entries of a row: k, and one for a token that is not among the k most probable.
    """
    ids = np.full((len(positions), width), PADDING, np.int64)
    tops = np.full((len(positions), width), -np.inf)
    for row, (_, top) in enumerate(positions):
        # NaN sorts anywhere; `unsound` finds it before anything is computed from it.
        ranked = sorted(top.items(), key=lambda item: (-item[1], item[0]))[:width]
        ids[row, : len(ranked)] = [token for token, _ in ranked]
        tops[row, : len(ranked)] = [logprob for _, logprob in ranked]
    tokens = np.array([token for token, _ in positions], np.int64)
    return Scores(tokens, np.array([top[token] for token, top in positions], float), ids, tops)


def unsound(measured: Scores, top: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the positions that no softmax can give, and those with fewer than *top* tokens."""
    listed = measured.ids != PADDING
    with np.errstate(over="ignore", invalid="ignore"):
        # Written so that NaN is not sound: every comparison with it is false.
        sound = (measured.logprobs > IMPOSSIBLE) & (measured.logprobs <= EXCESS)
        sound &= (~listed | (measured.tops > IMPOSSIBLE)).all(axis=1)
        sound &= np.exp(measured.tops).sum(axis=1) <= 1 + EXCESS
    return ~sound, listed.sum(axis=1) < top


def lower_bound(p: Scores, q: Scores, top: int) -> Floats:
    """
    Return a lower bound of KL(p ‖ q) in nat, per position.

    The groups are each token that both lists hold, the set M of those that only p's list holds, and
    the rest. The mass x = q(M) is unknown, but no token of M is in q's list; so x is at most what
    that list leaves, and at most |M| times its last probability. With b = 1 − q(common) and a = p(rest), the divergence
    of the groups, Σ p ln(p/q) + p(M) ln(p(M)/x) + a ln(a/(b − x)), is convex in x and smallest at
    x = b p(M) / (p(M) + a), or at the limit if that is smaller. Without the group M, two lists
    without a common token would have the bound 0.

    Args:
        p, q: The same positions, none of them `unsound`.
        top: How many tokens of each list are the most probable of all; the text's own token may be
            listed besides.
    """
    same = (p.ids[:, :, None] == q.ids[:, None, :]) & (p.ids != PADDING)[:, :, None]
    listed = np.exp(p.tops)
    q_listed = np.exp(q.tops)
    other = np.einsum("ijk,ik->ij", same.astype(np.float64), q_listed)
    common = np.where(other > 0, listed, 0)
    only = listed - common
    mass, rest = only.sum(axis=1), np.maximum(1 - listed.sum(axis=1), 0)
    left = np.maximum(1 - other.sum(axis=1), ROUNDING)
    limit = np.minimum((only > 0).sum(axis=1) * q_listed[:, top - 1], 1 - q_listed.sum(axis=1))
    limit = np.maximum(limit, ROUNDING)
    x = np.minimum(left * mass / np.maximum(mass + rest, ROUNDING), limit)
    groups = rel_entr(mass, x) + rel_entr(rest, left - x)
    return np.asarray(np.maximum(rel_entr(common, other).sum(axis=1) + groups, 0))


def agreement(p: Scores, q: Scores) -> NDArray[np.bool_]:
    """
    Return the positions at which both have the same most probable token.

    A bfloat16 model often has two equally probable ones; either of them is an agreement.
    """
    in_p = (p.ids == q.ids[:, :1]) & (p.tops >= p.tops[:, :1])
    in_q = (q.ids == p.ids[:, :1]) & (q.tops >= q.tops[:, :1])
    return np.asarray(in_p.any(axis=1) | in_q.any(axis=1))


def limits(values: Floats, confidence: float) -> tuple[float, float]:
    """
    Return one-sided lower and upper limits of the mean of *values*, each at *confidence*.

    Positions of a text are not independent, but texts are; so *values* are means over texts, and
    the percentile bootstrap draws texts (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, chapter 13). The same numbers give the same limits.
    """
    drawn = bootstrap(
        [values],
        np.mean,
        n_resamples=4000,
        confidence_level=2 * confidence - 1,
        method="percentile",
        rng=np.random.default_rng(20261121),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)
