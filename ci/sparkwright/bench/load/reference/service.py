"""The reference server itself: connections and routes."""

from __future__ import annotations

import socket
import time
from typing import TypeVar

import msgspec

from sparkwright.bench.load.reference import question
from sparkwright.bench.load.reference.answer import Answer
from sparkwright.bench.load.reference.asked import Asked, tokenized, word
from sparkwright.bench.load.reference.behaviour import Behaviour, Fault
from sparkwright.bench.load.reference.connection import Connection
from sparkwright.bench.load.reference.counters import Counters
from sparkwright.bench.load.reference.loop import Loop
from sparkwright.bench.load.reference.pace import Pace
from sparkwright.bench.load.reference.question import Question, Refused

T = TypeVar("T")


class _Text(msgspec.Struct):
    prompt: str = ""


class _Codes(msgspec.Struct):
    tokens: list[int] = []


class Service:
    """
    A server with *behaviour* that listens on *port*, or on a free one.

    Attributes:
        url: Where it is.
    """

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        self.behaviour, self.loop = behaviour, Loop()
        self.counters, self.pace = Counters(behaviour), Pace(behaviour)
        self._listening = socket.create_server(("127.0.0.1", port), backlog=1024)
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
        wrong = {fault for fault in self.behaviour.faults if self.wrong(fault)}
        Answer(self.pace, self.counters, connection, wanted, wrong).begin()


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the question cannot be read: {error!s:.200}") from None
