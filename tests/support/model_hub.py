"""A hub of models on loopback: its statements and files, and byte ranges of them, as the real one answers; and how hubs fail."""

import contextlib
import re
from pathlib import Path

from tests.support import loopback

COMMIT = "a" * 40


class ModelHub(loopback.Server):
    """
    Serves the folders below *root*, one for each ORG/NAME.

    Attributes:
        storage: Address to which files are redirected; empty to send them itself.
        ranges: Whether it knows byte ranges.
        token: Without it, files are refused.
        asked: Path, Authorization and Range of each request.
    """

    request_queue_size = 128

    def __init__(self, root: Path) -> None:
        super().__init__(_Handler)
        self.root, self.storage, self.ranges, self.token = root, "", True, ""
        self.asked: list[tuple[str, str, str]] = []
        self.sent = 0

    @property
    def headers_asked(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _, _ in self.asked if path.endswith(".safetensors")]


class _Handler(loopback.Handler):
    server: ModelHub

    def do_GET(self) -> None:  # noqa: N802
        hub, sent = self.server, self.headers.get("Authorization") or ""
        hub.asked.append((self.path, sent, self.headers.get("Range") or ""))
        if hub.token and sent != f"Bearer {hub.token}":
            return self.answer(401, {"error": "gated"})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/revision/main(\?blobs=true)?", self.path):
            folder = hub.root / match[1]
            files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(folder.glob("*"))]
            return self.answer(200, {"sha": COMMIT, "siblings": files}) if files else self.answer(404)
        match = re.fullmatch(rf"/([\w.-]+/[\w.-]+)/resolve/{COMMIT}/([\w.-]+)", self.path)
        if not match or not (path := hub.root / match[1] / match[2]).is_file():
            return self.answer(404)
        if hub.storage:
            return self.answer(302, None, Location=hub.storage + self.path)
        return self.send(path)

    def send(self, path: Path) -> None:
        """Send the file at *path*, or a range of it."""
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "") if self.server.ranges else None
        first, end = (int(asked[1]), min(size, int(asked[2]) + 1)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.end_headers()
        with path.open("rb") as stream, contextlib.suppress(OSError):
            stream.seek(first)
            self.server.sent += self.wfile.write(stream.read(end - first))
