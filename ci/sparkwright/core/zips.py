"""
Zip archives, read without unpacking.

An archive is hostile: a member may climb out of its folder, be a link, overlap another one, or
promise less than it holds. Everything is checked from its directory, before a byte is unpacked.
"""

import base64
import contextlib
import csv
import errno
import io
import itertools
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sparkwright.core.errors import Failure, FileError, WheelError

#: What an installer writes into a ``.dist-info`` folder beside the files of the wheel.
INSTALLER_FILES = frozenset(
    ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json")
)
#: Bytes of the largest member.
MOST_BYTES = 4 * 1024**3
#: Fixed part of a zip's local file header (APPNOTE.TXT 4.3.7); name and extra field follow it.
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
#: Bytes of its end of central directory record, without the comment (4.3.16).
_END_RECORD = 22
MOST_MEMBERS = 100_000
#: All members of a zip together, as the disk of a build machine would have to hold them. Of one
#: member `MOST_BYTES`; the largest library of the official vLLM wheel has 308 MB.
MOST_BYTES_TOTAL = 24 * 1024**3
#: Above these sizes a member, or a zip, that is `MOST_RATIO` times its compressed size is refused.
RATIO_FROM, RATIO_TOTAL_FROM, MOST_RATIO = 64 * 1024**2, 1024**3, 200
#: Every installer can unpack these; others may also require gigabytes of memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

#: Bytes of a text in a wheel that is read into memory, such as METADATA and RECORD.
MOST_BYTES_TEXT = 64 * 1024**2
#: Bytes of the largest header that extends another one, such as a long name.
MOST_HEADER_BYTES = 1 << 20

_RECORD_SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})=?")

#: What Python's readers raise for bytes that are no archive; each compression has errors of its
#: own.
DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    csv.Error,
    EOFError,
    TypeError,
    ValueError,
    LookupError,
    OverflowError,
    RuntimeError,
)


class ArchiveHeader(tarfile.TarInfo):
    """
    A header of a tar. `tarfile` would read one that extends another, or the map of a sparse file,
    into memory, whatever its size.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        # Every Python calls this for every header; newer ones do not call `frombuf`.
        if self.type == tarfile.GNUTYPE_SPARSE or (
            self.size > MOST_HEADER_BYTES and not self.isreg()
        ):
            raise tarfile.ReadError("it has a sparse file or an endless header")
        # git writes one, with the commit; the values of all of them would be kept.
        if self.type == tarfile.XGLTYPE and tar.pax_headers:
            raise tarfile.ReadError("it has a second global header")
        header: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return header

    def _proc_gnusparse_10(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("it has a sparse file in the form of pax")


def safe_path(name: str, origin: str) -> str:
    """
    Return the member name *name*, known to stay inside its folder.

    Raises:
        archive-unsafe: It is absolute, climbs with ``..``, hides in ``.git``, or has a character no
            source path has.
    """
    if odd_name(name) or {"", ".", "..", ".git"} & set(name.lower().split("/")):
        raise FileError(
            "archive-unsafe",
            f"{origin} has a member that would leave its folder, or has no usable name.",
            details=[f"member: {name!r}"],
        )
    return name


def odd_name(text: str) -> bool:
    """
    Return True if *text* has a character that no source path has, bytes that are not UTF-8 (Python
    reads them as surrogates), or a name that is too long for a file system.
    """
    # Control characters, those that turn the direction of text, and surrogates are not printable.
    odd = not text.isprintable() or "\\" in text
    return odd or len(text) > 1024 or max(map(len, text.encode().split(b"/"))) > 255


def folders_above(path: str) -> set[str]:
    """Return the folders above *path*; for hundreds of them, `pathlib` takes milliseconds."""
    return {path[:end] for end, letter in enumerate(path) if letter == "/"}


@contextlib.contextmanager
def damage_guard(
    origin: str, failure: Failure = partial(FileError, "archive-unsafe")
) -> Iterator[None]:
    """
    Raise *failure* for the errors that Python's archive readers raise on damaged bytes; errors of
    the disk pass. Only reads of the archive belong in the block: faults of ours look the same.
    """
    try:
        yield
    except (*DAMAGE, OSError) as error:
        # Readers use OSError for bad bytes, too: without a number, or for a seek to a place that no
        # file has.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise failure(
            f"{origin} is damaged.", details=[str(error) or type(error).__name__]
        ) from error


class Archive(zipfile.ZipFile):
    """
    A zip archive that is read.

    Attributes:
        guard: The guard of reads from a member that is `open`; `read` has it.
        origin: Its name, for messages.
    """

    def __init__(self, path: Path, failure: Failure) -> None:
        self.guard, self.origin = partial(damage_guard, path.name, failure), path.name
        super().__init__(path)

    def read(self, name: str | zipfile.ZipInfo, pwd: bytes | None = None) -> bytes:
        with self.guard():
            return super().read(name, pwd)


def zip_file(path: Path, failure: Failure = partial(WheelError, "wheel-invalid")) -> Archive:
    """
    Return the zip archive at *path*, whose damaged members are *failure*, too.

    Raises:
        wheel-invalid: Or as *failure*: it is no regular file, or its directory is damaged.
    """
    try:
        # A pipe would be waited for.
        if path.is_file():
            return Archive(path, failure)
    except (*DAMAGE, OSError) as error:
        raise failure(f"{path.name} cannot be read.", details=[str(error)]) from error
    raise failure(f"{path.name} is no file.", details=[str(path)])


def zip_members(
    archive: zipfile.ZipFile,
    origin: str,
    failure: Failure = partial(WheelError, "wheel-invalid"),
) -> dict[str, zipfile.ZipInfo]:
    """
    Return the files of *archive* by name, from its directory; nothing is unpacked.

    Raises:
        archive-unsafe: A name leaves its folder, or it is a link.
        wheel-invalid: Or as *failure*: bytes surround the archive; or a member appears twice or
            below a file, shares bytes with another, is compressed in an unusual way, or is larger
            than in any wheel.
    """
    infos, files, total = archive.infolist(), dict[str, zipfile.ZipInfo](), 0
    if len(infos) > MOST_MEMBERS:
        raise failure(f"{origin} has more than {MOST_MEMBERS} members.")
    # A member ends before the next one begins: members that share bytes let a small file hold a
    # large content many times.
    offsets = sorted([*(info.header_offset for info in infos), archive.start_dir])
    assert archive.fp
    archive.fp.seek(-_END_RECORD - len(archive.comment), os.SEEK_END)
    if offsets[0] or archive.fp.read(4) != b"PK\5\6":
        raise failure(f"{origin} has bytes before or after the archive.")
    # Of two members at the same offset, the first ends there.
    following = dict(reversed([*itertools.pairwise(offsets)]))
    names = {info.filename for info in infos}
    for info in infos:
        path, fault = safe_path(info.filename.removesuffix("/"), origin), ""
        details = [f"member: {info.filename!r}", f"bytes: {info.file_size}"]
        if stat.S_ISLNK(info.external_attr >> 16):
            raise FileError(
                "archive-unsafe",
                f"{origin} has a symbolic link, which no wheel may have.",
                details=details,
            )
        total += info.file_size
        packed = LOCAL_HEADER.size + info.compress_size
        if info.filename in files:
            fault = "holds the same member twice"
        elif not names.isdisjoint(folders_above(path)):
            fault = "has a file where another member needs a folder"
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
    return {name: info for name, info in files.items() if not info.is_dir()}


# Wheels.


class RecordRow(NamedTuple):
    """A row of RECORD, as it stands there."""

    name: str
    digest: str
    size: str

    @property
    def sha256(self) -> str:
        """The sha256 that it states, in hex; empty if it states none."""
        return record_sha256(self.digest)


def record_rows(text: str, origin: str) -> list[RecordRow]:
    """
    Return the rows of the RECORD *text* of the wheel *origin*.

    Raises:
        wheel-invalid: It has more rows than a wheel has members, or one without three fields.
    """
    with damage_guard(f"RECORD of {origin}", partial(WheelError, "wheel-invalid")):
        # One more than there may be: millions of short lines would fill the memory.
        lines = itertools.islice(filter(None, csv.reader(io.StringIO(text))), MOST_MEMBERS + 1)
        rows = list(itertools.starmap(RecordRow, lines))
    if len(rows) > MOST_MEMBERS:
        raise WheelError("wheel-invalid", f"RECORD of {origin} has more than {MOST_MEMBERS} rows.")
    return rows


def member_text(
    wheel: Archive,
    listed: Mapping[str, zipfile.ZipInfo],
    name: str,
    limit: int = MOST_BYTES_TEXT,
) -> bytes:
    """
    Return the text of the member *name* of *wheel*.

    Raises:
        wheel-invalid: It is missing, damaged, or has more bytes than *limit*.
    """
    info = listed.get(name)
    if info is None or info.file_size > limit:
        raise WheelError(
            "wheel-invalid",
            f"{wheel.origin} has no usable {name.rpartition('/')[2]}.",
            details=[f"expected: {name}"],
        )
    with wheel.guard(), wheel.open(info) as stream:
        return stream.read(limit)


def records(wheel: Archive, listed: Mapping[str, zipfile.ZipInfo]) -> dict[str, RecordRow]:
    """
    Return the rows of RECORD by member.

    Raises:
        wheel-invalid: There is no RECORD, or no readable one.
    """
    data = member_text(wheel, listed, f"{info_folder(listed, wheel.origin)}/RECORD")
    with wheel.guard():
        text = data.decode()
    return {row.name: row for row in record_rows(text, wheel.origin)}


def record_sha256(digest: str) -> str:
    """Return the sha256 in hex that *digest*, a field of RECORD, states; empty if it is none."""
    match = _RECORD_SHA256.fullmatch(digest)
    return base64.urlsafe_b64decode(f"{match[1]}=").hex() if match else ""


def info_folder(members: Iterable[str], origin: str) -> str:
    """
    Return the ``.dist-info`` folder of the wheel with *members*, whose name need not be spelled as
    in the wheel's own.

    Raises:
        wheel-invalid: There is not exactly one.
    """
    tops = sorted({name.partition("/")[0] for name in members})
    infos = [folder for folder in tops if folder.endswith(".dist-info")]
    if len(infos) != 1:
        raise WheelError(
            "wheel-invalid",
            f"{origin} does not have one .dist-info folder.",
            details=infos[:5],
        )
    return infos[0]


def is_release(name: str, version: str, project: str, expected: str) -> bool:
    """
    Return whether *name* and *version*, in the spelling of a hostile wheel, are *project* (a
    normalised name) and the version *expected*.
    """
    with contextlib.suppress(InvalidVersion):
        return canonicalize_name(name) == project and Version(version) == Version(expected)
    return False


def _inflated(size: int, packed: int, limit: int) -> bool:
    return size > limit and size > MOST_RATIO * max(packed, 1)
