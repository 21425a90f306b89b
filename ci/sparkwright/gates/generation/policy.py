"""The policy of G4: prompts with their answers, facts in a long context, chats, and bounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.recipes.recipe import Ability

Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


def _require_pattern(answer: str) -> None:
    """Raise `ValueError` unless *answer* is a regular expression that some texts lack."""
    try:
        everywhere = re.search(answer, "")
    except re.error as error:
        raise ValueError(f"the answer {answer} is no regular expression: {error}") from error
    if everywhere:
        raise ValueError(f"the answer {answer} is in every text")


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    From where on a measure of an answer is an alarm.

    Attributes:
        run: Tokens of one kind in a row, at least.
        zeros: Tokens with the id 0 in a row, at least: the argmax of logits that are all NaN.
        share: Share of the most frequent token, at least.
        distinct: Share of different runs of four tokens, below.
        ratio: Compression by zlib, at least.
        replacement: Share of U+FFFD among the characters, at least.
        entropy: Mean entropy in nat over all answers, below.
        short: Tokens of an answer, below.
    """

    run: Count
    zeros: Count
    share: Share
    distinct: Share
    ratio: Positive
    replacement: Share
    entropy: Positive
    short: Count


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
        if self.answer:
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


class GenerationPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/generation.yaml``, which states the source of each threshold.

    Attributes:
        tokens: The most tokens of each answer.
        top: Logarithms of probabilities per token.
        tie: Nat; two tokens that are nearer may change places when speculation is switched off.
        line: Of a long text, with a ``{number}`` that counts up and an ``{other}`` that varies.
    """

    tokens: Count
    top: Count
    tie: Positive
    bounds: Bounds
    profiles: dict[str, Profile]
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1)]
    line: Annotated[str, Meta(pattern=r"\{number\}")]
    facts: Annotated[tuple[Fact, ...], Meta(min_length=1)]
    chats: tuple[Chat, ...]
    deep: Deep

    def __post_init__(self) -> None:
        names = [prompt.name for prompt in (*self.prompts, *self.facts)]
        names += [chat.name for chat in self.chats]
        if len(set(names)) < len(names):
            raise ValueError("prompts, facts and chats have unique names")
        if max(profile.answers for profile in self.profiles.values()) > len(self.prompts):
            raise ValueError("a profile asks for more right answers than there are prompts")


def long_text(line: str, lines: int, facts: Sequence[Fact] = ()) -> str:
    """Return *lines* lines and those of *facts*, the same for the same arguments."""
    # A multiplicative walk looks random and does not change between releases of Python.
    text = [
        line.replace("{number}", str(number + 1)).replace(
            "{other}", str((number * 7919 + 17) % 9973)
        )
        for number in range(lines)
    ]
    for fact in sorted(facts, key=lambda fact: -fact.depth):
        text.insert(round(fact.depth * lines), fact.line)
    return "\n".join(text) + "\n"


def filled_text(
    policy: GenerationPolicy, wrap: str, tokens: int, count: Callable[[str], int]
) -> str:
    """
    Return a text with all facts that has, with a question, at most *tokens* tokens.

    Args:
        wrap: As in `Profile`.
        count: From a text to its tokens; called a few times.
    """
    question = max((fact.text for fact in policy.facts), key=len)

    def length(lines: int) -> int:
        text = long_text(policy.line, lines, policy.facts) + question
        return count(wrap.replace("{prompt}", text))

    # Numbers grow longer, so the first estimate is a little too large.
    lines = int(tokens * 50 / max(50, length(100) - length(50)))
    while lines and (actual := length(lines)) > tokens:
        lines = min(lines - 1, int(lines * tokens / actual))
    return long_text(policy.line, lines, policy.facts)
