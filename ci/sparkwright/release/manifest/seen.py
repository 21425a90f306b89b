"""
Which manifest of each index this machine has seen, so that nobody can serve it an older one, or two of the same serial.

One small file per index in the user's state folder: the cache may be deleted at any time, this should not be.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.core.errors import StoreError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.store import translate_disk_full
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import times
from sparkwright.release.manifest.records import Manifest, Sha256, Time
from sparkwright.release.signing.urls import normalised

#: By how many days this machine's clock may be behind the publisher's; more, and expiry means nothing.
CLOCK_TOLERANCE = 1.0

LARGEST = 64 * 1024


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest manifest of an index that this machine has seen: its serial, sha256 and time, and the URL it is signed for."""

    url: str
    serial: int
    sha256: Sha256
    made: Time


def index_id(url: str) -> str:
    """Return what an index is known by on this machine: the sha256 of the URL that it is signed for, in its one spelling."""
    return sha256_bytes(normalised(url).encode())


def folder() -> Path:
    """Return the state folder: ``SPARKWRIGHT_STATE_DIR``, else the platform's place for state."""
    if named := os.environ.get("SPARKWRIGHT_STATE_DIR"):
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_state_path("sparkwright", appauthor=False))


def check(manifest: Manifest, sha256: str, index: str, now: Time, state: Path | None = None) -> None:
    """
    Refuse a manifest that is older than one that was seen, or that nobody stands for any more; writes nothing.

    Args:
        sha256: Of the file as it is served, signature included. *index*: see `index_id`. *now*: this machine's clock.
        state: Where the machine remembers; None for `folder`.

    Raises:
        manifest-replayed: A newer one was seen. manifest-forked: One of the same serial was seen, and it was another.
        manifest-expired: Its time is over. clock-wrong: This machine's clock cannot tell. state-unusable: The record cannot be read.
    """
    if before := recall(index, state):
        _compare(before, manifest, sha256)
    if (behind := times.days(now, manifest.made)) > CLOCK_TOLERANCE:
        details = [f"clock  {now}", f"signed {manifest.made}"]
        raise ReleaseError("clock-wrong", f"This machine's clock is {behind:.1f} days behind the index {manifest.url}.", details=details)
    if (over := times.days(manifest.expires, now)) >= 0:
        details = [f"serial {manifest.serial}", f"signed {manifest.made}", f"until  {manifest.expires}", f"now    {now}"]
        raise ReleaseError("manifest-expired", f"The manifest of {manifest.url} expired {over:.1f} days ago.", details=details)


def note(manifest: Manifest, sha256: str, index: str, state: Path | None = None) -> None:
    """
    Remember that this manifest was seen (arguments as of `check`); never an older one than is remembered.

    Raises:
        manifest-replayed, manifest-forked: Another run has seen another one meanwhile. state-unusable, disk-full: It cannot be written.
    """
    path = _path(index, state)
    with _held(path):
        if before := recall(index, state):
            _compare(before, manifest, sha256)
            if before.serial == manifest.serial:
                return
        _write(path, msgspec.json.encode(Seen(manifest.url, manifest.serial, sha256, manifest.made)))


def recall(index: str, state: Path | None = None) -> Seen | None:
    """
    Return what was seen of the index, or None where it is new to this machine.

    Raises:
        state-unusable: The record is damaged; a fresh start would let an old manifest pass.
    """
    path = _path(index, state)
    try:
        with path.open("rb") as stream:
            return msgspec.json.decode(stream.read(LARGEST), type=Seen)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError("state-unusable", f"{path} cannot be read.", details=[str(error)]) from error


def _compare(before: Seen, manifest: Manifest, sha256: str) -> None:
    if manifest.serial < before.serial:
        details = [f"seen   serial {before.serial} of {before.made}", f"served serial {manifest.serial} of {manifest.made}"]
        raise ReleaseError(
            "manifest-replayed", f"The manifest of {manifest.url} is older than one that this machine has seen.", details=details
        )
    if manifest.serial == before.serial and sha256 != before.sha256:
        details = [f"seen   {before.sha256}", f"served {sha256}"]
        raise ReleaseError(
            "manifest-forked", f"There are two manifests of {manifest.url} with the serial {manifest.serial}.", details=details
        )


def _path(index: str, state: Path | None) -> Path:
    return (state or folder()) / "seen" / f"{index}.json"


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    from filelock import FileLock

    try:
        with translate_disk_full(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_suffix(".lock"))
            lock.acquire()
    except OSError as error:
        raise StoreError("state-unusable", f"{path.parent} cannot be written.", details=[str(error)]) from error
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")  # alone under the lock; what a killed run left is written over
    try:
        with translate_disk_full(path.parent), temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError("state-unusable", f"{path} cannot be written.", details=[str(error)]) from error
