"""An answer as it came over the wire, bytes with the time of each; taken apart when the measuring is over."""

from __future__ import annotations

import http.client
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from sparkwright.bench.load.order import Request
from sparkwright.bench.server import openai_schema
from sparkwright.bench.server.openai_schema import Assembler, ServerInvalid

if TYPE_CHECKING:
    import socket

    from _typeshed import WriteableBuffer

#: A piece of an answer, and when it came.
Piece = tuple[float, bytes]


class _Played(io.RawIOBase):
    """The pieces, one for each read; *at* is when the newest of those that were read had come."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces, self._next, self._place = pieces, 0, 0
        self.at = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._next == len(self._pieces):
            return 0
        self.at, piece = self._pieces[self._next]
        view = memoryview(buffer)
        part = piece[self._place : self._place + len(view)]
        view[: len(part)] = part
        self._place += len(part)
        if self._place == len(piece):
            self._next, self._place = self._next + 1, 0
        return len(part)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)


class Asked(NamedTuple):
    model: str
    prompt: tuple[int, ...] | None
    tokens: int
    top: int


class Seen(Request, frozen=True, gc=False):
    """A request, and the tokens of its answer (*codes*), for who looks at the words as well."""

    codes: tuple[int, ...] = ()


def request(pieces: Sequence[Piece], began: float, asked: Asked, prompt: int, broken: str = "") -> Seen:
    """
    Return what *pieces* say of a request.

    Args:
        began: When it was sent, on the clock of *pieces*; the result counts from there and has ``began`` 0.
        asked: What it asked for. *prompt*: how many tokens of a prompt were sent; 0 where only the server knows.
        broken: What went wrong while the pieces came; it goes before what is wrong with them.
    """
    played, gathering = _Played(pieces), Assembler(asked.model, asked.tokens, asked.prompt)
    first = last = 0.0
    chunks = tokens = counted = 0
    codes: list[int] = []
    error = ""
    try:
        for event in openai_schema.events(_pieces(_reply(played))):
            gathering.add(event)
            if brought := sum(len(choice.token_ids or ()) for choice in event.choices):
                codes += [code for choice in event.choices for code in choice.token_ids or ()]
                first, last = first or played.at, played.at
                chunks, tokens = chunks + 1, tokens + brought
            counted = (event.usage.completion_tokens or 0) if event.usage and not event.choices else counted
        answer = gathering.completion()
        prompt = answer.usage.prompt_tokens
        if answer.finish_reason != "length" or tokens != asked.tokens:
            error = f"usage-mismatch: {tokens} of {asked.tokens} tokens came, and the answer ended for {answer.finish_reason}"
    except ServerInvalid as invalid:
        error = str(invalid)
    except (http.client.HTTPException, ValueError) as cut:
        # The latter is int() of a chunk's size.
        error = f"stream-truncated: the connection ended in an answer: {type(cut).__name__}"
    ttft, seconds = (first - began, last - began) if first else (0.0, 0.0)
    return Seen(0.0, ttft, seconds, prompt, counted or tokens, chunks, broken or error, tuple(codes))


def _reply(played: _Played) -> http.client.HTTPResponse:
    """Return the reply behind its head; raise `ServerInvalid` where it is no stream of events."""
    try:
        response = http.client.HTTPResponse(cast("socket.socket", played), method="POST")
        response.begin()
    except (http.client.HTTPException, ValueError, OSError) as error:
        raise ServerInvalid("server-unreachable", f"no answer: {type(error).__name__} {error}") from None
    if response.status != 200:
        raise ServerInvalid("server-refused", f"status {response.status}: {_body(response)}")
    kind = response.headers.get("content-type", "of no kind").partition(";")[0]
    if kind != "text/event-stream" or response.headers.get("content-encoding"):
        raise ServerInvalid("answer-unreadable", f"the answer is {kind}, not a stream of events")
    return response


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := response.read1(1 << 16):
        yield piece
    if response.length:
        raise ServerInvalid("stream-truncated", f"{response.length} bytes of the answer are missing")


def _body(reply: http.client.HTTPResponse) -> str:
    try:
        return reply.read()[:200].decode("utf-8", "replace")
    except http.client.HTTPException:
        return "(cut)"
