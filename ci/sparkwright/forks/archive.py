"""
Source archives, read without unpacking.

An archive is hostile: a member may climb out of its folder, be a link that leaves it, a device, or promise less than it
holds. Everything is checked here before a byte reaches the object store; nothing is written to a path that a member names.
"""

from __future__ import annotations

import posixpath
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.errors import ArchiveUnsafe
from sparkwright.git import EXECUTABLE, LINK, REGULAR

#: A whole CUTLASS or vLLM source is below 1 GB in 20,000 files; what exceeds these is not a source.
MOST_FILES = 200_000
MOST_BYTES = 4 * 1024**3


class Member(msgspec.Struct, frozen=True):
    """A file of an archive: its path below the archive's top folder, its git mode, and its bytes (a link's are its target)."""

    path: str
    mode: str
    data: bytes


def safe_path(name: str, origin: str) -> str:
    """
    Return the member name *name*, known to stay inside its folder.

    Raises:
        ArchiveUnsafe: It is absolute, climbs with ``..``, hides in ``.git``, or has a character no source path has.
    """
    parts = name.split("/")
    bad = name.startswith("/") or "\\" in name or any(ord(letter) < 32 for letter in name) or len(name) > 1024
    if bad or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        raise ArchiveUnsafe(f"{origin} has a member that would leave its folder.", details=[f"member: {name!r}"])
    return name


def _check_link(path: str, target: str, origin: str) -> None:
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if target.startswith("/") or "\\" in target or reached == ".." or reached.startswith("../"):
        raise ArchiveUnsafe(f"{origin} has a link that leaves its folder.", details=[f"member: {path!r}", f"points to: {target!r}"])


class _Budget:
    """Counts files and bytes against the limits, and refuses a second member of the same path."""

    def __init__(self, origin: str) -> None:
        self.origin, self.bytes = origin, 0
        self.seen: set[str] = set()

    def spend(self, path: str, count: int) -> None:
        self.bytes += count
        if path in self.seen:
            raise ArchiveUnsafe(f"{self.origin} holds the same path twice.", details=[f"member: {path!r}"])
        self.seen.add(path)
        if len(self.seen) > MOST_FILES or self.bytes > MOST_BYTES:
            raise ArchiveUnsafe(f"{self.origin} is larger than any source: over {MOST_FILES} files or {MOST_BYTES} bytes.")


def sdist_members(archive: Path) -> Iterator[Member]:
    """
    Yield the files of the source distribution *archive* (``.tar.gz``), its single top folder taken away.

    Raises:
        ArchiveUnsafe: A member is unsafe (module docstring), or the archive is damaged.
    """
    origin, top = archive.name, ""
    budget = _Budget(origin)
    try:
        with tarfile.open(archive, mode="r|gz") as tar:
            for info in tar:
                name = safe_path(info.name.rstrip("/").removeprefix("./"), origin)
                head, _, path = name.partition("/")
                top = top or head
                if head != top:
                    raise ArchiveUnsafe(f"{origin} has more than one top folder.", details=[top, head])
                if info.isdir() or not path:
                    continue
                if info.issym():
                    _check_link(path, info.linkname, origin)
                    budget.spend(path, len(info.linkname))
                    yield Member(path, LINK, info.linkname.encode())
                elif info.isreg():
                    budget.spend(path, info.size)
                    stream = tar.extractfile(info)
                    assert stream is not None
                    yield Member(path, EXECUTABLE if info.mode & 0o100 else REGULAR, stream.read())
                else:
                    raise ArchiveUnsafe(f"{origin} has a member that is no file, folder or symbolic link.", details=[f"member: {name!r}"])
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ArchiveUnsafe(f"{origin} is damaged.", details=[str(error)]) from error


def wheel_members(archive: Path, folder: str) -> Iterator[Member]:
    """
    Yield the files below *folder* of the wheel *archive*; modes inside wheels carry no meaning for headers.

    Raises:
        ArchiveUnsafe: A member is unsafe, the archive is damaged, or the folder is not in it.
    """
    origin = archive.name
    budget = _Budget(origin)
    try:
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if info.is_dir():
                    continue
                name = safe_path(info.filename, origin)
                if not name.startswith(folder + "/"):
                    continue
                path = name.removeprefix(folder + "/")
                budget.spend(path, info.file_size)
                with zipped.open(info) as stream:
                    data = stream.read(info.file_size + 1)
                if len(data) != info.file_size:
                    raise ArchiveUnsafe(f"{origin} holds more than it admits to.", details=[f"member: {name!r}"])
                yield Member(path, REGULAR, data)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ArchiveUnsafe(f"{origin} is damaged.", details=[str(error)]) from error
    if not budget.seen:
        raise ArchiveUnsafe(f"{origin} has no folder {folder!r}.")
