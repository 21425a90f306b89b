"""
The wheels of a set: downloaded to the user's cache, several at a time, and known by hash alone.

A cached file is hashed again unless its time is that of the last check; uv hashes every wheel that
it unpacks. The wheels of an index in a folder are used in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sparkwright.client.errors import ClientError
from sparkwright.client.folders import LOCK, own_folder
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.core import files, http
from sparkwright.core.console import Progress, console
from sparkwright.core.errors import StoreError
from sparkwright.core.store import flush, locked

#: Transfers at once, and seconds for all files of a set together: 12 GB at 1 MB/s.
CONNECTIONS, SECONDS = 8, 12_000.0


def check_room(folder: Path, size: int) -> None:
    """Raise `disk-full` unless *size* bytes fit where *folder* lies."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StoreError(
            "disk-full",
            f"{folder} has no room for {size / 1e6:,.1f} MB.",
            details=[f"free: {free / 1e6:,.1f} MB"],
        )


def obtain(cache: Path, wheels: Sequence[LockedWheel], checked: Mapping[str, int]) -> list[Path]:
    """
    Return where each of *wheels* lies; their addresses are absolute.

    Args:
        checked: The sha256 of files that were checked before → their times then, in ns.

    Raises:
        download-invalid: Other bytes arrived. index-damaged: A file does not exist, or is not the
            one that the index names.
        index-unreachable: A server does not answer, or is too slow. disk-full: There is no room.
    """
    with (
        locked(own_folder(cache) / LOCK, str(cache)),
        ThreadPoolExecutor(CONNECTIONS) as pool,
    ):
        places = [_place(cache, wheel) for wheel in wheels]
        times = [checked.get(wheel.sha256, 0) for wheel in wheels]
        valid = list(pool.map(_is_valid, wheels, places, times))
        pairs = [
            pair
            for pair, good in zip(zip(wheels, places, strict=True), valid, strict=True)
            if not good
        ]
        # The largest first: a small file at the end delays the whole less.
        pairs.sort(key=lambda pair: -pair[0].size)
        check_room(cache, sum(wheel.size for wheel, _ in pairs))
        with console.progress("wheels", sum(wheel.size for wheel, _ in pairs), "bytes") as line:
            transfers = _Transfers(line)
            futures = [pool.submit(transfers.bring, *pair) for pair in pairs]
            try:
                ended = wait(futures, SECONDS, FIRST_EXCEPTION)
                for future in ended.done:
                    future.result()
                if ended.not_done:
                    raise ClientError(
                        "index-unreachable",
                        f"{len(ended.not_done)} wheels did not arrive within {SECONDS:g} s.",
                    )
            finally:
                transfers.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
    return places


def _place(cache: Path, wheel: LockedWheel) -> Path:
    address = urlsplit(wheel.url)
    if address.scheme == "file":
        return Path(unquote(address.path))
    return own_folder(cache, "wheels", wheel.sha256) / wheel.name


def _is_valid(wheel: LockedWheel, path: Path, time: int) -> bool:
    local = urlsplit(wheel.url).scheme == "file"
    regular = path.is_file() and (local or not path.is_symlink())
    with contextlib.suppress(OSError):
        # A file with holes could be larger than any disk.
        state = path.stat()
        sized = regular and wheel.size in (0, state.st_size)
        if sized and (state.st_mtime_ns == time or files.sha256_file(path) == wheel.sha256):
            return True
    if local:
        raise ClientError("index-damaged", f"{path} is not the file that the index names.")
    path.unlink(missing_ok=True)
    return False


class _Transfers:
    """
    Transfers that share a progress line.

    Attributes:
        stopped: Ends all of them.
    """

    def __init__(self, line: Progress) -> None:
        self._line, self._done, self._lock = line, dict[str, int](), threading.Lock()
        self.stopped = threading.Event()

    def bring(self, wheel: LockedWheel, path: Path) -> None:
        """Download *wheel* to *path*; if it is wrong, once more from its beginning."""

        def advance(done: int, _total: int) -> None:
            with self._lock:
                self._done[wheel.project] = done
                self._line.update(sum(self._done.values()), wheel.name)

        partial, arrived = path.with_name(f"{path.name}.part"), ""
        for _ in range(2):
            if partial.is_symlink() or (partial.exists() and partial.stat().st_nlink > 1):
                partial.unlink()
            try:
                http.download(
                    wheel.url, partial, size=wheel.size, on_progress=advance, stopped=self.stopped
                )
            except http.HttpFailure as failure:
                raise _translated(wheel, failure) from None
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


def _translated(wheel: LockedWheel, failure: http.HttpFailure) -> ClientError:
    """Return the failure of a download with its reference."""
    reference = "index-unreachable"
    if failure.status in (404, 410):
        reference = "index-damaged"
    elif failure.kind in ("broken", "redirect", "size"):
        reference = "download-invalid"
    what = f"{http.redact_credentials(wheel.url)} cannot be downloaded."
    return ClientError(reference, what, details=[str(failure)])
