"""
A wheel read as hostile: its limits are checked before anything is unpacked, the names in it are compared
and never written to, and RECORD is held against the bytes.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from email.parser import BytesParser
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkwright.builder.compile.unit_manifest import CompiledUnit
from sparkwright.builder.wheel.archive import BUILD_RECORD
from sparkwright.builder.wheel.elf import MAGIC
from sparkwright.core.errors import FileError, WheelError
from sparkwright.forks import archive as archives

MOST_MEMBERS = 100_000
#: A member; the largest library of the official vLLM wheel has 308 MB.
MOST_BYTES = 4 * 1024**3
#: All members together, as the disk of a build machine would have to hold them.
MOST_BYTES_TOTAL = 24 * 1024**3
#: Above these sizes a member, or a wheel, that is `MOST_RATIO` times its compressed size is refused.
RATIO_FROM, RATIO_TOTAL_FROM, MOST_RATIO = 64 * 1024**2, 1024**3, 200
#: RECORD and METADATA are read into memory.
MOST_BYTES_TEXT = 64 * 1024**2

_DAMAGED = partial(WheelError, "wheel-invalid")
_ENTRY = b"PK\x01\x02"
#: Bytes of a member's header before its name.
_LOCAL_HEADER = 30
#: What every installer can unpack; the others may also require gigabytes of memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")

Members = dict[str, zipfile.ZipInfo]


class Subject(msgspec.Struct, frozen=True):
    """
    The wheel that a report is about.

    Attributes:
        file: Its file name.
        sha256: Of the whole file.
        size: Bytes.
        name: The normalised distribution name.
        version: With its local label.
        platforms: The platform tags of the file name.
    """

    file: str
    sha256: str
    size: int
    name: str
    version: str
    platforms: tuple[str, ...]


class Contents(msgspec.Struct, frozen=True):
    """
    What the directory and the metadata of a wheel state.

    Attributes:
        names: Of all members.
        python: Its ``Requires-Python``; empty without one.
        requires: Its ``Requires-Dist``.
        ours: Whether it holds a build record of sparkwright.
        units: The unit manifest in that record.
    """

    names: tuple[str, ...]
    python: str
    requires: tuple[str, ...]
    ours: bool
    units: tuple[CompiledUnit, ...] = ()


class Mismatch(msgspec.Struct, frozen=True):
    """A member on which RECORD and the archive disagree: *rule* is the finding's, *message* says how."""

    member: str
    rule: str
    message: str


class Binary(msgspec.Struct, frozen=True):
    """An ELF member: its name in the wheel, the path of its copy, the sha256 and count of its bytes."""

    name: str
    path: Path
    sha256: str
    size: int


class _Units(msgspec.Struct):
    """The part of a build record that the audit reads."""

    units: tuple[CompiledUnit, ...] = ()


def subject(wheel: Path) -> Subject:
    """
    Return what the file name and the bytes of *wheel* state.

    Raises:
        wheel-invalid: The file is missing or not a regular file, its name is not a wheel's, or its
            directory is longer than any wheel's.
    """
    sha, entries = hashlib.sha256(), 0
    try:
        if wheel.exists() and not wheel.is_file():
            raise OSError("It is not a regular file.")
        name, version, _, tags = parse_wheel_filename(wheel.name)
        with wheel.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
                entries += block.count(_ENTRY)
    except (InvalidWheelFilename, OSError) as error:
        raise WheelError("wheel-invalid", f"{wheel.name} is not a wheel.", details=[str(error)]) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; archives that are
    # members count a little too.
    if entries > 2 * MOST_MEMBERS:
        raise WheelError("wheel-invalid", f"{wheel.name} has more than {MOST_MEMBERS} members.")
    platforms = tuple(sorted({tag.platform for tag in tags}))
    return Subject(wheel.name, sha.hexdigest(), wheel.stat().st_size, name, str(version), platforms)


def members(archive: zipfile.ZipFile, origin: str) -> Members:
    """
    Return the members of *archive* that are files, by name, from what its directory states.

    Raises:
        wheel-invalid: One appears twice, shares bytes with another, is compressed in an unusual way, or
            is larger than in any wheel.
        archive-unsafe: A name leaves its folder, or it is a link.
    """
    files: Members = {}
    total = 0
    infos = archive.infolist()
    if len(infos) > MOST_MEMBERS:
        raise WheelError("wheel-invalid", f"{origin} has more than {MOST_MEMBERS} members.")
    for info in infos:
        name, details = info.filename, [f"member: {info.filename!r}", f"bytes: {info.file_size}"]
        parts = name.rstrip("/").split("/")
        unsafe = any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 for letter in name)
        if "\\" in name or unsafe:
            raise FileError("archive-unsafe", f"{origin} has a member that would leave its folder.", details=details)
        if info.external_attr >> 28 == 0o12:
            raise FileError("archive-unsafe", f"{origin} has a symbolic link, which no wheel may have.", details=details)
        if name in files:
            raise WheelError("wheel-invalid", f"{origin} holds the same member twice.", details=details)
        if info.compress_type not in _COMPRESSIONS:
            what = f"{origin} is packed in a way that not every installer knows."
            raise WheelError("wheel-invalid", what, details=details)
        total += info.file_size
        inflated = _inflated(info.file_size, info.compress_size, RATIO_FROM)
        if info.file_size > MOST_BYTES or total > MOST_BYTES_TOTAL or inflated:
            raise WheelError("wheel-invalid", f"{origin} is larger than any wheel.", details=details)
        if not info.is_dir():
            files[name] = info
    # Members that share bytes let a small file hold a large content many times.
    ordered = sorted(infos, key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in ordered[1:]), archive.start_dir]
    for info, end in zip(ordered, ends, strict=True):
        if info.header_offset + _LOCAL_HEADER + info.compress_size > end:
            details = [f"member: {info.filename!r}"]
            raise WheelError("wheel-invalid", f"{origin} holds members that overlap.", details=details)
    if _inflated(total, archive.start_dir, RATIO_TOTAL_FROM):
        details = [f"bytes of all members: {total}"]
        raise WheelError("wheel-invalid", f"{origin} is larger than any wheel.", details=details)
    return files


def _inflated(size: int, packed: int, limit: int) -> bool:
    return size > limit and size > MOST_RATIO * max(packed, 1)


def text(archive: zipfile.ZipFile, listed: Mapping[str, zipfile.ZipInfo], name: str, origin: str) -> bytes:
    """Return the text of the member *name*; raise `wheel-invalid` if it is missing or too long."""
    info = listed.get(name)
    if info is None or info.file_size > MOST_BYTES_TEXT:
        what = f"{origin} has no usable {name.rpartition('/')[2]}."
        raise WheelError("wheel-invalid", what, details=[f"expected: {name}"])
    with archive.open(info) as stream:
        return stream.read(MOST_BYTES_TEXT)


def _dist_info(archive: zipfile.ZipFile, listed: Members, about: Subject) -> tuple[str, Message]:
    """Return the name of the ``.dist-info`` folder, and the METADATA in it."""
    folders = {name.split("/")[0] for name in listed if name.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        what = f"{about.file} has {len(folders)} .dist-info folders instead of one."
        raise WheelError("wheel-invalid", what, details=sorted(folders))
    folder = folders.pop()
    metadata = BytesParser().parsebytes(text(archive, listed, f"{folder}/METADATA", about.file), headersonly=True)
    name, version = canonicalize_name(str(metadata["Name"])), str(metadata["Version"])
    if (name, version) != (about.name, about.version):
        details = [f"METADATA: {name} {version}"]
        raise WheelError("wheel-invalid", f"{about.file} holds another distribution.", details=details)
    return folder, metadata


def contents(wheel: Path, about: Subject) -> Contents:
    """
    Return what the directory and the metadata of *wheel* state.

    Raises:
        wheel-invalid, archive-unsafe: As `walk`; also for a build record that is not one.
    """
    units: tuple[CompiledUnit, ...] = ()
    with archives.zip_file(wheel) as archive:
        listed = members(archive, about.file)
        folder, metadata = _dist_info(archive, listed, about)
        record = f"{folder}/{BUILD_RECORD}"
        ours = record in listed
        if ours:
            units = msgspec.json.decode(text(archive, listed, record, about.file), type=_Units).units
    requires = tuple(map(str, metadata.get_all("Requires-Dist", ())))
    return Contents(tuple(sorted(listed)), str(metadata["Requires-Python"] or ""), requires, ours, units)


def _stream_hash(stream: IO[bytes], sink: Path) -> tuple[str, bool]:
    """Return the sha256 of *stream*, and whether it begins like ELF; then also write it to *sink*."""
    sha = hashlib.sha256()
    block = stream.read(1 << 20)
    binary = block.startswith(MAGIC)
    with sink.open("wb") if binary else contextlib.nullcontext() as output:
        while block:
            sha.update(block)
            if output is not None:
                output.write(block)
            block = stream.read(1 << 20)
    return sha.hexdigest(), binary


def _compare(name: str, row: tuple[str, str] | None, sha256: str, size: int) -> Mismatch | None:
    if row is None:
        return Mismatch(name, "record-missing", "RECORD does not list it")
    digest = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
    if row[0].rstrip("=") != digest:
        return Mismatch(name, "record-mismatch", f"RECORD says {row[0] or 'no hash'}, the bytes are {digest}")
    if row[1] not in ("", str(size)):
        return Mismatch(name, "record-mismatch", f"RECORD says {row[1]} bytes, there are {size}")
    return None


def walk(
    wheel: Path, about: Subject, folder: Path, visit: Callable[[Binary], None], advance: Callable[[int, str], None]
) -> tuple[Mismatch, ...]:
    """
    Read every member of *wheel* once.

    Args:
        folder: Where ELF members are put, one at a time, under a name of ours.
        visit: Called with each ELF member; its file is gone afterwards.
        advance: Called with the bytes read so far and the member's name.

    Returns:
        Where RECORD and the members disagree, by member name.

    Raises:
        wheel-invalid: The archive is damaged, too large, or is another distribution than its name says.
        archive-unsafe: A member's name leaves its folder, or it is a link.
    """
    mismatches: list[Mismatch | None] = []
    copy, done = folder / "library", 0
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(archives.opened(wheel))
        # What *visit* raises is not damage of the archive.
        with archives.damage_guard(wheel.name, _DAMAGED):
            listed = members(archive, about.file)
            info_folder, _ = _dist_info(archive, listed, about)
            record = text(archive, listed, f"{info_folder}/RECORD", about.file).decode("utf-8")
            rows = {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(record)) if len(row) == 3}
        unsigned = {f"{info_folder}/{name}" for name in _UNSIGNED}
        for name, info in sorted(listed.items()):
            with archives.damage_guard(wheel.name, _DAMAGED), archive.open(info) as stream:
                sha256, binary = _stream_hash(stream, copy)
            if name not in unsigned:
                mismatches.append(_compare(name, rows.get(name), sha256, info.file_size))
            if binary:
                visit(Binary(name, copy, sha256, info.file_size))
                copy.unlink()
            done += info.file_size
            advance(done, name)
    surplus = rows.keys() - listed.keys() - unsigned
    mismatches += [Mismatch(name, "record-surplus", "RECORD lists it, the wheel does not hold it") for name in surplus]
    return tuple(sorted((one for one in mismatches if one), key=lambda mismatch: mismatch.member))
