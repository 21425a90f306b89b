"""
HTTP requests, bounded in time and bytes.

A timer shuts down the sockets of a request when its time is over, so a server that trickles its
status line, headers, chunk sizes or trailers, or sends `100 Continue` without end, holds up
nothing. Numbers of a reply are read strictly, and credentials go to the host that they are for.
"""

import contextlib
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

from sparkwright import __version__
from sparkwright.core.console import one_line
from sparkwright.core.files import sha256_file
from sparkwright.core.store import flush, translate_disk_full

if TYPE_CHECKING:
    import requests

#: Seconds for a connection, and for every `CHUNK` bytes of a download (2 kB/s).
CONNECT, STALL = 10.0, 30.0
CHUNK = 1 << 16
#: How often a request is sent, or a download goes without progress, before it fails.
ATTEMPTS = 4
#: Seconds: of a download's pause after its first attempt without progress (after the second twice
#: as many, and so on), and of a request's pause, which doubles with each attempt.
PAUSE = 0.5
REDIRECTS = 5
#: Bytes of the largest reply that is held in memory, and of the largest file; wheels on the package
#: index are smaller.
LARGEST, LARGEST_FILE = 4 << 20, 4 << 30

Kind = Literal["broken", "redirect", "size", "slow", "status", "unreachable"]


class HttpFailure(Exception):
    """
    A request without a usable reply; its text is one printable line without credentials.

    Attributes:
        kind: What failed, for callers that tell failures apart.
        status: The status of the reply, for the kind ``status``.
        retryable: Another attempt may succeed.
    """

    def __init__(self, kind: Kind, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.kind, self.status = kind, status
        self.retryable = kind in ("broken", "slow", "unreachable") or status == 429 or status >= 500


class _Deadline:
    """
    The end of a request: shuts down its sockets when *seconds* are over or *stopped* is set.

    Attributes:
        until: When that is, by `time.monotonic`; may be moved.
    """

    def __init__(self, seconds: float, stopped: threading.Event | None, token: str) -> None:
        self.until, self.expired = time.monotonic() + seconds, False
        self._seconds, self._stopped, self.token = seconds, stopped, token
        self._sockets: list[socket.socket] = []
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="http deadline", daemon=True).start()

    def hold(self, connection: socket.socket) -> None:
        # The socket is duplicated, since http.client and ssl detach and close theirs.
        self._sockets.append(socket.socket(fileno=os.dup(connection.fileno())))

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            if time.monotonic() > self.until or (self._stopped and self._stopped.is_set()):
                self.expired = True
                for held in self._sockets[:]:
                    with contextlib.suppress(OSError):
                        held.shutdown(socket.SHUT_RDWR)
        for held in self._sockets:
            held.close()

    @contextlib.contextmanager
    def guard(self, kind: Kind) -> Iterator[None]:
        """Raise `HttpFailure` for whatever the libraries raise within the block."""
        from requests import TooManyRedirects
        from urllib3.exceptions import HTTPError

        try:
            yield
        # requests raises OSErrors, and ValueErrors for an address that is not valid.
        except (OSError, HTTPError, http.client.HTTPException, ValueError, AttributeError) as error:
            if self.expired:
                raise HttpFailure("slow", f"no complete reply in {self._seconds:.3g} s") from None
            kind = "redirect" if isinstance(error, TooManyRedirects) else kind
            raise HttpFailure(
                kind, one_line(redact_credentials(str(error)), 300, self.token)
            ) from None


class Reply:
    """
    A reply.

    Attributes:
        status: Its status.
        headers: By their names, in capital or small letters.
        url: Where it came from, after redirects.
        length: The number of bytes that it states for its body, or None.
        body: Empty until `read`.

    Raises:
        HttpFailure: Its Content-Length is not a number.
    """

    def __init__(self, response: "requests.Response", deadline: _Deadline) -> None:
        self.status, self.url, self.body = response.status_code, response.url, b""
        self.headers = response.headers
        self._response, self._deadline = response, deadline
        length = None if "transfer-encoding" in self.headers else self.headers.get("content-length")
        if length is not None and not re.fullmatch(r"[0-9]{1,15}", length):
            raise HttpFailure("broken", f"Content-Length is no number: {one_line(length, 80)}")
        self.length = None if length is None else int(length)

    def pieces(
        self, limit: int, *, steady: bool = False, beginning: bool = False
    ) -> Iterator[bytes]:
        """
        Yield the body as it arrives.

        Args:
            limit: The largest body, in bytes.
            steady: Measure the deadline anew with every `CHUNK` bytes.
            beginning: Leave the rest of a larger body unread.

        Raises:
            HttpFailure: The body is larger, breaks off, or takes too long.
        """
        count, extended = 0, 0
        while True:
            with self._deadline.guard("broken"):
                piece = self._response.raw.read1(CHUNK)
                # A connection that was shut down looks like the end of the body.
                if self._deadline.expired:
                    raise TimeoutError
            if not piece:
                return
            count += len(piece)
            if count > limit and beginning:
                yield piece[: limit - count]
                return
            if count > limit:
                raise HttpFailure("size", f"larger than {limit} bytes")
            if steady and count - extended >= CHUNK:
                extended, self._deadline.until = count, time.monotonic() + STALL
            yield piece

    def read(self, limit: int = LARGEST, *, beginning: bool = False) -> None:
        """Read the body; raises as `pieces`. That of an error has a limit of its own."""
        most = limit if self.status < 300 else LARGEST
        self.body = b"".join(self.pieces(most, beginning=beginning))


def _session(deadline: _Deadline, *, redirects: bool) -> "requests.Session":
    """
    Return a session of requests that reports its sockets to *deadline*, and follows *redirects*
    within their scheme.
    """
    import requests
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
            pool: Any = super().get_connection_with_tls_context(*arguments, **options)

            class Connection(pool.ConnectionCls):  # type: ignore[misc]  # of http or https
                def _new_conn(self) -> socket.socket:
                    connection: socket.socket = super()._new_conn()
                    deadline.hold(connection)
                    return connection

            pool.ConnectionCls = Connection
            return pool

    class Session(requests.Session):
        def get_redirect_target(self, resp: requests.Response) -> str | None:
            target = super().get_redirect_target(resp) if redirects else None
            if target is not None:
                resp._content = b""  # a session would read the body of a redirect to its end
                resp.close()
                with deadline.guard("redirect"):
                    address = urljoin(resp.url, target)
                encrypted = resp.url.startswith("https://")
                if not address.startswith("https://" if encrypted else ("https://", "http://")):
                    shown = one_line(redact_credentials(address), 200, deadline.token)
                    raise HttpFailure("redirect", f"redirected out of https: {shown}")
            return target

        def rebuild_auth(self: Any, prepared_request: Any, response: requests.Response) -> None:
            # That of requests would put credentials of ~/.netrc in the place of a token.
            if self.should_strip_auth(response.request.url, prepared_request.url):
                prepared_request.headers.pop("Authorization", None)

    session = Session()
    session.max_redirects = REDIRECTS
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    session.verify = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or True
    # A compressed body could become a huge one, and byte ranges would mean something else.
    session.headers.update(
        {"Accept-Encoding": "identity", "User-Agent": f"sparkwright/{__version__}"}
    )
    return session


@contextlib.contextmanager
def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    data: Any = None,
    token: str = "",
    redirects: bool = False,
    direct: bool = False,
    seconds: float = 60.0,
    stall: float = STALL,
    stopped: threading.Event | None = None,
) -> Iterator[Reply]:
    """
    Send a request, and yield its reply with the body unread.

    Args:
        data: Bytes, or an iterable with a length.
        token: Sent as a bearer token to the host of *url* alone, and taken out of every message.
            Without one, credentials come from the URL and from ~/.netrc, as with pip.
        redirects: Follow them, but not out of https.
        direct: Connect to the host of *url* itself, and take neither a proxy nor credentials from
            the environment.
        stall: Seconds without a byte.
        seconds: For the whole request, its body included.
        stopped: An event that ends the request within a fraction of a second.

    Raises:
        HttpFailure: There is no reply in time, or a redirect cannot be followed. A reply of status
            500 or more is yielded.
    """
    with contextlib.closing(_Deadline(seconds, stopped, token)) as deadline:
        session = _session(deadline, redirects=redirects)
        session.trust_env = not direct
        session.headers.update(headers or {})
        if token:
            session.headers["Authorization"] = f"Bearer {token}"
            # With an `auth` of its own, requests reads neither ~/.netrc nor credentials in the URL.
            session.auth = lambda request: request
        with deadline.guard("unreachable"):
            response = session.request(
                method,
                url,
                data=data or None,
                stream=True,
                timeout=(CONNECT, stall),
                allow_redirects=redirects,
            )
        with session, response:
            with deadline.guard("broken"):
                # A connection that was shut down looks like the end of the headers.
                if deadline.expired:
                    raise TimeoutError
            yield Reply(response, deadline)


def request(
    method: str,
    url: str,
    *,
    limit: int = LARGEST,
    beginning: bool = False,
    seconds: float = 60.0,
    **options: Any,
) -> Reply:
    """
    Return the whole reply to a request, whose body has at most *limit* bytes, or the *beginning* of
    that many bytes of a larger body. Unless it is a POST, it is repeated after broken connections
    and bodies, passing faults of the server, and a limit that may end at once.

    Args:
        seconds: All attempts included.
        options: As for `exchange`.

    Raises:
        HttpFailure: As `exchange` and `Reply.pieces`. A reply of status 500 or more is returned.
    """
    until, pause = time.monotonic() + seconds, PAUSE
    # A POST without a whole reply may have taken effect.
    for left in reversed(range(1 if method == "POST" else ATTEMPTS)):
        try:
            with exchange(method, url, seconds=until - time.monotonic(), **options) as reply:
                reply.read(limit, beginning=beginning)
        except HttpFailure as failure:
            if not left or time.monotonic() + pause > until or not failure.retryable:
                raise
        else:
            passing = reply.status == 429 or reply.status >= 500
            if not left or time.monotonic() + pause > until or not passing:
                break
        time.sleep(pause)
        pause *= 2
    return reply


def download(
    url: str,
    partial: Path,
    sha256: str,
    *,
    size: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    stopped: threading.Event | None = None,
) -> str:
    """
    Download the rest of the file at *url* to *partial*, and resume after broken connections; if
    what an earlier run left is of another file, from the beginning.

    Args:
        sha256: Of the whole file.
        size: Bytes of the whole file, 0 if not known.
        on_progress: Called with the bytes that are there, and with those of the whole file or 0.
        stopped: As for `exchange`.

    Returns:
        The sha256 of what arrived, which is removed if it is another than *sha256*.

    Raises:
        HttpFailure: The server does not offer the file, another size, or too little of it in
            several attempts.
        disk-full: There is no room; what arrived is kept.
    """
    stopped = stopped or threading.Event()
    resumed, failures, furthest = partial.exists(), 0, _size(partial)
    while True:
        try:
            _resume(url, partial, size, on_progress, stopped)
        except HttpFailure as error:
            if error.kind == "size" and _size(partial) >= size:
                partial.unlink(missing_ok=True)
            # A line that breaks often, and brings more than ever each time, gets there. A server
            # without ranges begins again each time.
            have = _size(partial)
            failures = 0 if have >= furthest + CHUNK else failures + 1
            furthest = max(have, furthest)
            if not error.retryable or failures >= ATTEMPTS or stopped.wait(PAUSE * failures):
                raise
            continue
        if (arrived := sha256_file(partial)) == sha256:
            return arrived
        partial.unlink()
        if not resumed:
            return arrived
        resumed, failures, furthest = False, 0, 0


def _resume(
    url: str,
    partial: Path,
    size: int,
    on_progress: Callable[[int, int], None],
    stopped: threading.Event,
) -> None:
    have = _size(partial)
    with exchange(
        "GET",
        url,
        headers={"Range": f"bytes={have}-"} if have else {},
        redirects=True,
        seconds=STALL,
        stopped=stopped,
    ) as reply:
        if reply.status == 416 and have:
            return  # the server has no byte after these; the hash decides
        if reply.status not in (200, 206):
            raise HttpFailure("status", f"answered {reply.status}", reply.status)
        if not reply.headers.get("content-range", "").startswith(f"bytes {have}-"):
            have = 0
        total = size if reply.length is None else have + reply.length
        if size and total != size:
            raise HttpFailure("size", f"{total} bytes are served, and {size} are expected")
        on_progress(have, total)
        with translate_disk_full(partial.parent):
            with partial.open("ab" if have else "wb") as sink:
                for piece in reply.pieces((size or LARGEST_FILE) - have, steady=True):
                    sink.write(piece)
                    have += len(piece)
                    on_progress(have, total)
            flush(partial)
        if size and have < size:
            raise HttpFailure("broken", f"{have} of {size} bytes came")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def redact_credentials(text: str) -> str:
    """Return *text* without the user names and passwords of the URLs in it."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
