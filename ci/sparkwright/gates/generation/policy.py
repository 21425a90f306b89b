"""The policy of the generation gate: its prompts, one of them made to length around a needle, and the profiles of kinds of model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from sparkwright.gates.generation import detectors
from sparkwright.gates.generation.detectors import Bounds

Kind = Literal["fact", "arithmetic", "translation", "code", "cjk", "long"]


class Long(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a long prompt is made of.

    Attributes:
        line: A line of the filling, with a ``{number}`` that counts up and an ``{other}`` that looks random.
        needle: The line that the answer is in.
        depth: Where the needle lies, as a share of the filling.
    """

    line: str
    needle: str
    depth: float = 0.35

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1:
            raise ValueError("a needle lies at a depth from 0 to 1")
        if "{number}" not in self.line:
            raise ValueError("a line of the filling has no place for the {number}")


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One prompt.

    Attributes:
        name: Unique, kebab-case.
        text: What the model continues; of a long one, what stands after the filling.
        answer: A regular expression that what the model says must contain.
        long: The filling of a long one.
    """

    name: str
    kind: Kind
    text: str
    answer: str
    long: Long | None = None

    def __post_init__(self) -> None:
        try:
            empty = re.search(self.answer, "")
        except re.error as error:
            raise ValueError(f"the answer of {self.name} is no regular expression: {error}") from error
        if empty:
            raise ValueError(f"the answer of {self.name} is in every text")
        if (self.kind == "long") != (self.long is not None):
            raise ValueError(f"{self.name} is {self.kind}; just the long prompts have a filling")


class Fitted(msgspec.Struct, frozen=True):
    """A prompt as it is sent, with its length in tokens of the model."""

    prompt: Prompt
    text: str
    tokens: int


def filling(long: Long, lines: int) -> str:
    """Return *lines* lines, the needle among them; the same for the same arguments."""
    # A multiplicative walk: the numbers look unrelated and need no generator whose sequence may change between versions of Python.
    made = [
        long.line.replace("{number}", str(number + 1)).replace("{other}", str((number * 7919 + 17) % 9973)) for number in range(lines)
    ]
    made.insert(round(long.depth * lines), long.needle)
    return "\n".join(made) + "\n"


def grown(prompt: Prompt, wrap: str, target: int, count: Callable[[str], int]) -> tuple[str, int]:
    """
    Return the long *prompt* filled up to at most *target* tokens and at least nine tenths of that, and its length in tokens.

    Args:
        wrap: What stands around every prompt, with ``{prompt}``.
        count: Tokens of a text; asked a dozen times.
    """
    assert prompt.long is not None

    def made(lines: int) -> str:
        assert prompt.long is not None
        return wrap.replace("{prompt}", filling(prompt.long, lines) + prompt.text)

    # The number of tokens grows with the lines, so bisection holds; a line has at least a token, which bounds it from above.
    least, most = 0, max(1, target)
    text = made(0)
    tokens = count(text)
    per_line = max(1.0, (count(made(50)) - tokens) / 50)
    guess = int((target - tokens) / per_line)
    while least < most and tokens < 0.9 * target:
        guess = min(max(guess, least + 1), most)
        found = made(guess)
        length = count(found)
        if length <= target:
            least, text, tokens = guess, found, length
        else:
            most = guess - 1
        guess = (least + most + 1) // 2
    return text, tokens


def fit(prompt: Prompt, wrap: str, target: int, count: Callable[[str], int]) -> Fitted:
    """Return *prompt* as it is sent, a long one filled up to *target* tokens."""
    if prompt.long:
        return Fitted(prompt, *grown(prompt, wrap, target, count))
    text = wrap.replace("{prompt}", prompt.text)
    return Fitted(prompt, text, count(text))


def _essence(text: str) -> str:
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


def holds(text: str, again: str) -> bool:
    """
    Return whether *again*, which is *text* through the tokenizer and back, is still that text.

    Blanks and forms of characters that mean the same (NFKC) may differ, as some tokenizers normalise, and marks that the
    tokenizer adds may stand around it; characters that became unknown ones may not.
    """
    return _essence(text) in _essence(again)


def answered(prompt: Prompt, text: str) -> bool:
    """Return whether *text* has the prompt's answer in it."""
    return re.search(prompt.answer, unicodedata.normalize("NFKC", text)) is not None


def unique(prompts: Sequence[Prompt]) -> bool:
    """Return whether every prompt has a name of its own."""
    return len({prompt.name for prompt in prompts}) == len(prompts)


#: Every check that a profile may leave out.
OPTIONAL = ("answers", "entropy", *(detector.name for detector in detectors.DETECTORS))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What can be asked of a kind of model.

    Attributes:
        about: Which kind it is.
        answers: How many answers must be right.
        long: Length of the long prompt in tokens.
        wrap: What stands around every prompt, with ``{prompt}``.
        ends: Texts of tokens that end an answer; those that are no single token of the model are passed over.
        not_run: Checks that this kind cannot be judged by, and why.
    """

    about: str
    answers: int
    long: int
    wrap: str = "{prompt}"
    ends: tuple[str, ...] = ()
    not_run: dict[str, str] = {}

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.not_run) - set(OPTIONAL)):
            raise ValueError(f"no check that may be left out is named {', '.join(unknown)}")
        if "{prompt}" not in self.wrap:
            raise ValueError("wrap has no place for the {prompt}")
        if self.long < 1 or self.answers < 0:
            raise ValueError("a long prompt has at least a token, and answers are counted from 0")


class Logprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pass that asks for log probabilities: its tokens, and how many of the likeliest; 0 tokens leave it out."""

    tokens: int
    top: int


class GenerationPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/generation.yaml``, which says where each threshold comes from.

    Attributes:
        tokens: Of each answer (gates.md §3.3: 200).
        bounds: Of the detectors.
        logprobs: For the entropy.
        batch: How many prompts are asked at once for the row that informs; 0 leaves it out.
        profiles: By kind of model.
        prompts: At least one; names are unique.
    """

    tokens: int
    bounds: Bounds
    logprobs: Logprobs
    batch: int
    profiles: dict[str, Profile]
    prompts: tuple[Prompt, ...]

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.prompts or not unique(self.prompts):
            raise ValueError("there are prompts with unique names, and tokens to be said")
        if few := [name for name, profile in self.profiles.items() if profile.answers > len(self.prompts)]:
            raise ValueError(f"more right answers than prompts are asked for by {', '.join(few)}")
