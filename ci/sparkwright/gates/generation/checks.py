"""
Judge what a model generated: pure functions of answers.

Broken kernels show in numbers: repetition, one token everywhere, unreadable characters, a collapsed
distribution, or tokens that are not those of a recomputation. The natural texts of
tests/unit/natural_texts.json (prose in ten languages, code, tables, lists of numbers, under two
tokenizers) set off none of the detectors.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from sparkwright.bench.server.client import ChatAnswer, Completion
from sparkwright.core.console import one_line
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    failed,
    inconclusive,
    not_run,
    passed,
)
from sparkwright.gates.generation.policy import Bounds, Chat, Prompt

#: What a decoder writes for bytes that are no character.
REPLACEMENT = "\ufffd"

#: Runs of blanks, and rules of punctuation: code and tables compress like garbage does.
_DRAWN = re.compile(r"([ \t\n]|[-=_.*#~+|])\1{2,}")

#: Text that a parser or the template should have taken out of an answer.
_MARKUP = re.compile(r"</?think>|<\|?/?(im_|tool|start_|end_|channel)")


def longest_run(tokens: Sequence[int], of: int | None = None) -> int:
    """Return the length of the longest run of one token, or of the token *of*."""
    longest = length = 0
    for index, token in enumerate(tokens):
        length = length + 1 if index and token == tokens[index - 1] else 1
        if of is None or token == of:
            longest = max(longest, length)
    return longest


def top_share(tokens: Sequence[int]) -> float:
    """Return the share of the most frequent token; 0 without tokens."""
    return Counter(tokens).most_common(1)[0][1] / len(tokens) if tokens else 0.0


def distinct(tokens: Sequence[int]) -> float:
    """Return the share of different runs among all runs of four tokens; 1 if there is none."""
    runs = [tuple(tokens[index : index + 4]) for index in range(len(tokens) - 3)]
    return len(set(runs)) / len(runs) if runs else 1.0


def zlib_ratio(text: str) -> float:
    """Return how many times smaller *text* is under zlib, its rules and blanks shortened before."""
    data = _DRAWN.sub(r"\1", text).encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, 9)) if data else 0.0


def replacement_share(text: str) -> float:
    """Return the share of U+FFFD; up to three at the end do not count, as a cut leaves them."""
    body = text.rstrip(REPLACEMENT)
    body = text if len(text) - len(body) > 3 else body
    return body.count(REPLACEMENT) / len(body) if body else 0.0


def entropy(top: Mapping[int, float]) -> float:
    """
    Return a lower bound, in nat, of the entropy of a distribution with the log probabilities *top*.

    The rest counts as one outcome; merging outcomes lowers the entropy (grouping property; Cover
    and Thomas, Elements of Information Theory, 2.2).
    """
    listed = [math.exp(logprob) for logprob in top.values()]
    rest = max(0.0, 1.0 - sum(listed))
    return -sum(share * math.log(share) for share in (*listed, rest) if share > 0.0)


class Detector(msgspec.Struct, frozen=True):
    """
    One measure of an answer.

    Attributes:
        name: Of the check. *reason*: why it fails. *label*: what is measured.
        measure: From the tokens and the text of an answer.
        bound: Its field of `Bounds`. *alarm*: on which side of it.
    """

    name: str
    reason: str
    label: str
    measure: Callable[[Sequence[int], str], float]
    bound: str
    alarm: Literal["from", "below"] = "from"

    def alarms(self, answer: Completion, bounds: Bounds) -> bool:
        """Return whether *answer* sets it off."""
        value, bound = self.measure(answer.tokens, answer.text), getattr(bounds, self.bound)
        return bool(value >= bound if self.alarm == "from" else value < bound)


#: In the order in which they are reported.
DETECTORS: tuple[Detector, ...] = (
    Detector(
        "nan-tokens",
        "token-zero-run",
        "longest run of token 0",
        lambda tokens, _: longest_run(tokens, 0),
        "zeros",
    ),
    Detector(
        "same-token-run",
        "token-run",
        "longest run of a token",
        lambda tokens, _: longest_run(tokens),
        "run",
    ),
    Detector(
        "top-token-share",
        "token-share",
        "share of the most frequent token",
        lambda tokens, _: top_share(tokens),
        "share",
    ),
    Detector(
        "distinct-4-grams",
        "repetition",
        "share of distinct 4-grams",
        lambda tokens, _: distinct(tokens),
        "distinct",
        "below",
    ),
    Detector("zlib-ratio", "compressible", "zlib ratio", lambda _, text: zlib_ratio(text), "ratio"),
    Detector(
        "replacement-characters",
        "unreadable",
        "share of U+FFFD",
        lambda _, text: replacement_share(text),
        "replacement",
    ),
    Detector(
        "answer-length", "answer-short", "tokens", lambda tokens, _: len(tokens), "short", "below"
    ),
)


def alarms(answer: Completion, bounds: Bounds) -> tuple[str, ...]:
    """Return the names of the detectors that *answer* sets off."""
    return tuple(detector.name for detector in DETECTORS if detector.alarms(answer, bounds))


def detected(answers: Mapping[str, Completion], detector: Detector, bounds: Bounds) -> Check:
    """Return whether *detector* is silent on every answer."""
    if not answers:
        return not_run(detector.name, "no answer arrived", "no-answers")
    values = {
        name: detector.measure(answer.tokens, answer.text) for name, answer in answers.items()
    }
    worst = (max if detector.alarm == "from" else min)(values.values())
    bound = float(getattr(bounds, detector.bound))
    bad = [name for name, answer in answers.items() if detector.alarms(answer, bounds)]
    side = "below" if detector.alarm == "from" else "at least"
    samples = [
        Sample(
            name, f"{side} {bound:g}", f"{values[name]:.4g}: {one_line(answers[name].text, 160)}"
        )
        for name in bad
    ]
    figure = Figure(detector.label, worst, count=len(answers), bound=bound)
    message = f"{detector.label}: {worst:.4g} at the worst of {len(answers)} answers"
    return verdict(detector.name, message, detector.reason, not bad, [figure], samples)


def verdict(
    name: str,
    message: str,
    reason: str,
    good: bool,
    figures: Iterable[Figure] = (),
    samples: Iterable[Sample] = (),
) -> Check:
    """Return a check that passes if *good*, and else fails for *reason*."""
    if good:
        return passed(name, message, figures=figures, samples=samples)
    return failed(name, message, reason, figures=figures, samples=samples)


def difference(name: str, one: Sequence[int], other: Sequence[int]) -> Sample | None:
    """Return where two answers begin to differ, with some tokens of both; None if they do not."""
    if tuple(one) == tuple(other):
        return None
    index = first_difference(one, other)
    return Sample(
        f"{name}, token {index}",
        *(" ".join(map(str, tokens[index : index + 8])) for tokens in (one, other)),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token that differs, or the length of the shorter answer."""
    shared = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(shared) if a != b), min(len(one), len(other)))


def identity(pairs: Mapping[str, tuple[Completion, Completion]]) -> Check:
    """Return whether both answers of each pair have the same tokens."""
    if not pairs:
        return not_run("identical-reruns", "no prompt was answered twice", "no-answers")
    found = (difference(name, one.tokens, other.tokens) for name, (one, other) in pairs.items())
    samples = [sample for sample in found if sample]
    figure = Figure("prompts that differ", len(samples), count=len(pairs), bound=0)
    message = f"{len(samples)} of {len(pairs)} prompts got other tokens in a second cold run at concurrency 1"
    return verdict("identical-reruns", message, "rerun-differs", not samples, [figure], samples)


def collapse(answers: Mapping[str, Completion], minimum: float) -> Check:
    """Return whether the mean entropy over all tokens is at least *minimum* nat."""
    steps = [step for answer in answers.values() for step in answer.logprobs]
    if not steps:
        return not_run("entropy", "no log probabilities arrived", "no-answers")
    mean = math.fsum(map(entropy, steps)) / len(steps)
    figure = Figure("mean entropy, lower bound", mean, "nat", len(steps), bound=minimum)
    if any(math.isnan(logprob) for step in steps for logprob in step.values()):
        return failed("entropy", "a log probability is not a number", "logprob-nan")
    message = f"mean entropy {mean:.4g} nat over {len(steps)} tokens, {minimum:g} is the least"
    return verdict("entropy", message, "entropy-collapsed", mean >= minimum, [figure])


def right(
    name: str, reason: str, asked: Sequence[Prompt], answers: Mapping[str, Completion], minimum: int
) -> Check:
    """Return whether at least *minimum* answers contain what was asked for."""
    if not answers:
        return not_run(name, "no answer arrived", "no-answers")
    wrong = [
        prompt
        for prompt in asked
        if prompt.name in answers and not _holds(prompt.answer, answers[prompt.name].text)
    ]
    count = len(answers) - len(wrong)
    figure = Figure("right answers", count, count=len(answers), bound=minimum)
    samples = [
        Sample(prompt.name, f"/{prompt.answer}/", one_line(answers[prompt.name].text, 160))
        for prompt in wrong
    ]
    message = f"{count} of {len(answers)} answers are right; {minimum} are needed"
    # A missing answer might have been right, and `streams` is not a pass then.
    if count < minimum <= count + len(asked) - len(answers):
        return inconclusive(name, message, "no-answers", figures=[figure], samples=samples)
    return verdict(name, message, reason, count >= minimum, [figure], samples)


def _holds(answer: str, text: str) -> bool:
    return re.search(answer, unicodedata.normalize("NFKC", text)) is not None


def encodable(text: str, decoded: str) -> bool:
    """
    Return whether *decoded*, which is *text* through the tokenizer and back, is that text.

    Blanks and normal forms may differ, as some tokenizers normalise, and tokens may stand around
    it; unknown characters may not.
    """
    one, other = (
        re.sub(r"\s+", "", unicodedata.normalize("NFKC", part)) for part in (text, decoded)
    )
    return one in other


def corrupted(before: Mapping[str, float], after: Mapping[str, float], name: str) -> Check:
    """Return whether the counter of requests with NaN logits exists and never counted."""
    if name not in after:
        message = "VLLM_COMPUTE_NANS_IN_LOGITS=1 is not set, so the server does not count them"
        return not_run("corrupted-requests", message, "counter-absent")
    most = max(after[name], before.get(name, 0.0), key=abs)
    figures = [Figure("corrupted requests", most, bound=0)]
    message = f"{most:g} requests had NaN logits since the server's start"
    clean = after[name] == before.get(name, 0.0) == 0
    return verdict("corrupted-requests", message, "requests-corrupted", clean, figures)


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model writes as the arguments of a tool, and as structured output."""

    town: str
    crates: int
    urgent: bool


#: Its JSON schema, without references, which not every parser follows.
DELIVERY_SCHEMA = msgspec.json.schema_components([Delivery])[1]["Delivery"]
TOOL = {
    "type": "function",
    "function": {
        "name": "record_delivery",
        "description": "Record a delivery.",
        "parameters": DELIVERY_SCHEMA,
    },
}


def chat_fault(chat: Chat, answer: ChatAnswer) -> str:
    """Return what is wrong with the *answer* to *chat*; empty if nothing is."""
    if answer.finish_reason not in (
        (chat.finish, "tool_calls") if chat.tool_choice else (chat.finish,)
    ):
        return f"it ended by {answer.finish_reason} after {answer.usage.completion_tokens} tokens"
    text = answer.content
    if markup := _MARKUP.search(text):
        return f"{markup[0]} is left in the answer"
    if chat.ability == "reasoning" and not answer.reasoning.strip():
        return "no reasoning was separated from the answer"
    if chat.ability in ("tools", "structured"):
        if chat.tool_choice:
            if [call.name for call in answer.tool_calls] != ["record_delivery"]:
                return f"{len(answer.tool_calls)} tools were called: {one_line(text, 160)}"
            text = answer.tool_calls[0].arguments
        try:
            delivery = msgspec.json.decode(text, type=Delivery)
        except ValueError as error:
            return f"{error}: {one_line(text, 160)}"
        text = f"{delivery.town} {delivery.crates} {delivery.urgent}"
    return "" if _holds(chat.answer, text) else one_line(text, 160)


def without_speculation(pairs: Mapping[str, tuple[Completion, Completion]], tie: float) -> Check:
    """Return whether the same text is generated without speculation, apart from ties."""
    samples = []
    for name, (one, other) in pairs.items():
        index = first_difference(one.tokens, other.tokens)
        steps = [answer.logprobs[index] for answer in (one, other) if index < len(answer.tokens)]
        rivals = [answer.tokens[index] for answer in (one, other) if index < len(answer.tokens)]
        # The kernels of drafts sum in another order, so tokens that are equally likely may differ.
        near = all(
            max(step.values()) - step.get(rival, -math.inf) <= tie
            for step in steps
            for rival in rivals
        )
        sample = difference(name, one.tokens, other.tokens)
        if sample and not (near and len(steps) == 2):
            samples.append(sample)
    figure = Figure("prompts that differ", len(samples), count=len(pairs), bound=0)
    message = f"{len(samples)} of {len(pairs)} greedy answers are others without speculation"
    if not pairs:
        return not_run("speculation", "no prompt was answered twice", "no-answers")
    return verdict("speculation", message, "speculation-differs", not samples, [figure], samples)


def damaged_from(distances: Sequence[tuple[int, float]], limit: float) -> int | None:
    """
    Return the depth from which on the median of three *distances* in a row is beyond *limit* nat.

    A mixture of experts may go another way at one token without damage; None if nothing is damaged.
    """
    for index in range(len(distances) - 2):
        window = distances[index : index + 3]
        if not median(kl for _, kl in window) <= limit:
            return next(depth for depth, kl in window if not kl <= limit)
    return None
