"""
Messages of vLLM's OpenAI-compatible server as records, decoded strictly and compared with the request.

The fields are those of OpenAI's completions and chat protocols and of vLLM's additions to them
(``token_ids``, ``prompt_token_ids``, ``prompt_logprobs``, ``reasoning``), as vLLM 0.20 to 0.33 sends
them. Unknown fields are ignored, so later releases may add to them.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from sparkwright.core.console import one_line

#: Why a reply does not count: stable reference → what it means and what to do.
REASONS: Mapping[str, str] = {
    "server-unreachable": "Nothing listens at the address, or it closed the connection without a "
    "reply. Check that the server still runs.",
    "server-silent": "The connection stands, but no reply began in time. The server hangs, or is "
    "still loading its model.",
    "server-slow": "The reply began, but was not complete in time. Look at the server's log, and "
    "at what else uses the machine.",
    "server-html": "A web page came instead of a reply of vLLM. A proxy or another program listens "
    "at the address.",
    "server-refused": "The server answered with an error or a redirect. Its own words are quoted.",
    "answer-unreadable": "The reply does not have the form of vLLM's replies. Another program or "
    "an unknown release of vLLM answers.",
    "answer-too-large": "The reply has more bytes or more tokens than were asked for. The server "
    "does not end its replies.",
    "stream-truncated": "The reply ended before it was complete. The server or a proxy broke down; "
    "look at the server's log.",
    "stream-error": "The server gave up in the middle of its reply. Its own words are quoted; look "
    "at the server's log.",
    "model-mismatch": "Another model answers than the one asked for. The wrong server runs at the "
    "address.",
    "prompt-too-long": "The prompt and the tokens asked for do not fit into the server's "
    "--max-model-len. Raise it, or shorten them.",
    "prompt-unreadable": "The prompt holds something that no tokenizer accepts: half of a "
    "surrogate pair, or a negative token. Correct the file of prompts.",
    "usage-mismatch": "The server counts other tokens than it sent, or read another prompt than it "
    "was sent. Its figures are no measurement.",
}

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
T = TypeVar("T")


class ServerInvalid(Exception):
    """
    The behaviour of a server does not count as a measurement.

    Attributes:
        reason: Stable, in kebab-case; `REASONS` explains each.
        message: What was seen, in one printable line.
        status: The HTTP status of an error, else 0.
    """

    def __init__(self, reason: str, message: str, status: int = 0) -> None:
        self.reason, self.message, self.status = reason, one_line(message, 400), status
        # The names of version 1, until its last reader is gone.
        self.reference, self.says = self.reason, self.message
        super().__init__(f"{reason}: {self.message}")


class Usage(msgspec.Struct, frozen=True):
    """The tokens that the server counted."""

    prompt_tokens: int
    completion_tokens: int = 0


class Position(msgspec.Struct, frozen=True):
    """
    The distribution before one token of a prompt.

    Attributes:
        token: The token of the prompt.
        logprob: Natural logarithm of its probability.
        top: Token → logarithm, of the most probable ones; may also hold *token*.
    """

    token: int
    logprob: float
    top: dict[int, float]


class Completion(msgspec.Struct, frozen=True):
    """
    A completion.

    Attributes:
        tokens: Token ids of the completion.
        text: The same, as the server decoded it.
        finish_reason: ``length`` or ``stop``.
        usage: The server's counts, which are those of *tokens* and of the prompt.
        logprobs: For each token of the completion: token → natural logarithm of its probability, of
            the chosen token and the most probable ones; NaN if the server says null. Empty unless
            asked for.
        prompt_logprobs: For each token of the prompt but the first. Empty unless asked for.
        chunk_seconds: When each chunk with tokens arrived, in seconds since the request.
        seconds: From the request to the end of the reply.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[Position, ...] = ()
    chunk_seconds: tuple[float, ...] = ()
    seconds: float = 0.0


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool; *arguments* is the text that the model wrote, which may not be JSON."""

    name: str
    arguments: str


class ChatAnswer(msgspec.Struct, frozen=True):
    """
    The answer of a chat.

    Attributes:
        content: The text for the user, without reasoning and tool calls.
        reasoning: The text that the reasoning parser separated.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        chunk_seconds, seconds: As of `Completion`.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    usage: Usage
    chunk_seconds: tuple[float, ...] = ()
    seconds: float = 0.0


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Score(msgspec.Struct):
    logprob: float | None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function
    index: int | None = None


class _Message(msgspec.Struct):
    """A message of a chat, or the difference that a chunk makes to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the name up to vLLM 0.11
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[TokenId, _Score] | None] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Model(msgspec.Struct, frozen=True):
    """An entry of ``/v1/models``; *max_model_len* counts the tokens of prompt and completion."""

    id: str
    max_model_len: int | None = None


class Event(msgspec.Struct):
    """An event of a stream, or a complete reply of any endpoint."""

    model: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None
    data: tuple[Model, ...] | None = None
    version: str | None = None
    tokens: tuple[TokenId, ...] | None = None
    prompt: str | None = None


def decode(body: bytes, record: type[T]) -> T:
    """Return the JSON *body* as a *record*; raise `ServerInvalid` if it is not one."""
    if body.lstrip()[:1] == b"<":
        raise ServerInvalid("server-html", f"a web page came: {_excerpt(body)}")
    try:
        return msgspec.json.decode(body, type=record)
    # The errors of msgspec and of UTF-8 are ValueErrors; deep nesting is not.
    except (ValueError, RecursionError, OverflowError) as error:
        if "truncated" in str(error):
            message = f"the reply ends after {len(body)} bytes in the middle of its JSON"
            raise ServerInvalid("stream-truncated", message) from None
        message = f"{error}; it begins {_excerpt(body)!r}"
        raise ServerInvalid("answer-unreadable", message) from None


def _excerpt(body: bytes) -> str:
    return body[:80].decode("utf-8", "replace")


def events(pieces: Iterable[bytes]) -> Iterator[Event]:
    """
    Yield the events of a stream of server-sent events, up to ``[DONE]``.

    Raises:
        ServerInvalid: It is not such a stream, or has no end.
    """
    for line in _lines(pieces):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield decode(data, Event)
        elif line.lstrip()[:1] == b"<":
            raise ServerInvalid("server-html", f"a web page came in the stream: {_excerpt(line)}")
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise ServerInvalid("answer-unreadable", f"a line is no event: {_excerpt(line)!r}")
    raise ServerInvalid("stream-truncated", "the stream ended without its last event, [DONE]")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a body; a last line without its end only if it is a web page."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            yield from (line.rstrip(b"\r") for line in lines)
    if rest.lstrip()[:1] == b"<":
        yield bytes(rest)


class Assembler:
    """
    A reply whose events are still arriving.

    Args:
        model: The name that must answer.
        max_tokens: The most tokens that may come.
        prompt: The token ids of the prompt; None if it was sent as text.
        with_logprobs: Each token must have its logprobs.
    """

    def __init__(
        self,
        model: str,
        max_tokens: int,
        prompt: Sequence[int] | None = None,
        *,
        with_logprobs: bool = False,
    ) -> None:
        self._model, self._max_tokens = model, max_tokens
        self._prompt = None if prompt is None else list(prompt)
        self._with_logprobs = with_logprobs
        self._begin = time.monotonic()
        self._chunks: list[float] = []
        self._usage: Usage | None = None
        self._finish = ""
        self._prompt_read: list[int] | None = None
        self._prompt_scores: list[dict[int, _Score] | None] | None = None
        self._tokens: list[int] = []
        self._text, self._reasoning = "", ""
        self._logprobs: list[dict[int, float]] = []
        self._calls: list[ToolCall] = []

    def add(self, event: Event) -> None:
        """Add *event*; raise `ServerInvalid` if it does not belong to the request."""
        if event.error:
            # vLLM sends some refusals as the first event of a stream with status 200.
            code = event.error.code
            refused = not self._chunks and isinstance(code, int) and 400 <= code < 500
            reason = "server-refused" if refused else "stream-error"
            raise ServerInvalid(reason, f"the server says: {event.error.message}")
        if event.model != self._model:
            text = f"{event.model!r} answers, {self._model!r} was asked for"
            raise ServerInvalid("model-mismatch", text)
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._add_choice(choice)

    def _add_choice(self, choice: _Choice) -> None:
        part = choice.message or choice.delta or _Message(choice.text)
        if choice.token_ids or part not in (_Message(), _Message("")):
            if self._finish:
                raise ServerInvalid("answer-unreadable", "tokens came after the end of the answer")
            self._chunks.append(time.monotonic() - self._begin)
        if choice.text and not choice.token_ids:
            text = "the server sends text without token_ids; it is no vLLM from 0.10.2 on"
            raise ServerInvalid("answer-unreadable", text)
        self._finish = choice.finish_reason or self._finish
        self._prompt_read = choice.prompt_token_ids or self._prompt_read
        self._prompt_scores = choice.prompt_logprobs or self._prompt_scores
        self._tokens += choice.token_ids or ()
        self._text += part.content or ""
        self._reasoning += part.reasoning or part.reasoning_content or ""
        if len(self._tokens) > self._max_tokens:
            text = f"more than the {self._max_tokens} tokens that were asked for came"
            raise ServerInvalid("answer-too-large", text)
        if self._with_logprobs and choice.token_ids:
            self._logprobs += _distributions(choice.logprobs, len(choice.token_ids))
        for call in part.tool_calls or ():
            self._add_call(call)

    def _add_call(self, call: _Call) -> None:
        index = len(self._calls) if call.index is None else call.index
        if index == len(self._calls):
            self._calls.append(ToolCall("", ""))
        if not 0 <= index < len(self._calls):
            raise ServerInvalid("answer-unreadable", f"tool call {index} has no predecessor")
        old, new = self._calls[index], call.function
        name, arguments = old.name + (new.name or ""), old.arguments + (new.arguments or "")
        self._calls[index] = ToolCall(name, arguments)

    def completion(self) -> Completion:
        """Return the completion; raise `ServerInvalid` if it is incomplete or miscounted."""
        usage = self._complete(("length", "stop"))
        if usage.completion_tokens != len(self._tokens):
            message = f"the server counts {usage.completion_tokens} tokens, {len(self._tokens)} came"
            raise ServerInvalid("usage-mismatch", message)
        prompt = self._prompt_read if self._prompt is None else self._prompt
        read = self._prompt_read or prompt
        if prompt is not None and (usage.prompt_tokens != len(prompt) or read != prompt):
            message = f"of a prompt of {len(prompt)} tokens, {usage.prompt_tokens} or others were read"
            raise ServerInvalid("usage-mismatch", message)
        return Completion(
            tokens=tuple(self._tokens),
            text=self._text,
            finish_reason=self._finish,
            usage=usage,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=_positions(self._prompt_scores, prompt or []),
            chunk_seconds=tuple(self._chunks),
            seconds=time.monotonic() - self._begin,
        )

    def chat_answer(self) -> ChatAnswer:
        """Return the answer of a chat; raise `ServerInvalid` if it is incomplete."""
        usage = self._complete(("length", "stop", "tool_calls"))
        if usage.completion_tokens > self._max_tokens:
            message = f"{usage.completion_tokens} tokens for the {self._max_tokens} asked for"
            raise ServerInvalid("answer-too-large", message)
        return ChatAnswer(
            content=self._text,
            reasoning=self._reasoning,
            tool_calls=tuple(self._calls),
            finish_reason=self._finish,
            usage=usage,
            chunk_seconds=tuple(self._chunks),
            seconds=time.monotonic() - self._begin,
        )

    def _complete(self, finish_reasons: Sequence[str]) -> Usage:
        if not self._finish:
            message = f"the reply ended after {len(self._chunks)} chunks without a finish_reason"
            raise ServerInvalid("stream-truncated", message)
        if self._finish not in finish_reasons:
            message = f"the server ended after {len(self._chunks)} chunks: {self._finish}"
            raise ServerInvalid("stream-error", message)
        if self._usage is None:
            raise ServerInvalid("usage-mismatch", "the server does not state its token counts")
        return self._usage


def _distributions(logprobs: _Logprobs | None, count: int) -> Iterator[dict[int, float]]:
    """Yield the distributions of *count* tokens."""
    top = (logprobs and logprobs.top_logprobs) or [None] * count
    lists = (logprobs.tokens, logprobs.token_logprobs, top) if logprobs else ()
    if [len(values) for values in lists] != [count] * 3:
        raise ServerInvalid("answer-unreadable", f"{count} tokens came without as many logprobs")
    for name, own, others in zip(*lists, strict=True):
        yield {_token(key): _number(value) for key, value in {**(others or {}), name: own}.items()}


def _token(name: str) -> int:
    """Return the token that *name* stands for under ``return_tokens_as_token_ids``."""
    digits = name.removeprefix("token_id:")
    if digits == name or not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        message = f"logprobs name a token {name[:40]!r} instead of token_id:N"
        raise ServerInvalid("answer-unreadable", message)
    return int(digits)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _positions(
    scores: Sequence[Mapping[int, _Score] | None] | None, prompt: Sequence[int]
) -> tuple[Position, ...]:
    if scores is None:
        return ()
    if len(scores) != len(prompt):
        message = f"{len(scores)} tokens of a prompt of {len(prompt)} are scored"
        raise ServerInvalid("usage-mismatch", message)
    positions: list[Position] = []
    for token, top in zip(prompt[1:], scores[1:], strict=True):
        if top is None or token not in top:
            message = f"token {token} of the prompt, at {len(positions) + 1}, has no logprob"
            raise ServerInvalid("answer-unreadable", message)
        numbers = {other: _number(score.logprob) for other, score in top.items()}
        positions.append(Position(token, numbers[token], numbers))
    return tuple(positions)


def metrics(text: str) -> dict[str, float]:
    """
    Return metrics in Prometheus' text format.

    Each name stands with its labels as written, and the sum over all labels under the bare name.

    Raises:
        ServerInvalid: A line is not in that format.
    """
    values: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([^\s{]+)(\{.*\})?\s+([^\s}]+)(?:\s+\d+)?\s*", line)
        try:
            name, labels, value = match.groups("") if match else ("", "", "")
            number = float(value)
        except ValueError:
            message = f"a line is no metric: {line[:80]!r}"
            raise ServerInvalid("answer-unreadable", message) from None
        values[name] += number
        if labels:
            values[name + labels] = number
    return dict(values)
