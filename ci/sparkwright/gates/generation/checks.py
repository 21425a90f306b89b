"""
What G4 asks, and how it judges the answers: its policy, and pure functions.

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.recipe import Ability
from sparkwright.bench.records import Count, Positive, Share
from sparkwright.bench.server.client import ChatAnswer, Completion, ToolCall
from sparkwright.core.console import one_line
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    failed,
    judged,
    not_run,
)


def _require_pattern(answer: str) -> None:
    """Raise `ValueError` unless *answer* is a regular expression."""
    try:
        re.compile(answer)
    except re.error as error:
        raise ValueError(f"the answer {answer} is no regular expression: {error}") from error


class DetectorBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    From where on a measure of an answer is an alarm; a sound model repeats itself now and then.

    Attributes:
        run: Tokens of one kind in a row, at least.
        zeros: Tokens with the id 0 in a row, at least: the argmax of logits that are all NaN.
        distinct: Share of different runs of four tokens, below.
        ratio: Compression by zlib, at least.
        replacement: Share of U+FFFD among the characters, at least.
        entropy: Mean entropy in nat over all answers, below.
        short: Tokens of an answer, below.
        answers: Answers with an alarm, of all prompts, that are no garbage yet.
    """

    run: Count
    zeros: Count
    distinct: Share
    ratio: Positive
    replacement: Share
    entropy: Positive
    short: Count
    answers: Count


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that the model continues, and a regular expression that a right answer contains."""

    name: str
    text: str
    answer: str

    def __post_init__(self) -> None:
        _require_pattern(self.answer)


class Fact(Prompt, frozen=True, forbid_unknown_fields=True):
    """
    A fact in a long text, and the question for it.

    Attributes:
        line: The line that states the fact.
        depth: Where it lies, as a share of the text.
    """

    line: str
    depth: Annotated[float, Meta(ge=0, le=1)]


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A question in a chat.

    Attributes:
        ability: The model that is asked declares it in its recipe.
        answer: A regular expression for the answer; of a tool call and of structured output, for
            the values in their order. Empty if every answer is right.
        image: The URL of an image, ``data:`` included.
        tool_choice: ``auto`` or ``required``.
        finish: How the answer must end.
        max_tokens: The most tokens of the answer, reasoning included.
    """

    name: str
    ability: Ability
    text: str
    answer: str = ""
    image: str = ""
    tool_choice: Literal["auto", "required", ""] = ""
    finish: Literal["stop", "length"] = "stop"
    max_tokens: Count = 4096

    def __post_init__(self) -> None:
        _require_pattern(self.answer)


class Deep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A long generation that is compared with its own recomputation.

    Attributes:
        prompt: Tokens of the prompt.
        temperature: At which it is sampled.
        every: Tokens between two comparisons; fewer in a short generation.
        kl_max: Nat; damage is where the median of three comparisons in a row is beyond.
    """

    prompt: Count
    temperature: Positive
    every: Count
    kl_max: Positive


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What can be asked of a kind of model.

    Attributes:
        about: Which kind it is.
        answers: How many answers must be right.
        context: Lengths in tokens at which facts are retrieved; ``maximum`` is the server's.
        deep: Tokens of the long generation.
        wrap: The text around each prompt, with ``{prompt}``.
        not_run: Checks that cannot judge this kind, and why.
    """

    about: str
    answers: Annotated[int, Meta(ge=0)]
    context: tuple[Count | Literal["maximum"], ...]
    deep: Annotated[int, Meta(ge=64)]
    wrap: Annotated[str, Meta(pattern=r"\{prompt\}")] = "{prompt}"
    not_run: dict[str, str] = {}


class DirtyTextPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How the rate of dirty answers is measured.

    Attributes:
        answers: In a round, with each position of each switch.
        rounds: Asked if an answer of the first is dirty.
        tokens: The most of an answer.
        temperature: At which answers are sampled.
        concurrency: Requests at once, if no recipe states it.
        blocks: Of the prefix cache that all questions begin with.
        repeats: As often in a row the same text is dirt.
        letters: Scripts that each answer may have.
        chance: That a sound server fails, over all comparisons.
        most: The share of dirty answers that no server may exceed.
        template: Variables of the chat template; one that does not know them ignores them.
        chats, calls: Questions with a ``{number}`` that varies; the latter call the tool.
    """

    answers: Count
    rounds: Count
    tokens: Count
    temperature: Positive
    concurrency: Annotated[int, Meta(ge=2)]
    blocks: Count
    repeats: Annotated[int, Meta(ge=2, le=100)]
    letters: tuple[str, ...]
    chance: Annotated[float, Meta(gt=0, lt=1)]
    most: Share
    template: dict[str, bool]
    chats: Annotated[tuple[str, ...], Meta(min_length=1)]
    calls: tuple[str, ...]


class GenerationPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/generation.yaml``, which states the source of each threshold.

    Attributes:
        tokens: The most tokens of each answer.
        top: Logarithms of probabilities per token.
        tie: Nat; two tokens that are nearer may change places from run to run.
        differing: Prompts whose answers may differ by more, as those of a mixture of experts do.
        line: Of a long text, with a ``{number}`` that counts up and an ``{other}`` that varies.
    """

    tokens: Count
    top: Count
    tie: Positive
    differing: Annotated[int, Meta(ge=0)]
    bounds: DetectorBounds
    profiles: dict[str, Profile]
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1)]
    line: Annotated[str, Meta(pattern=r"\{number\}")]
    facts: Annotated[tuple[Fact, ...], Meta(min_length=1)]
    chats: tuple[Chat, ...]
    deep: Deep
    dirty_text: DirtyTextPolicy

    def __post_init__(self) -> None:
        names = [
            *(prompt.name for prompt in (*self.prompts, *self.facts)),
            *(chat.name for chat in self.chats),
        ]
        if len(set(names)) < len(names):
            raise ValueError("prompts, facts and chats have unique names")


#: What a decoder writes for bytes that are no character.
REPLACEMENT = "\ufffd"

#: Runs of blanks, and rules of punctuation: code and tables compress like garbage does.
_DRAWN = re.compile(r"([ \t\n]|[-=_.*#~+|])\1{2,}")

#: Text that a parser or the template should have taken out of an answer.
MARKUP = re.compile(
    r"</?think>|<\|?/?(im_|tool|start_|end_|channel)|<｜|<(function|parameter)=|<arg_(key|value)>|"
    r"<TOOLCALL|\[TOOL_CALLS\]"
)


def longest_run(tokens: Sequence[int], of: int | None = None) -> int:
    """Return the length of the longest run of one token, or of the token *of*."""
    runs = (len([*run]) for token, run in groupby(tokens) if of in (None, token))
    return max(runs, default=0)


def distinct(tokens: Sequence[int]) -> float:
    """Return the share of different runs among all runs of four tokens; 1 if there is none."""
    runs = [tuple(tokens[index : index + 4]) for index in range(len(tokens) - 3)]
    return len(set(runs)) / len(runs) if runs else 1.0


def shortened(text: str) -> str:
    """Return *text* with its rules and runs of blanks shortened."""
    return _DRAWN.sub(r"\1", text)


def zlib_ratio(text: str) -> float:
    """Return how many times smaller *text* is under zlib, its rules and blanks shortened before."""
    data = shortened(text).encode("utf-8", "surrogatepass")
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


def alarms(answer: Completion, bounds: DetectorBounds) -> str:
    """Return the measures of *answer* that are beyond *bounds*; empty for a natural text."""
    run, different = longest_run(answer.tokens), distinct(answer.tokens)
    ratio, unreadable = zlib_ratio(answer.text), replacement_share(answer.text)
    measures = {
        f"one token {run} times in a row": run >= bounds.run,
        f"{different:.0%} of the 4-grams differ": different < bounds.distinct,
        f"zlib makes it {ratio:.1f} times smaller": ratio >= bounds.ratio,
        f"{unreadable:.0%} of U+FFFD": unreadable >= bounds.replacement,
        f"{len(answer.tokens)} tokens": len(answer.tokens) < bounds.short,
    }
    return ", ".join(text for text, alarm in measures.items() if alarm)


def garbage(answers: Mapping[str, Completion], bounds: DetectorBounds) -> Iterator[Check]:
    """Yield whether no answer repeats token 0, and whether few look like garbage."""
    zeros = {case: longest_run(answer.tokens, 0) for case, answer in answers.items()}
    worst = max(zeros, key=zeros.__getitem__)
    message = f"token 0 at most {zeros[worst]} times in a row"
    figure = Figure("longest run of token 0", zeros[worst], count=len(zeros), bound=bounds.zeros)
    sample = Sample(worst, "", one_line(answers[worst].text, 160))
    sound = zeros[worst] < bounds.zeros
    yield judged("nan-tokens", message, "token-zero-run", sound, [figure], [sample])
    samples = []
    for case, answer in answers.items():
        if text := alarms(answer, bounds):
            samples.append(Sample(case, "", f"{text}: {one_line(answer.text, 160)}"))
    message = f"{len(samples)} of {len(answers)} answers look like garbage"
    figure = Figure("garbage", len(samples), count=len(answers), bound=bounds.answers)
    few = len(samples) <= bounds.answers
    yield judged("garbage", message, "text-garbage", few, [figure], samples)


def same_tokens(
    name: str,
    reason: str,
    pairs: Mapping[str, tuple[Completion, Completion]],
    policy: GenerationPolicy,
) -> Check:
    """
    Return the check *name* that both answers of nearly each pair have the same tokens.

    A token that the second answer's logarithms find nearly the most probable may stand in its
    place, as other kernels sum in another order.
    """
    samples = []
    for case, (first, other) in pairs.items():
        shared = enumerate(zip(first.tokens, other.tokens, strict=False))
        shorter = min(len(first.tokens), len(other.tokens))
        index = next((index for index, (a, b) in shared if a != b), shorter)
        step, rival = other.logprobs[index : index + 1], first.tokens[index : index + 1]
        near = (
            step
            and rival
            and max(step[0].values()) - step[0].get(rival[0], -math.inf) <= policy.tie
        )
        if first.tokens != other.tokens and not near:
            shown = (" ".join(map(str, pair.tokens[index : index + 8])) for pair in (first, other))
            samples.append(Sample(f"{case}, token {index}", *shown))
    return judged(
        name,
        f"{len(samples)} of {len(pairs)} prompts got other tokens the second time",
        reason,
        len(samples) <= policy.differing,
        [Figure("prompts that differ", len(samples), count=len(pairs), bound=policy.differing)],
        samples,
    )


def collapse(answers: Mapping[str, Completion], minimum: float) -> Check:
    """Return whether the mean entropy over all tokens is at least *minimum* nat."""
    steps = [step for answer in answers.values() for step in answer.logprobs]
    if any(math.isnan(logprob) for step in steps for logprob in step.values()):
        return failed("entropy", "a log probability is not a number", "not-a-number")
    mean = math.fsum(map(entropy, steps)) / len(steps)
    return judged(
        "entropy",
        f"mean entropy {mean:.4g} nat over {len(steps)} tokens, {minimum:g} is the least",
        "entropy-collapsed",
        mean >= minimum,
        [Figure("mean entropy, lower bound", mean, "nat", len(steps), bound=minimum)],
    )


def right(
    name: str, reason: str, prompts: Sequence[Prompt], answers: Mapping[str, Completion], least: int
) -> Check:
    """Return whether at least *least* answers contain the expected text."""
    samples = [
        Sample(prompt.name, f"/{prompt.answer}/", one_line(answers[prompt.name].text, 160))
        for prompt in prompts
        if not _holds(prompt.answer, answers[prompt.name].text)
    ]
    count = len(answers) - len(samples)
    return judged(
        name,
        f"{count} of {len(answers)} answers are right; {least} are needed",
        reason,
        count >= least,
        [Figure("right answers", count, count=len(answers), bound=least)],
        samples,
    )


def _holds(answer: str, text: str) -> bool:
    return re.search(answer, unicodedata.normalize("NFKC", text)) is not None


def encodable(text: str, decoded: str) -> bool:
    """
    Return whether *decoded*, which is *text* through the tokenizer and back, is that text.

    Blanks and normal forms may differ, as some tokenizers normalise, and tokens may stand around
    it; unknown characters may not.
    """
    expected, other = (
        re.sub(r"\s+", "", unicodedata.normalize("NFKC", part)) for part in (text, decoded)
    )
    return expected in other


def corrupted(before: Mapping[str, float], after: Mapping[str, float]) -> Check:
    """Return whether the counter of requests with NaN logits exists and never counted."""
    name = "vllm:corrupted_requests_total"
    if name not in after:
        return not_run(
            "corrupted-requests",
            "VLLM_COMPUTE_NANS_IN_LOGITS=1 is not set, so the server does not count them",
            "counter-absent",
        )
    most = max(after[name], before.get(name, 0.0), key=abs)
    message = f"{most:g} requests had NaN logits since the server's start"
    clean = after[name] == before.get(name, 0.0) == 0
    figure = Figure("corrupted requests", most, bound=0)
    return judged("corrupted-requests", message, "requests-corrupted", clean, [figure])


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model writes as the arguments of a tool, and as structured output."""

    town: str
    crates: int
    urgent: bool


#: Its JSON schema, without references, which not every parser follows.
DELIVERY_SCHEMA = msgspec.json.schema_components([Delivery])[1]["Delivery"]


#: The name of the tool.
TOOL = "record_delivery"


def tool(*, strict: bool) -> dict[str, object]:
    """
    Return the definition of the tool.

    vLLM holds the arguments of a required call to the schema: up to 0.23 always, in 0.32 only those
    of a tool that is *strict*. With ``auto`` a strict tool would hide what the model writes itself.
    """
    function = {
        "name": TOOL,
        "description": "Record a delivery.",
        "parameters": DELIVERY_SCHEMA,
    }
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def call_fault(call: ToolCall) -> str:
    """Return why *call* is none of the tool with arguments of its schema; empty if it is."""
    try:
        msgspec.json.decode(call.arguments, type=Delivery)
    except ValueError as error:
        return f"{error}: {one_line(call.arguments, 160)}"
    return "" if call.name == TOOL else f"{one_line(call.name, 80)} was called"


def chat_fault(chat: Chat, answer: ChatAnswer) -> str:
    """Return what is wrong with the *answer* to *chat*; empty if nothing is."""
    if answer.finish_reason not in (
        (chat.finish, "tool_calls") if chat.tool_choice else (chat.finish,)
    ):
        return f"it ended by {answer.finish_reason} after {answer.usage.completion_tokens} tokens"
    text = answer.content
    if markup := MARKUP.search(text):
        return f"{markup[0]} is left in the answer"
    if chat.ability == "reasoning" and not answer.reasoning.strip():
        return "no reasoning was separated from the answer"
    if chat.ability in ("tools", "structured"):
        if chat.tool_choice:
            if [call.name for call in answer.tool_calls] != [TOOL]:
                return f"{len(answer.tool_calls)} tools were called: {one_line(text, 160)}"
            text = answer.tool_calls[0].arguments
        try:
            delivery = msgspec.json.decode(text, type=Delivery)
        except ValueError as error:
            return f"{error}: {one_line(text, 160)}"
        text = f"{delivery.town} {delivery.crates} {delivery.urgent}"
    return "" if _holds(chat.answer, text) else one_line(text, 160)


def sound_tokens(distances: Sequence[tuple[int, float]], limit: float, count: int) -> int:
    """
    Return the depth from which on the median of three *distances* in a row is beyond *limit* nat;
    *count*, the number of all tokens, if there is none.

    A mixture of experts may go another way at one token without damage.
    """
    for index in range(len(distances) - 2):
        window = distances[index : index + 3]
        if not median(kl for _, kl in window) <= limit:
            return next(depth for depth, kl in window if not kl <= limit)
    return count
