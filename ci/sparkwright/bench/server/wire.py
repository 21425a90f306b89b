"""
One HTTP exchange with a server that may be slow, silent, endless or no server of ours at all: bounded in bytes and in time.

`http.client` bounds neither the time that headers trickle in nor the sum of what it reads, so it is given a wire of its own that does.
Nothing is followed, unpacked or kept: a redirect is an answer like any other, and every exchange has its own connection.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from sparkwright.core.console import one_line
from sparkwright.core.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: The most bytes of an answer of which nothing else is known, headers included; the counters of vLLM have some hundred thousand.
LARGEST = 4 * 1024 * 1024
#: The most bytes of one line of a stream; a token with 50 logprobs has about 3,000.
LONGEST_LINE = 1024 * 1024


class ServerInvalid(Exception):
    """
    What a server answered, or did not, does not count as a measurement.

    Args:
        reference: Why, stable and in kebab-case; `sparkwright.bench.server.answers.REASONS` explains each.
        says: What was seen, in one printable sentence.
    """

    def __init__(self, reference: str, says: str) -> None:
        self.reference, self.says = reference, one_line(says, 400)
        super().__init__(f"{reference}: {self.says}")


class _Clock:
    """The time that an answer may take: *timeout* seconds between two bytes, *deadline* seconds in all."""

    def __init__(self, timeout: float, deadline: float) -> None:
        self.timeout, self.deadline, self._end, self.heard = timeout, deadline, time.monotonic() + deadline, 0

    def next(self) -> float:
        """Return how long the next byte may take; raise `ServerInvalid` where the time is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.late()
        return min(self.timeout, left)

    def late(self) -> ServerInvalid:
        if not self.heard:
            return ServerInvalid("server-silent", f"the server sent nothing for {min(self.timeout, self.deadline):g} s")
        over = time.monotonic() >= self._end
        what = f"the answer was not whole after {self.deadline:g} s" if over else f"the server stopped for {self.timeout:g} s in an answer"
        return ServerInvalid("server-slow", f"{what}; {self.heard} bytes had come")


class _Wire(io.RawIOBase):
    """The receiving side of a connection, and as much of a socket as `http.client` uses."""

    def __init__(self, connection: socket.socket, clock: _Clock, largest: int) -> None:
        self._connection, self._clock, self._left = connection, clock, largest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._connection.settimeout(self._clock.next())
        try:
            count = self._connection.recv_into(buffer)
        except TimeoutError:
            raise self._clock.late() from None
        self._clock.heard += count
        self._left -= count
        if self._left < 0:
            raise ServerInvalid("answer-too-large", f"the answer has more than {self._clock.heard + self._left} bytes")
        return count

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._clock.next())
        try:
            self._connection.sendall(data)
        except TimeoutError:
            raise ServerInvalid("server-silent", "the server does not take the question") from None

    def close(self) -> None:
        """Do nothing: `exchange` closes the connection."""


class Reply:
    """What came back: status, headers, and a body that is read once."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status = response.status
        self.kind = (response.headers.get("content-type") or "").partition(";")[0].strip().lower()
        self.location = response.headers.get("location") or ""
        self.packed = (response.headers.get("content-encoding") or "identity").strip().lower() != "identity"

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it comes; raise `ServerInvalid` where it ends before it is whole."""
        while piece := self._response.read1(1 << 16):
            yield piece
        # http.client says so only of chunked bodies.
        if self._response.length:
            raise ServerInvalid("stream-truncated", f"{self._response.length} bytes of the answer are missing")

    def body(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.pieces())

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the body with their ends; one without is the last one, and cut."""
        rest = bytearray()
        for piece in self.pieces():
            begin = max(0, len(rest) - 1)
            rest += piece
            if rest.find(b"\n", begin) >= 0:
                *whole, last = bytes(rest).split(b"\n")
                yield from (line + b"\n" for line in whole)
                rest = bytearray(last)
            if len(rest) > LONGEST_LINE:
                raise ServerInvalid("answer-too-large", f"a line of the answer has more than {LONGEST_LINE} bytes")
        if rest:
            yield bytes(rest)


class Address:
    """
    Where a server is.

    Args:
        url: ``http://127.0.0.1:8000``; nothing but scheme, host, port and the beginning of the path.
        key: What the server asks of whoever asks it (``VLLM_API_KEY``); empty for none.

    Raises:
        UsageError: It is another kind of address, or holds a name and a password.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._key = key
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError("usage", f"{one_line(url, 200)} is not the address of a server: {error}.") from None
        odd = not url.isascii() or not url.isprintable() or " " in url or "@" in parts.netloc or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or odd:
            raise UsageError("usage", f"{one_line(url, 200)} is not the address of a server, such as http://127.0.0.1:8000.")
        self.secure, self.host = parts.scheme == "https", parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.path = parts.path.rstrip("/")

    @contextlib.contextmanager
    def exchange(self, path: str, body: bytes | None, *, timeout: float, deadline: float, largest: int = LARGEST) -> Iterator[Reply]:
        """
        Yield the reply to one request, a POST of JSON where there is a *body*; what is wrong inside the block counts, too.

        Raises:
            ServerInvalid: The server cannot be reached, is too slow, sends too much, or does not speak HTTP.
        """
        clock = _Clock(timeout, deadline)
        try:
            connection = self._connect(clock)
        except (OSError, ValueError) as error:
            raise ServerInvalid("server-unreachable", f"{self.host} port {self.port}: {error}") from None
        with connection:
            try:
                yield self._ask(_Wire(connection, clock, largest), path, body)
            except http.client.IncompleteRead:
                raise ServerInvalid("stream-truncated", f"the connection ended in an answer, after {clock.heard} bytes") from None
            except http.client.HTTPException as error:
                if not clock.heard:
                    raise ServerInvalid("server-unreachable", "the server closed the connection without an answer") from None
                raise ServerInvalid("answer-unreadable", f"not HTTP: {type(error).__name__} {error}") from None
            except OSError as error:
                reference = "stream-truncated" if clock.heard else "server-unreachable"
                raise ServerInvalid(reference, f"the connection broke after {clock.heard} bytes: {error}") from None
            except ValueError as error:
                # int() of a length or chunk size, and the like; what callers decode has errors of its own.
                raise ServerInvalid("answer-unreadable", f"not HTTP: {error}") from None

    def _connect(self, clock: _Clock) -> socket.socket:
        plain = socket.create_connection((self.host, self.port), timeout=clock.next())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.secure:
            return plain
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise

    def _ask(self, wire: _Wire, path: str, body: bytes | None) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port)
        connection.sock = cast(socket.socket, wire)
        headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "sparkwright", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection.request("GET" if body is None else "POST", self.path + path, body, headers)
        return Reply(connection.getresponse())
