"""
G5: is the candidate's distribution over the next token that of the reference, at every place of the same texts?

Both servers score the same tokens (teacher forcing), so one odd token does not carry the comparison away, and a kernel that is a
little wrong everywhere shows although greedy answers still read well. The reference scores twice, and how far it is from itself (A/A)
is the floor below which nobody can be asked to be. Every limit is held against an interval, not a point: what the texts do not decide
is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from sparkwright.bench.server import openai_schema
from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.gates.core.server_under_test import ServerIdentity, same_model
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    inconclusive,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.logprobs import divergence, reference
from sparkwright.gates.logprobs.divergence import Floats, Scores
from sparkwright.gates.logprobs.reference import LogprobsPolicy, Reference, ReferenceInvalid

__all__ = ["CHECKS", "COMPARED", "REASONS", "TITLE", "LogprobsPolicy", "record", "run"]

TITLE = "distributions against a reference"

REASONS: Mapping[str, str] = {
    **openai_schema.REASONS,
    "reference-unstable": "The reference differs from itself by more than the policy allows, so nothing can be held against it: "
    "score it at concurrency 1, without other load, or take another backend as the reference.",
    "reference-unsound": "The reference gives logarithms that no softmax gives (not a number, a sum above 1): take another reference.",
    "reference-damaged": "The saved reference cannot be read, was cut short or changed: make it again.",
    "reference-other-model": "The reference is of another model, tokenizer or corpus than the candidate's run: make it with the same ones.",
    "reference-other-policy": "The reference has other numbers of texts, tokens or logarithms than the policy asks: make it again.",
    "corpus-too-short": "With this tokenizer a text has fewer tokens than the policy asks: lower `tokens` or lengthen the corpus.",
    "too-few-logprobs": "The server gives fewer logarithms per position than asked: raise its --max-logprobs.",
    "not-a-number": "The candidate gives a logarithm that is not a number or minus infinity: a kernel writes NaN or does not write at all.",
    "not-a-distribution": "The candidate's probabilities add up to more than 1: its logits or its softmax are damaged.",
    "distribution-differs": "The candidate's distributions are further from the reference's than the policy allows: a kernel, "
    "a scale or a weight is wrong, however well the text reads.",
    "text-differs": "Some texts come out far from the reference's although the average may be good: garbage that depends on the prompt.",
    "best-token-differs": "The candidate's most likely token is another one too often.",
    "perplexity-differs": "The texts are more, or less, likely to the candidate than to the reference.",
    "texts-do-not-decide": "The interval holds the limit: score more texts (`texts` in the policy), or make the reference steadier.",
    "not-measured": "An earlier check of this gate ended before this could be measured.",
}  # fmt: skip

#: What follows the two checks of the measurement itself, in order.
COMPARED = ("divergence", "worst-text", "best-token", "perplexity", "tails")

CHECKS = (
    *declare("reference", *COMPARED[:-1], measured=True),
    *declare("candidate"),
    *declare(COMPARED[-1], measured=True, role="informs"),
)


def run(
    policy: LogprobsPolicy, candidate: Client, against: Client | Reference | Path, *,
    paragraphs: Mapping[str, tuple[str, ...]], served: ServerIdentity, reference_served: ServerIdentity | None = None, again: Client | None = None,
) -> tuple[Check, ...]:  # fmt: skip
    """
    Return the checks of the gate.

    Args:
        candidate: The server of the wheel in question, about which *served* tells what is known.
        against: The server of the reference, or what it said earlier, or the file with that.
        paragraphs: The corpus, as `reference.load_corpus` reads it.
        reference_served: About the reference's server; what is known of the candidate's, less its wheel, where it is not given.
        again: A second launch of the reference, for the floor.

    Raises:
        file-invalid: The corpus is not the one that the policy names.
    """
    try:
        if isinstance(against, Client):
            about = reference_served or msgspec.structs.replace(served, wheel="")
            against = record(policy, paragraphs, against, about, again)
        known = against if isinstance(against, Reference) else reference.load(against)
    except ServerInvalid as error:
        return _ended(invalid("reference", f"The reference's server: {error.says}.", error.reference))
    except ReferenceInvalid as error:
        return _ended(invalid("reference", f"{error.says[:1].upper()}{error.says[1:]}.", error.reference))
    stable = _reference_check(policy, known)
    if stable.state != "pass":
        return _ended(stable)
    measured = candidate_scores(policy, candidate, known, served, made_texts(policy, paragraphs))
    if isinstance(measured, Check):
        return _ended(stable, measured)
    sound = passed("candidate", f"The candidate scored {len(measured)} positions of {policy.texts} texts; each is a distribution.")
    return (stable, sound, *compare(policy, known, measured, same_host=known.served.host == served.host))


def _ended(*done: Check) -> tuple[Check, ...]:
    missing = ("candidate", *COMPARED) if len(done) == 1 else COMPARED
    return (
        *done,
        *(not_run(name, f"{done[-1].name} ended the gate.", "not-measured", required=name != "tails") for name in missing),
    )


def _reference_check(policy: LogprobsPolicy, known: Reference) -> Check:
    """Return whether the reference fits the policy, is sound and agrees with itself."""
    if known.corpus != policy.corpus:
        return invalid("reference", "The reference is of another corpus than the policy names.", "reference-other-model")
    if (len(known.texts), len(known.texts[0]), known.top) != (policy.texts, policy.tokens, policy.top):
        return invalid("reference", "The reference has other texts, tokens or logarithms than the policy asks.", "reference-other-policy")
    wrong, above, few = divergence.unsound(known.scores, policy.top)
    if (wrong | above | few).any():
        return invalid("reference", "The reference's logarithms are those of no distribution.", "reference-unsound")
    floor, same, _ = known.floor.mean(axis=0)
    apart = [spread(known.floor[:, column]) for column in (0, 1)]
    figures = [
        Figure("A/A floor of the mean KL", float(floor), "nat", policy.texts, apart[0], policy.floor_most),
        Figure("A/A best tokens the same", 100 * float(same), "%", policy.texts, 100 * apart[1], 100 * policy.agreement_least),
    ]
    if floor > policy.floor_most or same < policy.agreement_least:
        says = f"The reference differs from itself by {floor:.4f} nat and agrees with itself on {same:.1%} of the best tokens."
        return invalid("reference", says, "reference-unstable", figures=figures)
    says = f"The reference differs from itself by {floor:.2g} nat and agrees with itself on {same:.2%} of the best tokens."
    return passed("reference", says, figures=figures)


#: What vLLM answers when a logarithm that it was asked for is not a number (seen with 0.32.0).
NOT_A_NUMBER = "Out of range float values"


def record(
    policy: LogprobsPolicy, paragraphs: Mapping[str, tuple[str, ...]], server: Client, served: ServerIdentity, again: Client | None = None
) -> Reference:
    """
    Return what *server* says of the corpus, with its floor from a second pass.

    Args:
        again: A second launch of the same reference, for the second pass; *server* itself without one.

    Raises:
        ServerInvalid: The server does not answer as it should.
        ReferenceInvalid: What it says is sound for nobody, or a text is too short for its tokenizer.
        file-invalid: The corpus is not the one that the policy names.
    """
    made = made_texts(policy, paragraphs)
    tokens = _tokens(policy, made, server)
    first = _score(policy, tokens, server, "reference")
    second = _score(policy, tokens, again or server, "reference, again")
    for scores in (first, second):
        wrong, above, few = divergence.unsound(scores, policy.top)
        if few.any():
            raise ReferenceInvalid("too-few-logprobs", f"the reference gives fewer than {policy.top} logarithms at {few.sum()} positions")
        if wrong.any() or above.any():
            raise ReferenceInvalid("reference-unsound", f"{(wrong | above).sum()} positions of the reference are no distribution")
    floor = by_text(columns(first, second, policy.top), policy.texts)
    return Reference(served, server.model(), server.version(), policy.corpus, policy.top, tokens, first, floor)


def made_texts(policy: LogprobsPolicy, paragraphs: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the texts of the policy; raise `file-invalid` where the corpus gives others than it names."""
    made = reference.corpus_texts(paragraphs, policy.texts)
    if reference.digest_of(made) != policy.corpus:
        raise FileError(
            "file-invalid",
            "The corpus is not the one that the policy of the distributions names.",
            details=[f"policy: {policy.corpus}", f"corpus: {reference.digest_of(made)}"],
        )
    return made


def _tokens(policy: LogprobsPolicy, made: tuple[str, ...], server: Client) -> tuple[tuple[int, ...], ...]:
    """Return the first tokens of each text; raise `ReferenceInvalid` where one has too few, `ServerInvalid` where they do not fit."""
    if server.max_model_len() <= policy.tokens:
        raise ServerInvalid("prompt-too-long", f"its context holds {server.max_model_len()} tokens; {policy.tokens} and one to write are needed")
    tokens = tuple(server.tokenize(text)[: policy.tokens] for text in made)
    short = [number for number, text in enumerate(tokens) if len(text) < policy.tokens]
    if short:
        raise ReferenceInvalid("corpus-too-short", f"text {short[0]} has {len(tokens[short[0]])} tokens instead of {policy.tokens}")
    return tokens


def _score(policy: LogprobsPolicy, tokens: Sequence[Sequence[int]], server: Client, who: str) -> Scores:
    """Return what *server* says of *tokens*, one text at a time: batches would bring differences that no candidate is to blame for."""
    rows: list[tuple[int, float, Mapping[int, float]]] = []
    with console.progress(f"scores of the {who}", len(tokens), "texts") as line:
        for number, text in enumerate(tokens):
            positions = server.complete(text, max_tokens=1, prompt_logprobs=policy.top).prompt_logprobs
            if [position.token for position in positions] != list(text[1:]):
                raise ServerInvalid("answer-unreadable", f"text {number}: it scored other tokens than it was sent")
            if widest := max((len(position.top) for position in positions), default=0) > policy.top + 1:
                raise ServerInvalid("answer-unreadable", f"text {number}: it gave {widest} logarithms where {policy.top} were asked")
            rows += [(position.token, position.logprob, position.top) for position in positions]
            line.update(number + 1)
    return divergence.scores(rows, policy.top + 1)


def candidate_scores(
    policy: LogprobsPolicy, server: Client, known: Reference, served: ServerIdentity, made: tuple[str, ...]
) -> Scores | Check:
    """Return the candidate's scores, or the check that says why there are none that count."""
    try:
        name = server.model()
        if not same_model(served, name, known.served, known.name):
            return invalid("candidate", f"The candidate serves {name!r}, the reference is of {known.name!r}.", "reference-other-model")
        if _tokens(policy, made, server) != known.texts:
            says = "The candidate's tokenizer gives other tokens for the corpus than the reference's."
            return invalid("candidate", says, "reference-other-model")
        scores = _score(policy, known.texts, server, "candidate")
    except ServerInvalid as error:
        if NOT_A_NUMBER in error.says:
            return failed("candidate", f"The candidate's server cannot write its own logarithms: {error.says}.", "not-a-number")
        return invalid("candidate", f"The candidate's server: {error.says}.", error.reference)
    except ReferenceInvalid as error:
        return invalid("candidate", f"The candidate: {error.says}.", error.reference)
    wrong, above, few = divergence.unsound(scores, policy.top)
    if wrong.any():
        says = f"{wrong.sum()} of {len(scores)} positions hold a logarithm that is not a number or minus infinity."
        return failed("candidate", says, "not-a-number", samples=_where(wrong, scores, policy))
    if above.any():
        says = f"The probabilities of {above.sum()} of {len(scores)} positions add up to more than 1."
        return failed("candidate", says, "not-a-distribution", samples=_where(above, scores, policy))
    if few.any():
        says = f"{few.sum()} positions have fewer than {policy.top} logarithms."
        return invalid("candidate", says, "too-few-logprobs")
    return scores


def _where(marked: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], scores: Scores, policy: LogprobsPolicy) -> list[Sample]:
    return [
        Sample(place(int(index), policy), actual=f"token {scores.tokens[index]}: {scores.logprobs[index]}, best {scores.tops[index, 0]}")
        for index in np.flatnonzero(marked)[:5]
    ]


def columns(one: Scores, other: Scores, top: int) -> Floats:
    """Return per position: lower bound of KL(one ‖ other), same best token, and ln p(one) − ln p(other) of the token that is there."""
    same = divergence.agreement(one, other).astype(np.float64)
    return np.stack([divergence.lower_bound(one, other, top), same, one.logprobs - other.logprobs], axis=1)


def by_text(of: Floats, texts: int) -> Floats:
    """Return the means over each text of a row per position."""
    means: Floats = of.reshape(texts, -1, of.shape[1]).mean(axis=1)
    return means


def place(position: int, policy: LogprobsPolicy) -> str:
    """Return where a position of the scores is, in words."""
    text, token = divmod(position, policy.tokens - 1)
    return f"text {text}, token {token + 1}"


def spread(values: Floats) -> float:
    """Return the standard deviation over texts."""
    return float(values.std(ddof=1))


def compare(policy: LogprobsPolicy, known: Reference, measured: Scores, *, same_host: bool) -> tuple[Check, ...]:
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


def _sample(position: int, known: Scores, measured: Scores, apart: Floats, policy: LogprobsPolicy) -> Sample:
    expected, found = (f"token {scores.ids[position, 0]} at {np.exp(scores.tops[position, 0]):.3f}" for scores in (known, measured))
    return Sample(place(position, policy), expected, f"{found}; KL at least {apart[position, 0]:.3f} nat")


def _divergence(policy: LogprobsPolicy, blocks: Floats, worst: Sequence[Sample]) -> Check:
    limit = max(policy.kl_floors * float(blocks[:, 3].mean()), policy.kl_most)
    mean = float(blocks[:, 0].mean())
    figure = Figure("mean KL, lower bound", mean, "nat", policy.texts, spread(blocks[:, 0]), limit)

    def excess(means: Floats) -> Floats:
        return np.asarray(means[:, 0] - np.maximum(policy.kl_floors * means[:, 3], policy.kl_most))

    says = f"KL is at least {mean:.4g} nat on average; the limit is {limit:.4g}."
    return _decided("divergence", says, "distribution-differs", _limits(policy, excess, blocks), figure, worst)


def _worst_text(policy: LogprobsPolicy, blocks: Floats) -> Check:
    """Return whether each text is near; one that is not is no accident of the choice of texts, so there is no interval."""
    limit, text = max(policy.kl_floors * float(blocks[:, 3].max()), policy.text_most), int(blocks[:, 0].argmax())
    most, beyond = float(blocks[text, 0]), int((blocks[:, 0] > limit).sum())
    figures = [Figure("largest mean KL of a text", most, "nat", policy.texts, bound=limit), Figure("texts beyond the limit", beyond)]
    says = f"The furthest text is at least {most:.4g} nat away on average; the limit is {limit:.4g}."
    if not beyond:
        return passed("worst-text", says, figures=figures)
    samples = [Sample(f"text {index}", actual=f"KL at least {blocks[index, 0]:.4g} nat") for index in np.argsort(-blocks[:, 0])[:beyond]]
    return failed("worst-text", says, "text-differs", figures=figures, samples=samples)


def _best_token(policy: LogprobsPolicy, blocks: Floats) -> Check:
    limit = max(float(blocks[:, 4].mean()) - policy.agreement_drop, policy.agreement_least)
    mean = float(blocks[:, 1].mean())
    figure = Figure("best tokens the same", 100 * mean, "%", policy.texts, 100 * spread(blocks[:, 1]), 100 * limit)

    def excess(means: Floats) -> Floats:
        return np.asarray(np.maximum(means[:, 4] - policy.agreement_drop, policy.agreement_least) - means[:, 1])

    says = f"The best token is the same at {mean:.2%} of the positions; the limit is {limit:.2%}."
    return _decided("best-token", says, "best-token-differs", _limits(policy, excess, blocks), figure)


def _perplexity(policy: LogprobsPolicy, blocks: Floats) -> Check:
    mean = float(blocks[:, 2].mean())
    figure = Figure("ln perplexity, candidate less reference", mean, "", policy.texts, spread(blocks[:, 2]), policy.perplexity_most)
    low, high = _limits(policy, lambda means: np.asarray(means[:, 2]), blocks)
    # Beyond the limit on either side fails; an interval within both passes.
    excess = (max(low, -high) - policy.perplexity_most, max(high, -low) - policy.perplexity_most)
    says = f"ln perplexity differs by {mean:+.5f}; the limit is ±{policy.perplexity_most:g}."
    return _decided("perplexity", says, "perplexity-differs", excess, figure)


def _limits(policy: LogprobsPolicy, statistic: Callable[[Floats], Floats], blocks: Floats) -> tuple[float, float]:
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
