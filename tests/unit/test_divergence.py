"""The arithmetic of the distributions gate: what is a lower bound for every pair of distributions, and what an interval covers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkwright.gates.logprobs import distributions
from sparkwright.gates.logprobs.distributions import Floats, Scores

#: What `ROUNDING` may take from the bound of one position.
SLACK = 1e-9

sizes = st.integers(3, 40)
seeds = st.integers(0, 2**32 - 1)
#: From nearly flat to nearly certain.
sharpness = st.sampled_from([0.1, 1.0, 3.0, 10.0, 30.0])


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max())
    return np.asarray(shifted / shifted.sum())


def drawn(size: int, seed: int, sharp: float, near: float) -> tuple[Floats, Floats]:
    """Return two distributions over *size* tokens, *near* 0 alike and the larger the further apart."""
    draw = np.random.default_rng(seed)
    logits = draw.standard_normal(size) * sharp
    return softmax(logits), softmax(logits + draw.standard_normal(size) * near)


def kl(p: Floats, q: Floats) -> float:
    """Return the true divergence of two whole distributions."""
    there = p > 0
    return float((p[there] * np.log(p[there] / q[there])).sum())


def listed(chances: Floats, token: int, top: int) -> Scores:
    """Return what a server says of one position with those chances: the *top* most likely, and the token that is there."""
    with np.errstate(divide="ignore"):
        logs = np.log(chances)
    ranked = np.argsort(-chances, kind="stable")[:top]
    told = {int(one): float(logs[one]) for one in [*ranked, token]}
    return distributions.scores([(token, told)], top + 1)


def bound(p: Floats, q: Floats, token: int, top: int) -> float:
    return float(distributions.lower_bound(listed(p, token, top), listed(q, token, top), top)[0])


@settings(max_examples=300)
@given(sizes, seeds, sharpness, sharpness, st.integers(1, 40), st.integers(0, 39))
def test_the_bound_is_never_above_the_divergence(size: int, seed: int, sharp: float, near: float, top: int, token: int) -> None:
    """However the lists overlap, wherever the token lies and however many are told, KL is at least the bound, and that at least 0."""
    p, q = drawn(size, seed, sharp, near)

    found = bound(p, q, token % size, min(top, size))

    assert 0 <= found <= kl(p, q) + SLACK
    assert bound(p, p, token % size, min(top, size)) == 0


def test_both_of_two_equally_likely_tokens_are_the_best() -> None:
    """A tie to the bit, as bfloat16 models have them, is an agreement whichever comes first in the list."""
    tie = {3: -0.7, 5: -0.7, 9: -5.0}
    other = {5: -0.6, 3: -0.8, 9: -5.0}
    third = {9: -0.1, 5: -3.0, 3: -4.0}
    rows = [distributions.scores([(3, one)], 4) for one in (tie, other, third)]

    assert distributions.agreement(rows[0], rows[1])[0]
    assert distributions.agreement(rows[1], rows[0])[0]
    assert not distributions.agreement(rows[0], rows[2])[0]


def test_the_interval_covers_the_truth() -> None:
    """Of 300 experiments with 64 skewed texts, each limit at 99 % misses the true mean in no more than 5 %."""
    draw = np.random.default_rng(1)
    found = [distributions.limits(draw.gamma(2.0, 0.5, size=64), 0.99) for _ in range(300)]

    assert sum(low > 1.0 for low, _ in found) <= 15
    assert sum(high < 1.0 for _, high in found) <= 15
