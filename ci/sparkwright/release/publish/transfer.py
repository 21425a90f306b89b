"""Large files to and from GitHub: streamed, bounded in time, hashed as they pass, the token only where it belongs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urljoin, urlsplit

from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError
from sparkwright.core.github import LARGEST, REDIRECTS, GitHub, Reply, host_of, one_line, replied
from sparkwright.core.store import room_guard
from sparkwright.release.errors import InstallError
from sparkwright.release.publish.hosts import Moved

#: Bytes a second below which a transfer is given up; a slower line would need hours for one wheel.
SLOWEST = 50_000
#: Seconds that each transfer has beside that, and the longest that one byte is waited for.
GRACE, STALL = 300.0, 60.0
CHUNK = 1 << 16


class Body:
    """A file on its way out, hashed and counted as it is read; requests takes its length for the Content-Length."""

    def __init__(self, stream: IO[bytes], size: int, name: str, moved: Moved) -> None:
        self._stream, self._size, self._name, self._moved = stream, size, name, moved
        self._until = time.monotonic() + GRACE + size / SLOWEST
        self.hash = hashlib.sha256()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(CHUNK), b"")

    def read(self, count: int = CHUNK) -> bytes:
        if time.monotonic() > self._until:
            raise TimeoutError(f"slower than {SLOWEST / 1000:g} kB/s")
        piece = self._stream.read(max(count, CHUNK))
        self.hash.update(piece)
        self._moved(len(piece), self._name)
        return piece


def upload(github: GitHub, url: str, path: Path, moved: Moved) -> tuple[Reply, str]:
    """
    Send the file at *path* to *url* once, and return the reply and the sha256 of what was read.

    Raises:
        OSError, urllib3.exceptions.HTTPError: The connection broke; nobody knows what arrived.
    """
    import requests

    with path.open("rb") as stream:
        body = Body(stream, path.stat().st_size, path.name, moved)
        # requests takes whatever has a length and can be read.
        request = requests.Request("POST", url, data=body, headers={"Content-Type": "application/octet-stream"})
        with github.exchange(request, STALL) as reply:
            said = bytearray()
            while len(said) <= LARGEST and (piece := reply.raw.read1(CHUNK)):
                said += piece
            return replied(reply, bytes(said)), body.hash.hexdigest()


def fetch(url: str, path: Path, size: int, sha256: str) -> None:
    """
    Bring the published file at *url* to *path*, as everybody can.

    Raises:
        download-invalid: Other bytes came. github-unreachable: None came.
    """
    from urllib3.exceptions import HTTPError

    try:
        with path.open("wb") as sink, room_guard(path.parent), console.progress(f"fetch {path.name}", size, "bytes") as line:
            count, found = download(GitHub(), url, size, path.name, lambda _, name: line.update(sink.tell(), name), sink)
    except (OSError, HTTPError) as error:
        raise GitHubError("github-unreachable", f"{path.name} cannot be fetched.", details=[one_line(str(error), 300)]) from None
    if (count, found) != (size, sha256):
        details = [f"came:   {count} bytes, {found}", f"wanted: {size} bytes, {sha256}"]
        raise InstallError("download-invalid", f"{path.name} is not what was published.", details=details)


def download(github: GitHub, url: str, size: int, name: str, moved: Moved, sink: IO[bytes] | None = None) -> tuple[int, str]:
    """
    Return how many bytes came of the file at *url*, and their sha256; one that is longer than *size* is not read to its end.

    Args:
        sink: Where they are kept, if anywhere.

    Raises:
        github-unreachable: Another status than 200, or a redirect that leads nowhere or into the clear.
        OSError, urllib3.exceptions.HTTPError: The connection broke.
    """
    import requests

    place, until = url, time.monotonic() + GRACE + size / SLOWEST
    for _ in range(1 + REDIRECTS):
        request = requests.Request("GET", place, headers={"Accept": "application/octet-stream"})
        # What lies behind a redirect is signed by its address, and another host must not see the token.
        with github.exchange(request, STALL, known=host_of(place) == host_of(url)) as reply:
            if reply.status_code in (301, 302, 303, 307, 308):
                place = _onward(place, reply.headers.get("location", ""), name)
                continue
            if reply.status_code != 200:
                raise GitHubError("github-unreachable", f"{name} cannot be read back.", details=[f"answered {reply.status_code}"])
            found, count = hashlib.sha256(), 0
            while count <= size and (piece := reply.raw.read1(CHUNK)):
                if time.monotonic() > until:
                    raise TimeoutError(f"slower than {SLOWEST / 1000:g} kB/s")
                found.update(piece)
                count += len(piece)
                if sink:
                    sink.write(piece)
                moved(len(piece), name)
            return count, found.hexdigest()
    raise GitHubError("github-unreachable", f"The way to {name} is a circle.")


def _onward(place: str, location: str, name: str) -> str:
    there = urljoin(place, location)
    if urlsplit(there).scheme not in ("https", urlsplit(place).scheme):
        raise GitHubError("github-unreachable", f"The way to {name} leads out of https.", details=["nothing was asked there"])
    return there
