"""Files of the index on this machine's disk: written beside their place, flushed, named once, and read back."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparkwright.core.files import sha256_file
from sparkwright.core.store import flush, translate_disk_full
from sparkwright.release.errors import ReleaseError
from sparkwright.release.publish.hosts import Moved, Observe, unmoved, unobserved

CHUNK = 1 << 20
#: What a killed run may leave beside its place begins so; no published name does.
UNFINISHED = ".unfinished-"


class Folder:
    """
    The folder of an index.

    Args:
        root: The folder; made when missing.
    """

    name = "folder"

    def __init__(self, root: Path, observe: Observe = unobserved) -> None:
        self.root, self._observe = root, observe
        self.sent: list[str] = []
        self.there: list[str] = []

    def ready(self) -> None:
        """Make the folder."""
        with translate_disk_full(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def address(self, place: str) -> str:
        """Return *place* itself: addresses in the index are relative to its root."""
        return place

    def put(self, place: str, path: Path, sha256: str, moved: Moved = unmoved) -> str:
        """See `hosts.Host.put`."""
        if not self._known(place, sha256):
            with path.open("rb") as source:
                self._write(place, iter(lambda: source.read(CHUNK), b""), sha256, moved)
        return place

    def take(self, place: str, path: Path, sha256: str) -> None:
        """Bring the small file at *path* to *place*, too, by a further name for it where the file system has such; `flush` ends it."""
        if self._known(place, sha256):
            return
        there = self.root / place
        self._observe(f"name {place}")
        with translate_disk_full(self.root):
            if (found := sha256_file(path)) != sha256:
                raise ReleaseError("publish-failed", f"{path} is not what it was.", details=[f"now: {found}", f"was: {sha256}"])
            there.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o644)
            _name(path, there, copied=True)
        self.sent.append(place)

    def flush(self, places: Iterable[str]) -> None:
        """Write what was taken, by this run or one before it, and its names through to the disk; nothing may refer to it before."""
        for path in {one for place in places for one in (self.root / place, (self.root / place).parent)}:
            flush(path)

    def finish(self) -> None:
        """Do nothing: what lies in the folder is there for everybody who knows its name."""

    def remove(self, places: tuple[str, ...]) -> None:
        """Remove the files, what killed runs left beside them, and the folders that become empty."""
        for place in places:
            path = self.root / place
            self._observe(f"remove {place}")
            path.unlink(missing_ok=True)
            for left in path.parent.glob(f"{UNFINISHED}*"):
                left.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty, or not there
                path.parent.rmdir()

    def _known(self, place: str, sha256: str) -> bool:
        """Whether the right bytes are at *place* already; other bytes there are an error."""
        path = self.root / place
        if not path.exists():
            return False
        if (found := sha256_file(path)) != sha256:
            raise ReleaseError("wheel-name-taken", f"{place} is there with other bytes.", details=[f"there: {found}", f"to be: {sha256}"])
        self.there.append(place)
        return True

    def _write(self, place: str, pieces: Iterable[bytes], sha256: str, moved: Moved) -> None:
        path = self.root / place
        with translate_disk_full(self.root), _beside(path) as unfinished:
            self._observe(f"write {place}")
            if (found := _flushed(unfinished, pieces, path.name, moved)) != sha256:
                raise ReleaseError(
                    "publish-failed",
                    f"{path.name} changed while it was read.", details=[f"read:    {found}", f"decided: {sha256}"],
                    todo="Publish again, once nothing writes to the wheel any more.",
                )  # fmt: skip
            if (found := _read_back(unfinished)) != sha256:
                raise ReleaseError(
                    "publish-failed", f"The disk does not keep {place}.", details=[f"kept:    {found}", f"written: {sha256}"]
                )
            self._observe(f"name {place}")
            _name(unfinished, path)
        flush(path.parent)
        self.sent.append(place)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a new empty file beside *path*, removed at the end; what killed runs left there goes, too (the caller holds the lock)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{UNFINISHED}*"):
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _flushed(path: Path, pieces: Iterable[bytes], name: str, moved: Moved) -> str:
    """Write *pieces* to *path* and through to the disk, and return their sha256."""
    found = hashlib.sha256()
    with path.open("wb") as sink:
        for piece in pieces:
            found.update(piece)
            sink.write(piece)
            moved(len(piece), name)
        sink.flush()
        os.fchmod(sink.fileno(), 0o644)
        os.fsync(sink.fileno())
    return found.hexdigest()


def _read_back(path: Path) -> str:
    """Return the sha256 of *path* as the disk has it."""
    with path.open("rb") as stream:
        # What was just written would come from memory otherwise, and prove nothing.
        with contextlib.suppress(OSError):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _name(unfinished: Path, path: Path, *, copied: bool = False) -> None:
    """Give the file its name, which must be free; with *copied*, *unfinished* keeps its own where there are no hard links."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise ReleaseError("wheel-name-taken", f"{path.name} appeared while it was written.") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV):
            raise
        # A file system without hard links; nobody else writes here, since the caller holds the lock.
        if path.exists():
            raise ReleaseError("wheel-name-taken", f"{path.name} appeared while it was written.") from None
        if copied:
            with _beside(path) as beside:
                beside.write_bytes(unfinished.read_bytes())
                beside.chmod(0o644)
                os.rename(beside, path)
        else:
            os.rename(unfinished, path)
