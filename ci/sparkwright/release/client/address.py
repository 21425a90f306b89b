"""
Where an index is, and small files from it, bounded in bytes and in time.

Nothing that comes from here is believed: the manifest is checked by its signature, all else by its hash. The bounds keep a server
from holding up or filling the machine before that.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from sparkwright.errors import IndexMissing, Offline, SourceUnreachable, SparkwrightError
from sparkwright.forks.packageindex import shown
from sparkwright.forks.session import Outside, config
from sparkwright.release.signing import trust
from sparkwright.store import reading

if TYPE_CHECKING:
    import requests

#: A server may be slow, not endless: seconds for a whole small file, whatever it trickles.
PATIENCE = 60.0
PIECE = 1 << 16

_KEPT = threading.local()


class Address(msgspec.Struct, frozen=True):
    """
    An index.

    Attributes:
        url: With a final slash; empty for a folder. *reached*: the same after the user's mirror map.
        folder: Where it lies on this machine, or None.
    """

    url: str = ""
    reached: str = ""
    folder: Path | None = None

    def __str__(self) -> str:
        return shown(self.url) if self.folder is None else str(self.folder)

    def of(self, name: str) -> str:
        """Return where *name*, a path below the root or an absolute URL, lies: a URL, ``file://`` ones for a folder."""
        if "://" in name:
            return name
        return (self.folder / name).as_uri() if self.folder is not None else urljoin(self.reached, name)


def find(named: str, session: Outside) -> Address:
    """
    Return the index *named* on the command line, or else by SPARKWRIGHT_RELEASES, by the user's configuration, or by the installer.

    Raises:
        IndexMissing: None of them names one, or it is neither a URL nor a folder.
    """
    carried = trust.carried()
    text = named or os.environ.get("SPARKWRIGHT_RELEASES", "") or config().releases or (carried.index if carried else "")
    if not text:
        raise IndexMissing("Nothing says where the index of releases is.")
    parts = urlsplit(text)
    if parts.scheme in ("http", "https") and parts.netloc:
        url = text.rstrip("/") + "/"
        reached = session.mirrored(url)
        return Address(url, reached) if not reached.startswith("file:") else Address(url, "", _path(reached))
    folder = _path(text) if parts.scheme == "file" else Path(text)
    if not folder.is_dir():
        raise IndexMissing(f"{shown(text)} is neither a URL nor a folder.")
    return Address(folder=folder.absolute())


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def small(address: Address, name: str, *, most: int, failure: type[SparkwrightError], offline: bool = False) -> bytes | None:
    """
    Return the file *name* of at most *most* bytes; None where there is none.

    Raises:
        failure: It is larger, or the server sends elsewhere for it.
        SourceUnreachable: The server does not answer, breaks off, or is too slow. Offline: It may not be asked.
    """
    if address.folder is not None:
        return _local(address.folder / name, most, failure)
    url = address.of(name)
    if offline:
        raise Offline(f"{shown(url)} would have to be asked.")
    return _remote(url, most, failure)


def _local(path: Path, most: int, failure: type[SparkwrightError]) -> bytes | None:
    try:
        with reading(path) as stream:
            data = stream.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceUnreachable(f"{path} cannot be read.", details=[str(error)]) from error
    return _bounded(data, str(path), most, failure)


def _bounded(data: bytes | bytearray, where: str, most: int, failure: type[SparkwrightError]) -> bytes:
    if len(data) > most:
        raise failure(f"{where} is larger than such a file can be.", details=[f"bound: {most} bytes"])
    return bytes(data)


def _remote(url: str, most: int, failure: type[SparkwrightError]) -> bytes | None:
    import requests
    from urllib3.exceptions import HTTPError

    try:
        # The address is signed with the manifest, so another one that a server sends to is not it.
        with _http().get(url, stream=True, timeout=(20, PATIENCE), allow_redirects=False) as reply:
            if reply.is_redirect or 300 <= reply.status_code < 400:
                to = shown(reply.headers.get("Location", "nowhere"))
                raise failure(f"{shown(url)} sends elsewhere, which is not followed.", details=[f"to: {to[:200]}"])
            if reply.status_code in (404, 410):
                return None
            reply.raise_for_status()
            return _taken(reply, shown(url), most, failure)
    except (requests.RequestException, HTTPError) as error:
        raise SourceUnreachable(f"{shown(url)} cannot be had.", details=[shown(str(error))]) from error


def _http() -> requests.Session:
    """Return this thread's session, so that the dozens of small files of a release come over one connection."""
    from sparkwright.forks.download import http

    if not hasattr(_KEPT, "session"):
        _KEPT.session = http()
    session: requests.Session = _KEPT.session
    return session


def _taken(reply: requests.Response, where: str, most: int, failure: type[SparkwrightError]) -> bytes:
    until, data = time.monotonic() + PATIENCE, bytearray()
    # One byte or many: whatever came is handed on, so that the clock is looked at while a server trickles.
    while piece := reply.raw.read1(PIECE):
        data += piece
        if len(data) > most:
            break
        if time.monotonic() > until:
            raise SourceUnreachable(f"{where} did not arrive within {PATIENCE:.0f} s.", details=[f"arrived: {len(data)} bytes"])
    _bounded(data, where, most, failure)
    length = reply.headers.get("Content-Length", "")
    if length.isdigit() and len(data) < int(length):
        raise SourceUnreachable(f"{where} broke off.", details=[f"arrived: {len(data)} of {length} bytes"])
    return bytes(data)
