"""
Our own small client: for the deterministic probe, and to hold other generators against; it measures no release.

One thread and one selector. While the load runs, bytes are stamped and kept and nothing else; they are taken apart afterwards
(`sparkwright.gates.load.recorded`). Each request has a connection of its own, made before its time begins.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sparkwright import __version__, digest
from sparkwright.errors import UsageError
from sparkwright.gates.load import prompts, recorded
from sparkwright.gates.load.order import LoadInvalid, Order, Request, Run
from sparkwright.gates.server.completion import Asked
from sparkwright.gates.server.wire import Address

#: Bytes of an answer for each token of it (number, text, the event around it), for each byte of the question, and beside.
PER_TOKEN, PER_BYTE, ENVELOPE = 1500, 4, 1 << 16
#: Bytes of all answers that are kept until the load is over.
MOST = 1 << 30
#: Events beside those with tokens: usage, the end, an error.
EVENTS = 8


class Flight:
    """One request on its way: *body* asks for what *asked* says, with *prompt* tokens sent (0: a text)."""

    def __init__(self, head: bytes, body: bytes, asked: Asked, prompt: int) -> None:
        self.question, self.asked, self.prompt = head % len(body) + body, asked, prompt
        self.began, self.broken, self.size, self.events = 0.0, "", 0, 0
        self.pieces: list[recorded.Piece] = []
        self._left, self._connecting = memoryview(self.question), False
        self.socket = socket.socket()

    def connect(self, host: tuple[str, int]) -> None:
        """Begin to connect, once; what fails comes out when it is written to."""
        if self._connecting:
            return
        self._connecting = True
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (code := self.socket.connect_ex(host)) not in (0, errno.EINPROGRESS):
            self.broken = f"server-unreachable: {os.strerror(code)}"

    def send(self) -> bool:
        """Send what the kernel takes, and return whether all is sent."""
        self.began = self.began or time.perf_counter()
        try:
            self._left = self._left[self.socket.send(self._left) :]
        except BlockingIOError:
            return False
        except OSError as error:
            self.broken = f"server-unreachable: {error.strerror}"
            return True
        return not self._left

    def receive(self) -> bool:
        """Keep what came and when, and return whether more may come."""
        try:
            piece = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError as error:
            self.broken = f"stream-truncated: the connection broke: {error.strerror}"
            return False
        at = time.perf_counter()
        if not piece:
            return False
        self.pieces.append((at, piece))
        self.size += len(piece)
        self.events += piece.count(b"data: ")
        largest = ENVELOPE + PER_TOKEN * self.asked.tokens + PER_BYTE * len(self.question)
        if self.events > self.asked.tokens + EVENTS or self.size > largest:
            self.broken = f"answer-too-large: {self.events} events came for {self.asked.tokens} tokens"
        return not self.broken

    def result(self, zero: float) -> recorded.Seen:
        """Return what was seen, its beginning counted from *zero*."""
        made = recorded.request(self.pieces, self.began, self.asked, self.prompt, self.broken)
        return replace(made, began=(self.began or zero) - zero)


class Own:
    """The generator; see the module."""

    @property
    def name(self) -> str:
        """Its name and version."""
        return f"sparkwright's client {__version__}"

    def measure(self, order: Order) -> Run:
        """Make the load and return what was measured; see `sparkwright.gates.load.order.Generator`."""
        try:
            address = Address(order.url)
        except UsageError as error:
            raise LoadInvalid("generator-failed", str(error)) from None
        if address.secure:
            raise LoadInvalid("generator-failed", "this client speaks plain HTTP only; it is for servers on this machine")
        until = time.perf_counter() + order.patience
        flights = _flights(order, address)
        if order.warmups:
            _fly(itertools.islice(flights, order.warmups), order, address, until)
        flown, zero = _fly(itertools.islice(flights, order.requests), order, address, until)
        requests = tuple(flight.result(zero) for flight in flown)
        ends = [one.began + one.seconds for one in requests]
        parts = [digest.sha256_file(Path(part)) for part in (__file__, recorded.__file__)]
        return Run(self.name, digest.key("client", parts), max(ends, default=0.0), _plain(requests))

    def answers(self, order: Order) -> tuple[recorded.Seen, ...]:
        """Return the requests of *order* with the tokens that came, for the probe that wants the same ones each time."""
        address = Address(order.url)
        until = time.perf_counter() + order.patience
        flown, zero = _fly(itertools.islice(_flights(order, address), order.requests), order, address, until)
        return tuple(flight.result(zero) for flight in flown)


def _plain(requests: tuple[recorded.Seen, ...]) -> tuple[Request, ...]:
    return tuple(Request(one.began, one.ttft, one.seconds, one.prompt, one.tokens, one.chunks, one.error) for one in requests)


def _flights(order: Order, address: Address) -> Iterator[Flight]:
    """Yield requests without end."""
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nhost: {address.host}:{address.port}\r\ncontent-type: application/json\r\n"
        "accept: text/event-stream\r\nconnection: close\r\ncontent-length: "
    ).encode() + b"%d\r\n\r\n"
    for prompt in prompts.of(order):
        question = {
            "model": order.model, "prompt": prompt, "max_tokens": order.answer, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        codes = tuple(prompt) if isinstance(prompt, list) else None
        yield Flight(head, msgspec.json.encode(question), Asked(order.model, codes, order.answer, 0), len(codes or ()))


def _fly(flights: Iterator[Flight], order: Order, address: Address, until: float) -> tuple[list[Flight], float]:
    """
    Make the requests *flights*, as many at a time as ordered, and return them with the time of the first.

    Raises:
        LoadInvalid: They are not through at *until* (``generator-late``), or too much came (``generator-failed``).
    """
    waiting = list(flights)[::-1]
    flown: list[Flight] = []
    host = (address.host, address.port)
    with selectors.DefaultSelector() as selector:
        for _ in range(min(order.concurrency, len(waiting))):
            _launch(selector, waiting, order.concurrency, host)
        while selector.get_map():
            if (left := until - time.perf_counter()) <= 0:
                _close(selector)
                raise LoadInvalid("generator-late", f"{len(flown)} of {order.requests} requests were through after {order.patience:g} s")
            ended = [key for key, events in selector.select(min(left, 1.0)) if not _step(selector, key, events)]
            for key in ended:
                selector.unregister(key.fileobj)
                key.data.socket.close()
                flown.append(key.data)
                if waiting:
                    _launch(selector, waiting, order.concurrency, host)
            if ended and sum(flight.size for flight in flown) > MOST:
                _close(selector)
                raise LoadInvalid("generator-failed", f"the answers have more than {MOST} bytes")
    return flown, min((flight.began for flight in flown if flight.began), default=0.0)


def _launch(selector: selectors.BaseSelector, waiting: list[Flight], concurrency: int, host: tuple[str, int]) -> None:
    """Start the next of *waiting*, and connect the one whose turn comes when all that fly have ended."""
    flight = waiting.pop()
    flight.connect(host)
    if len(waiting) >= concurrency:
        waiting[-concurrency].connect(host)
    selector.register(flight.socket, selectors.EVENT_WRITE, flight)


def _step(selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> bool:
    """Do what the socket of *key* is ready for, and return whether its request goes on."""
    flight: Flight = key.data
    if flight.broken:
        return False
    if events & selectors.EVENT_WRITE:
        if flight.send():
            selector.modify(key.fileobj, selectors.EVENT_READ, flight)
        return not flight.broken
    return flight.receive()


def _close(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        key.data.socket.close()
