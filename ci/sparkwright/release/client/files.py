"""
The files of a set, brought into the store: a few at a time, taken up where they broke off, and by hash alone.

A file in the store is hashed again before it is used: disks have faults, and nothing is changed in an environment before all is at hand.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sparkwright.core import digest
from sparkwright.core.console import Progress, console
from sparkwright.core.store import room_guard
from sparkwright.forks.context import Outside
from sparkwright.forks.download import ATTEMPTS, CHUNK, http, path_of
from sparkwright.forks.errors import SourceError
from sparkwright.forks.package_index import shown
from sparkwright.release.client.state import Pinned
from sparkwright.release.errors import InstallError, ReleaseError

if TYPE_CHECKING:
    import requests

#: Files at once: one connection rarely fills a line, and more than a few help nobody.
LINES = 4
#: Seconds before another attempt, times how many brought nothing.
PAUSE = 1.0
#: Where nothing says how large a file is; the largest wheels on the package index are below it.
LARGEST = 4 << 30


class _Account:
    """What all transfers have brought together, on one line; *stopped* ends the others where one failed."""

    def __init__(self, line: Progress) -> None:
        self._line, self._lock, self._done = line, threading.Lock(), 0
        self.stopped = threading.Event()

    def add(self, count: int, name: str) -> None:
        with self._lock:
            self._done += count
            self._line.update(self._done, name)


def missing(session: Outside, pinned: Sequence[Pinned]) -> int:
    """Return how many bytes the store lacks of *pinned*, as far as their sizes are known."""
    return sum(one.size for one in pinned if not path_of(session.store, one.sha256, one.filename).is_file())


def obtain(session: Outside, pinned: Sequence[Pinned]) -> Mapping[str, Path]:
    """
    Return where each of *pinned* lies, by file name, every byte of them verified.

    Raises:
        download-invalid: Other bytes arrived, or fewer, however often it was tried. index-damaged: The server has no such file.
        source-unreachable: It does not answer. offline: The store lacks some, and the network may not be asked. disk-full.
    """
    absent = [one for one in pinned if not path_of(session.store, one.sha256, one.filename).is_file()]
    if session.offline and (far := [one for one in absent if urlsplit(one.url).scheme != "file"]):
        raise SourceError("offline", f"{len(far)} files are not in the store.", details=[one.filename for one in far][:10])
    if absent:
        console.note(f"{len(absent)} of {len(pinned)} files to fetch")
    with console.progress("files", sum(one.size for one in pinned), "bytes") as line, ThreadPoolExecutor(LINES) as pool:
        account = _Account(line)
        # The largest first: a last small file ends the whole sooner than a last large one.
        made = [pool.submit(_one, session, one, account) for one in sorted(pinned, key=lambda one: -one.size)]
        try:
            return {path.name: path for path in (future.result() for future in made)}
        except BaseException:
            account.stopped.set()
            for future in made:
                future.cancel()
            raise


def _one(session: Outside, one: Pinned, account: _Account) -> Path:
    path = path_of(session.store, one.sha256, one.filename)
    with session.store.lock(f"download-{one.sha256[:16]}"):
        if path.is_file():
            if digest.sha256_file(path) == one.sha256:
                account.add(path.stat().st_size, one.filename)
                return path
            console.warn(f"{path} was damaged in the store, and is fetched again")
            path.unlink()
        if session.offline and urlsplit(one.url).scheme != "file":
            raise SourceError("offline", f"{one.filename} is not in the store.")
        partial = session.store.folder("downloads", one.sha256) / f"{one.filename}.part"
        with room_guard(partial.parent):
            _bring(session, one, partial, account)
        os.replace(partial, path)
    return path


def _bring(session: Outside, one: Pinned, partial: Path, account: _Account) -> None:
    """Bring the file to *partial*; what is wrong is fetched once more from the beginning, in case the beginning was wrong."""
    found = ""
    for _ in range(2):
        if urlsplit(one.url).scheme == "file":
            _copy(one, partial, account)
        else:
            _resume(session.mirrored(one.url), one, partial, account)
        if (found := digest.sha256_file(partial)) == one.sha256:
            return
        account.add(-partial.stat().st_size, one.filename)
        partial.unlink()
    raise InstallError(
        "download-invalid",
        f"{one.filename} arrived with other bytes than the signed release names.",
        details=[f"wanted:  {one.sha256}", f"arrived: {found}"],
    )


def _copy(one: Pinned, partial: Path, account: _Account) -> None:
    source = Path(unquote(urlsplit(one.url).path))
    partial.unlink(missing_ok=True)
    try:
        try:
            os.link(source, partial)  # the same bytes twice on one disk would only take room
        except OSError:
            shutil.copyfile(source, partial)
    except FileNotFoundError as error:
        raise ReleaseError("index-damaged", f"{source} is not there.") from error
    account.add(partial.stat().st_size, one.filename)


def _resume(url: str, one: Pinned, partial: Path, account: _Account) -> None:
    import requests
    from urllib3.exceptions import HTTPError

    broke, cut, idle = "", False, 0
    account.add(_size(partial), one.filename)
    with http() as session:
        while idle < ATTEMPTS:
            account.stopped.wait(PAUSE * idle)
            if account.stopped.is_set():
                raise SourceError("source-unreachable", "Another file could not be had.")
            before = _size(partial)
            try:
                if _transfer(session, url, one, partial, account):
                    return
                broke, cut = "the connection closed early", True
            except requests.HTTPError as error:
                gone = error.response.status_code in (404, 410)
                failure = functools.partial(ReleaseError, "index-damaged") if gone else functools.partial(SourceError, "source-unreachable")
                raise failure(f"{shown(url)} cannot be had.", details=[shown(str(error))]) from error
            except (requests.exceptions.InvalidSchema, requests.TooManyRedirects) as error:
                raise InstallError(
                    "download-invalid", f"{shown(url)} sends to a place that is not followed.", details=[shown(str(error))]
                ) from error
            except HTTPError as error:  # of the body: requests wraps those of the head in its own
                broke, cut = shown(str(error)), True
            except requests.RequestException as error:
                broke, cut = shown(str(error)), False
            # A line that breaks often, and brings something each time, gets there.
            idle = 0 if _size(partial) > before else idle + 1
            console.detail(f"{one.filename}: {broke}; trying again")
    details = [broke, f"kept: {_size(partial)} of {one.size or 'unknown'} bytes in {partial}"]
    if cut:
        todo = "Run again: what arrived is kept. If it ends at the same place each time, go round the proxy between."
        raise InstallError("download-invalid", f"{shown(url)} broke off {ATTEMPTS} times.", details=details, todo=todo)
    raise SourceError("source-unreachable", f"{shown(url)} was not reached in {ATTEMPTS} attempts.", details=details)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(session: requests.Session, url: str, one: Pinned, partial: Path, account: _Account) -> bool:
    """Fetch from where *partial* ends; return whether the whole is there now, as far as its size tells."""
    have, most = _size(partial), one.size or LARGEST
    if one.size and have >= one.size:
        return True
    headers = {"Range": f"bytes={have}-"} if have else {}
    with session.get(url, headers=headers, stream=True, timeout=(20, 60)) as reply:
        if reply.status_code == 416:
            return True  # no byte is after what we hold; the hash says whether it is right
        reply.raise_for_status()
        if reply.status_code != 206 or not reply.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            account.add(-have, one.filename)
            have = 0
        length = reply.headers.get("Content-Length", "")
        whole = one.size or (have + int(length) if length.isdigit() else 0)
        if length.isdigit() and have + int(length) < whole:
            details = [
                f"signed: {whole} bytes",
                f"served: {have + int(length)} bytes of {reply.headers.get('Content-Type', 'no type')!r:.80}",
            ]
            raise InstallError("download-invalid", f"{shown(url)} is shorter than the signed release says.", details=details)
        with partial.open("ab" if have else "wb") as sink:
            for chunk in _pieces(reply, account):
                have += len(chunk)
                if have > most:
                    sink.truncate(0)
                    raise InstallError(
                        "download-invalid", f"{shown(url)} is longer than the signed release says.", details=[f"says: {most} bytes"]
                    )
                sink.write(chunk)
                account.add(len(chunk), one.filename)
            sink.flush()
            os.fsync(sink.fileno())
    return have >= whole if whole else True


def _pieces(reply: requests.Response, account: _Account) -> Iterator[bytes]:
    """Yield what arrives; a server that trickles less than 1 kB a second over two minutes counts as broken off."""
    began, came = time.monotonic(), 0
    while (piece := reply.raw.read1(CHUNK)) and not account.stopped.is_set():
        yield piece
        came += len(piece)
        if time.monotonic() - began > 120:
            if came < 120_000:
                return
            began, came = time.monotonic(), 0
