"""
A static host on loopback, as Pages or nginx are: files of a folder over HTTP/1.1, with ranges, and with faults where a test wants them.

    with indexserver.serve(folder) as served:
        requests.get(served.url + "index.html")
        assert [request.path for request in served.asked] == ["/index.html"]

A *fault* is asked about every path: ``None`` serves the file, a number is the status of an empty reply, and ``"truncate"`` announces the
whole file, sends half of it and hangs up.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".toml": "application/toml",
    ".txt": "text/plain; charset=utf-8",
}
PIECE = 1 << 20

Fault = Callable[[str], int | str | None]


class Request(NamedTuple):
    """What a client asked, decoded, and the status that it got."""

    method: str
    path: str
    status: int
    headers: Mapping[str, str]


class Served:
    """
    The running host.

    Attributes:
        url: With a final slash.
        asked: Every request that was answered, in order.
    """

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.folder, self.fault = folder, fault
        self.asked: list[Request] = []
        self.url = ""

    def find(self, path: str) -> tuple[Path, str] | int | str:
        """Return the file at *path* and its type, a status, or the address that a folder without its slash moves to."""
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            return 400
        place = self.folder.joinpath(*parts)
        if place.is_dir() and not path.endswith("/"):
            return quote(path) + "/"
        if place.is_dir():
            place = place / "index.html"
        elif path.endswith("/"):
            return 404
        return (
            (place, TYPES.get(place.suffix, "application/octet-stream")) if place.is_file() else 404
        )


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection; a client may ask on it again and again."""

    protocol_version = "HTTP/1.1"
    # A head and a body are two writes; without this the second waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        host, path = self.server.served, unquote(urlsplit(self.path).path)
        bad = host.fault(path) if host.fault else None
        if isinstance(bad, int):
            self.reply(bad)
        else:
            self._file(path, host.find(path), cut=bad == "truncate")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self, path: str, found: tuple[Path, str] | int | str, *, cut: bool) -> None:
        if isinstance(found, int):
            self.reply(found)
        elif isinstance(found, str):
            self.reply(301, location=found)
        else:
            with found[0].open("rb") as stream:
                size = stream.seek(0, 2)
                begin, end, status = _range(self.headers.get("Range", ""), size)
                if status == 416:
                    return self.reply(416, place=f"bytes */{size}")
                self._head(
                    status,
                    end - begin,
                    found[1],
                    place=f"bytes {begin}-{end - 1}/{size}" if status == 206 else "",
                )
                if self.command == "GET":
                    stream.seek(begin)
                    self._body(stream, (end - begin) // 2 if cut else end - begin)
                self.close_connection = self.close_connection or cut
        return None

    def _body(self, stream: Any, left: int) -> None:
        while left and (piece := stream.read(min(left, PIECE))):
            self.wfile.write(piece)
            left -= len(piece)

    def reply(
        self,
        status: int,
        body: bytes = b"",
        kind: str = "application/octet-stream",
        *,
        location: str = "",
        place: str = "",
    ) -> None:
        """Send a whole reply."""
        self._head(status, len(body), kind, location=location, place=place)
        if self.command == "GET":
            self.wfile.write(body)

    def _head(
        self, status: int, length: int, kind: str, *, location: str = "", place: str = ""
    ) -> None:
        self._note(status)
        self.send_response(status)
        about = {"Content-Type": kind, "Content-Length": str(length), "Accept-Ranges": "bytes"}
        for name, value in {**about, "Location": location, "Content-Range": place}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def _note(self, status: int) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.served.asked.append(
            Request(
                self.command,
                path,
                status,
                {name.lower(): text for name, text in self.headers.items()},
            )
        )

    def log_message(self, *_: object) -> None:
        """Say nothing: `Served.asked` has it."""


def _range(asked: str, size: int) -> tuple[int, int, int]:
    """Return begin, end and status for what a Range header asks of *size* bytes; what is no single range is served whole (RFC 9110)."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.strip())
    if not found or found.groups() == ("", ""):
        return 0, size, 200
    first, last = found.groups()
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    return (begin, end, 206) if begin < end else (0, 0, 416)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Ends with its threads: `server_close` waits for them, after their connections were shut down."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self, served: Served) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served, self._live, self._lock = served, set[socket.socket](), threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._live.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._live.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that hung up."""

    def hang_up(self) -> None:
        """End every connection, so that no thread waits for a client's next request."""
        with self._lock:
            for request in self._live:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serve(folder: Path, *, fault: Fault | None = None) -> Iterator[Served]:
    """Serve *folder* until the block ends."""
    served = Served(folder, fault)
    server = _Server(served)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.hang_up()
        server.server_close()
        thread.join(60)
        assert not thread.is_alive()
