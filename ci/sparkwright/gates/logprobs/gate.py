"""
G5: compare the candidate's next-token distributions with a reference's, and decode with prefill.

Both servers score the same tokens (teacher forcing), so one odd token does not end the comparison,
and a kernel that is a little wrong everywhere is seen although greedy answers still read well. The
reference scores twice; its distance from itself (A/A) is the floor of what can be asked.

Prefill alone does not show damage in decode or in the prefix cache. So the candidate also generates
tokens (greedy and sampled, alone and in a batch, with a cold prompt and with one that the cache has
in whole or in part), and the distribution behind each is compared with the one that prefill,
without the cache, gives for the same tokens. Prompts for the cache have several of its blocks, of
the size that the server states. Each limit is compared with an interval; texts that do not decide
are inconclusive.

A patch may repair numbers that the stock wheel has wrong, and declares that. Then a recorded
reference of high precision decides: the candidate may not be further from it than the stock wheel.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, Completion, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.states import State
from sparkwright.gates.core import observed
from sparkwright.gates.core.observed import Pace
from sparkwright.gates.core.server_under_test import ServerIdentity
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
from sparkwright.gates.logprobs import distributions
from sparkwright.gates.logprobs.distributions import (
    Floats,
    LogprobsPolicy,
    Reference,
    Row,
    Scores,
)

#: How tokens are generated, by check: the temperature, and concurrency 1 or the policy's.
MODES: Mapping[str, tuple[float, bool]] = {
    "decode-greedy": (0.0, False),
    "decode-sampled": (1.0, False),
    "decode-greedy-batch": (0.0, True),
    "decode-sampled-batch": (1.0, True),
}

#: The same after a prompt that the prefix cache has in whole, or up to a place around the edge of a
#: block.
CACHED = ("cached-prefix", "shared-prefix")

#: The checks after those of the reference and of the candidate's answers.
COMPARED = ("divergence", "best-token", "perplexity")
DECODED = (*MODES, *CACHED, "sampling", "acceptance")

CHECKS = (*declare("reference", *COMPARED, *DECODED, measured=True), *declare("candidate"))

REASONS: Mapping[str, str] = {
    **SERVER_REASONS,
    "reference-unstable": "The reference differs from itself by more than the policy allows. Score "
    "it without other load, or take another backend as the reference.",
    "reference-unsound": "The reference gives logarithms that no softmax gives (NaN, a sum above "
    "1). Take another reference.",
    "reference-damaged": "The recorded reference cannot be read or was cut short. Record it again.",
    "reference-unnamed": (
        "The reference lacks its wheel, flags or model digest, so "
        "it may be the candidate's. Record it with WHEEL, --serve and "
        "--recipe."
    ),
    "reference-is-candidate": (
        "The reference is of the candidate's own wheel and shares its "
        "faults. Record it from the official wheel or an earlier "
        "release."
    ),
    "reference-other-model": "The reference is of other weights, another tokenizer or other texts. "
    "Record it with the same ones, and name the files of a server that runs already with "
    "--model-folder.",
    "reference-other-policy": "The reference has other numbers of texts, tokens or logarithms than "
    "the policy. Record it again.",
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
    "sampling-differs": "Sampled tokens do not follow their own distribution: the sampler or the "
    "rejection of drafts is wrong.",
    "acceptance-differs": (
        "The share of accepted drafts differs from the reference's: the "
        "draft model or its kernels differ."
    ),
    "no-speculation": "Neither server drafts tokens, so there is no acceptance to compare.",
    "precise-missing": "A patch declares to repair what the stock wheel computes, and the "
    "reference has no folder `precise`. Record there the same model served in BF16, or by an "
    "independent path, on this machine: --record DIR/precise --only G5.",
    "reference-without-speculation": "The candidate drafts tokens and the reference does not. "
    "Record the reference with the recipe's flags.",
    "prefix-cache-unused": "The server has no prefix cache, and its recipe does not announce that "
    "(`prefix_cache`); or it found nothing of prompts of several blocks. Check its flags.",
    "texts-do-not-decide": "The interval holds the limit. Score more texts (`texts` in the policy) "
    "or make the reference steadier.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}

#: Tokens of a large block of a prefix cache, as Qwen3-Next has them on 0.33.0.
LARGE_BLOCK = 560

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Decoded(msgspec.Struct, frozen=True):
    """
    The generated tokens of one mode, compared with their recomputation by prefill.

    Attributes:
        kl: Per text, the mean lower bound of KL in nat.
        scores: The distributions behind the generated tokens.
        prompt: Tokens of a prompt.
        shared: Tokens of whole blocks that the prompts share with stored ones.
        cache_hits: Tokens that were found in the prefix cache meanwhile.
        acceptance: The accepted share of the drafted tokens; None if none was drafted.
    """

    kl: Floats
    scores: Scores
    prompt: int
    shared: int
    cache_hits: float
    acceptance: float | None


def record(policy: LogprobsPolicy, server: Client, served: ServerIdentity) -> Reference:
    """
    Return what *server* reports of the texts, and how well it agrees with itself.

    Raises:
        ServerInvalid: The server does not answer as it should, or a text has too few tokens.
    """
    texts = _tokens(policy, server)
    rows = _score(policy, texts, server)
    first, second = _sound(policy, rows), _sound(policy, _score(policy, texts, server))
    kl, other, _ = _distances(policy, first, second).T
    cached = CACHED if observed.cache_block(server.metrics()) else ()
    decoded = {name: _decode(policy, texts, server, name) for name in (*MODES, *cached)}
    modes = {name: mode.kl for name, mode in decoded.items()}
    distances = {"divergence": kl, "best-token": other, **modes}
    floors = {name: values.tolist() for name, values in distances.items()}
    return Reference(
        served,
        server.model(),
        policy.shape,
        texts,
        rows,
        floors,
        decoded["decode-greedy"].acceptance,
    )


def run(
    policy: LogprobsPolicy,
    candidate: Client,
    against: Path,
    *,
    served: ServerIdentity,
    cached: bool | None = None,
    repairs: Sequence[str] = (),
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, which ends at the first reply that does not count.

    Args:
        candidate: The server of the candidate, whose identity is *served*.
        against: The file of the reference; one of high precision is in the folder ``precise``
            beside it.
        cached: Whether the recipe announces a prefix cache; None without a recipe.
        repairs: What patches repair of the distributions of the stock wheel.
    """
    results = dict[str, Check]()
    try:
        for check in _judged(policy, candidate, against, served, cached, repairs):
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
    cached = 3 * len(CACHED) * policy.decode_texts * policy.cached_blocks * LARGE_BLOCK
    generated = (len(MODES) + len(CACHED)) * policy.decode_texts * policy.decode_tokens
    requests = policy.texts + 3 * (len(MODES) + len(CACHED)) * policy.decode_texts
    prefill = (scored + plain + cached) / pace.prefill_tokens_s
    return prefill + generated / pace.decode_tokens_s + requests / pace.requests_s


def _judged(
    policy: LogprobsPolicy,
    candidate: Client,
    against: Path,
    served: ServerIdentity,
    cached: bool | None,
    repairs: Sequence[str],
) -> Iterator[Check]:
    """Yield the checks in the order of the questions."""
    reference = distributions.load(against)
    check = _check_reference(policy, reference, served)
    expected = _sound(policy, reference.rows)
    yield check
    same = served.model == reference.served.model
    if not same or _tokens(policy, candidate) != reference.texts:
        raise ServerInvalid(
            "reference-other-model",
            f"the reference is of {reference.name}, its tokenizer or other texts",
        )
    measured = _sound(policy, _score(policy, reference.texts, candidate))
    # The floor of another machine says nothing about this one.
    own = float(reference.served.host == served.host)
    floors = {name: own * np.array(values) for name, values in reference.floors.items()}
    if repairs:
        yield from _repaired(policy, reference, expected, measured, against, served)
    else:
        yield from _compared(policy, expected, measured, floors)
    decoded = dict[str, Decoded]()
    for name in MODES:
        mode = decoded[name] = _decode(policy, reference.texts, candidate, name)
        reasons = ("decode-differs", "decode-differs")
        yield _kl_check(policy, name, reasons, mode.kl, floors[name])
    for name in CACHED:
        yield _cached(policy, reference.texts, candidate, name, floors, served, cached)
    yield _sampling(policy, [mode for name, mode in decoded.items() if MODES[name][0]])
    yield _acceptance(policy, reference.acceptance, decoded["decode-greedy"].acceptance)


def _compared(
    policy: LogprobsPolicy, expected: Scores, measured: Scores, floors: Mapping[str, Floats]
) -> Iterator[Check]:
    """Yield the checks of the candidate's scores against those *expected* of the stock wheel."""
    kl, other, shift = _distances(policy, expected, measured).T
    yield _kl_check(
        policy, "divergence", ("distribution-differs", "text-differs"), kl, floors["divergence"]
    )
    limit = policy.other_best_rise + float(floors["best-token"].mean())
    yield _mean_check(
        policy, "best-token", "share of other best tokens", other, min(policy.other_best_max, limit)
    )
    yield _mean_check(policy, "perplexity", "change of ln perplexity", shift, policy.perplexity_max)


def _repaired(
    policy: LogprobsPolicy,
    reference: Reference,
    stock: Scores,
    measured: Scores,
    against: Path,
    served: ServerIdentity,
) -> Iterator[Check]:
    """Yield the same checks against a reference of high precision, from which *stock* is so far."""
    path = against.parent / "precise" / against.name
    if not path.exists():
        for name in COMPARED:
            yield not_run(name, "There is no reference of high precision.", "precise-missing")
        return
    precise = distributions.load(path)
    if precise.shape != reference.shape or precise.texts != reference.texts:
        message = "the precise reference has another tokenizer, other texts or another policy"
        raise ServerInvalid("reference-other-model", message)
    identity = precise.served
    if identity.host != served.host or (identity.model, identity.flags) == (
        served.model, served.flags,
    ):  # fmt: skip
        message = "the precise reference is of another machine, or was served as the candidate is"
        raise ServerInvalid("reference-is-candidate", message)
    exact = _sound(policy, precise.rows)
    kl, other, shift = np.abs(_distances(policy, exact, measured)).T
    stock_kl, stock_other, stock_shift = np.abs(_distances(policy, exact, stock)).T
    further = kl - stock_kl
    if bad := [int(index) for index in np.argsort(-further) if further[index] > policy.text_max]:
        samples = [
            Sample(f"text {index}", f"{stock_kl[index]:.4g} nat", f"{kl[index]:.4g} nat")
            for index in bad
        ]
        message = f"{len(bad)} of {len(kl)} texts are further from the precise ones than stock's."
        yield failed("divergence", message, "text-differs", samples=samples)
    else:
        yield _mean_check(
            policy, "divergence", "KL in nat beyond the stock wheel's, from the precise reference",
            further, policy.kl_max, "distribution-differs", either=False,
        )  # fmt: skip
    yield _mean_check(
        policy, "best-token", "share of other best tokens beyond the stock wheel's",
        other - stock_other, policy.other_best_rise, either=False,
    )  # fmt: skip
    yield _mean_check(
        policy, "perplexity", "change of ln perplexity beyond the stock wheel's",
        shift - stock_shift, policy.perplexity_max, either=False,
    )  # fmt: skip


def _cached(
    policy: LogprobsPolicy,
    texts: Sequence[list[int]],
    server: Client,
    name: str,
    floors: Mapping[str, Floats],
    served: ServerIdentity,
    announced: bool | None,
) -> Check:
    """Return whether tokens after blocks of the prefix cache are those after a cold prompt."""
    block = observed.cache_block(server.metrics())
    if not block and announced is None:
        return not_run(
            name,
            "The server has no prefix cache.",
            "prefix-cache-unused",
            required="--no-enable-prefix-caching" not in (served.flags or ()),
        )
    if not block:
        message = "There is no prefix cache in this configuration"
        message += ", and the recipe announces one." if announced else ", as the recipe announces."
        figures = [Figure("block of the prefix cache", 0, "tokens")]
        return judged(name, message, "prefix-cache-unused", not announced, figures)
    mode = _decode(policy, texts, server, name)
    figures = [
        Figure("block of the prefix cache", block, "tokens"),
        Figure("tokens of each prompt", mode.prompt, "tokens", policy.decode_texts),
        Figure("tokens found in the cache", mode.cache_hits, "tokens", bound=mode.shared),
    ]
    # An unshared block that was found is another prompt's.
    least = policy.decode_texts * block if name == "cached-prefix" else 0
    reason = "prefix-cache-unused" if mode.cache_hits < least else "cache-differs"
    if not least <= mode.cache_hits <= mode.shared:
        message = f"{mode.cache_hits:g} tokens were found in the cache, of {mode.shared} shared."
        return failed(name, message, reason, figures=figures)
    check = _kl_check(
        policy, name, ("cache-differs", "cache-differs"), mode.kl, floors.get(name, np.zeros(1))
    )
    return msgspec.structs.replace(check, figures=(*check.figures, *figures))


def _check_reference(policy: LogprobsPolicy, reference: Reference, served: ServerIdentity) -> Check:
    """
    Return the check of the reference; raise `ServerInvalid` unless it was recorded from another
    wheel by this policy, and agrees with itself.
    """
    identity = reference.served
    required = {name: getattr(identity, name) for name in ("wheel", "model", "flags")}
    if missing := [name for name, value in required.items() if value in ("", None)]:
        raise ServerInvalid("reference-unnamed", f"it does not name its {', '.join(missing)}")
    if identity.wheel == served.wheel:
        raise ServerInvalid(
            "reference-is-candidate", "it was recorded from the candidate's own wheel"
        )
    if (
        reference.shape != policy.shape
        or {*reference.floors} - {*CACHED} != {"divergence", "best-token", *MODES}
    ):  # fmt: skip
        raise ServerInvalid(
            "reference-other-policy", "it has other texts, tokens or logarithms than the policy"
        )
    floor, other = (fmean(reference.floors[name]) for name in ("divergence", "best-token"))
    # A reference that is damaged in decode would widen the limits for the same damage.
    modes = reference.floors.keys() - {"divergence", "best-token"}
    decoded = max(fmean(reference.floors[name]) for name in modes)
    message = (
        f"it differs from itself by {floor:.2g} nat, with {other:.2%} other best tokens, and its "
        f"generated tokens from prefill by {decoded:.2g} nat"
    )
    steady = floor <= policy.floor_max and other <= policy.other_best_max
    if not (steady and decoded <= max(policy.floor_max, policy.decode_kl_max)):
        raise ServerInvalid("reference-unstable", message)
    figures = [
        Figure("A/A floor of the mean KL", floor, "nat", policy.texts, bound=policy.floor_max),
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


def _score(policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client) -> list[Row]:
    """Return the rows of *texts*, one at a time, as batches differ by more than a kernel may."""
    rows: list[Row] = []
    with console.progress("scores", len(texts), "texts") as line:
        for number, text in enumerate(texts):
            rows += _prefill(policy, server, text)
            line.update(number + 1)
    return rows


def _prefill(policy: LogprobsPolicy, server: Client, text: Sequence[int]) -> list[Row]:
    """Return each token of *text* but the first, with the logarithms that prefill gives for it."""
    # vLLM computes such a request without its prefix cache.
    scored = server.complete(text, max_tokens=1, prompt_logprobs=policy.top).prompt_logprobs
    return list(zip(text[1:], scored, strict=True))


def _sound(policy: LogprobsPolicy, rows: Sequence[Row]) -> Scores:
    """Return *rows* as arrays; raise `ServerInvalid` if a position is no distribution."""
    scores = distributions.scores(rows, policy.top + 1)
    if wrong := int(distributions.unsound(scores).sum()):
        raise ServerInvalid("not-a-number", f"{wrong} of {len(rows)} positions are no distribution")
    if few := int((scores.ids[:, policy.top - 1] == distributions.PADDING).sum()):
        raise ServerInvalid(
            "too-few-logprobs", f"{few} positions have fewer than {policy.top} logarithms"
        )
    return scores


def _decode(
    policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client, name: str
) -> Decoded:
    """Generate tokens in the mode *name*, and compare each with its recomputation by prefill."""
    temperature, batched = MODES.get(name, (0.0, False))
    stored = list[list[int]]()
    prompts = [text[: policy.decode_prompt] for text in texts[: policy.decode_texts]]
    shared = 0
    if name in CACHED:
        stored, prompts, shared = _cached_prompts(policy, texts, server, name)
    shared_salt = uuid.uuid4().hex

    def generate(number: int) -> Completion:
        # A block of the cache is found only under the salt that it was stored with. With one salt
        # for all, a cache that mixes prompts up gives a prompt the blocks of another.
        salt, prompt = shared_salt if stored else uuid.uuid4().hex, prompts[number]
        if stored:
            server.complete(stored[number], max_tokens=1, cache_salt=salt)
        answer = server.complete(
            prompt,
            max_tokens=policy.decode_tokens,
            temperature=temperature,
            # The modes draw anew: tokens that both draw alike would count twice.
            seed=number + len(prompts) * batched,
            logprobs=policy.top,
            ignore_eos=True,
            cache_salt=salt,
        )
        if (count := len(answer.tokens)) < policy.decode_tokens:
            raise ServerInvalid(
                "token-count-wrong",
                f"with ignore_eos, an answer ended after {count} of {policy.decode_tokens} tokens",
            )
        return answer

    before = server.metrics()
    with ThreadPoolExecutor(policy.decode_batch if batched else 1) as pool:
        completions = list(pool.map(generate, range(len(prompts))))
    after = server.metrics()
    keys = (observed.CACHE_HITS, ACCEPTED, DRAFTED)
    growth = [after.get(key, 0.0) - before.get(key, 0.0) for key in keys]
    generated, recomputed = list[Row](), list[Row]()
    for prompt, completion in zip(prompts, completions, strict=True):
        generated += zip(completion.tokens, completion.logprobs, strict=True)
        rows = _prefill(policy, server, [*prompt, *completion.tokens])
        recomputed += rows[-policy.decode_tokens :]
    scores, expected = _sound(policy, generated), _sound(policy, recomputed)
    kl = distributions.lower_bound(expected, scores, policy.top)
    means = kl.reshape(len(prompts), -1).mean(axis=1)
    acceptance = growth[1] / growth[2] if growth[2] else None
    return Decoded(means, scores, len(prompts[0]), shared, growth[0], acceptance)


def _cached_prompts(
    policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client, name: str
) -> tuple[list[list[int]], list[list[int]], int]:
    """
    Return prompts that are stored in the cache first, those that then find them there, and how many
    tokens of whole blocks each of these shares with its own, together.
    """
    block = observed.cache_block(server.metrics())
    room = server.max_model_len() - policy.decode_tokens
    length = observed.prompt_length(block, policy.cached_blocks, room)
    prompts = []
    for number in range(policy.decode_texts):
        parts = [texts[(number + part) % len(texts)] for part in range(1 + length // policy.tokens)]
        prompts.append([token for part in parts for token in part][:length])
    later = prompts
    if name == "shared-prefix":
        later = []
        for number, prompt in enumerate(prompts):
            # It leaves its own one token before, at or after the edge of a block.
            edge = block * (1 + number // 3 % (length // block)) + number % 3 - 1
            later.append([*prompt[:edge], *reversed(prompt[edge:])])
    shared, sent = 0, list[list[int]]()
    for pair in zip(prompts, later, strict=True):
        for prompt in pair:
            common = max((_common(old, prompt) for old in sent), default=0)
            # Of a prompt, at least one token is computed.
            shared += min(common, length - 1) // block * block
            sent.append(prompt)
    return prompts, later, shared


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))


def _distances(policy: LogprobsPolicy, first: Scores, other: Scores) -> Floats:
    """Return, per text: mean KL(one ‖ other), share of other best tokens, difference of ln p."""
    columns = (
        distributions.lower_bound(first, other, policy.top),
        ~distributions.agreement(first, other),
        first.logprobs - other.logprobs,
    )
    return np.stack([column.reshape(policy.texts, -1).mean(axis=1) for column in columns], axis=1)


def _kl_check(
    policy: LogprobsPolicy, name: str, reasons: tuple[str, str], kl: Floats, floor: Floats
) -> Check:
    """
    Return whether the texts are near on average, and each by itself.

    That one text is damaged is no accident of the choice of texts, so there is no interval.
    """
    mean_max, text_max = policy.kl_max, policy.text_max
    if name in MODES or name in CACHED:
        mean_max, text_max = policy.decode_kl_max, policy.decode_text_max
    limit = max(text_max, policy.kl_floors * float(floor.max()))
    if bad := [int(index) for index in np.argsort(-kl) if not kl[index] <= limit]:
        samples = [
            Sample(f"text {index}", f"at most {limit:.4g} nat", f"{kl[index]:.4g} nat")
            for index in bad
        ]
        return failed(
            name,
            f"{len(bad)} of {len(kl)} texts differ by more than {limit:.4g} nat on average.",
            reasons[1],
            samples=samples,
        )
    limit = max(mean_max, policy.kl_floors * float(floor.mean()))
    return _mean_check(policy, name, "mean KL in nat, lower bound", kl, limit, reasons[0])


def _mean_check(
    policy: LogprobsPolicy,
    name: str,
    label: str,
    values: Floats,
    limit: float,
    reason: str = "",
    *,
    either: bool = True,
) -> Check:
    """
    Return whether the mean of *values*, one per text, is at most *limit*; with *either*, on both
    sides of 0.
    """
    low, high = distributions.limits(values, policy.confidence)
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


def _sampling(policy: LogprobsPolicy, sampled: Sequence[Decoded]) -> Check:
    """
    Return whether sampled tokens follow their own distributions.

    A token drawn from its distribution is the most probable one with that one's probability p, so
    their count less Σ p has mean 0 and variance Σ p (1 - p); each p is known before the drawing,
    so the terms are uncorrelated.
    """
    tops = np.concatenate([mode.scores.tops for mode in sampled])
    drawn = np.concatenate([mode.scores.logprobs for mode in sampled]) >= tops[:, 0]
    chance = np.where(tops >= tops[:, :1], np.exp(tops), 0).sum(axis=1).clip(max=1)
    error = float((drawn - chance).sum() / np.sqrt((chance * (1 - chance)).sum() + 1))
    message = f"The most probable token was drawn {error:+.1f} standard errors too often."
    most = policy.sampling_max
    figure = Figure("excess of best tokens", error, "errors", len(drawn), bound=most)
    return judged("sampling", message, "sampling-differs", abs(error) <= most, [figure])


def _acceptance(policy: LogprobsPolicy, expected: float | None, measured: float | None) -> Check:
    """Return whether as many drafts are accepted as with the reference."""
    if expected is None:
        reason = "no-speculation" if measured is None else "reference-without-speculation"
        return not_run(
            "acceptance", "The reference drafts no tokens.", reason, required=measured is not None
        )
    share, band = measured or 0.0, policy.acceptance_band
    message = f"{share:.1%} of the drafted tokens were accepted, {expected:.1%} by the reference."
    figure = Figure("accepted drafts", share, bound=expected - band)
    return judged(
        "acceptance", message, "acceptance-differs", abs(share - expected) <= band, [figure]
    )
