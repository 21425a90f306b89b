"""
Source archives, read without unpacking.

An archive is hostile: a member may climb out of its folder, be a link that leaves it, a device, or promise less than it
holds. Everything is checked here before a byte reaches the object store; nothing is written to a path that a member names.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

from sparkwright.errors import ArchiveUnsafe, SparkwrightError, WheelInvalid
from sparkwright.git import EXECUTABLE, LINK, REGULAR

#: A whole CUTLASS or vLLM source is below 1 GB in 20,000 files; what exceeds these is not a source.
MOST_FILES = 200_000
MOST_BYTES = 4 * 1024**3

#: What Python's readers raise for bytes that are no archive; each compression has errors of its own.
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, csv.Error, EOFError, ValueError, LookupError,
    OverflowError, RuntimeError,
)  # fmt: skip


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
    if name.startswith("/") or _odd(name) or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        raise ArchiveUnsafe(f"{origin} has a member that would leave its folder.", details=[f"member: {name!r}"])
    return name


def _odd(text: str) -> bool:
    """Has *text* a character that no source path has, or bytes that are not UTF-8 (Python reads them as surrogates)?"""
    return len(text) > 1024 or "\\" in text or any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in text)


def _check_link(path: str, target: str, origin: str) -> None:
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    # A name before ".." may be a link itself, so that the text alone does not say where the two lead.
    leaves = climbs > path.count("/") or ".." in parts[climbs:]
    if not target or target.startswith("/") or _odd(target) or leaves:
        raise ArchiveUnsafe(f"{origin} has a link that leaves its folder.", details=[f"member: {path!r}", f"points to: {target!r}"])


@contextlib.contextmanager
def damage_guard(origin: str, failure: type[SparkwrightError] = ArchiveUnsafe) -> Iterator[None]:
    """Turn what Python's archive readers raise for damaged bytes into *failure*; errors of the disk stay what they are."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        # Readers use OSError for bad bytes, too: without a number, or for a seek to a place that no file has.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise failure(f"{origin} is damaged.", details=[str(error) or type(error).__name__]) from error


def opened(path: Path, failure: type[SparkwrightError] = WheelInvalid) -> zipfile.ZipFile:
    """
    Return the zip archive at *path*, opened.

    Raises:
        SparkwrightError: As *failure*: there is no such file, it is a folder, a pipe or a device, or its directory is damaged.
    """
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            raise failure(f"{path.name} is no file.", details=[str(path)])
        with damage_guard(path.name, failure):
            return zipfile.ZipFile(path)
    except OSError as error:
        raise failure(f"{path.name} cannot be read.", details=[str(error)]) from error


@contextlib.contextmanager
def zip_file(path: Path, failure: type[SparkwrightError] = WheelInvalid) -> Iterator[zipfile.ZipFile]:
    """
    Yield the zip archive at *path*, as `opened`; damage that is found while the block reads members is *failure*, too.

    Keep the block to reading the archive: a fault of other code in it would be reported as damage.
    """
    with opened(path, failure) as archive, damage_guard(path.name, failure):
        yield archive


class _Budget:
    """Counts files and bytes against the limits, and refuses a second member at the same path or below a file."""

    def __init__(self, origin: str) -> None:
        self.origin, self.bytes = origin, 0
        self.seen: set[str] = set()
        self._folders: set[str] = set()

    def spend(self, path: str, count: int) -> None:
        self.bytes += count
        above = [path[:place] for place, letter in enumerate(path) if letter == "/"]
        self._folders.update(above)
        if path in self.seen or path in self._folders or not self.seen.isdisjoint(above):
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
    with archive.open("rb") as stream:
        yield from tar_members(stream, archive.name, compression="gz")


def tar_members(stream: IO[bytes], origin: str, *, compression: Literal["", "gz"] = "") -> Iterator[Member]:
    """
    Yield the files of the tar in *stream*, its single top folder taken away.

    Raises:
        ArchiveUnsafe: A member is unsafe (module docstring), or the tar is damaged; *origin* names it.
    """
    top, budget = "", _Budget(origin)
    with damage_guard(origin), tarfile.open(fileobj=stream, mode="r|gz" if compression else "r|") as tar:
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
                content = tar.extractfile(info)
                assert content is not None
                yield Member(path, EXECUTABLE if info.mode & 0o100 else REGULAR, content.read())
            else:
                raise ArchiveUnsafe(f"{origin} has a member that is no file, folder or symbolic link.", details=[f"member: {name!r}"])


def wheel_members(archive: Path, folder: str) -> Iterator[Member]:
    """
    Yield the files below *folder* of the wheel *archive*; modes inside wheels carry no meaning for headers.

    Raises:
        ArchiveUnsafe: A member is unsafe, the archive is damaged, or the folder is not in it.
    """
    origin = archive.name
    budget = _Budget(origin)
    with zip_file(archive, ArchiveUnsafe) as zipped:
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
    if not budget.seen:
        raise ArchiveUnsafe(f"{origin} has no folder {folder!r}.")
