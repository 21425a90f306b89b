"""What the fake hosts share: JSON answers, pages, routes, static files, and servers on loopback that answer until a block ends."""

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with JSON, or with bytes as they are."""

    def log_message(self, *_: object) -> None:
        """Say nothing; the test's output is for the test."""

    def body(self) -> bytes:
        """Return what was sent along; fewer bytes than announced where the client broke off."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, record: Any = None, **headers: str) -> None:
        """Send *record*; underscores in the names of *headers* stand for hyphens."""
        data = b"" if record is None else record if isinstance(record, bytes) else json.dumps(record).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def page(records: list[Any], query: dict[str, list[str]]) -> list[Any]:
    """Return the records of the page that *query* asks for."""
    size, number = int(query.get("per_page", ["30"])[0]), int(query.get("page", ["1"])[0])
    return records[(number - 1) * size : number * size]


class Server(http.server.ThreadingHTTPServer):
    """A server that answers while its block runs, and whose threads end with it."""

    #: Clients that wait to be accepted; a batch comes at once.
    request_queue_size = 128

    daemon_threads = False

    def __init__(self, handler: Callable[..., http.server.BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._answering = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._answering.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._answering.join()


class FileHandler(http.server.SimpleHTTPRequestHandler):
    """Answers with files."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def files(folder: Path) -> Iterator[str]:
    """Serve *folder* until the block ends, and yield its address with a final slash."""
    with Server(functools.partial(FileHandler, directory=str(folder))) as server:
        yield f"{server.url}/"
