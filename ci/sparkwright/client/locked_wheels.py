"""
The wheels of a locked set (``pylock.toml``, PEP 751), and how they come into the user's cache.

A lock is read as hostile: only wheels with a sha256 at an address are accepted; archives,
directories, repositories, extras and whatever else the format has are refused.

Wheels are known by hash alone: a cached file is hashed again, and uv hashes every wheel that it
unpacks. The wheels of an index in a folder are used in place.
"""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from sparkwright.client.errors import ClientError
from sparkwright.client.folders import check_room, own_folder
from sparkwright.core import files, http
from sparkwright.core.console import console
from sparkwright.core.store import flush

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.pylock import PackageWheel, Pylock
    from packaging.tags import Tag

#: Transfers at once, and seconds for all files of a set together: 12 GB at 1 MB/s.
CONNECTIONS, SECONDS = 8, 12_000.0

#: What a status or a kind of failure of a download means.
_REFERENCES: dict[int | str, str] = {
    404: "index-damaged",
    410: "index-damaged",
    "broken": "download-invalid",
    "redirect": "download-invalid",
    "size": "download-invalid",
}
#: No file name has more than 255 bytes, and while it arrives, ``.part`` follows.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,245}\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class LockedWheel(msgspec.Struct, frozen=True, order=True):
    """
    A wheel of a locked set.

    Attributes:
        project: The normalised name.
        url: Absolute, or relative to the root of the index.
        size: In bytes; 0 if the lock does not state it.
    """

    project: str
    version: str
    name: str
    url: str
    sha256: str
    size: int = 0


def read(data: bytes, what: str) -> Pylock:
    """
    Return the lock in *data*; *what* names it in messages.

    Raises:
        lock-invalid: It is not one, or holds something else than wheels with hashes and addresses.
    """
    from packaging.pylock import Pylock, PylockValidationError

    try:
        lock = Pylock.from_dict(tomllib.loads(data.decode("utf-8")))
        faults = [
            f"{package.name}: not wheels alone, or one without version, name, sha256 or usable"
            " address"
            for package in lock.packages
            if package.version is None
            or package.sdist
            or package.is_direct
            or not package.wheels
            or not all(map(_is_usable, package.wheels))
        ]
    except (ValueError, PylockValidationError, RecursionError, TypeError, AttributeError) as error:
        raise ClientError(
            "lock-invalid", f"{what} is no pylock.toml.", details=[str(error)[:1000]]
        ) from error
    if lock.extras or lock.dependency_groups or lock.default_groups:
        faults.append("it leaves a choice: extras or groups")
    if faults:
        raise ClientError(
            "lock-invalid", f"{what} is no lock of wheels with hashes.", details=faults[:20]
        )
    return lock


def _is_usable(wheel: PackageWheel) -> bool:
    """Return whether *wheel* has a sha256, and an address without credentials on a server."""
    address = urlsplit(wheel.url or "")
    inside = not address.netloc and ".." not in re.split(r"[/\\]", address.path)
    return bool(
        _FILE.fullmatch(_name(wheel))
        and _SHA256.fullmatch(wheel.hashes.get("sha256", ""))
        and wheel.url
        and not wheel.path
        and (address.scheme in ("https", "http") or (not address.scheme and inside))
        and not (address.username or address.password)
        and (wheel.size or 0) >= 0
    )


def _name(wheel: PackageWheel) -> str:
    return wheel.name or unquote(urlsplit(wheel.url or "").path.rpartition("/")[2])


def select(
    lock: Pylock, tags: Sequence[Tag], markers: Environment, what: str
) -> tuple[LockedWheel, ...]:
    """
    Return one wheel of each package that the lock selects for a Python, by project.

    Args:
        tags: The wheel tags that this Python accepts, best first.
        markers: The values of environment markers (PEP 508).

    Raises:
        release-unknown: The lock is not for this Python, or has no wheel of a package for it.
    """
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
    from packaging.pylock import PackageWheel, PylockSelectError
    from packaging.utils import canonicalize_name

    try:
        chosen = list(lock.select(environment=markers, tags=list(tags)))
    except (PylockSelectError, UndefinedComparison, UndefinedEnvironmentName, KeyError) as error:
        raise ClientError(
            "release-unknown",
            f"{what} has no set for Python {markers.get('python_full_version')} on this machine.",
            details=[str(error)],
            todo="Run the client with another; `sparkwright list` shows those that it is for.",
        ) from error
    return tuple(
        sorted(
            LockedWheel(
                canonicalize_name(package.name),
                str(package.version),
                _name(wheel),
                wheel.url or "",
                wheel.hashes["sha256"],
                wheel.size or 0,
            )
            for package, wheel in chosen
            if isinstance(wheel, PackageWheel)
        )
    )


def obtain(cache: Path, wheels: Sequence[LockedWheel]) -> list[Path]:
    """
    Return where each of *wheels* lies; their addresses are absolute, and the lock of *cache* is
    held.

    Raises:
        download-invalid: Other bytes arrived. index-damaged: A file does not exist, or is not the
            one that the index names.
        index-unreachable: A server does not answer, or is too slow. disk-full: There is no room.
    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        paths = [_path(cache, wheel) for wheel in wheels]
        valid = pool.map(_is_valid, wheels, paths)
        pairs = [
            (wheel, path)
            for wheel, path, good in zip(wheels, paths, valid, strict=True)
            if not good
        ]
        size, stopped = sum(wheel.size for wheel, _ in pairs), threading.Event()
        parts = [part for part in (_partial(path) for _, path in pairs) if part.is_file()]
        check_room(cache, size - sum(part.stat().st_size for part in parts))
        arrived = {wheel.sha256: 0 for wheel, _ in pairs}
        with console.progress("wheels", size, "bytes") as line:

            def bring(wheel: LockedWheel, path: Path) -> None:
                def advance(count: int, _total: int) -> None:
                    arrived[wheel.sha256] = count
                    line.update(sum(arrived.values()), wheel.name)

                _download(wheel, path, advance, stopped)

            futures = [pool.submit(bring, *pair) for pair in pairs]
            try:
                for future in as_completed(futures, SECONDS):
                    future.result()
            except TimeoutError as error:
                raise ClientError(
                    "index-unreachable", f"Not every wheel arrived within {SECONDS:g} s."
                ) from error
            finally:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
    return paths


def _path(cache: Path, wheel: LockedWheel) -> Path:
    address = urlsplit(wheel.url)
    if address.scheme == "file":
        return Path(unquote(address.path))
    return own_folder(cache, "wheels", wheel.sha256) / wheel.name


def _is_valid(wheel: LockedWheel, path: Path) -> bool:
    local = urlsplit(wheel.url).scheme == "file"
    regular = path.is_file() and (local or not path.is_symlink())
    # A file with holes could be larger than any disk.
    sized = regular and wheel.size in (0, path.stat().st_size)
    if sized and files.sha256_file(path) == wheel.sha256:
        return True
    if local:
        raise ClientError("index-damaged", f"{path} is not the file that the index names.")
    path.unlink(missing_ok=True)
    return False


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _download(
    wheel: LockedWheel,
    path: Path,
    on_progress: Callable[[int, int], None],
    stopped: threading.Event,
) -> None:
    """Download *wheel* to *path*."""
    partial = _partial(path)
    if partial.is_symlink() or (partial.exists() and partial.stat().st_nlink > 1):
        partial.unlink()
    try:
        arrived = http.download(
            wheel.url,
            partial,
            wheel.sha256,
            size=wheel.size,
            on_progress=on_progress,
            stopped=stopped,
        )
    except http.HttpFailure as failure:
        raise ClientError(
            _REFERENCES.get(failure.status or failure.kind, "index-unreachable"),
            f"{http.redact_credentials(wheel.url)} cannot be downloaded.",
            details=[str(failure)],
        ) from None
    if arrived != wheel.sha256:
        raise ClientError(
            "download-invalid",
            f"{wheel.name} arrived with other bytes than the signed release names.",
            details=[f"expected: {wheel.sha256}", f"arrived:  {arrived}"],
        )
    os.replace(partial, path)
    flush(path.parent)
