"""An upstream host: git's own server of bare repositories, over HTTP on loopback."""

import functools
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.loopback import Handler, Server


class GitHost(Server):
    """
    Serves every repository of *folder* while its block runs.

    Attributes:
        sound: Whether a request, its path and body given, is answered.
        hangs: Whether the others are kept waiting, in place of a closed connection.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(functools.partial(_Backend, self))
        self.folder = folder
        self.sound: Callable[[str, bytes], bool] = lambda *_: True
        self.hangs = False
        self.closed = threading.Event()

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        super().__exit__(*error)


class _Backend(Handler):
    """Answers as git-http-backend(1) does, which speaks CGI."""

    def __init__(self, host: GitHost, *request: object) -> None:
        self.host = host
        super().__init__(*request)  # type: ignore[arg-type]  # what a server gives its handlers

    def do_GET(self) -> None:  # noqa: N802  http.server calls it so
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
        self.answer(int(fields.pop("Status", "200").split()[0]), body, **fields)

    do_POST = do_GET  # noqa: N815
