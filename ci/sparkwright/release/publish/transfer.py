"""Large files to and from GitHub: streamed, bounded in time, and hashed on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sparkwright.core import http
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError
from sparkwright.core.github import GitHub
from sparkwright.core.http import HttpFailure, Reply
from sparkwright.core.store import translate_disk_full
from sparkwright.release.errors import InstallError
from sparkwright.release.publish.hosts import Moved

#: Bytes a second below which a transfer is given up, and the seconds that each transfer has beside that.
SLOWEST, GRACE = 50_000, 300.0
CHUNK = 1 << 16
_BINARY = "application/octet-stream"


class Body:
    """A file on its way out, hashed and counted as it is read; its length becomes the Content-Length."""

    def __init__(self, stream: IO[bytes], size: int, name: str, moved: Moved) -> None:
        self._stream, self._size, self._name, self._moved = stream, size, name, moved
        self.hash = hashlib.sha256()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(CHUNK), b"")

    def read(self, count: int = CHUNK) -> bytes:
        piece = self._stream.read(max(count, CHUNK))
        self.hash.update(piece)
        self._moved(len(piece), self._name)
        return piece


def upload(github: GitHub, url: str, path: Path, moved: Moved) -> tuple[Reply, str]:
    """
    Send the file at *path* to *url* once, and return the reply and the sha256 of what was read.

    Raises:
        HttpFailure: The connection broke; what arrived is not known.
    """
    with path.open("rb") as file:
        body = Body(file, path.stat().st_size, path.name, moved)
        seconds = GRACE + len(body) / SLOWEST
        with http.exchange("POST", url, token=github.token, data=body, headers={"Content-Type": _BINARY}, seconds=seconds) as reply:
            reply.read()
            return reply, body.hash.hexdigest()


def fetch(url: str, path: Path, size: int, sha256: str) -> None:
    """
    Bring the published file at *url* to *path*, as everybody can.

    Raises:
        download-invalid: Other bytes came.
        github-unreachable: None came.
    """
    try:
        progress = console.progress(f"fetch {path.name}", size, "bytes")
        with path.open("wb") as sink, translate_disk_full(path.parent), progress as line:
            count, found = download(
                GitHub(), url, size, path.name, lambda _, name: line.update(sink.tell(), name), sink
            )
    except HttpFailure as failure:
        raise GitHubError("github-unreachable", f"{path.name} cannot be fetched.", details=[str(failure)]) from None
    if (count, found) != (size, sha256):
        details = [f"came:   {count} bytes, {found}", f"wanted: {size} bytes, {sha256}"]
        raise InstallError("download-invalid", f"{path.name} is not what was published.", details=details)


def download(
    github: GitHub, url: str, size: int, name: str, moved: Moved, sink: IO[bytes] | None = None
) -> tuple[int, str]:
    """
    Return how many bytes came of the file at *url*, and their sha256; a longer file is not read to its end.

    Args:
        sink: Where the bytes are written, if anywhere.

    Raises:
        github-unreachable: The status is not 200.
        HttpFailure: The connection broke, or a redirect is not followed.
    """
    found, count = hashlib.sha256(), 0
    # Files lie behind a redirect to another host, which must not see the token.
    seconds = GRACE + size / SLOWEST
    with http.exchange("GET", url, token=github.token, headers={"Accept": _BINARY}, redirects=True, seconds=seconds) as stream:
        if stream.status != 200:
            details = [f"answered {stream.status}"]
            raise GitHubError("github-unreachable", f"{name} cannot be read back.", details=details)
        for piece in stream.pieces(size + CHUNK):
            found.update(piece)
            count += len(piece)
            if sink:
                sink.write(piece)
            moved(len(piece), name)
            if count > size:
                break
    return count, found.hexdigest()
