"""
Source archives, read without unpacking.

An archive is hostile: a member may climb out of its folder, be a link that leaves it, a device, or
promise less than it holds. Everything is checked here before a byte reaches the object store;
nothing is written to a path that a member names.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import itertools
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import msgspec

from sparkwright.core.errors import Failure, FileError, WheelError
from sparkwright.core.git import EXECUTABLE, LINK, REGULAR

#: A whole CUTLASS or vLLM source is below 1 GB in 20,000 files; what exceeds these is not a source.
MOST_FILES = 200_000
MOST_BYTES = 4 * 1024**3

#: Fixed part of a zip's local file header (APPNOTE.TXT 4.3.7); name and extra field follow it.
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
MOST_MEMBERS = 100_000
#: All members of a zip together, as the disk of a build machine would have to hold them. Of one
#: member `MOST_BYTES`; the largest library of the official vLLM wheel has 308 MB.
MOST_BYTES_TOTAL = 24 * 1024**3
#: Above these sizes a member, or a zip, that is `MOST_RATIO` times its compressed size is refused.
RATIO_FROM, RATIO_TOTAL_FROM, MOST_RATIO = 64 * 1024**2, 1024**3, 200
#: Every installer can unpack these; others may also require gigabytes of memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

#: What Python's readers raise for bytes that are no archive; each compression has errors of its
#: own.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    csv.Error,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
    RuntimeError,
)


class Member(msgspec.Struct, frozen=True):
    """
    A file of an archive: its path below the archive's top folder, its git mode, and its bytes (a
    link's are its target).
    """

    path: str
    mode: str
    data: bytes


def safe_path(name: str, origin: str) -> str:
    """
    Return the member name *name*, known to stay inside its folder.

    Raises:
        archive-unsafe: It is absolute, climbs with ``..``, hides in ``.git``, or has a character no
            source path has.
    """
    parts = name.split("/")
    if (
        name.startswith("/")
        or _odd(name)
        or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)
    ):
        raise FileError(
            "archive-unsafe",
            f"{origin} has a member that would leave its folder.",
            details=[f"member: {name!r}"],
        )
    return name


def _odd(text: str) -> bool:
    """
    Return True if *text* has a character that no source path has, or bytes that are not UTF-8
    (Python reads them as surrogates).
    """
    return (
        len(text) > 1024
        or "\\" in text
        or any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in text)
    )


def _check_link(path: str, target: str, origin: str) -> None:
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    # A name before ".." may be a link itself, so that the text alone does not say where the two
    # lead.
    leaves = climbs > path.count("/") or ".." in parts[climbs:]
    if not target or target.startswith("/") or _odd(target) or leaves:
        raise FileError(
            "archive-unsafe",
            f"{origin} has a link that leaves its folder.",
            details=[f"member: {path!r}", f"points to: {target!r}"],
        )


@contextlib.contextmanager
def damage_guard(
    origin: str, failure: Failure = partial(FileError, "archive-unsafe")
) -> Iterator[None]:
    """
    Raise *failure* for the errors that Python's archive readers raise on damaged bytes; errors of
    the disk pass.
    """
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        # Readers use OSError for bad bytes, too: without a number, or for a seek to a place that no
        # file has.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise failure(
            f"{origin} is damaged.", details=[str(error) or type(error).__name__]
        ) from error


def opened(path: Path, failure: Failure = partial(WheelError, "wheel-invalid")) -> zipfile.ZipFile:
    """
    Return the zip archive at *path*, opened.

    Raises:
        wheel-invalid: Or as *failure*: there is no such file, it is a folder, a pipe or a device,
            or its directory is damaged.
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
def zip_file(
    path: Path, failure: Failure = partial(WheelError, "wheel-invalid")
) -> Iterator[zipfile.ZipFile]:
    """
    Yield the zip archive at *path*, as `opened`; within the block, what damaged members make
    Python's reader raise is *failure*, too.
    """
    with opened(path, failure) as archive, damage_guard(path.name, failure):
        yield archive


class _Budget:
    """
    Counts files and bytes against the limits, and refuses a second member at the same path or below
    a file.
    """

    def __init__(self, origin: str) -> None:
        self.origin, self.bytes = origin, 0
        self.seen: set[str] = set()
        self._folders: set[str] = set()

    def spend(self, path: str, count: int) -> None:
        self.bytes += count
        above = [path[:end] for end, letter in enumerate(path) if letter == "/"]
        self._folders.update(above)
        if path in self.seen or path in self._folders or not self.seen.isdisjoint(above):
            raise FileError(
                "archive-unsafe",
                f"{self.origin} holds the same path twice.",
                details=[f"member: {path!r}"],
            )
        self.seen.add(path)
        if len(self.seen) > MOST_FILES or self.bytes > MOST_BYTES:
            raise FileError(
                "archive-unsafe",
                f"{self.origin} is larger than any source: over {MOST_FILES} files or "
                f"{MOST_BYTES} bytes.",
            )


def sdist_members(archive: Path) -> Iterator[Member]:
    """
    Yield the files of the source distribution *archive* (``.tar.gz``), its single top folder taken
    away.

    Raises:
        archive-unsafe: A member is unsafe (module docstring), or the archive is damaged.
    """
    with archive.open("rb") as stream:
        yield from tar_members(stream, archive.name, compression="gz")


def tar_members(
    stream: IO[bytes], origin: str, *, compression: Literal["", "gz"] = ""
) -> Iterator[Member]:
    """
    Yield the files of the tar in *stream*, its single top folder taken away.

    Raises:
        archive-unsafe: A member is unsafe (module docstring), or the tar is damaged; *origin* names
            it.
    """
    top, budget = "", _Budget(origin)
    with (
        damage_guard(origin),
        tarfile.open(fileobj=stream, mode="r|gz" if compression else "r|") as tar,
    ):
        for info in tar:
            name = safe_path(info.name.rstrip("/").removeprefix("./"), origin)
            head, _, path = name.partition("/")
            top = top or head
            if head != top:
                raise FileError(
                    "archive-unsafe", f"{origin} has more than one top folder.", details=[top, head]
                )
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
                raise FileError(
                    "archive-unsafe",
                    f"{origin} has a member that is no file, folder or symbolic link.",
                    details=[f"member: {name!r}"],
                )


def zip_members(
    archive: zipfile.ZipFile,
    origin: str,
    failure: Failure = partial(WheelError, "wheel-invalid"),
) -> dict[str, zipfile.ZipInfo]:
    """
    Return the files of *archive* by name, from its directory; nothing is unpacked.

    Raises:
        archive-unsafe: A name leaves its folder, or it is a link.
        wheel-invalid: Or as *failure*: a member appears twice or below a file, shares bytes with
            another, is compressed in an unusual way, or is larger than in any wheel.
    """
    infos = archive.infolist()
    if len(infos) > MOST_MEMBERS:
        raise failure(f"{origin} has more than {MOST_MEMBERS} members.")
    files: dict[str, zipfile.ZipInfo] = {}
    # A member ends before the next one begins: members that share bytes let a small file hold a
    # large content many times.
    offsets = sorted([*(info.header_offset for info in infos), archive.start_dir])
    # Of two members at the same offset, the first ends there.
    following = dict(reversed([*itertools.pairwise(offsets)]))
    total = 0
    for info in infos:
        details = [f"member: {info.filename!r}", f"bytes: {info.file_size}"]
        safe_path(info.filename.removesuffix("/"), origin)
        if stat.S_ISLNK(info.external_attr >> 16):
            what = f"{origin} has a symbolic link, which no wheel may have."
            raise FileError("archive-unsafe", what, details=details)
        total += info.file_size
        packed = LOCAL_HEADER.size + info.compress_size
        fault = ""
        if info.filename in files:
            fault = "holds the same member twice"
        elif info.compress_type not in _COMPRESSIONS:
            fault = "is packed in a way that not every installer knows"
        elif (
            info.file_size > MOST_BYTES
            or total > MOST_BYTES_TOTAL
            or _inflated(info.file_size, info.compress_size, RATIO_FROM)
            or _inflated(total, archive.start_dir, RATIO_TOTAL_FROM)
        ):
            fault = "is larger than any wheel"
        elif info.header_offset + packed > following.get(info.header_offset, 0):
            fault = "holds members that overlap"
        if fault:
            raise failure(f"{origin} {fault}.", details=details)
        files[info.filename] = info
    regular = {name: info for name, info in files.items() if not info.is_dir()}
    for name in regular:
        if any(str(folder) in regular for folder in PurePosixPath(name).parents):
            what = f"{origin} has a file where another member needs a folder."
            raise failure(what, details=[f"member: {name!r}"])
    return regular


def _inflated(size: int, packed: int, limit: int) -> bool:
    return size > limit and size > MOST_RATIO * max(packed, 1)


def wheel_members(archive: Path, folder: str) -> Iterator[Member]:
    """
    Yield the files below *folder* of the wheel *archive*; modes inside wheels carry no meaning for
    headers.

    Raises:
        archive-unsafe: A member is unsafe, the archive is damaged, or the folder is not in it.
    """
    failure = partial(FileError, "archive-unsafe")
    budget = _Budget(archive.name)
    with zip_file(archive, failure) as zipped:
        for name, info in zip_members(zipped, archive.name, failure).items():
            if name.startswith(folder + "/"):
                path = name.removeprefix(folder + "/")
                budget.spend(path, info.file_size)
                yield Member(path, REGULAR, zipped.read(info))
    if not budget.seen:
        raise FileError("archive-unsafe", f"{archive.name} has no folder {folder!r}.")
