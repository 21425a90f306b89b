"""
Messages of vLLM's OpenAI-compatible server as records, decoded strictly and compared with requests.

The fields are those of OpenAI's completions and chat protocols and of vLLM's additions to them
(``token_ids``, ``prompt_token_ids``, ``prompt_logprobs``, ``reasoning``). Unknown fields are
ignored, so later releases may add to them.
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


class GeneratedReply:
    """
    A complete reply of a generating endpoint, of the right model and length.

    Args:
        begin: When the request was sent, by `time.monotonic`.

    Raises:
        ServerInvalid: It is incomplete, of another model, or longer than *max_tokens*.
    """

    def __init__(
        self, events: Iterable[Event], model: str, max_tokens: int, *, begin: float
    ) -> None:
        self.finish, self.usage = "", Usage(-1, -1)
        self._choices: list[_Choice] = []
        self.chunk_seconds: list[float] = []
        for event in events:
            if event.error:
                # vLLM sends some refusals as the first event of a stream with status 200.
                code = event.error.code
                refused = not self._choices and isinstance(code, int) and 400 <= code < 500
                reason = "server-refused" if refused else "stream-error"
                raise ServerInvalid(reason, f"the server says: {event.error.message}")
            if event.model != model:
                text = f"{event.model!r} answers, {model!r} was asked for"
                raise ServerInvalid("model-mismatch", text)
            self.usage = event.usage or self.usage
            for choice in event.choices:
                if choice.token_ids or _part(choice) not in (_Message(), _Message("")):
                    if self.finish:
                        raise ServerInvalid("answer-unreadable", "tokens came after the end")
                    self.chunk_seconds.append(time.monotonic() - begin)
                self.finish = choice.finish_reason or self.finish
                self._choices.append(choice)
        self.seconds = time.monotonic() - begin
        count = f"after {len(self.chunk_seconds)} chunks"
        if not self.finish:
            raise ServerInvalid("stream-truncated", f"the reply ended {count} without a reason")
        if self.finish not in ("length", "stop", "tool_calls"):
            raise ServerInvalid("stream-error", f"the server ended {count}: {self.finish}")
        if self.usage.prompt_tokens < 0:
            raise ServerInvalid("usage-mismatch", "the server does not state its token counts")
        sent = sum(len(choice.token_ids or ()) for choice in self._choices)
        if (sent or self.usage.completion_tokens) > max_tokens:
            raise ServerInvalid("answer-too-large", f"more than {max_tokens} tokens came")

    def completion(self, prompt: Sequence[int] | None, *, with_logprobs: bool) -> Completion:
        """
        Return the completion of *prompt*, which is None if it was sent as text.

        Raises:
            ServerInvalid: The server's counts are wrong, or logprobs are missing.
        """
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        read = list(prompt) if prompt is not None else None
        scores: list[dict[int, _Score] | None] = []
        for choice in self._choices:
            if choice.text and not choice.token_ids:
                text = "the server sends text without token_ids; it is no vLLM from 0.10.2 on"
                raise ServerInvalid("answer-unreadable", text)
            tokens += choice.token_ids or ()
            read = choice.prompt_token_ids or read
            if with_logprobs and choice.token_ids:
                logprobs += _distributions(choice.logprobs, len(choice.token_ids))
            scores = choice.prompt_logprobs or scores
        if self.usage.completion_tokens != len(tokens):
            text = f"the server counts {self.usage.completion_tokens} tokens, {len(tokens)} came"
            raise ServerInvalid("usage-mismatch", text)
        if read and (self.usage.prompt_tokens != len(read) or read != list(prompt or read)):
            text = f"{self.usage.prompt_tokens} tokens of the prompt were read, or others"
            raise ServerInvalid("usage-mismatch", text)
        return Completion(
            tokens=tuple(tokens),
            text="".join(choice.text for choice in self._choices),
            finish_reason=self.finish,
            usage=self.usage,
            logprobs=tuple(logprobs),
            prompt_logprobs=_positions(scores, read or ()) if scores else (),
            chunk_seconds=tuple(self.chunk_seconds),
            seconds=self.seconds,
        )

    def chat_answer(self) -> ChatAnswer:
        """Return the answer of a chat; raise `ServerInvalid` if its tool calls have gaps."""
        parts = [_part(choice) for choice in self._choices]
        calls: list[ToolCall] = []
        for call in (call for part in parts for call in part.tool_calls or ()):
            index = len(calls) if call.index is None else call.index
            if not 0 <= index <= len(calls):
                raise ServerInvalid("answer-unreadable", f"tool call {index} has no predecessor")
            old = calls.pop(index) if index < len(calls) else ToolCall("", "")
            name, arguments = call.function.name or "", call.function.arguments or ""
            calls.insert(index, ToolCall(old.name + name, old.arguments + arguments))
        return ChatAnswer(
            content="".join(part.content or "" for part in parts),
            reasoning="".join(part.reasoning or part.reasoning_content or "" for part in parts),
            tool_calls=tuple(calls),
            finish_reason=self.finish,
            usage=self.usage,
            chunk_seconds=tuple(self.chunk_seconds),
            seconds=self.seconds,
        )


def _part(choice: _Choice) -> _Message:
    return choice.message or choice.delta or _Message(choice.text)


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
    scores: Sequence[Mapping[int, _Score] | None], prompt: Sequence[int]
) -> tuple[Position, ...]:
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
