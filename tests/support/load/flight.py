"""One request of our own client on its way: sent, and its bytes stamped and kept."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Any

from msgspec.structs import replace
from tests.support.load import recorded
from tests.support.load.recorded import Asked

#: Bytes of an answer for each token of it (number, text, the event around it), for each byte of the question, and beside.
PER_TOKEN, PER_BYTE, ENVELOPE = 1500, 4, 1 << 16
#: Events beside those with tokens: usage, the end, an error.
EVENTS = 8


class Flight:
    """One request on its way: *body* asks for what *asked* says, with *prompt* tokens sent (0: a text)."""

    def __init__(self, head: bytes, body: bytes, asked: Asked, prompt: int) -> None:
        self.question, self.asked, self.prompt = head % len(body) + body, asked, prompt
        self.began, self.broken, self.size, self.events = 0.0, "", 0, 0
        self.pieces: list[recorded.Piece] = []
        self._left, self._connecting = memoryview(self.question), False
        self.socket: socket.socket

    def connect(self, family: socket.AddressFamily, place: tuple[Any, ...]) -> None:
        """Begin to connect, once; what fails comes out when it is written to."""
        if self._connecting:
            return
        self._connecting = True
        # Made here and not before, as an order may have more requests than a process may have open files.
        self.socket = socket.socket(family)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (code := self.socket.connect_ex(place)) not in (0, errno.EINPROGRESS):
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
