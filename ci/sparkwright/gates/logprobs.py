"""
G5: compare the candidate's next-token distributions with a reference's, and decode with prefill.

Both servers score the same tokens (teacher forcing), so one odd token does not end the comparison,
and a kernel that is a little wrong everywhere is seen although greedy answers still read well. The
reference scores twice; its distance from itself (A/A) is the floor of what can be asked.

Prefill alone does not show damage in decode or in the prefix cache. So the candidate also generates
tokens (greedy and alone, sampled and in a batch, and after a prompt that the cache has in whole or
in part), and the distribution behind each is compared with the one that prefill,
without the cache, gives for the same tokens. Prompts for the cache have several of its blocks, of
the size that the server states. Each limit is compared with an interval; texts that do not decide
are inconclusive.

A patch may repair numbers that the stock wheel has wrong, and declares that. Then a recorded
reference of high precision decides: the candidate must be nearer to it than the stock wheel, over
all texts, and further away in none by more than the limits; so where the stock wheel is right, the
candidate still has to agree.

A server reports the k most probable tokens of a position, not the whole distribution. They prove a
lower bound of the Kullback-Leibler divergence, by the data-processing inequality: however the
vocabulary is partitioned, the divergence of the groups is at most that of the tokens.

A reference is what one server reported for every position of the texts, and how well it agrees with
itself. It is recorded once, as two servers rarely fit on one GPU. The file names the wheel, its
flags and the model, and is read as untrusted.
"""

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from sparkwright.bench.records import Positive, Share
from sparkwright.bench.server.client import (
    REASONS as SERVER_REASONS,
    Client,
    Completion,
    ServerInvalid,
    TokenId,
)
from sparkwright.core.files import sha256_bytes
from sparkwright.core.states import State
from sparkwright.gates.core.server_under_test import (
    CACHE_HITS,
    LARGE_BLOCK,
    REFERENCE,
    Pace,
    Recorded,
    ServerIdentity,
    cache_block,
    machine_facts,
    prompt_length,
    read_recorded,
    read_stock,
)
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    decided,
    declare,
    failed,
    invalid,
    judged,
    not_run,
    passed,
)

#: A token, and logarithms of probabilities at its position.
Row = tuple[TokenId, Annotated[Mapping[TokenId, float], msgspec.Meta(min_length=1)]]

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


def arrays(positions: Sequence[Row], width: int) -> Scores:
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

    texts: Annotated[int, msgspec.Meta(ge=8, le=256)]
    tokens: Annotated[int, msgspec.Meta(ge=2, le=2048)]
    top: Annotated[int, msgspec.Meta(ge=1, le=100)]
    decode_texts: Annotated[int, msgspec.Meta(ge=8, le=256)]
    decode_prompt: Annotated[int, msgspec.Meta(ge=2)]
    decode_tokens: Annotated[int, msgspec.Meta(ge=2)]
    decode_batch: Annotated[int, msgspec.Meta(ge=2)]
    cached_blocks: Annotated[int, msgspec.Meta(ge=2, le=16)]
    hits_share: Share
    kl_max: Positive
    kl_floors: Annotated[float, msgspec.Meta(ge=1)]
    text_max: Positive
    decode_kl_max: Positive
    decode_text_max: Positive
    other_best_max: Share
    other_best_rise: Share
    perplexity_max: Positive
    sampling_max: Positive
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1)]
    corpus: Annotated[
        dict[
            str,
            Annotated[
                tuple[Annotated[str, msgspec.Meta(pattern=r"\S")], ...], msgspec.Meta(min_length=1)
            ],
        ],
        msgspec.Meta(min_length=1),
    ]

    @property
    def shape(self) -> str:
        """The sizes that a reference shares with its policy."""
        sizes = self.texts, self.tokens, self.top, self.decode_texts
        return "{} texts of {} tokens, {} logarithms; {} are continued".format(*sizes)

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

        return list(map(text, range(self.texts)))


class Reference(Recorded, frozen=True, forbid_unknown_fields=True):
    """
    What a server reported, whose `shape` is that of the policy.

    Attributes:
        texts: Token ids, a row per text.
        rows: The reported logarithms at every token but each text's first, text after text.
        floors: How far the server is from itself, per text: by check, the mean KL in nat of a
            second pass (``divergence``) or of generated tokens and their recomputation; and the
            share of positions with another most probable token (``best-token``).
        hits: By check, the tokens of prompts that were found in the prefix cache; empty without
            one.
    """

    texts: list[list[int]]
    rows: list[Row]
    floors: dict[str, Annotated[list[float], msgspec.Meta(min_length=1)]]
    hits: dict[str, Annotated[float, msgspec.Meta(ge=0)]]

    def __post_init__(self) -> None:
        if len(self.rows) != sum(map(len, self.texts)) - len(self.texts):
            raise ValueError("its sizes do not agree")


#: Temperature, and whether requests are sent at the policy's concurrency instead of one by one.
Mode = tuple[float, bool]

#: How tokens are generated, by check.
GREEDY, SAMPLED = "decode-greedy", "decode-sampled-batch"
MODES: Mapping[str, Mode] = {GREEDY: (0.0, False), SAMPLED: (1.0, True)}

#: The checks of answers whose prompt is in the prefix cache in whole, or up to a token near the
#: edge of a block.
CACHED = ("cached-prefix", "shared-prefix")

#: The checks after those of the reference and of the candidate's answers.
COMPARED = ("divergence", "best-token", "perplexity")
DECODED = (*MODES, *CACHED, "sampling")

CHECKS = (*declare("reference", *COMPARED, *DECODED, measured=True), *declare("candidate"))

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    **REFERENCE,
    "reference-unstable": "The reference differs from itself by more than the policy allows. Score "
    "it without other load, or take another backend as the reference.",
    "reference-unsound": "The reference gives logarithms that no softmax gives (NaN, a sum above "
    "1). Take another reference.",
    "corpus-too-short": "With this tokenizer a text has fewer tokens than the policy asks for. "
    "Lower `tokens` or lengthen the corpus.",
    "too-few-logprobs": "The server gives fewer logarithms per position than asked for. Raise its "
    "--max-logprobs.",
    "token-count-wrong": "A completion has fewer tokens than were asked for with ignore_eos. The "
    "server ends answers early.",
    "distribution-differs": "The distributions differ from the reference's by more than the policy "
    "allows: a kernel, a scale or a weight is wrong, however well the text reads.",
    "text-differs": "Some texts differ although the average may be good: damage that depends on "
    "the prompt.",
    "best-token-differs": "The most probable token differs too often.",
    "perplexity-differs": "The candidate gives the texts another probability.",
    "decode-differs": (
        "Generated tokens have other distributions than prefill gives: a "
        "decode kernel, the KV cache, a CUDA graph or speculation is wrong."
    ),
    "cache-differs": "After a prefix from the cache the distributions are not those of a cold run: "
    "the prefix cache returns wrong blocks.",
    "greedy-differs": "Greedy tokens are not the best of their own distributions: drafts are "
    "accepted that the model does not propose, or the server changes logits (a penalty).",
    "sampling-differs": "Sampled tokens do not follow their own distribution: the sampler or the "
    "rejection of drafts is wrong.",
    "precise-missing": "A patch declares to repair what the stock wheel computes, and the "
    "reference has no folder `precise`. Record there the same model served in BF16, or by an "
    "independent path, on this machine: --record DIR/precise --only G5. The folder is named when "
    "the reference is recorded.",
    "precise-unfit": "The precise reference is of other texts, another tokenizer or machine, of "
    "the candidate's own wheel or of none that it names, or it was served as the candidate is. "
    "Record it again.",
    "repair-unseen": "A patch declares to repair what the stock wheel computes, and the "
    "distributions are no nearer to the precise reference than that one's. Mend the patch, or name "
    "only recipes in its trailer in which it is seen.",
    "prefix-cache-unused": "The server has no prefix cache, and its recipe does not announce that "
    "(`prefix_cache`); or it found nothing of prompts of several blocks. Check its flags.",
    "texts-do-not-decide": "The interval holds the limit. Score more texts (`texts` in the policy) "
    "or make the reference steadier.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}


def record(policy: LogprobsPolicy, server: Client, served: ServerIdentity) -> Reference:
    """
    Return what *server* reports of the texts, and how well it agrees with itself.

    Raises:
        ServerInvalid: The server does not answer as it should, or a text has too few tokens.
    """
    texts = _tokens(policy, server)
    rows = score(policy, texts, server)
    first, second = sound(policy, rows), sound(policy, score(policy, texts, server))
    kl, other, _ = _distances(policy, first, second).T
    floors = {"divergence": kl, "best-token": other}
    for name, mode in MODES.items():
        floors[name], _ = decode(policy, server, policy.prompts(texts), mode)
    hits = dict[str, float]()
    for name in CACHED if cache_block(server.metrics()) else ():
        stored, prompts, _ = _cached_prompts(policy, texts, server, name)
        floors[name], hits[name] = _decode_after_cache(policy, server, prompts, stored)
    means = {name: values.tolist() for name, values in floors.items()}
    return Reference(served, policy.shape, texts, rows, means, hits)


def run(
    policy: LogprobsPolicy,
    candidate: Client,
    against: Path,
    *,
    served: ServerIdentity,
    announces_cache: bool,
    repairs: Sequence[str] = (),
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, which ends at the first reply that does not count.

    Args:
        candidate: The server of the candidate, whose identity is *served*.
        against: The file of the reference; one of high precision is in the folder ``precise``
            beside it.
        announces_cache: Whether the recipe announces a prefix cache.
        repairs: What patches repair of the distributions of the stock wheel.
    """
    results = dict[str, Check]()
    try:
        for check in _judged(policy, candidate, against, served, announces_cache, repairs):
            results[check.name] = check
        results["candidate"] = passed(
            "candidate", "The candidate gave a distribution at each position."
        )
    except ServerInvalid as error:
        name, make, reason = "candidate" if results else "reference", invalid, error.reason
        if reason == "not-a-number":
            make, reason = (failed, reason) if results else (invalid, "reference-unsound")
        results[name] = make(name, f"The {name}: {error.message}.", reason)
    for name in ("candidate", *COMPARED, *DECODED):
        results.setdefault(name, not_run(name, "The gate ended before.", "not-measured"))
    return tuple(results.values())


def estimate(policy: LogprobsPolicy, pace: Pace) -> float:
    """Return the seconds that the gate takes, with blocks of a hybrid model for the cache."""
    scored = policy.texts * policy.tokens
    # Each prompt is read once, and once more with the tokens that were generated after it.
    plain = 2 * len(MODES) * policy.decode_texts * policy.decode_prompt
    blocks = 3 * len(CACHED) * policy.decode_texts * policy.cached_blocks
    generated = (len(MODES) + len(CACHED)) * policy.decode_texts * policy.decode_tokens
    requests = policy.texts + 3 * (len(MODES) + len(CACHED)) * policy.decode_texts
    prefill = (scored + plain + blocks * LARGE_BLOCK) / pace.prefill_tokens_s
    return prefill + generated / pace.decode_tokens_s + requests / pace.requests_s


def _judged(
    policy: LogprobsPolicy,
    candidate: Client,
    against: Path,
    served: ServerIdentity,
    announces_cache: bool,
    repairs: Sequence[str],
) -> Iterator[Check]:
    """Yield the checks in the order of the questions."""
    reference = read_stock(against, Reference, served, policy.shape, limit=LARGEST)
    check = _check_reference(policy, reference)
    expected = sound(policy, reference.rows)
    yield check
    texts, precise = reference.texts, None
    _refuse({"reference-other-model": _tokens(policy, candidate) != texts})
    if repairs:
        precise = _precise(policy, against.parent / "precise" / against.name, reference, served)
    measured = sound(policy, score(policy, texts, candidate))
    floors = {name: np.array(values) for name, values in reference.floors.items()}
    if machine_facts(reference.served.host) != machine_facts(served.host):
        # The floor of another machine says nothing about this one.
        floors = dict.fromkeys(floors, np.zeros(1))
    yield from _compared(policy, expected, measured, floors, precise)
    prompts = policy.prompts(texts)
    kl, greedy = decode(policy, candidate, prompts, MODES[GREEDY])
    yield _greedy(_kl_check(policy, GREEDY, kl, floors[GREEDY]), greedy)
    kl, sampled = decode(policy, candidate, prompts, MODES[SAMPLED])
    yield _kl_check(policy, SAMPLED, kl, floors[SAMPLED])
    for name in CACHED:
        yield _after_cached_blocks(policy, reference, candidate, name, floors, announces_cache)
    yield _sampling(policy, sampled)


def _refuse(faults: Mapping[str, bool]) -> None:
    """Raise `ServerInvalid` for the first reason in *faults* that applies."""
    for reason, applies in faults.items():
        if applies:
            raise ServerInvalid(reason, REASONS[reason].removesuffix("."))


def _precise(
    policy: LogprobsPolicy, path: Path, reference: Reference, served: ServerIdentity
) -> Scores:
    """
    Return the scores of the reference of high precision at *path*.

    Raises:
        ServerInvalid: There is none, or it is of other texts or says nothing of the candidate.
    """
    _refuse({"precise-missing": not path.exists()})
    precise = read_recorded(path, Reference, limit=LARGEST)
    identity = precise.served
    as_candidate = (identity.model, identity.flags) == (served.model, served.flags)
    other = (precise.shape, precise.texts) != (reference.shape, reference.texts)
    other |= as_candidate or identity.wheel in ("", served.wheel) or identity.host != served.host
    _refuse({"precise-unfit": other})
    return sound(policy, precise.rows)


def _compared(
    policy: LogprobsPolicy,
    stock: Scores,
    measured: Scores,
    floors: Mapping[str, Floats],
    precise: Scores | None,
) -> Iterator[Check]:
    """
    Yield the checks of the candidate's scores against those of the *stock* wheel; with a *precise*
    reference, of how much further from it they are than the stock wheel's.
    """
    distances, beyond = _distances(policy, stock, measured), ""
    if precise is not None:
        own = np.abs(_distances(policy, precise, measured))
        theirs = np.abs(_distances(policy, precise, stock))
        distances, beyond = own - theirs, ", beyond the stock wheel's from the precise reference"
        floors = dict.fromkeys(COMPARED, np.zeros(1))
    kl, other, shift = distances.T
    yield _kl_check(policy, "divergence", kl, floors["divergence"], beyond)
    limit = policy.other_best_rise + float(floors["best-token"].mean())
    limit = min(policy.other_best_max, limit)
    yield _mean_check(policy, "best-token", f"share of other best tokens{beyond}", other, limit)
    label, limit = f"change of ln perplexity{beyond}", policy.perplexity_max
    yield _mean_check(policy, "perplexity", label, shift, limit, either=precise is None)


def _after_cached_blocks(
    policy: LogprobsPolicy,
    reference: Reference,
    server: Client,
    name: str,
    floors: Mapping[str, Floats],
    announces_cache: bool,
) -> Check:
    """
    Return whether tokens after blocks of the prefix cache are those after a cold prompt, and
    enough are found there beside what the stock wheel finds.
    """
    block = cache_block(server.metrics())
    if not block:
        message = "There is no prefix cache in this configuration"
        announced = ", and the recipe announces one." if announces_cache else ", as it announces."
        figures = [Figure("block of the prefix cache", 0, "tokens")]
        reason, good = "prefix-cache-unused", not announces_cache
        return judged(name, message + announced, reason, good, figures)
    stored, prompts, shared = _cached_prompts(policy, reference.texts, server, name)
    kl, hits = _decode_after_cache(policy, server, prompts, stored)
    least = policy.hits_share * reference.hits.get(name, 0.0)
    if name == "cached-prefix":
        # A repeated prompt has to find its blocks in the cache, but with drafts the last one may be
        # missing.
        least = max(least, len(prompts) * max(block, shared // len(prompts) - block))
    figures = [
        Figure("block of the prefix cache", block, "tokens"),
        Figure("tokens of each prompt", len(prompts[0]), "tokens", policy.decode_texts),
        Figure("tokens found in the cache", hits, "tokens", bound=shared),
    ]
    # An unshared block that was found is another prompt's.
    if not least <= hits <= shared:
        reason = "prefix-cache-unused" if hits < least else "cache-differs"
        message = f"{hits:g} tokens were found in the cache, of {least:g} to {shared} shared."
        return failed(name, message, reason, figures=figures)
    check = _kl_check(policy, name, kl, floors.get(name, np.zeros(1)))
    return msgspec.structs.replace(check, figures=(*check.figures, *figures))


def _check_reference(policy: LogprobsPolicy, reference: Reference) -> Check:
    """
    Return the check of the reference; raise `ServerInvalid` unless it has what this policy asks
    for, and agrees with itself.
    """
    means = {name: fmean(values) for name, values in reference.floors.items()}
    names = {"divergence", "best-token", *MODES}
    _refuse(
        {
            "reference-unnamed": reference.served.flags is None,
            "reference-other-policy": {*means} - {*CACHED} != names,
        }
    )
    other, floor = means.pop("best-token"), means["divergence"]
    # A reference whose own decode is damaged would excuse the same damage here, so it is refused.
    most = max(means.values())
    message = (
        f"it differs from itself by {floor:.2g} nat, with {other:.2%} other best tokens, and its "
        f"generated tokens from prefill by {most:.2g} nat at most"
    )
    if most > policy.decode_kl_max or other > policy.other_best_max:
        raise ServerInvalid("reference-unstable", message)
    figures = [
        Figure("A/A floor of the mean KL", floor, "nat", policy.texts, bound=policy.decode_kl_max),
        Figure("A/A other best tokens", other, count=policy.texts, bound=policy.other_best_max),
    ]
    return passed("reference", f"The reference: {message}.", figures=figures)


def _tokens(policy: LogprobsPolicy, server: Client) -> list[list[int]]:
    """Return the first tokens of each text; raise `ServerInvalid` if one has too few."""
    tokens = [[*server.tokenize(text)[: policy.tokens]] for text in policy.corpus_texts()]
    if (shortest := min(map(len, tokens))) < policy.tokens:
        raise ServerInvalid(
            "corpus-too-short", f"a text has {shortest} tokens instead of {policy.tokens}"
        )
    return tokens


def score(policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client) -> list[Row]:
    """Return the rows of *texts*, one at a time, as batches differ by more than a kernel may."""
    return [row for text in texts for row in _prefill(policy, server, text)]


def _prefill(policy: LogprobsPolicy, server: Client, text: Sequence[int]) -> list[Row]:
    """Return each token of *text* but the first, with the logarithms that prefill gives for it."""
    # vLLM computes such a request without its prefix cache.
    scored = server.complete(text, max_tokens=1, prompt_logprobs=policy.top).prompt_logprobs
    return list(zip(text[1:], scored, strict=True))


def sound(policy: LogprobsPolicy, rows: Sequence[Row]) -> Scores:
    """Return *rows* as arrays; raise `ServerInvalid` if a position is no distribution."""
    scores = arrays(rows, policy.top + 1)
    if wrong := int(unsound(scores).sum()):
        raise ServerInvalid("not-a-number", f"{wrong} of {len(rows)} positions are no distribution")
    if few := int((scores.ids[:, policy.top - 1] == PADDING).sum()):
        raise ServerInvalid(
            "too-few-logprobs", f"{few} positions have fewer than {policy.top} logarithms"
        )
    return scores


def decode(
    policy: LogprobsPolicy,
    server: Client,
    prompts: Sequence[list[int]],
    mode: Mode = (0.0, False),
    stored: Sequence[list[int]] = (),
) -> tuple[Floats, Scores]:
    """
    Generate tokens after *prompts*, and compare each with its recomputation by prefill.

    Args:
        mode: As in `MODES`.
        stored: Prompts that the prefix cache gets first, one for each.

    Returns:
        Per prompt, the mean lower bound of KL in nat, and the distributions behind the tokens.
    """
    (temperature, batched), salt = mode, uuid.uuid4().hex

    def generate(number: int) -> Completion:
        # A block of the cache is found only under the salt that it was stored with. With one salt
        # for all, a cache that mixes prompts up gives a prompt the blocks of another.
        own = salt if stored else uuid.uuid4().hex
        if stored:
            server.complete(stored[number], max_tokens=1, cache_salt=own)
        answer = server.complete(
            prompts[number],
            max_tokens=policy.decode_tokens,
            temperature=temperature,
            seed=number,
            logprobs=policy.top,
            ignore_eos=True,
            cache_salt=own,
        )
        if (count := len(answer.tokens)) < policy.decode_tokens:
            raise ServerInvalid(
                "token-count-wrong",
                f"with ignore_eos, an answer ended after {count} of {policy.decode_tokens} tokens",
            )
        return answer

    with ThreadPoolExecutor(policy.decode_batch if batched else 1) as pool:
        completions = list(pool.map(generate, range(len(prompts))))
    generated, recomputed = list[Row](), list[Row]()
    for prompt, completion in zip(prompts, completions, strict=True):
        generated += zip(completion.tokens, completion.logprobs, strict=True)
        rows = _prefill(policy, server, [*prompt, *completion.tokens])
        recomputed += rows[-policy.decode_tokens :]
    scores, expected = sound(policy, generated), sound(policy, recomputed)
    kl = lower_bound(expected, scores, policy.top)
    return kl.reshape(len(prompts), -1).mean(axis=1), scores


def _decode_after_cache(
    policy: LogprobsPolicy,
    server: Client,
    prompts: Sequence[list[int]],
    stored: Sequence[list[int]],
) -> tuple[Floats, float]:
    """Return the KL of `decode` after *stored* prompts, and the tokens found in the cache."""
    before = server.metrics().get(CACHE_HITS, 0.0)
    kl, _ = decode(policy, server, prompts, stored=stored)
    return kl, server.metrics().get(CACHE_HITS, 0.0) - before


def _cached_prompts(
    policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client, name: str
) -> tuple[list[list[int]], list[list[int]], int]:
    """
    Return prompts that are stored in the cache first, those that then find them there, and how many
    tokens of whole blocks these share with their own, together.

    How many of the shared blocks can be found depends on the model: a hybrid keeps its state at
    some blocks of a prompt alone, and drafts cost the last block that was found.
    """
    block = cache_block(server.metrics())
    room = server.max_model_len() - policy.decode_tokens
    length = prompt_length(block, policy.cached_blocks, room)
    # Prompts that begin with different tokens have no block in common.
    corpus = itertools.cycle(itertools.chain.from_iterable(texts))
    first = sorted(set().union(*texts))
    prompts = [
        [first[number % len(first)], *itertools.islice(corpus, length - 1)]
        for number in range(policy.decode_texts)
    ]
    later, shared, whole = list[list[int]](), 0, length // block
    for number, prompt in enumerate(prompts):
        # Of a prompt, at least one token is computed.
        edge, tail = length - 1, prompt[-1:]
        if name == "shared-prefix":
            # The prompt differs from the cached one from a token on that is before, at or after the
            # edge of a block.
            edge = min(edge, block * (1 + number // 3 % whole) + number % 3 - 1)
            other = next((token for token in first if token != prompt[edge]), 0)
            tail = [other, *reversed(prompt[edge + 1 :])]
        later.append([*prompt[:edge], *tail])
        shared += edge // block * block
    return prompts, later, shared


def _distances(policy: LogprobsPolicy, first: Scores, other: Scores) -> Floats:
    """Return, per text: mean KL(one ‖ other), share of other best tokens, difference of ln p."""
    columns = (
        lower_bound(first, other, policy.top),
        ~agreement(first, other),
        first.logprobs - other.logprobs,
    )
    return np.stack([column.reshape(policy.texts, -1).mean(axis=1) for column in columns], axis=1)


def _kl_check(
    policy: LogprobsPolicy, name: str, kl: Floats, floor: Floats, beyond: str = ""
) -> Check:
    """
    Return whether the texts are near on average, and each by itself.

    That one text is damaged is no accident of the choice of texts, so there is no interval.
    """
    mean_max, text_max = policy.decode_kl_max, policy.decode_text_max
    reason = text_reason = "cache-differs" if name in CACHED else "decode-differs"
    if name == "divergence":
        mean_max, text_max = policy.kl_max, policy.text_max
        reason, text_reason = "distribution-differs", "text-differs"
    limit = max(text_max, policy.kl_floors * float(floor.max()))
    samples = list[Sample]()
    for index in np.argsort(-kl):
        if not kl[index] <= limit:
            text = f"{kl[index]:.4g} nat"
            samples.append(Sample(f"text {index}", f"at most {limit:.4g} nat", text))
    if samples:
        message = f"{len(samples)} of {len(kl)} texts differ by more than {limit:.4g} nat{beyond}."
        return failed(name, message, text_reason, samples=samples)
    limit = max(mean_max, policy.kl_floors * float(floor.mean()))
    if beyond:
        limit, reason = -ROUNDING, "repair-unseen"
    label = f"mean KL in nat, lower bound{beyond}"
    return _mean_check(policy, name, label, kl, limit, reason)


def _mean_check(
    policy: LogprobsPolicy,
    name: str,
    label: str,
    values: Floats,
    limit: float,
    reason: str = "",
    *,
    either: bool = False,
) -> Check:
    """
    Return whether the mean of *values*, one per text, is at most *limit*; with *either*, on both
    sides of 0.
    """
    low, high = limits(values, policy.confidence)
    if either:
        low, high = max(low, -high), max(high, -low)
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    figure = Figure(label, mean, "", len(values), spread, limit)
    state: State = "pass" if high <= limit else "fail" if low > limit else "inconclusive"
    reasons: dict[State, str] = {
        "fail": reason or f"{name}-differs", "inconclusive": "texts-do-not-decide"
    }  # fmt: skip
    return decided(
        name,
        f"{label}: {mean:.4g}, {'in size ' if either else ''}from {low:.4g} to {high:.4g}; "
        f"the limit is {limit:.4g}.",
        state,
        reasons,
        [figure],
    )


def _greedy(check: Check, generated: Scores) -> Check:
    """
    Return *check*, or that greedy tokens are not the best of their own distributions.

    A draft that is accepted too easily has a sound distribution, which its token does not follow.
    """
    wrong = int((generated.logprobs < generated.tops[:, 0]).sum())
    count = len(generated.logprobs)
    figure = Figure("greedy tokens that are not the best", wrong, "tokens", count, bound=0)
    if check.state != "pass" or not wrong:
        return msgspec.structs.replace(check, figures=(*check.figures, figure))
    message = f"{wrong} of {count} greedy tokens are not the most probable ones."
    return failed(check.name, message, "greedy-differs", figures=[figure])


def _sampling(policy: LogprobsPolicy, sampled: Scores) -> Check:
    """
    Return whether sampled tokens follow their own distributions.

    A token drawn from its distribution is the most probable one with that one's probability p, so
    their count less Σ p has mean 0 and variance Σ p (1 - p); each p is known before the drawing,
    so the terms are uncorrelated.
    """
    tops = sampled.tops
    drawn = sampled.logprobs >= tops[:, 0]
    chance = np.where(tops >= tops[:, :1], np.exp(tops), 0).sum(axis=1).clip(max=1)
    error = float((drawn - chance).sum() / np.sqrt((chance * (1 - chance)).sum() + 1))
    message = f"The most probable token was drawn {error:+.1f} standard errors too often."
    most = policy.sampling_max
    figure = Figure("excess of best tokens", error, "errors", len(drawn), bound=most)
    return judged("sampling", message, "sampling-differs", abs(error) <= most, [figure])
