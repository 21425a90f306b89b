"""One answer of the reference server: its tokens go out on their schedule, or break off as its faults order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec

from sparkwright.bench.load.reference import question
from sparkwright.bench.load.reference.asked import Asked
from sparkwright.bench.load.reference.behaviour import Fault
from sparkwright.bench.load.reference.connection import Connection
from sparkwright.bench.load.reference.counters import Counters
from sparkwright.bench.load.reference.pace import Pace

#: Seconds between two bytes of an answer that trickles.
TRICKLE = 1.0


class Answer:
    """
    One answer on its way.

    Args:
        pace, counters: Of the server.
        wanted: What was asked on *connection*, when its last bytes were heard.
        wrong: What is wrong with this answer.
    """

    def __init__(self, pace: Pace, counters: Counters, connection: Connection, wanted: Asked, wrong: set[Fault]) -> None:
        self._counters, self._connection, self._wanted, self._wrong = counters, connection, wanted, wrong
        self._asked = connection.heard
        self._tokens = None if "endless" in self._wrong else max(1, wanted.tokens - ("short" in self._wrong))
        #: The place at which what breaks in mid-stream breaks.
        self._breaks = max(1, (self._tokens or 2) // 2)
        self._chunks: Iterator[tuple[float, int]] = pace.chunks(self._asked, self._tokens)
        self._due, self._size = next(self._chunks)
        self._sent, self._first, self._last = 0, 0.0, 0.0
        self._event = b""

    def begin(self) -> None:
        """Count the question, and wait for the first token's time."""
        self._counters.asked(len(self._wanted.prompt), hit="prefix-hits" in self._wrong)
        self._connection.gone = self._aborted
        self._event = self._head() + self._part()
        self._connection.loop.at(self._due, self._send)

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
        self._counters.chunk(self._size, self._last - self._due, first=not self._sent)
        self._sent += self._size
        if self._broken() or self._connection.closed:
            return
        if (following := next(self._chunks, None)) is None:
            self._end()
            return
        self._due, self._size = following
        self._event = self._part()
        self._connection.loop.at(self._due, self._send)

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
        self._counters.ended(reason, self._first - self._asked, tpot)
        self._connection.done()

    def _aborted(self) -> None:
        self._counters.ended("abort", 0.0, 0.0)

    def _trickle(self, data: bytes) -> None:
        """Send *data* byte by byte."""
        self._connection.send(data[:1])
        if data[1:] and not self._connection.closed:
            self._connection.loop.at(time.monotonic() + TRICKLE, lambda: self._trickle(data[1:]))
