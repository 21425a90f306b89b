"""
What vLLM's OpenAI-compatible server answers, as records: decoded strictly, and held against what was asked.

The fields are those of the completions protocol and vLLM's additions to it (``token_ids``, ``prompt_token_ids``, ``prompt_logprobs``), as
seen in answers of vLLM 0.32.0. Unknown fields are passed over, so later releases may add to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, TypeVar

import msgspec

from sparkwright.bench.server.wire import ServerInvalid

#: Why an answer does not count: stable reference → what it means and what to do.
REASONS: Mapping[str, str] = {
    "server-unreachable": "Nothing listens at the address, or it closed the connection unanswered. Look whether the server still runs.",
    "server-silent": "The connection stands, but nothing came. The server hangs, or is still loading its model.",
    "server-slow": "The answer trickled, or stopped half-way. Look at the server's log, and at what else uses the machine.",
    "server-html": "A web page came where the server's answer belongs. A proxy or another program listens at the address.",
    "server-refused": "The server answered with an error or sent the question elsewhere. Its own words are quoted.",
    "answer-unreadable": "What came is not in the form that vLLM answers in. Another program or an unknown release answers there.",
    "answer-too-large": "The answer has more bytes, longer lines or more tokens than were asked for. The server does not end its answers.",
    "stream-truncated": "The answer ended before it was whole. The server or something before it broke down; look at the server's log.",
    "stream-error": "The server gave up in the middle of its answer. Its own words are quoted; look at the server's log.",
    "model-mismatch": "Another model answers than the one asked for. The wrong server runs at the address.",
    "prompt-too-long": "The prompt and the tokens asked for do not fit into the server's --max-model-len. Raise it, or shorten them.",
    "prompt-unreadable": "The prompt holds what no tokenizer takes: half of a surrogate pair, a negative token. Mend the file of prompts.",
    "usage-mismatch": "The server counts other tokens than it sent, or read another prompt than it got. Its figures are no measure.",
}

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True):
    """
    One completion, as it arrived.

    Attributes:
        prompt_tokens: How many tokens the prompt has, by the server's count.
        tokens: The completion.
        text: The same, as the server decoded it.
        finish_reason: ``length`` or ``stop``.
        logprobs: Per token of the completion: token → natural logarithm of its probability, of the chosen one and the likeliest; not a
            number where the server says null. Empty unless asked for.
        chunks: Events of the stream that carried tokens.
        seconds: From the question to the end of the answer.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[dict[int, float], ...] = ()
    chunks: int = 0
    seconds: float = 0.0


class Position(msgspec.Struct, frozen=True):
    """
    The distribution before one token of a prompt.

    Attributes:
        token: The token that is there.
        logprob: Natural logarithm of its probability.
        top: Token → logarithm, of the likeliest ones; may also hold *token*.
    """

    token: int
    logprob: float
    top: dict[int, float]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Scored(msgspec.Struct):
    logprob: float | None


class Choice(msgspec.Struct):
    """One continuation, or a part of it."""

    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[Token] | None = None
    prompt_token_ids: list[Token] | None = None
    prompt_logprobs: list[dict[Token, _Scored] | None] | None = None


class Usage(msgspec.Struct):
    """How many tokens the server counts."""

    prompt_tokens: int
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Event(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class Model(msgspec.Struct):
    """One entry of ``/v1/models``."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """``/v1/models``."""

    data: list[Model]


class Tokenized(msgspec.Struct):
    """``/tokenize``."""

    tokens: list[Token]


class Detokenized(msgspec.Struct):
    """``/detokenize``."""

    prompt: str


class Version(msgspec.Struct):
    """``/version``."""

    version: str


class Refusal(msgspec.Struct):
    """The body of an error, in OpenAI's form."""

    error: _Error


def decode(body: bytes, kind: type[T]) -> T:
    """Return JSON as a record of type *kind*; raise `ServerInvalid` where it is none, or is nested without end."""
    if body.lstrip()[:1] == b"<":
        raise ServerInvalid("server-html", f"a web page came: {body[:80].decode('utf-8', 'replace')}")
    try:
        return msgspec.json.decode(body, type=kind)
    # msgspec's errors and those of UTF-8 are ValueErrors; deep nesting is not.
    except (ValueError, RecursionError, OverflowError) as error:
        if "truncated" in str(error):
            raise ServerInvalid("stream-truncated", f"the answer ends after {len(body)} bytes in the middle of its JSON") from None
        raise ServerInvalid("answer-unreadable", f"{error}; it begins {body[:80].decode('utf-8', 'replace')!r}") from None


def events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a stream (server-sent events up to ``[DONE]``); raise `ServerInvalid` where it is none, or has no end."""
    for ended in lines:
        line = ended.rstrip(b"\r\n")
        if not ended.endswith(b"\n") and line.lstrip()[:1] != b"<":
            break
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield decode(data, Event)
        elif line.lstrip()[:1] == b"<":
            raise ServerInvalid("server-html", f"a web page came in the middle of the stream: {line[:80].decode('utf-8', 'replace')}")
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise ServerInvalid("answer-unreadable", f"a line that is no event: {line[:80].decode('utf-8', 'replace')!r}")
    raise ServerInvalid("stream-truncated", "the stream ended without its last event, [DONE]")


def metrics(text: str) -> dict[str, float]:
    """
    Return Prometheus' text form as numbers: each name with its labels as written, and the sum of a name under the bare name.

    Raises:
        ServerInvalid: A line is not in that form.
    """
    read: dict[str, float] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        # Labels may hold blanks and braces in quotes, but a value never holds a brace.
        name, brace, rest = line.rpartition("}")
        name, rest = (name + brace, rest) if brace else (line.partition(" ")[0], line.partition(" ")[2])
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            raise ServerInvalid("answer-unreadable", f"a line that is no metric: {line[:80]!r}") from None
        bare = name.partition("{")[0]
        read[name] = value
        if bare != name:
            read[bare] = read.get(bare, 0.0) + value
    return read
