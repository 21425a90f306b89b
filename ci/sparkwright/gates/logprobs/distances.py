"""
The limits of the distributions gate, and the checks of a candidate's scores against a reference's.

A limit is held against an interval: what the texts do not decide is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, inconclusive, passed
from sparkwright.gates.logprobs import divergence, reference
from sparkwright.gates.logprobs.divergence import Floats, Scores
from sparkwright.gates.logprobs.reference import Reference

#: Texts below which a bootstrap over texts means nothing.
FEWEST_TEXTS = 8


class DistributionsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/distributions.yaml``, which says where each number comes from.

    Attributes:
        texts, tokens, top: Texts scored, tokens of each, and logarithms per position.
        corpus: The sha256 of the texts that the corpus gives.
        kl_most, kl_floors: The mean lower bound of KL is at most the larger of *kl_most* nat and *kl_floors* times the A/A floor.
        text_most: The largest mean of one text, likewise.
        floor_most: The floor above which a reference counts as unstable, in nat.
        agreement_least, agreement_drop: The part of positions with the same best token is at least the larger of *agreement_least* and the
            reference's own less *agreement_drop*.
        perplexity_most: The difference of ln perplexity, either way.
        confidence: Of each one-sided limit.
    """

    texts: int
    tokens: int
    top: int
    corpus: str
    kl_most: float
    kl_floors: float
    text_most: float
    floor_most: float
    agreement_least: float
    agreement_drop: float
    perplexity_most: float
    confidence: float

    def __post_init__(self) -> None:
        if self.texts < FEWEST_TEXTS:
            raise ValueError(f"{self.texts} texts: a bootstrap over fewer than {FEWEST_TEXTS} means nothing")
        if self.tokens < 2 or not 1 <= self.top <= 1000:
            raise ValueError("tokens must be at least 2 and top from 1 to 1000")
        if self.texts * self.tokens * (self.top + 1) > reference.MOST_ENTRIES:
            raise ValueError(f"more than {reference.MOST_ENTRIES} logarithms would be kept")
        if not (min(self.kl_most, self.text_most, self.floor_most, self.perplexity_most) > 0 and self.kl_floors >= 1):
            raise ValueError("kl_most, text_most, floor_most and perplexity_most must be above 0, kl_floors at least 1")
        if not (0 < self.agreement_least <= 1 and 0 <= self.agreement_drop < 1 and 0.5 < self.confidence < 1):
            raise ValueError("agreement_least, agreement_drop and confidence are parts of 1, confidence above 0.5")


def columns(one: Scores, other: Scores, top: int) -> Floats:
    """Return per position: lower bound of KL(one ‖ other), same best token, and ln p(one) − ln p(other) of the token that is there."""
    same = divergence.agreement(one, other).astype(np.float64)
    return np.stack([divergence.lower_bound(one, other, top), same, one.logprobs - other.logprobs], axis=1)


def by_text(of: Floats, texts: int) -> Floats:
    """Return the means over each text of a row per position."""
    means: Floats = of.reshape(texts, -1, of.shape[1]).mean(axis=1)
    return means


def place(position: int, policy: DistributionsPolicy) -> str:
    """Return where a position of the scores is, in words."""
    text, token = divmod(position, policy.tokens - 1)
    return f"text {text}, token {token + 1}"


def spread(values: Floats) -> float:
    """Return the standard deviation over texts."""
    return float(values.std(ddof=1))


def compare(policy: DistributionsPolicy, known: Reference, measured: Scores, *, same_host: bool) -> tuple[Check, ...]:
    """Return the checks of *measured* against the reference; its floor counts on the same host alone."""
    found = columns(known.scores, measured, policy.top)
    # The floor of another machine says nothing about this one; then the limits stand alone.
    floor = known.floor if same_host else np.tile([0.0, 1.0, 0.0], (policy.texts, 1))
    blocks = np.concatenate([by_text(found, policy.texts), floor], axis=1)
    worst = [_sample(int(index), known.scores, measured, found, policy) for index in np.argsort(-found[:, 0])[:5]]
    return (
        _divergence(policy, blocks, worst),
        _worst_text(policy, blocks),
        _best_token(policy, blocks),
        _perplexity(policy, blocks),
        _tails(found),
    )


def _sample(position: int, known: Scores, measured: Scores, apart: Floats, policy: DistributionsPolicy) -> Sample:
    expected, found = (f"token {scores.ids[position, 0]} at {np.exp(scores.tops[position, 0]):.3f}" for scores in (known, measured))
    return Sample(place(position, policy), expected, f"{found}; KL at least {apart[position, 0]:.3f} nat")


def _divergence(policy: DistributionsPolicy, blocks: Floats, worst: Sequence[Sample]) -> Check:
    limit = max(policy.kl_floors * float(blocks[:, 3].mean()), policy.kl_most)
    mean = float(blocks[:, 0].mean())
    figure = Figure("mean KL, lower bound", mean, "nat", policy.texts, spread(blocks[:, 0]), limit)

    def excess(means: Floats) -> Floats:
        return np.asarray(means[:, 0] - np.maximum(policy.kl_floors * means[:, 3], policy.kl_most))

    says = f"KL is at least {mean:.4g} nat on average; the limit is {limit:.4g}."
    return _decided("divergence", says, "distribution-differs", _limits(policy, excess, blocks), figure, worst)


def _worst_text(policy: DistributionsPolicy, blocks: Floats) -> Check:
    """Return whether each text is near; one that is not is no accident of the choice of texts, so there is no interval."""
    limit, text = max(policy.kl_floors * float(blocks[:, 3].max()), policy.text_most), int(blocks[:, 0].argmax())
    most, beyond = float(blocks[text, 0]), int((blocks[:, 0] > limit).sum())
    figures = [Figure("largest mean KL of a text", most, "nat", policy.texts, bound=limit), Figure("texts beyond the limit", beyond)]
    says = f"The furthest text is at least {most:.4g} nat away on average; the limit is {limit:.4g}."
    if not beyond:
        return passed("worst-text", says, figures=figures)
    samples = [Sample(f"text {index}", actual=f"KL at least {blocks[index, 0]:.4g} nat") for index in np.argsort(-blocks[:, 0])[:beyond]]
    return failed("worst-text", says, "text-differs", figures=figures, samples=samples)


def _best_token(policy: DistributionsPolicy, blocks: Floats) -> Check:
    limit = max(float(blocks[:, 4].mean()) - policy.agreement_drop, policy.agreement_least)
    mean = float(blocks[:, 1].mean())
    figure = Figure("best tokens the same", 100 * mean, "%", policy.texts, 100 * spread(blocks[:, 1]), 100 * limit)

    def excess(means: Floats) -> Floats:
        return np.asarray(np.maximum(means[:, 4] - policy.agreement_drop, policy.agreement_least) - means[:, 1])

    says = f"The best token is the same at {mean:.2%} of the positions; the limit is {limit:.2%}."
    return _decided("best-token", says, "best-token-differs", _limits(policy, excess, blocks), figure)


def _perplexity(policy: DistributionsPolicy, blocks: Floats) -> Check:
    mean = float(blocks[:, 2].mean())
    figure = Figure("ln perplexity, candidate less reference", mean, "", policy.texts, spread(blocks[:, 2]), policy.perplexity_most)
    low, high = _limits(policy, lambda means: np.asarray(means[:, 2]), blocks)
    # Beyond the limit on either side fails; an interval within both passes.
    excess = (max(low, -high) - policy.perplexity_most, max(high, -low) - policy.perplexity_most)
    says = f"ln perplexity differs by {mean:+.5f}; the limit is ±{policy.perplexity_most:g}."
    return _decided("perplexity", says, "perplexity-differs", excess, figure)


def _limits(policy: DistributionsPolicy, statistic: Callable[[Floats], Floats], blocks: Floats) -> tuple[float, float]:
    return divergence.bootstrap(statistic, blocks, confidence=policy.confidence)


def _decided(
    name: str, says: str, reference: str, excess: tuple[float, float], figure: Figure, samples: Sequence[Sample] = ()
) -> Check:
    """Return the check whose excess over its limit lies in the interval *excess*."""
    low, high = excess
    if high <= 0:
        return passed(name, says, figures=[figure], samples=samples)
    if low > 0:
        return failed(name, says, reference, figures=[figure], samples=samples)
    return inconclusive(name, f"{says} The texts do not decide.", "texts-do-not-decide", figures=[figure], samples=samples)


def _tails(apart: Floats) -> Check:
    high, most = (float(value) for value in np.quantile(apart[:, 0], [0.999, 1]))
    worst = float(np.abs(apart[:, 2]).max())
    figures = [
        Figure("KL, 99.9 % of positions below", high, "nat", len(apart)),
        Figure("KL, largest", most, "nat", len(apart)),
        Figure("largest difference of one logarithm", worst, "nat", len(apart)),
    ]
    says = f"99.9 % of the positions are below {high:.3g} nat, the largest is {most:.3g}; it only informs."
    return passed("tails", says, figures=figures, required=False)
