"""
The files of a set, brought into the store: a few at a time, taken up where they broke off, and by hash alone.

A file in the store is hashed again before it is used: disks have faults, and nothing is changed in an environment before all is at hand.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sparkwright.core import http
from sparkwright.core.console import Progress, console
from sparkwright.core.files import sha256_file
from sparkwright.core.http import HttpFailure, redact_credentials
from sparkwright.core.store import translate_disk_full
from sparkwright.forks.context import StandaloneContext
from sparkwright.forks.package_index import path_of
from sparkwright.forks.stack import SourceError
from sparkwright.release.client.state import Pinned
from sparkwright.release.errors import InstallError, ReleaseError

#: Files at once: one connection rarely fills a line, and more than a few help nobody.
LINES = 4


class _Account:
    """What all transfers have brought together, on one line; *stopped* ends the others where one failed."""

    def __init__(self, line: Progress) -> None:
        self._line, self._lock, self._done = line, threading.Lock(), 0
        self.stopped = threading.Event()

    def add(self, count: int, name: str) -> None:
        with self._lock:
            self._done += count
            self._line.update(self._done, name)


def missing(context: StandaloneContext, pinned: Sequence[Pinned]) -> int:
    """Return how many bytes the store lacks of *pinned*, as far as their sizes are known."""
    return sum(one.size for one in pinned if not path_of(context.store, one.sha256, one.filename).is_file())


def obtain(context: StandaloneContext, pinned: Sequence[Pinned]) -> Mapping[str, Path]:
    """
    Return where each of *pinned* lies, by file name, every byte of them verified.

    Raises:
        download-invalid: Other bytes arrived, or fewer, however often it was tried. index-damaged: The server has no such file.
        source-unreachable: It does not answer. offline: The store lacks some, and the network may not be asked. disk-full.
    """
    absent = [one for one in pinned if not path_of(context.store, one.sha256, one.filename).is_file()]
    if context.offline and (far := [one for one in absent if urlsplit(one.url).scheme != "file"]):
        raise SourceError("offline", f"{len(far)} files are not in the store.", details=[one.filename for one in far][:10])
    if absent:
        console.note(f"{len(absent)} of {len(pinned)} files to fetch")
    with console.progress("files", sum(one.size for one in pinned), "bytes") as line, ThreadPoolExecutor(LINES) as pool:
        account = _Account(line)
        # The largest first: a last small file ends the whole sooner than a last large one.
        made = [pool.submit(_one, context, one, account) for one in sorted(pinned, key=lambda one: -one.size)]
        try:
            return {path.name: path for path in (future.result() for future in made)}
        except BaseException:
            account.stopped.set()
            for future in made:
                future.cancel()
            raise


def _one(context: StandaloneContext, one: Pinned, account: _Account) -> Path:
    path = path_of(context.store, one.sha256, one.filename)
    with context.store.lock(f"download-{one.sha256[:16]}"):
        if path.is_file():
            if sha256_file(path) == one.sha256:
                account.add(path.stat().st_size, one.filename)
                return path
            console.warn(f"{path} was damaged in the store, and is fetched again")
            path.unlink()
        if context.offline and urlsplit(one.url).scheme != "file":
            raise SourceError("offline", f"{one.filename} is not in the store.")
        partial = context.store.folder("downloads", one.sha256) / f"{one.filename}.part"
        with translate_disk_full(partial.parent):
            _bring(context, one, partial, account)
        os.replace(partial, path)
    return path


def _bring(context: StandaloneContext, one: Pinned, partial: Path, account: _Account) -> None:
    """Bring the file to *partial*; what is wrong is fetched once more from the beginning, in case the beginning was wrong."""
    found = ""
    for _ in range(2):
        if urlsplit(one.url).scheme == "file":
            _copy(one, partial, account)
        else:
            _resume(context.mirrored(one.url), one, partial, account)
        if (found := sha256_file(partial)) == one.sha256:
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


#: The failures that a server causes with what it sends, as against one that is not reached.
_INVALID = frozenset(("broken", "redirect", "size"))


def _resume(url: str, pinned: Pinned, partial: Path, account: _Account) -> None:
    counted = 0

    def advance(done: int, _total: int) -> None:
        nonlocal counted
        account.add(done - counted, pinned.filename)
        counted = done

    try:
        http.download(url, partial, size=pinned.size, on_progress=advance, stopped=account.stopped)
    except HttpFailure as failure:
        name, present = redact_credentials(url), partial.stat().st_size if partial.exists() else 0
        details = [str(failure), f"kept: {present} of {pinned.size or 'unknown'} bytes in {partial}"]
        if failure.status in (404, 410):
            raise ReleaseError("index-damaged", f"{name} does not exist.", details=details) from None
        if failure.kind in _INVALID:
            todo = "Run again: what arrived is kept. If it ends at the same point each time, avoid the proxy between."
            what = f"{name} cannot be downloaded whole."
            raise InstallError("download-invalid", what, details=details, todo=todo) from None
        raise SourceError("source-unreachable", f"{name} cannot be downloaded.", details=details) from None
