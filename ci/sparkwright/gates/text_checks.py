"""
What G4 asks, and how it judges the answers: its policy, and pure functions.

The natural texts of tests/unit/natural_texts.json (prose in ten languages, code, tables, lists of
numbers) have none of the faults.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Annotated, Literal, Self

import msgspec
from msgspec.structs import replace

from sparkwright.bench.recipes.recipe import Ability
from sparkwright.bench.records import Count, Positive, Share
from sparkwright.bench.server.client import ChatAnswer, Completion, ToolCall
from sparkwright.core.console import one_line
from sparkwright.core.strict_yaml import compile_patterns
from sparkwright.gates.core.verdict import Check, Figure, Sample, decided, judged, not_run


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that the model continues, and a regular expression that a right answer contains."""

    text: str
    answer: str

    def __post_init__(self) -> None:
        compile_patterns(self.answer)


class Fact(Prompt, frozen=True, forbid_unknown_fields=True):
    """
    A fact in a long text, and the question for it.

    Attributes:
        line: The line that states the fact.
        depth: Where it lies, as a share of the text.
    """

    line: str
    depth: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Chat(Prompt, frozen=True, forbid_unknown_fields=True):
    """
    A question in a chat.

    The answer to it may be empty if every one is right; that of a tool call and of structured
    output are the values in their order.

    Attributes:
        ability: The model that is asked declares it in its recipe.
        image: The URL of an image, ``data:`` included.
        tool_choice: ``auto`` or ``required``.
        finish: How the answer must end.
        max_tokens: The most tokens of the answer, reasoning included.
    """

    ability: Ability
    image: str = ""
    tool_choice: Literal["auto", "required", ""] = ""
    finish: Literal["stop", "length"] = "stop"
    max_tokens: Count = 4096


class Deep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A long generation that is compared with its own recomputation.

    Attributes:
        prompt: Tokens of the prompt.
        temperature: At which it is sampled.
        every: Tokens between two comparisons; fewer in a short generation.
        top: Logarithms of probabilities per token.
        kl_max: Nat; damage is where the median of three comparisons in a row is beyond.
    """

    prompt: Count
    temperature: Positive
    every: Count
    top: Count
    kl_max: Positive


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What can be asked of a kind of model.

    Attributes:
        answers: How many answers must be right.
        context: Lengths in tokens at which facts are retrieved; ``maximum`` is the server's.
        deep: Tokens of the long generation.
        wrap: The text around each prompt, with ``{prompt}``.
        no_dirty_text: Why the rate of dirty answers cannot judge this kind; empty if it can.
        sizes: Answers and rounds of the rate, in place of the policy's.
    """

    answers: Annotated[int, msgspec.Meta(ge=0)]
    context: tuple[Count | Literal["maximum"], ...]
    deep: Annotated[int, msgspec.Meta(ge=64)]
    wrap: Annotated[str, msgspec.Meta(pattern=r"\{prompt\}")] = "{prompt}"
    no_dirty_text: str = ""
    sizes: dict[Literal["answers", "rounds"], Count] = {}


class DirtyTextPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How the rate of dirty answers is measured.

    Attributes:
        answers: In a round, with each position of each switch.
        rounds: Asked if an answer of the first is dirty.
        tokens: The most of an answer.
        temperature: At which answers are sampled.
        concurrency: Requests at once, if no recipe states it.
        blocks: How many blocks of the prefix cache all questions have in common.
        repeats: As often in a row the same text is dirt.
        passages: The same for a text of *passage* characters or more.
        letters: Scripts that each answer may have.
        languages: Words that are frequent in a language, and rare in the others.
        words: As many of them show the language.
        chance: The probability that a sound server fails, over all comparisons.
        most: The share of dirty answers that no server may exceed.
        template: Variables of the chat template; one that does not know them ignores them.
        chats, calls: Questions with a ``{number}`` that varies; the latter call the tool.
    """

    answers: Count
    rounds: Count
    tokens: Count
    temperature: Positive
    concurrency: Annotated[int, msgspec.Meta(ge=2)]
    blocks: Count
    repeats: Annotated[int, msgspec.Meta(ge=2, le=100)]
    passages: Annotated[int, msgspec.Meta(ge=2, le=100)]
    passage: Annotated[int, msgspec.Meta(ge=2, le=200)]
    letters: tuple[str, ...]
    languages: dict[str, tuple[str, ...]]
    words: Annotated[int, msgspec.Meta(ge=2, le=10)]
    chance: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    most: Share
    template: dict[str, bool]
    chats: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    calls: tuple[str, ...]


class GenerationPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/generation.yaml``, which states the source of each threshold.

    Attributes:
        tokens: The most tokens of each answer.
        line: Of a long text, with a ``{number}`` that counts up and an ``{other}`` that varies.
    """

    tokens: Count
    profiles: dict[str, Profile]
    prompts: Annotated[dict[str, Prompt], msgspec.Meta(min_length=1)]
    line: Annotated[str, msgspec.Meta(pattern=r"\{number\}")]
    facts: Annotated[dict[str, Fact], msgspec.Meta(min_length=1)]
    chats: dict[str, Chat]
    deep: Deep
    dirty_text: DirtyTextPolicy

    def sized(self, profile: str) -> Self:
        """Return the policy with the sizes of the *profile*."""
        sizes = {str(name): count for name, count in self.profiles[profile].sizes.items()}
        return replace(self, dirty_text=replace(self.dirty_text, **sizes))


#: Fault → what shows it in a text: U+FFFD, unless a character is cut at the end; and what a parser
#: or the template should have taken out.
FAULTS: Mapping[str, re.Pattern[str]] = {
    "U+FFFD": re.compile(r"\ufffd(?!\ufffd{0,2}\Z)"),
    "markup": re.compile(
        r"</?think>|<\|?/?(im_|tool|start_|end_|channel)|<｜|<(function|parameter)=|"
        r"<arg_(key|value)>|<TOOLCALL|\[TOOL_CALLS\]"
    ),
}
#: A call that is not closed.
OPEN_CALL = re.compile(
    r"(?s)(?:<\|?tool|<TOOLCALL|<｜tool|<function=|\[TOOL_CALLS\])"
    r"(?!.*(?:</tool|</TOOLCALL|</function|end[|｜]>))"
)


def text_fault(text: str, *, cut: bool = False) -> str:
    """
    Return which of `FAULTS` *text* has, whatever was asked; empty if none.

    Args:
        cut: It ended at its most tokens; the call in which it ended may still be in it, as no
            parser takes that out.
    """
    call = OPEN_CALL.search(text) if cut else None
    for fault, pattern in FAULTS.items():
        end = call.start() if call and fault == "markup" else len(text)
        if match := pattern.search(text, 0, end):
            return f"{fault} ({one_line(match[0], 40)}) is left: {one_line(text, 160)}"
    return ""


def wrong(prompts: Mapping[str, Prompt], answers: Mapping[str, Completion]) -> list[Sample]:
    """Return the *answers* that lack the expected text."""
    return [
        Sample(case, f"/{prompt.answer}/", one_line(answers[case].text, 160))
        for case, prompt in prompts.items()
        if not _holds(prompt.answer, answers[case].text)
    ]


def right(
    name: str,
    reason: str,
    samples: Sequence[Sample],
    questions: int,
    least: int,
    stock: Collection[str],
) -> Check:
    """
    Return whether at least *least* of the answers to so many *questions* are right.

    What the model does not know is no fault of the wheel: an answer that is wrong with the stock
    wheel, too, is not needed. If that is wrong in more than half of them, the rest shows little.

    Args:
        samples: The wrong answers.
        stock: The questions that the stock wheel answers wrongly.
    """
    count, shared = questions - len(samples), sum(sample.case in stock for sample in samples)
    unknown = count < least and 2 * len(stock) > questions
    return decided(
        name,
        f"{count} of {questions} answers are right; {least - shared} are needed"
        f"{f', as {shared} are wrong with the stock wheel, too' if shared else ''}",
        "fail" if count < least - shared else "inconclusive" if unknown else "pass",
        {"fail": reason, "inconclusive": "stock-wrong-too"},
        [Figure("right answers", count, count=questions, bound=least - shared)],
        samples,
    )


def _holds(answer: str, text: str) -> bool:
    return re.search(answer, unicodedata.normalize("NFKC", text)) is not None


def corrupted(metrics: Mapping[str, float]) -> Check:
    """Return whether the counter of requests with NaN logits exists and never counted."""
    name, count = "corrupted-requests", metrics.get("vllm:corrupted_requests_total")
    if count is None:
        message = "VLLM_COMPUTE_NANS_IN_LOGITS=1 is not set, so the server does not count them"
        return not_run(name, message, "counter-absent")
    return judged(
        name,
        f"{count:g} requests had NaN logits since the server's start",
        "requests-corrupted",
        count == 0,
        [Figure("corrupted requests", count, bound=0)],
    )


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
        town = msgspec.json.decode(call.arguments, type=Delivery).town
    except ValueError as error:
        return f"{error}: {one_line(call.arguments, 160)}"
    # A value is not cut at its end, as a text may be.
    return text_fault(f"{town}.") if call.name == TOOL else f"{one_line(call.name, 80)} was called"


def chat_fault(chat: Chat, answer: ChatAnswer) -> str:
    """Return what is wrong with the *answer* to *chat*; empty if nothing is."""
    if answer.finish_reason not in (
        (chat.finish, "tool_calls") if chat.tool_choice else (chat.finish,)
    ):
        return f"it ended by {answer.finish_reason} after {answer.usage.completion_tokens} tokens"
    text = answer.content
    if fault := text_fault(text):
        return fault
    if chat.ability == "reasoning" and not answer.reasoning.strip():
        return "no reasoning was separated from the answer"
    if chat.ability in ("tools", "structured"):
        calls = answer.tool_calls if chat.tool_choice else (ToolCall(TOOL, text),)
        if len(calls) != 1:
            return f"{len(calls)} tools were called: {one_line(text, 160)}"
        if fault := call_fault(calls[0]):
            return fault
        delivery = msgspec.json.decode(calls[0].arguments, type=Delivery)
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
