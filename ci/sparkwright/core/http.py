"""
HTTP requests, bounded in time and bytes.

A watchdog closes the connection of a request when its time is over, so a server that trickles its
status line, headers, chunk sizes or trailers, or sends `100 Continue` without end, holds up
nothing. Numbers of a reply are read strictly, and credentials go to the host that they are for.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urljoin

import msgspec

from sparkwright import __version__
from sparkwright.core.console import console, one_line
from sparkwright.core.store import room_guard

if TYPE_CHECKING:
    import requests

#: Seconds for a connection, and for every `CHUNK` bytes of a download (2 kB/s).
CONNECT, STALL = 10.0, 30.0
CHUNK = 1 << 16
#: How often a request is sent, or a download goes without progress, before it fails.
ATTEMPTS = 4
#: Seconds before a download goes on, times the attempts without progress.
PAUSE = 0.5
REDIRECTS = 5
#: Bytes of the largest reply that is held in memory, and of the largest file; wheels on the package
#: index are smaller.
LARGEST, LARGEST_FILE = 4 << 20, 4 << 30

Kind = Literal["address", "broken", "redirect", "size", "slow", "status", "unreachable"]
Redirects = Literal["none", "same-host", "any"]

_active = threading.local()


class HttpFailure(Exception):
    """
    A request without a usable reply; its text is one printable line without credentials.

    Attributes:
        kind: What failed, for callers that tell failures apart.
        status: The status of the reply, for the kind ``status``.
    """

    def __init__(self, kind: Kind, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.kind, self.status = kind, status


class Reply(msgspec.Struct, frozen=True):
    """
    A whole reply; the names of *headers* are in lower case, *url* is where it came from after
    redirects.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    url: str = ""

    @property
    def retry_after(self) -> float | None:
        """
        Return the seconds after which the server may be asked again, or None if it does not say.
        """
        text = self.headers.get("retry-after", "")
        if re.fullmatch(r"[0-9]{1,9}", text):
            return float(text)
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None


class _Watchdog:
    """Closes the connection of a request when its time is over or *stopped* is set."""

    def __init__(self, seconds: float, stopped: threading.Event | None) -> None:
        self.until, self.expired = time.monotonic() + seconds, False
        self._stopped = stopped or threading.Event()
        # Without an event to look at, the thread sleeps until the deadline.
        self._interval = 0.2 if stopped else 3600.0
        self._done, self._lock = threading.Event(), threading.Lock()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._watch, name="http deadline", daemon=True).start()

    def hold(self, connection: socket.socket) -> None:
        """Watch *connection*, which a later redirect may replace by another one."""
        with self._lock:
            if self.expired:
                raise TimeoutError("no time is left")
            if self._socket:
                self._socket.close()
            # A handle of its own: http.client and ssl detach and close theirs.
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def close(self) -> None:
        self._done.set()
        with self._lock:
            if self._socket:
                self._socket.close()
            self._socket = None

    def _watch(self) -> None:
        while not self._done.wait(min(self._interval, max(0.0, self.until - time.monotonic()))):
            if time.monotonic() < self.until and not self._stopped.is_set():
                continue
            with self._lock:
                self.expired = True
                if self._socket:
                    with contextlib.suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RDWR)
            return


@functools.cache
def _adapter() -> Any:
    """
    Return the pool of connections of this process, each of which reports itself to the watchdog of
    its request.
    """
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Watched:
        def _new_conn(self) -> socket.socket:
            connection: socket.socket = super()._new_conn()  # type: ignore[misc]  # urllib3's, mixed in below
            _active.watchdog.hold(connection)
            return connection

        def request(self, *arguments: Any, **options: Any) -> None:
            if reused := getattr(self, "sock", None):
                _active.watchdog.hold(reused)
            super().request(*arguments, **options)  # type: ignore[misc]  # urllib3's, mixed in below

    connections = {
        "http": (HTTPConnectionPool, HTTPConnection),
        "https": (HTTPSConnectionPool, HTTPSConnection),
    }
    pools = {
        scheme: type(
            f"Watched{pool.__name__}",
            (pool,),
            {"ConnectionCls": type("Connection", (Watched, connection), {})},
        )
        for scheme, (pool, connection) in connections.items()
    }

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            manager = super().proxy_manager_for(proxy, **options)
            manager.pool_classes_by_scheme = pools
            return manager

    return Adapter()


class Stream:
    """
    A reply whose body is read piece by piece.

    Attributes:
        status, headers, url: As in `Reply`.
    """

    def __init__(
        self, reply: requests.Response, watchdog: _Watchdog, guard: Callable[[Kind], Any]
    ) -> None:
        self.status, self.url = reply.status_code, reply.url
        self.headers = {name.lower(): value for name, value in reply.headers.items()}
        self._reply, self._watchdog, self._guard = reply, watchdog, guard

    @property
    def length(self) -> int | None:
        """
        Return the number of bytes that the header Content-Length states, or None without one.

        Raises:
            HttpFailure: It is not a number.
        """
        text = self.headers.get("content-length")
        if text is None or "transfer-encoding" in self.headers:
            return None
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise HttpFailure("broken", f"Content-Length is no number: {one_line(text, 80)}")
        return int(text)

    def pieces(self, limit: int, *, steady: bool = False) -> Iterator[bytes]:
        """
        Yield the body as it arrives.

        Args:
            limit: The largest body, in bytes.
            steady: Measure the deadline anew with every `CHUNK` bytes.

        Raises:
            HttpFailure: The body is larger, breaks off, or takes too long.
        """
        count, extended, length = 0, 0, self.length
        while True:
            with self._guard("broken"):
                piece = self._reply.raw.read1(CHUNK)
                # A connection that the watchdog closed looks like the end of the body.
                if self._watchdog.expired:
                    raise TimeoutError
            if not piece:
                break
            count += len(piece)
            if count > limit:
                raise HttpFailure("size", f"larger than {limit} bytes")
            if steady and count - extended >= CHUNK:
                extended, self._watchdog.until = count, time.monotonic() + STALL
            yield piece
        if length is not None and count < length:
            raise HttpFailure("broken", f"{count} of {length} bytes came")

    def read(self, limit: int) -> bytes:
        """
        Return the whole body; raises as `pieces`. Of an error's body, return no more than *limit*
        bytes.
        """
        body = bytearray()
        try:
            for piece in self.pieces(limit):
                body += piece
        except HttpFailure as failure:
            if failure.kind != "size" or self.status < 300:
                raise
        return bytes(body)


@contextlib.contextmanager
def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    data: Any = None,
    token: str = "",
    netrc: bool = False,
    redirects: Redirects = "none",
    seconds: float = 60.0,
    stopped: threading.Event | None = None,
) -> Iterator[Stream]:
    """
    Send one request, and yield its reply with the body unread.

    Args:
        data: Bytes, or an iterable with a length.
        token: Sent as a bearer token to the host of *url* alone, and taken out of every message.
        netrc: Take credentials from the URL and from ~/.netrc, as pip does.
        redirects: Which are followed; none leaves https.
        seconds: For the whole request, its body included.
        stopped: An event that ends the request within a fraction of a second.

    Raises:
        HttpFailure: There is no reply in time, or a redirect that is not followed.
    """
    watchdog = _Watchdog(seconds, stopped)

    @contextlib.contextmanager
    def guard(kind: Kind) -> Iterator[None]:
        from urllib3.exceptions import HTTPError

        try:
            yield
        # Errors of requests are OSErrors, those of an address ValueErrors, too.
        except (OSError, HTTPError, http.client.HTTPException, ValueError, AttributeError) as error:
            if watchdog.expired:
                raise HttpFailure("slow", f"no whole reply within {seconds:g} s") from None
            kind = "address" if kind == "unreachable" and isinstance(error, ValueError) else kind
            raise HttpFailure(kind, one_line(redact_credentials(str(error)), 300, token)) from None

    try:
        _active.watchdog = watchdog
        with contextlib.ExitStack() as replies:
            with guard("unreachable"):
                reply = replies.enter_context(_send(method, url, headers or {}, data, token, netrc))
            for hop in range(1 + REDIRECTS):
                if redirects == "none" or reply.status_code not in (301, 302, 303, 307, 308):
                    break
                if hop == REDIRECTS:
                    raise HttpFailure("redirect", f"redirected more than {REDIRECTS} times")
                with guard("redirect"):
                    target = urljoin(reply.url, reply.headers.get("Location", ""))
                    same = host_of(target) == host_of(url)
                shown = one_line(redact_credentials(target), 200, token)
                if redirects == "same-host" and not same:
                    raise HttpFailure(
                        "redirect", f"redirected to another host, which is not followed: {shown}"
                    )
                if not target.startswith(
                    ("https://", "http://")[: 1 if reply.url.startswith("https:") else 2]
                ):
                    raise HttpFailure("redirect", f"redirected out of https: {shown}")
                authorization = reply.request.headers.get("Authorization", "") if same else ""
                replies.close()
                with guard("unreachable"):
                    carried = {
                        **(headers or {}),
                        **({"Authorization": authorization} if authorization else {}),
                    }
                    reply = replies.enter_context(
                        _send(method, target, carried, data, "", netrc and same)
                    )
            yield Stream(reply, watchdog, guard)
    finally:
        watchdog.close()


def _send(
    method: str, url: str, headers: Mapping[str, str], data: Any, token: str, netrc: bool
) -> requests.Response:
    import requests

    with requests.Session() as session:
        # Anything in this place keeps requests from ~/.netrc and from credentials in the URL.
        session.auth = None if netrc else lambda request: request
        session.verify = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or True
        # A compressed body could become a huge one, and byte ranges would mean something else.
        session.headers.update(
            {"User-Agent": f"sparkwright/{__version__}", "Accept-Encoding": "identity", **headers}
        )
        if token:
            session.headers["Authorization"] = f"Bearer {token}"
        prepared = session.prepare_request(requests.Request(method, url, data=data or None))
        settings = session.merge_environment_settings(prepared.url or "", {}, True, None, None)
        # The adapter, because a session reads the body of a redirect to its end, and has no other
        # pool of connections.
        if not (prepared.url or "").lower().startswith(("http://", "https://")):
            raise ValueError("neither http nor https")
        reply: requests.Response = _adapter().send(prepared, timeout=(CONNECT, STALL), **settings)
        return reply


def request(
    method: str,
    url: str,
    *,
    limit: int = LARGEST,
    seconds: float = 60.0,
    attempts: int = ATTEMPTS,
    longest_wait: float = 10.0,
    busy: Callable[[Reply], bool] = lambda reply: reply.status in (429, 503),
    **options: Any,
) -> Reply:
    """
    Return the whole reply to a request, repeated after broken connections and passing faults of the
    server.

    Args:
        limit: Bytes of the largest body.
        seconds: For all attempts together.
        longest_wait: Seconds of a ``Retry-After`` that are waited for; a reply that asks for more
            is returned.
        busy: Does the reply ask to wait?
        options: As for `exchange`.

    Raises:
        HttpFailure: No attempt brought a whole reply; one with status 500 or more is returned.
    """
    until = time.monotonic() + seconds
    for attempt in range(1, attempts + 1):
        pause, reply = seconds / 200 * 2**attempt, None
        try:
            with exchange(method, url, seconds=until - time.monotonic(), **options) as stream:
                reply = Reply(stream.status, stream.headers, stream.read(limit), stream.url)
        except HttpFailure as error:
            if (
                error.kind in ("address", "redirect", "size")
                or attempt == attempts
                or time.monotonic() + pause > until
            ):
                raise
            console.detail(f"{error}; sending the request again")
        else:
            # A limit that is used up ends hours later; any other 429 is passing.
            passing = reply.status >= 500 or (
                reply.status == 429 and "x-ratelimit-reset" not in reply.headers
            )
            if busy(reply) and reply.retry_after is not None:
                pause, passing = reply.retry_after, reply.retry_after <= longest_wait
                if passing and pause >= 1 and attempt < attempts:
                    console.note(f"{host_of(url)} asks to wait {pause:.0f} s")
            if not passing or attempt == attempts or time.monotonic() + pause > until:
                return reply
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def download(
    url: str,
    partial: Path,
    *,
    size: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    stopped: threading.Event | None = None,
) -> None:
    """
    Bring the rest of the file at *url* to *partial*, going on where a connection broke; the caller
    compares the hash.

    Args:
        size: Bytes of the whole file, 0 if not known.
        on_progress: Called with the bytes that are there, and with those of the whole file or 0.
        stopped: As for `exchange`.

    Raises:
        HttpFailure: The server does not offer the file, another size, or too little of it in
            several attempts.
        disk-full: There is no room; what arrived is kept.
    """
    idle, stop = 0, stopped or threading.Event()
    while not stop.wait(PAUSE * idle):
        before = _size(partial)
        try:
            _resume(url, partial, size, on_progress, stopped)
            return
        except HttpFailure as error:
            passing = (
                error.kind in ("broken", "slow", "unreachable")
                or error.status == 429
                or error.status >= 500
            )
            if error.kind == "size":
                partial.unlink(missing_ok=True)
            # A line that breaks often, and brings something each time, gets there; one that stalls
            # is tried once more.
            idle = (
                idle + ATTEMPTS // 2
                if error.kind == "slow"
                else 0
                if _size(partial) > before
                else idle + 1
            )
            if not passing or idle >= ATTEMPTS or stop.is_set():
                raise
            console.detail(f"{partial.name}: {error}; going on with {_size(partial)} bytes")
    raise HttpFailure("unreachable", "stopped")


def _resume(
    url: str,
    partial: Path,
    size: int,
    on_progress: Callable[[int, int], None],
    stopped: threading.Event | None,
) -> None:
    have = _size(partial)
    if size and have == size:
        on_progress(have, size)
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    with exchange(
        "GET", url, headers=headers, redirects="any", netrc=True, seconds=STALL, stopped=stopped
    ) as stream:
        if stream.status == 416 and have:
            return  # the server has no byte after these; the hash decides
        if stream.status not in (200, 206):
            raise HttpFailure("status", f"answered {stream.status}", stream.status)
        if stream.status != 206 or not stream.headers.get("content-range", "").startswith(
            f"bytes {have}-"
        ):
            have = 0
        total = size or (have + stream.length if stream.length is not None else 0)
        if size and stream.length is not None and have + stream.length != size:
            raise HttpFailure(
                "size", f"{have + stream.length} bytes are served, and {size} are expected"
            )
        on_progress(have, total)
        with room_guard(partial.parent), partial.open("ab" if have else "wb") as sink:
            try:
                for piece in stream.pieces((size or LARGEST_FILE) - have, steady=True):
                    sink.write(piece)
                    have += len(piece)
                    on_progress(have, total)
            finally:
                sink.flush()
                os.fsync(sink.fileno())
        if size and have < size:
            raise HttpFailure("broken", f"{have} of {size} bytes came")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def redact_credentials(text: str) -> str:
    """Return *text*, a URL or words that hold some, without a user's name and password."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def host_of(url: str) -> str:
    """
    Return scheme, host and port of *url* as the client reads them; other parsers see other hosts in
    odd URLs.
    """
    import requests
    from urllib3.util import parse_url

    parts = parse_url(requests.Request("GET", url).prepare().url or "")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme or "")
    return f"{parts.scheme}://{parts.host}:{port}"
