"""The reference server itself: routes, and answers that go out on their schedule."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from sparkwright.gates.load.reference import question
from sparkwright.gates.load.reference.asked import Asked, tokenized, word
from sparkwright.gates.load.reference.behaviour import Behaviour, Fault
from sparkwright.gates.load.reference.connection import Connection
from sparkwright.gates.load.reference.counters import Counters
from sparkwright.gates.load.reference.loop import Loop
from sparkwright.gates.load.reference.pace import Pace
from sparkwright.gates.load.reference.question import Question, Refused

T = TypeVar("T")

#: Seconds between two bytes of an answer that trickles.
TRICKLE = 1.0


class _Text(msgspec.Struct):
    prompt: str = ""


class _Codes(msgspec.Struct):
    tokens: list[int] = []


class Service:
    """
    A server with *behaviour* that listens on a port of its own.

    Attributes:
        url: Where it is.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.loop = behaviour, Loop()
        self.counters, self.pace = Counters(behaviour), Pace(behaviour)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listening.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._began, self._number = time.monotonic(), 0
        self.loop.watch(self._listening, self._accept)

    def _accept(self, _events: int) -> None:
        # A few at a time, so that what the first of them ask is heard before the last are here.
        for _ in range(8):
            try:
                one, _address = self._listening.accept()
            except OSError:
                return
            if self.loop.full:
                one.close()
            else:
                Connection(self.loop, one, self.answer)

    def answer(self, connection: Connection, asked: Question) -> None:
        """Answer what was *asked*, now or in time."""
        try:
            if asked.path in ("/v1/completions", "/v1/chat/completions"):
                self._number += 1
                if not self.wrong("silent"):
                    self._tokens(connection, asked)
                return
            connection.send(self._plain(asked))
        except Refused as refused:
            connection.send(question.refusal(refused))
        connection.done()

    def wrong(self, fault: Fault) -> bool:
        """Is *fault* there at the newest request?"""
        return self.behaviour.wrong(fault, self._number)

    @property
    def ready(self) -> bool:
        """Is it healthy?"""
        return "not-ready" not in self.behaviour.faults and time.monotonic() >= self._began + self.behaviour.loading

    def _plain(self, asked: Question) -> bytes:
        """Return the reply to a question that is not about tokens."""
        own = self.behaviour
        if asked.path == "/health":
            return question.whole(200 if self.ready else 503, b"")
        if asked.path == "/metrics":
            return question.whole(200, self.counters.text().encode(), "text/plain; version=1.0.0; charset=utf-8")
        if not self.ready:
            raise Refused(503, "the model is being loaded")
        found: object
        if asked.path == "/v1/models":
            found = {"object": "list", "data": [{"id": own.name, "object": "model", "root": own.name, "max_model_len": own.limit}]}
        elif asked.path == "/version":
            found = {"version": own.version}
        elif asked.path == "/lateness":
            found = self.counters.lateness()
        elif asked.path == "/tokenize":
            codes = tokenized(_decoded(asked.body, _Text).prompt, own.vocabulary)
            found = {"count": len(codes), "max_model_len": own.limit, "tokens": codes}
        elif asked.path == "/detokenize":
            found = {"prompt": "".join(word(code) for code in _decoded(asked.body, _Codes).tokens).strip()}
        else:
            raise Refused(404, "there is nothing at this path")
        return question.whole(200, msgspec.json.encode(found))

    def _tokens(self, connection: Connection, asked: Question) -> None:
        if not self.ready:
            raise Refused(503, "the model is being loaded")
        if self.wrong("refuses"):
            raise Refused(429, "too many requests")
        wanted = Asked(asked.body, self.behaviour, self._number, chat="chat" in asked.path)
        Answer(self, connection, wanted).begin()


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the question cannot be read: {error!s:.200}") from None


class Answer:
    """One answer on its way: *wanted* of the service *of*, to *connection*."""

    def __init__(self, of: Service, connection: Connection, wanted: Asked) -> None:
        self._of, self._connection, self._wanted = of, connection, wanted
        self._wrong = {fault for fault in of.behaviour.faults if of.wrong(fault)}
        self._asked = connection.heard
        self._tokens = None if "endless" in self._wrong else max(1, wanted.tokens - ("short" in self._wrong))
        #: The place at which what breaks in mid-stream breaks.
        self._breaks = max(1, (self._tokens or 2) // 2)
        self._chunks: Iterator[tuple[float, int]] = of.pace.chunks(self._asked, self._tokens)
        self._due, self._size = next(self._chunks)
        self._sent, self._first, self._last = 0, 0.0, 0.0
        self._event = b""

    def begin(self) -> None:
        """Count the question, and wait for the first token's time."""
        self._of.counters.asked(len(self._wanted.prompt), hit="prefix-hits" in self._wrong)
        self._connection.gone = self._aborted
        self._event = self._head() + self._part()
        self._of.loop.at(self._due, self._send)

    def _head(self) -> bytes:
        return question.STREAM if self._wanted.stream and "trickles" not in self._wrong else b""

    def _part(self) -> bytes:
        """Return the bytes of the chunk that is due next, made before its time."""
        if not self._wanted.stream:
            return b""
        finish = None
        if self._sent + self._size == self._tokens:
            finish = "stop" if "finish-reason" in self._wrong else "length"
        return question.event(self._wanted.part(self._sent, self._size, finish))

    def _send(self) -> None:
        """Send what is due, and prepare what comes next."""
        if self._connection.closed:
            return
        if "trickles" in self._wrong:
            self._trickle(question.STREAM + self._part())
            return
        self._last = time.monotonic()
        self._connection.send(self._event)
        self._first = self._first or self._last
        self._of.counters.chunk(self._size, self._last - self._due, first=not self._sent)
        self._sent += self._size
        if self._broken() or self._connection.closed:
            return
        if (following := next(self._chunks, None)) is None:
            self._end()
            return
        self._due, self._size = following
        self._event = self._part()
        self._of.loop.at(self._due, self._send)

    def _broken(self) -> bool:
        """Break off where that is what is wrong; return whether it did."""
        if self._sent < self._breaks:
            return False
        if "dies" in self._wrong:
            os._exit(1)
        if "closes" in self._wrong:
            self._connection.close()
            return True
        if "error-event" in self._wrong and self._wanted.stream:
            error = {"error": {"message": "the engine died", "type": "InternalServerError", "param": None, "code": 500}}
            self._connection.send(question.event(msgspec.json.encode(error)) + question.event(b"[DONE]") + question.STREAM_END)
            self._over("error")
            return True
        return False

    def _end(self) -> None:
        """Send the end of an answer whose tokens are out."""
        counted = self._sent + ("usage-more" in self._wrong)
        finish = "stop" if "finish-reason" in self._wrong else "length"
        if self._wanted.stream:
            told = self._wanted.usage and "usage-none" not in self._wrong
            usage = question.event(self._wanted.end(counted)) if told else b""
            self._connection.send(usage + question.event(b"[DONE]") + question.STREAM_END)
        else:
            self._connection.send(question.whole(200, self._wanted.answer(self._sent, counted, finish)))
        self._over(finish)

    def _over(self, reason: str) -> None:
        tpot = (self._last - self._first) / (self._sent - 1) if self._sent > 1 else 0.0
        self._of.counters.ended(reason, self._first - self._asked, tpot)
        self._connection.done()

    def _aborted(self) -> None:
        self._of.counters.ended("abort", 0.0, 0.0)

    def _trickle(self, data: bytes) -> None:
        """Send *data* byte by byte."""
        self._connection.send(data[:1])
        if data[1:] and not self._connection.closed:
            self._of.loop.at(time.monotonic() + TRICKLE, lambda: self._trickle(data[1:]))
