"""
The files of a set in the user's cache: several at a time, resumed if interrupted, and by hash.

A file in the cache is hashed again whenever it is used, and nothing is taken from elsewhere by a
link: its bytes are copied.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sparkwright.client.errors import ClientError
from sparkwright.client.folders import locked, own_folder
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.core import files, http
from sparkwright.core.console import Progress, console
from sparkwright.core.errors import StoreError
from sparkwright.core.store import flush, translate_disk_full

#: Transfers at once.
CONNECTIONS = 8


def check_room(folder: Path, size: int) -> None:
    """Raise `disk-full` unless *size* bytes fit where *folder* lies."""
    free = shutil.disk_usage(folder).free
    if size > free:
        what = f"{folder} has no room for {size / 1e6:,.1f} MB."
        raise StoreError("disk-full", what, details=[f"free: {free / 1e6:,.1f} MB"])


def obtain(cache: Path, wheels: Sequence[LockedWheel]) -> dict[str, Path]:
    """
    Return where the *wheels* lie in *cache*, by project; their addresses are absolute.

    Raises:
        download-invalid: Other bytes arrived. index-damaged: A file does not exist.
        index-unreachable: A server does not answer, or is too slow. disk-full: There is no room.
    """
    with locked(own_folder(cache)):
        places = {wheel.project: _place(cache, wheel) for wheel in wheels}
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            valid = list(pool.map(_is_valid, wheels, places.values()))
        absent = [wheel for wheel, present in zip(wheels, valid, strict=True) if not present]
        total = sum(wheel.size for wheel in absent)
        check_room(cache, total)
        if absent:
            console.note(f"{len(absent)} of {len(wheels)} wheels to download")
        with console.progress("wheels", total, "bytes") as line:
            _Transfers(line).run(absent, places)
    return places


def _place(cache: Path, wheel: LockedWheel) -> Path:
    return own_folder(cache, "wheels", wheel.sha256) / wheel.name


def _is_valid(wheel: LockedWheel, path: Path) -> bool:
    if not path.is_symlink() and path.is_file() and files.sha256_file(path) == wheel.sha256:
        return True
    path.unlink(missing_ok=True)
    return False


class _Transfers:
    """Transfers that share a progress line and end together if one of them fails."""

    def __init__(self, line: Progress) -> None:
        self._line, self._done, self._lock = line, dict[str, int](), threading.Lock()
        self._stopped = threading.Event()

    def run(self, wheels: Sequence[LockedWheel], places: dict[str, Path]) -> None:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            # The largest first: a small file at the end delays the whole less.
            ordered = sorted(wheels, key=lambda wheel: -wheel.size)
            transfers = [
                pool.submit(self._bring, wheel, places[wheel.project]) for wheel in ordered
            ]
            try:
                for transfer in transfers:
                    transfer.result()
            except BaseException:
                self._stopped.set()
                for transfer in transfers:
                    transfer.cancel()
                raise

    def _advance(self, wheel: LockedWheel, done: int) -> None:
        with self._lock:
            self._done[wheel.project] = done
            self._line.update(sum(self._done.values()), wheel.name)

    def _bring(self, wheel: LockedWheel, path: Path) -> None:
        """Bring the file to *path*; if it is wrong, once more from its beginning."""
        partial = path.with_name(f"{path.name}.part")
        for _ in range(2):
            if partial.is_symlink() or (partial.exists() and partial.stat().st_nlink > 1):
                partial.unlink()
            if urlsplit(wheel.url).scheme == "file":
                self._copy(wheel, partial)
            else:
                self._download(wheel, partial)
            arrived = files.sha256_file(partial)
            if arrived == wheel.sha256:
                os.replace(partial, path)
                flush(path.parent)
                return
            partial.unlink()
        raise ClientError(
            "download-invalid",
            f"{wheel.name} arrived with other bytes than the signed release names.",
            details=[f"expected: {wheel.sha256}", f"arrived:  {arrived}"],
        )

    def _copy(self, wheel: LockedWheel, partial: Path) -> None:
        source = Path(unquote(urlsplit(wheel.url).path))
        partial.unlink(missing_ok=True)
        if not source.is_file() or wheel.size not in (0, source.stat().st_size):
            what = f"{source} is not the file that the index names."
            raise ClientError("index-damaged", what, details=[f"expected: {wheel.size} bytes"])
        with (
            translate_disk_full(partial.parent),
            files.reading(source) as stream,
            partial.open("xb") as sink,
        ):
            shutil.copyfileobj(stream, sink, 1 << 20)
        self._advance(wheel, partial.stat().st_size)

    def _download(self, wheel: LockedWheel, partial: Path) -> None:
        def advance(done: int, _total: int) -> None:
            self._advance(wheel, done)

        try:
            http.download(
                wheel.url, partial, size=wheel.size, on_progress=advance, stopped=self._stopped
            )
        except http.HttpFailure as failure:
            name = http.redact_credentials(wheel.url)
            if failure.status in (404, 410):
                raise ClientError("index-damaged", f"{name} does not exist.") from None
            invalid = failure.kind in ("broken", "redirect", "size")
            reference = "download-invalid" if invalid else "index-unreachable"
            what = f"{name} cannot be downloaded whole."
            raise ClientError(reference, what, details=[str(failure)]) from None
