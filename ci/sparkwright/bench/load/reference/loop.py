"""Sockets and times in one thread, to some ten microseconds: asyncio's loop rounds its waits up to the next millisecond."""

from __future__ import annotations

import collections
import heapq
import selectors
import socket
import time
from collections.abc import Callable

#: select(2) waits to the microsecond and takes file descriptors below 1,024; further connections are closed at once.
MOST = 900


class Loop:
    """
    Runs callbacks when a socket is ready or a time has come.

    Attributes:
        woke: When the kernel last said that sockets are ready; the time to count from, however many of them wait their turn.
    """

    def __init__(self) -> None:
        self._selector = selectors.SelectSelector()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._count = 0
        self.woke = time.monotonic()

    @property
    def full(self) -> bool:
        """Are there as many sockets as can be watched?"""
        return len(self._selector.get_map()) > MOST

    def at(self, due: float, call: Callable[[], None]) -> None:
        """Have *call* called at *due*, a time of `time.monotonic`."""
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, call))

    def soon(self, call: Callable[[], None]) -> None:
        """Have *call* called when no socket is ready and nothing is due: what was heard at one time counts from that time."""
        self._soon.append(call)

    def watch(self, one: socket.socket, ready: Callable[[int], None], *, writing: bool = False) -> None:
        """Have *ready* called with the events of the socket *one*, those of *writing* included or not; again to change that."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if one in self._selector.get_map():
            self._selector.modify(one, events, ready)
        else:
            self._selector.register(one, events, ready)

    def forget(self, one: socket.socket) -> None:
        """Stop watching *one*."""
        if one in self._selector.get_map():
            self._selector.unregister(one)

    def run(self) -> None:
        """Run until the process ends."""
        while True:
            wait = max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None
            ready = self._selector.select(0 if self._soon else wait)
            self.woke = time.monotonic()
            self._due()
            if not ready and self._soon:
                self._soon.popleft()()
            for key, events in ready:
                if key.fileobj in self._selector.get_map():
                    key.data(events)
                # What is due does not wait for the other sockets.
                self._due()

    def _due(self) -> None:
        heap = self._heap
        while heap and heap[0][0] <= time.monotonic():
            heapq.heappop(heap)[2]()
