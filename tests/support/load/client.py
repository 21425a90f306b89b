"""
Our own small client: for the deterministic probe, and to hold other generators against; it measures no release.

One thread and one selector. While the load runs, bytes are stamped and kept and nothing else; they are taken apart afterwards
(`tests.support.load.recorded`). Each request has a connection of its own, made before its time begins.
"""

from __future__ import annotations

import itertools
import random
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
from tests.support.load import flight, recorded
from tests.support.load.flight import Flight
from tests.support.load.recorded import Asked

from sparkwright import __version__
from sparkwright.bench.load.order import LoadInvalid, Order, Request, Run
from sparkwright.core.files import content_key, sha256_file

#: Tokens of random prompts: single bytes in every vocabulary that we know, so none is beyond a small one.
CODES = range(3, 256)

Where = tuple[socket.AddressFamily, tuple[Any, ...]]


class Own:
    """The generator; see the module."""

    @property
    def name(self) -> str:
        """Its name and version."""
        return f"sparkwright's client {__version__}"

    def measure(self, order: Order) -> Run:
        """Make the load and return what was measured; see `sparkwright.bench.load.order.Generator`."""
        requests = tuple(
            Request(one.began, one.ttft, one.seconds, one.prompt, one.tokens, one.chunks, one.error) for one in self.answers(order)
        )
        parts = [sha256_file(Path(part)) for part in (__file__, flight.__file__, recorded.__file__)]
        ends = [one.began + one.seconds for one in requests]
        return Run(self.name, content_key("client", parts), max(ends, default=0.0), requests)

    def answers(self, order: Order) -> tuple[recorded.Seen, ...]:
        """Make the load and return the requests with the tokens that came: the probe wants the same ones each time."""
        address = urlsplit(order.url)
        until = time.perf_counter() + order.patience
        flights = _flights(order, address)
        if order.warmups:
            _fly(itertools.islice(flights, order.warmups), order, address, until)
        flown, zero = _fly(itertools.islice(flights, order.requests), order, address, until)
        return tuple(sorted((one.result(zero) for one in flown), key=lambda one: one.began))


def _flights(order: Order, address: SplitResult) -> Iterator[Flight]:
    """Yield requests without end."""
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nhost: {address.hostname}:{address.port}\r\ncontent-type: application/json\r\n"
        "accept: text/event-stream\r\nconnection: close\r\ncontent-length: "
    ).encode() + b"%d\r\n\r\n"
    drawn = random.Random(order.seed)
    while True:
        prompt = drawn.choices(CODES, k=order.prompt)
        question = {
            "model": order.model, "prompt": prompt, "max_tokens": order.answer, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        yield Flight(head, msgspec.json.encode(question), Asked(order.model, tuple(prompt), order.answer, 0), len(prompt))


def _fly(flights: Iterator[Flight], order: Order, address: SplitResult, until: float) -> tuple[list[Flight], float]:
    """
    Make the requests *flights*, as many at a time as ordered, and return them with the time of the first.

    Raises:
        LoadInvalid: They are not through at *until* (``generator-late``).
    """
    waiting = list(flights)[::-1]
    flown: list[Flight] = []
    where = _where(address)
    with selectors.DefaultSelector() as selector:
        for _ in range(min(order.concurrency, len(waiting))):
            _launch(selector, waiting, order.concurrency, where)
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
                    _launch(selector, waiting, order.concurrency, where)
    return flown, min((one.began for one in flown if one.began), default=0.0)


def _where(address: SplitResult) -> Where:
    """Return the family and the address of the socket to connect to; raise `LoadInvalid` where the host has no address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LoadInvalid("generator-failed", f"{address.hostname} has no address: {error}") from None
    return family, place


def _launch(selector: selectors.BaseSelector, waiting: list[Flight], concurrency: int, where: Where) -> None:
    """Start the next of *waiting*, and connect the one whose turn comes when all that fly have ended."""
    following = waiting.pop()
    following.connect(*where)
    if len(waiting) >= concurrency:
        waiting[-concurrency].connect(*where)
    selector.register(following.socket, selectors.EVENT_WRITE, following)


def _step(selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> bool:
    """Do what the socket of *key* is ready for, and return whether its request goes on."""
    flying: Flight = key.data
    if flying.broken:
        return False
    if events & selectors.EVENT_WRITE:
        if flying.send():
            selector.modify(key.fileobj, selectors.EVENT_READ, flying)
        return not flying.broken
    return flying.receive()


def _close(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        key.data.socket.close()
