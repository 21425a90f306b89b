"""
Where an index is, and small files from it, bounded in bytes and in time.

Nothing that comes from here is believed: the manifest is checked by its signature, all else by its hash. The bounds keep a server
from holding up or filling the machine before that.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from sparkwright.core import http
from sparkwright.core.config import config
from sparkwright.core.console import one_line
from sparkwright.core.errors import Failure
from sparkwright.core.files import reading
from sparkwright.core.http import HttpFailure, redact_credentials
from sparkwright.forks.context import StandaloneContext
from sparkwright.forks.stack import SourceError
from sparkwright.release.errors import ReleaseError
from sparkwright.release.signing import trust

#: Seconds for a whole small file.
PATIENCE = 60.0


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
        return redact_credentials(self.url) if self.folder is None else str(self.folder)

    def of(self, name: str) -> str:
        """Return where *name*, a path below the root or an absolute URL, lies: a URL, ``file://`` ones for a folder."""
        if "://" in name:
            return name
        return (self.folder / name).as_uri() if self.folder is not None else urljoin(self.reached, name)


def find(named: str, context: StandaloneContext) -> Address:
    """
    Return the index *named* on the command line, or else by SPARKWRIGHT_RELEASES, by the user's configuration, or by the installer.

    Raises:
        index-missing: None of them names one, or it is neither a URL nor a folder.
    """
    carried = trust.carried()
    text = named or os.environ.get("SPARKWRIGHT_RELEASES", "") or config().releases or (carried.index if carried else "")
    if not text:
        raise ReleaseError("index-missing", "Nothing says where the index of releases is.")
    parts = urlsplit(text)
    if parts.scheme in ("http", "https") and parts.netloc:
        url = text.rstrip("/") + "/"
        reached = context.mirrored(url)
        return Address(url, reached) if not reached.startswith("file:") else Address(url, "", _path(reached))
    folder = _path(text) if parts.scheme == "file" else Path(text)
    if not folder.is_dir():
        raise ReleaseError("index-missing", f"{redact_credentials(text)} is neither a URL nor a folder.")
    return Address(folder=folder.absolute())


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def small(address: Address, name: str, *, most: int, failure: Failure, offline: bool = False) -> bytes | None:
    """
    Return the file *name* of at most *most* bytes; None where there is none.

    Raises:
        failure: It is larger, or the server sends elsewhere for it.
        source-unreachable: The server does not answer, breaks off, or is too slow. offline: It may not be asked.
    """
    if address.folder is not None:
        return _local(address.folder / name, most, failure)
    url = address.of(name)
    if offline:
        raise SourceError("offline", f"{redact_credentials(url)} would have to be asked.")
    return _remote(url, most, failure)


def _local(path: Path, most: int, failure: Failure) -> bytes | None:
    try:
        with reading(path) as stream:
            data = stream.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceError("source-unreachable", f"{path} cannot be read.", details=[str(error)]) from error
    return _bounded(data, str(path), most, failure)


def _bounded(data: bytes | bytearray, where: str, most: int, failure: Failure) -> bytes:
    if len(data) > most:
        raise failure(f"{where} is larger than such a file can be.", details=[f"bound: {most} bytes"])
    return bytes(data)


def _remote(url: str, most: int, failure: Failure) -> bytes | None:
    name = redact_credentials(url)
    try:
        reply = http.request("GET", url, limit=most, seconds=PATIENCE)
    except HttpFailure as error:
        if error.kind == "size":
            raise failure(f"{name} is larger than such a file can be.", details=[f"bound: {most} bytes"]) from None
        raise SourceError("source-unreachable", f"{name} cannot be fetched.", details=[str(error)]) from None
    # The address is signed with the manifest, so another one that a server redirects to is not it.
    if 300 <= reply.status < 400:
        target = one_line(redact_credentials(reply.headers.get("location", "nowhere")), 200)
        raise failure(f"{name} is redirected, which is not followed.", details=[f"to: {target}"])
    if reply.status in (404, 410):
        return None
    if reply.status != 200:
        raise SourceError("source-unreachable", f"{name} cannot be fetched.", details=[f"answered {reply.status}"])
    return reply.body
