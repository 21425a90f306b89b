"""What the fake hosts share: JSON answers, pages, routes, static files, git repositories, and servers on loopback that answer until a block ends."""

import contextlib
import functools
import http.server
import json
import os
import subprocess
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


class GitHost(Server):
    """
    Serves every repository of *folder*, by git's own server over HTTP, while its block runs.

    Attributes:
        sound: Whether a request, its path and body given, is answered.
        hangs: Whether the others are kept waiting, in place of a closed connection.
        limit: Bytes after which an answer is cut off; None for no limit.
        largest: Bytes of the largest answer.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(functools.partial(_Backend, self))
        self.folder = folder
        self.sound: Callable[[str, bytes], bool] = lambda *_: True
        self.hangs = False
        self.limit: int | None = None
        self.largest = 0
        self.closed = threading.Event()

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        super().__exit__(*error)


class _Backend(Handler):
    """Answers as git-http-backend(1) does, which speaks CGI."""

    def __init__(self, host: GitHost, *request: object) -> None:
        self.host = host
        super().__init__(*request)  # type: ignore[arg-type]  # what a server gives its handlers

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        sent = self.body()
        if not self.host.sound(path, sent):
            if self.host.hangs:
                self.host.closed.wait()
            return
        variables = {
            "GIT_PROJECT_ROOT": str(self.host.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REMOTE_ADDR": "127.0.0.1",
        }
        command, env = ["git", "http-backend"], {**os.environ, **variables}
        done = subprocess.run(command, env=env, input=sent, capture_output=True, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        fields["Content-Length"] = str(len(body))
        self.host.largest = max(self.host.largest, len(body))
        self.answer(int(fields.pop("Status", "200").split()[0]), body[: self.host.limit], **fields)

    do_POST = do_GET  # noqa: N815
