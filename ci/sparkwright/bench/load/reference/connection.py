"""One connection to the reference server: questions in turn, and bytes that go out as soon as the kernel takes them."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import TYPE_CHECKING

from sparkwright.bench.load.reference import question
from sparkwright.bench.load.reference.loop import Loop
from sparkwright.bench.load.reference.question import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkwright.bench.load.reference.question import Question

#: Bytes that a client may leave unread before it is taken for gone.
UNREAD = 8 << 20


class Connection:
    """
    A connection.

    Attributes:
        closed: Whether it is gone. *heard*: when its last bytes came.
        gone: Called once when it is, where somebody waits for that.
    """

    def __init__(self, loop: Loop, one: socket.socket, answer: Callable[[Connection, Question], None]) -> None:
        self.loop, self._socket, self._answer = loop, one, answer
        self._arrived, self._left = bytearray(), bytearray()
        self._busy = self.closed = False
        self._stays, self.heard = True, 0.0
        self.gone: Callable[[], None] | None = None
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(one, self._ready)

    def send(self, data: bytes) -> None:
        """Send *data*, what the kernel does not take as soon as it does."""
        if self.closed:
            return
        if not self._left:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                return
            if not data:
                return
            self.loop.watch(self._socket, self._ready, writing=True)
        self._left += data
        if len(self._left) > UNREAD:
            self.close()

    def done(self) -> None:
        """Say that the answer is whole: the next question's turn."""
        self._busy = False
        self.gone = None
        if not self._stays and not self._left:
            self.close()
        if self._arrived:
            # Later, and not from here: a client may send thousands of questions in one piece.
            self.loop.soon(self._next)

    def close(self) -> None:
        """Close it, whatever is left."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self._socket)
        self._socket.close()
        if self.gone:
            self.gone()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ and not self.closed:
            self._read()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                del self._left[: self._socket.send(self._left)]
            except BlockingIOError:
                raise
            except OSError:
                self.close()
                return
        if not self._left:
            self.loop.watch(self._socket, self._ready)
            if not self._stays and not self._busy:
                self.close()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece or len(self._arrived) > question.HEAD + question.BODY:
            self.close()
            return
        self._arrived += piece
        self.heard = self.loop.woke
        if not self._busy:
            self.loop.soon(self._next)

    def _next(self) -> None:
        if not self._busy and not self.closed and self._arrived:
            try:
                asked = question.read(self._arrived)
            except Refused as refused:
                self._stays = False
                self.send(question.refusal(refused))
                if not self._left:
                    self.close()
                return
            if asked is None:
                return
            self._busy, self._stays = True, asked.stays
            self._answer(self, asked)
