"""
Next-token distributions: how far two are apart, the policy of G5, and a recorded reference.

A server reports the k most probable tokens of a position, not the whole distribution. They prove a
lower bound of the Kullback-Leibler divergence, by the data-processing inequality: however the
vocabulary is partitioned, the divergence of the groups is at most that of the tokens.

A reference is what one server reported for every position of the texts, and how well it agrees with
itself. It is recorded once, as two servers rarely fit on one GPU. The file names the wheel, its
flags and the model, and is read as untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from scipy.special import rel_entr

from sparkwright.bench.records import Positive, Share
from sparkwright.bench.server.client import TokenId
from sparkwright.core.files import sha256_bytes
from sparkwright.gates.core.server_under_test import ServerIdentity, read_recorded

#: A token, and logarithms of probabilities at its position.
Row = tuple[TokenId, Annotated[Mapping[TokenId, float], Meta(min_length=1)]]

Floats = NDArray[np.float64]

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
        logprobs: Per position, the natural logarithm of the probability of the token that follows.
        ids: A row per position: the reported tokens, the most probable first, then `PADDING`.
        tops: Their logarithms; minus infinity for padding.
    """

    logprobs: Floats
    ids: NDArray[np.int64]
    tops: Floats


def scores(positions: Sequence[Row], width: int) -> Scores:
    """
    Return *positions*, whose logarithms have that of their token among them, as arrays.

    Args:
        width: Entries of a row: k, and one for a token that is not among the k most probable.
    """
    ids = np.full((len(positions), width), PADDING, np.int64)
    tops = np.full((len(positions), width), -np.inf)
    for row, (_, top) in enumerate(positions):
        # NaN sorts anywhere; `unsound` finds it before anything is computed from it.
        ranked = sorted(top.items(), key=lambda item: (-item[1], item[0]))[:width]
        ids[row, : len(ranked)], tops[row, : len(ranked)] = zip(*ranked, strict=True)
    logprobs = np.array([top.get(token, np.nan) for token, top in positions])
    return Scores(logprobs, ids, tops)


def unsound(measured: Scores) -> NDArray[np.bool_]:
    """Return the positions that no softmax can give."""
    with np.errstate(over="ignore", invalid="ignore"):
        # Written so that NaN is not sound: every comparison with it is false.
        sound = (measured.logprobs > IMPOSSIBLE) & (measured.logprobs <= EXCESS)
        sound &= ((measured.ids == PADDING) | (measured.tops > IMPOSSIBLE)).all(axis=1)
        return np.asarray(~(sound & (np.exp(measured.tops).sum(axis=1) <= 1 + EXCESS)))


def lower_bound(p: Scores, q: Scores, top: int) -> Floats:
    """
    Return a lower bound of KL(p ‖ q) in nat, per position.

    The groups are each token that both lists hold, the set M of those that only p's list holds, and
    the rest. The mass x = q(M) is unknown, but no token of M is in q's list; so x is at most what
    that list leaves, and at most |M| times its last probability. With b = 1 − q(common) and
    a = p(rest), the divergence of the groups, Σ p ln(p/q) + p(M) ln(p(M)/x) + a ln(a/(b − x)), is
    convex in x and smallest at x = b p(M) / (p(M) + a), or at the limit if that is smaller. Without
    the group M, two lists without a common token would have the bound 0.

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
    from scipy.stats import bootstrap

    drawn = bootstrap(
        [values],
        np.mean,
        n_resamples=4000,
        confidence_level=2 * confidence - 1,
        method="percentile",
        rng=np.random.default_rng(20261121),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


#: Bytes; 64 texts of 512 tokens with 20 logarithms each take about 20 MB.
LARGEST = 64 * 1024 * 1024

#: Characters of a text: 512 tokens of any tokenizer with less than 12 characters a token.
LENGTH = 6000


class LogprobsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/logprobs.yaml``, which states the source of each number.

    Attributes:
        texts, tokens, top: Texts, tokens of each, and logarithms per position. A bootstrap over
            fewer than eight texts means nothing.
        decode_texts: How many texts are continued.
        decode_prompt, decode_tokens: Tokens of each prompt and of each continuation.
        decode_batch: The concurrency of the batched modes.
        cached_blocks: Whole blocks of the prefix cache in a prompt for it, and half of one more.
        hits_share: Of the tokens that the stock wheel finds in its cache of the same prompts, ours
            finds this share at least.
        kl_max, kl_floors: The mean lower bound of KL is at most the larger of *kl_max* nat and
            *kl_floors* times the A/A floor.
        text_max: The largest mean of one text, likewise.
        decode_kl_max, decode_text_max: The same for generated tokens; a reference that differs more
            from itself counts as unstable.
        other_best_max, other_best_rise: The share of positions with another most probable token is
            at most *other_best_max*, and at most *other_best_rise* above the reference's own.
        perplexity_max: The difference of ln perplexity, either way.
        sampling_max: Standard errors by which the share of most probable tokens among the sampled
            ones may differ from its expectation.
        confidence: Of each one-sided limit.
        corpus: Paragraphs of the texts, by genre.
    """

    texts: Annotated[int, Meta(ge=8, le=256)]
    tokens: Annotated[int, Meta(ge=2, le=2048)]
    top: Annotated[int, Meta(ge=1, le=100)]
    decode_texts: Annotated[int, Meta(ge=8, le=256)]
    decode_prompt: Annotated[int, Meta(ge=2)]
    decode_tokens: Annotated[int, Meta(ge=2)]
    decode_batch: Annotated[int, Meta(ge=2)]
    cached_blocks: Annotated[int, Meta(ge=2, le=16)]
    hits_share: Share
    kl_max: Positive
    kl_floors: Annotated[float, Meta(ge=1)]
    text_max: Positive
    decode_kl_max: Positive
    decode_text_max: Positive
    other_best_max: Share
    other_best_rise: Share
    perplexity_max: Positive
    sampling_max: Positive
    confidence: Annotated[float, Meta(gt=0.5, lt=1)]
    corpus: Annotated[
        dict[str, Annotated[tuple[Annotated[str, Meta(pattern=r"\S")], ...], Meta(min_length=1)]],
        Meta(min_length=1),
    ]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes that a reference shares with its policy."""
        return self.texts, self.tokens, self.top, self.decode_texts

    def prompts(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """Return the beginnings of *texts* that are continued."""
        return [text[: self.decode_prompt] for text in texts[: self.decode_texts]]

    def corpus_texts(self) -> list[str]:
        """Return the texts: all paragraphs, in another order for each, alike on every machine."""
        paragraphs = [text.strip() for genre in sorted(self.corpus) for text in self.corpus[genre]]

        def text(number: int) -> str:
            # Sorted by a hash, as the order of a random generator may change between releases.
            ordered = sorted(paragraphs, key=lambda part: sha256_bytes(f"{number} {part}".encode()))
            joined = "\n\n".join([*ordered, ""])
            return (joined * (1 + LENGTH // len(joined)))[:LENGTH]

        return [text(number) for number in range(self.texts)]


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a server reported.

    Attributes:
        served: Its wheel, flags, model and machine.
        shape: `LogprobsPolicy.shape`.
        texts: Token ids, a row per text.
        rows: The reported logarithms at every token but each text's first, text after text.
        floors: How far the server is from itself, per text: by check, the mean KL in nat of a
            second pass (``divergence``) or of generated tokens and their recomputation; and the
            share of positions with another most probable token (``best-token``).
        hits: By check, the tokens of prompts that were found in the prefix cache; empty without
            one.
    """

    served: ServerIdentity
    shape: tuple[int, int, int, int]
    texts: list[list[int]]
    rows: list[Row]
    floors: dict[str, Annotated[list[float], Meta(min_length=1)]]
    hits: dict[str, Annotated[float, Meta(ge=0)]]

    def __post_init__(self) -> None:
        if len(self.rows) != self.shape[0] * (self.shape[1] - 1):
            raise ValueError("its sizes do not agree")


def load(path: Path) -> Reference:
    """
    Return the reference in the file at *path*, in bounded time and memory.

    Raises:
        ServerInvalid: It is too large, no such file, cut short or of other sizes.
    """
    return read_recorded(path, Reference, "reference-damaged", limit=LARGEST)
