"""Asking servers for the scores of the distributions gate: the same tokens for both, one text at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sparkwright.bench.server.client import Client, ServerInvalid
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.gates.core.served import Served, same_model
from sparkwright.gates.core.verdict import Check, Sample, failed, invalid
from sparkwright.gates.logprobs import corpus, divergence
from sparkwright.gates.logprobs.distances import DistributionsPolicy, by_text, columns, place
from sparkwright.gates.logprobs.divergence import Scores
from sparkwright.gates.logprobs.reference import Reference, ReferenceInvalid

#: What vLLM answers when a logarithm that it was asked for is not a number (seen with 0.32.0).
NOT_A_NUMBER = "Out of range float values"


def record(
    policy: DistributionsPolicy, paragraphs: Mapping[str, tuple[str, ...]], server: Client, served: Served, again: Client | None = None
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


def made_texts(policy: DistributionsPolicy, paragraphs: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the texts of the policy; raise `file-invalid` where the corpus gives others than it names."""
    made = corpus.texts(paragraphs, policy.texts)
    if corpus.digest_of(made) != policy.corpus:
        raise FileError(
            "file-invalid",
            "The corpus is not the one that the policy of the distributions names.",
            details=[f"policy: {policy.corpus}", f"corpus: {corpus.digest_of(made)}"],
        )
    return made


def _tokens(policy: DistributionsPolicy, made: tuple[str, ...], server: Client) -> tuple[tuple[int, ...], ...]:
    """Return the first tokens of each text; raise `ReferenceInvalid` where one has too few, `ServerInvalid` where they do not fit."""
    if server.limit() <= policy.tokens:
        raise ServerInvalid("prompt-too-long", f"its context holds {server.limit()} tokens; {policy.tokens} and one to write are needed")
    tokens = tuple(server.tokenize(text)[: policy.tokens] for text in made)
    short = [number for number, text in enumerate(tokens) if len(text) < policy.tokens]
    if short:
        raise ReferenceInvalid("corpus-too-short", f"text {short[0]} has {len(tokens[short[0]])} tokens instead of {policy.tokens}")
    return tokens


def _score(policy: DistributionsPolicy, tokens: Sequence[Sequence[int]], server: Client, who: str) -> Scores:
    """Return what *server* says of *tokens*, one text at a time: batches would bring differences that no candidate is to blame for."""
    rows: list[tuple[int, float, Mapping[int, float]]] = []
    with console.progress(f"scores of the {who}", len(tokens), "texts") as line:
        for number, text in enumerate(tokens):
            positions = server.score(text, top=policy.top)
            if [position.token for position in positions] != list(text[1:]):
                raise ServerInvalid("answer-unreadable", f"text {number}: it scored other tokens than it was sent")
            if widest := max((len(position.top) for position in positions), default=0) > policy.top + 1:
                raise ServerInvalid("answer-unreadable", f"text {number}: it gave {widest} logarithms where {policy.top} were asked")
            rows += [(position.token, position.logprob, position.top) for position in positions]
            line.update(number + 1)
    return divergence.scores(rows, policy.top + 1)


def candidate_scores(
    policy: DistributionsPolicy, server: Client, known: Reference, served: Served, made: tuple[str, ...]
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


def _where(marked: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], scores: Scores, policy: DistributionsPolicy) -> list[Sample]:
    return [
        Sample(place(int(index), policy), actual=f"token {scores.tokens[index]}: {scores.logprobs[index]}, best {scores.tops[index, 0]}")
        for index in np.flatnonzero(marked)[:5]
    ]
