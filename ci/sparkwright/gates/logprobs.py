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
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from sparkwright.bench.server.client import REASONS as SERVER_REASONS
from sparkwright.bench.server.client import Client, Completion, ServerInvalid
from sparkwright.core.states import State
from sparkwright.gates import distributions
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.server_under_test import Pace, ServerIdentity
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
from sparkwright.gates.distributions import (
    Floats,
    LogprobsPolicy,
    Reference,
    Row,
    Scores,
)

#: Temperature, and whether requests are sent at the policy's concurrency instead of one by one.
Mode = tuple[float, bool]

#: How tokens are generated, by check.
MODES: Mapping[str, Mode] = {
    "decode-greedy": (0.0, False),
    "decode-sampled-batch": (1.0, True),
}

#: The checks of answers whose prompt is in the prefix cache in whole, or up to a token near the
#: edge of a block.
CACHED = ("cached-prefix", "shared-prefix")

#: The checks after those of the reference and of the candidate's answers.
COMPARED = ("divergence", "best-token", "perplexity")
DECODED = (*MODES, *CACHED, "sampling")

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
    for name in CACHED if server_under_test.cache_block(server.metrics()) else ():
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
    announces_cache: bool | None = None,
    repairs: Sequence[str] = (),
) -> tuple[Check, ...]:
    """
    Return the checks of the gate, which ends at the first reply that does not count.

    Args:
        candidate: The server of the candidate, whose identity is *served*.
        against: The file of the reference; one of high precision is in the folder ``precise``
            beside it.
        announces_cache: Whether the recipe announces a prefix cache; None without a recipe.
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
    prefill = (scored + plain + blocks * server_under_test.LARGE_BLOCK) / pace.prefill_tokens_s
    return prefill + generated / pace.decode_tokens_s + requests / pace.requests_s


def _judged(
    policy: LogprobsPolicy,
    candidate: Client,
    against: Path,
    served: ServerIdentity,
    announces_cache: bool | None,
    repairs: Sequence[str],
) -> Iterator[Check]:
    """Yield the checks in the order of the questions."""
    reference = distributions.load(against)
    check = _check_reference(policy, reference, served)
    expected = sound(policy, reference.rows)
    yield check
    texts, precise = reference.texts, None
    other = served.model != reference.served.model or _tokens(policy, candidate) != texts
    _refuse({"reference-other-model": other})
    if repairs:
        precise = _precise(policy, against.parent / "precise" / against.name, reference, served)
    measured = sound(policy, score(policy, texts, candidate))
    floors = {name: np.array(values) for name, values in reference.floors.items()}
    if reference.served.host != served.host:
        # The floor of another machine says nothing about this one.
        floors = dict.fromkeys(floors, np.zeros(1))
    yield from _compared(policy, expected, measured, floors, precise)
    for name, mode in MODES.items():
        kl, generated = decode(policy, candidate, policy.prompts(texts), mode)
        check = _kl_check(policy, name, kl, floors[name])
        temperature, _ = mode
        yield check if temperature else _greedy(check, generated)
    for name in CACHED:
        yield _after_cached_blocks(
            policy, reference, candidate, name, floors, served, announces_cache
        )
    # Only tokens of the last mode are sampled; the others are greedy.
    yield _sampling(policy, generated)


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
    precise = distributions.load(path)
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
        own, theirs = (np.abs(_distances(policy, precise, each)) for each in (measured, stock))
        distances, beyond = own - theirs, ", beyond the stock wheel's from the precise reference"
        floors = {name: np.zeros(1) for name in COMPARED}
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
    served: ServerIdentity,
    announces_cache: bool | None,
) -> Check:
    """
    Return whether tokens after blocks of the prefix cache are those after a cold prompt, and
    enough are found there beside what the stock wheel finds.
    """
    block = server_under_test.cache_block(server.metrics())
    if not block:
        message = "There is no prefix cache in this configuration"
        if announces_cache is None:
            required = "--no-enable-prefix-caching" not in (served.flags or ())
            return not_run(name, f"{message}.", "prefix-cache-unused", required=required)
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


def _check_reference(policy: LogprobsPolicy, reference: Reference, served: ServerIdentity) -> Check:
    """
    Return the check of the reference; raise `ServerInvalid` unless it was recorded from another
    wheel by this policy, and agrees with itself.
    """
    identity = reference.served
    means = {name: fmean(values) for name, values in reference.floors.items()}
    names = {"divergence", "best-token", *MODES}
    _refuse(
        {
            "reference-unnamed": not (identity.wheel and identity.model) or identity.flags is None,
            "reference-is-candidate": identity.wheel == served.wheel,
            "reference-other-policy": reference.shape != policy.shape
            or {*means} - {*CACHED} != names,
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
    scores = distributions.scores(rows, policy.top + 1)
    if wrong := int(distributions.unsound(scores).sum()):
        raise ServerInvalid("not-a-number", f"{wrong} of {len(rows)} positions are no distribution")
    if few := int((scores.ids[:, policy.top - 1] == distributions.PADDING).sum()):
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
    kl = distributions.lower_bound(expected, scores, policy.top)
    return kl.reshape(len(prompts), -1).mean(axis=1), scores


def _decode_after_cache(
    policy: LogprobsPolicy,
    server: Client,
    prompts: Sequence[list[int]],
    stored: Sequence[list[int]],
) -> tuple[Floats, float]:
    """Return the KL of `decode` after *stored* prompts, and the tokens found in the cache."""
    before = server.metrics().get(server_under_test.CACHE_HITS, 0.0)
    kl, _ = decode(policy, server, prompts, stored=stored)
    return kl, server.metrics().get(server_under_test.CACHE_HITS, 0.0) - before


def _cached_prompts(
    policy: LogprobsPolicy, texts: Sequence[list[int]], server: Client, name: str
) -> tuple[list[list[int]], list[list[int]], int]:
    """
    Return prompts that are stored in the cache first, those that then find them there, and how many
    tokens of whole blocks these share with their own, together.

    How many of the shared blocks can be found depends on the model: a hybrid keeps its state at
    some blocks of a prompt alone, and drafts cost the last block that was found.
    """
    block = server_under_test.cache_block(server.metrics())
    room = server.max_model_len() - policy.decode_tokens
    length = server_under_test.prompt_length(block, policy.cached_blocks, room)
    # Prompts that begin with different tokens have no block in common.
    first = sorted({token for text in texts for token in text})
    corpus = itertools.cycle(token for text in texts for token in text)
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
        distributions.lower_bound(first, other, policy.top),
        ~distributions.agreement(first, other),
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
    if bad := [int(index) for index in np.argsort(-kl) if not kl[index] <= limit]:
        samples = [
            Sample(f"text {index}", f"at most {limit:.4g} nat", f"{kl[index]:.4g} nat")
            for index in bad
        ]
        message = f"{len(bad)} of {len(kl)} texts differ by more than {limit:.4g} nat{beyond}."
        return failed(name, message, text_reason, samples=samples)
    limit = max(mean_max, policy.kl_floors * float(floor.mean()))
    if beyond:
        limit, reason = -distributions.ROUNDING, "repair-unseen"
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
