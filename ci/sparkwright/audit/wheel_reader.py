"""
A wheel read as hostile: the names in it are compared and never written to, and RECORD is held
against the bytes; `sparkwright.builder.wheel.archive.members` checks the limits of the archive
before anything is unpacked.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import BytesParser
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkwright.builder.compile.unit_manifest import CompiledUnit
from sparkwright.builder.wheel.archive import BUILD_RECORD, MOST_MEMBERS, member_text, members
from sparkwright.builder.wheel.elf import MAGIC
from sparkwright.core.errors import WheelError
from sparkwright.forks import archive as archives

_DAMAGED = partial(WheelError, "wheel-invalid")
_ENTRY = b"PK\x01\x02"
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")


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
    """
    A member on which RECORD and the archive disagree: *rule* is the finding's, *message* says how.
    """

    member: str
    rule: str
    message: str


class Binary(msgspec.Struct, frozen=True):
    """
    An ELF member: its name in the wheel, the path of its copy, the sha256 and count of its bytes.
    """

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
        raise WheelError(
            "wheel-invalid", f"{wheel.name} is not a wheel.", details=[str(error)]
        ) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; archives that
    # are members count a little too.
    if entries > 2 * MOST_MEMBERS:
        raise WheelError("wheel-invalid", f"{wheel.name} has more than {MOST_MEMBERS} members.")
    platforms = tuple(sorted({tag.platform for tag in tags}))
    return Subject(wheel.name, sha.hexdigest(), wheel.stat().st_size, name, str(version), platforms)


def _dist_info(
    archive: zipfile.ZipFile, listed: dict[str, zipfile.ZipInfo], about: Subject
) -> tuple[str, Message]:
    """Return the name of the ``.dist-info`` folder, and the METADATA in it."""
    folders = {
        name.split("/")[0] for name in listed if name.partition("/")[0].endswith(".dist-info")
    }
    if len(folders) != 1:
        what = f"{about.file} has {len(folders)} .dist-info folders instead of one."
        raise WheelError("wheel-invalid", what, details=sorted(folders))
    folder = folders.pop()
    metadata = BytesParser().parsebytes(
        member_text(archive, listed, f"{folder}/METADATA", about.file), headersonly=True
    )
    name, version = canonicalize_name(str(metadata["Name"])), str(metadata["Version"])
    if (name, version) != (about.name, about.version):
        details = [f"METADATA: {name} {version}"]
        raise WheelError(
            "wheel-invalid", f"{about.file} holds another distribution.", details=details
        )
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
            units = msgspec.json.decode(
                member_text(archive, listed, record, about.file), type=_Units
            ).units
    requires = tuple(map(str, metadata.get_all("Requires-Dist", ())))
    return Contents(
        tuple(sorted(listed)), str(metadata["Requires-Python"] or ""), requires, ours, units
    )


def _stream_hash(stream: IO[bytes], sink: Path) -> tuple[str, bool]:
    """
    Return the sha256 of *stream*, and whether it begins like ELF; then also write it to *sink*.
    """
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
        return Mismatch(
            name, "record-mismatch", f"RECORD says {row[0] or 'no hash'}, the bytes are {digest}"
        )
    if row[1] not in ("", str(size)):
        return Mismatch(name, "record-mismatch", f"RECORD says {row[1]} bytes, there are {size}")
    return None


def walk(
    wheel: Path,
    about: Subject,
    folder: Path,
    visit: Callable[[Binary], None],
    advance: Callable[[int, str], None],
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
        wheel-invalid: The archive is damaged, too large, or is another distribution than its name
            says. archive-unsafe: A member's name leaves its folder, or it is a link.
    """
    mismatches: list[Mismatch | None] = []
    copy, done = folder / "library", 0
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(archives.opened(wheel))
        # What *visit* raises is not damage of the archive.
        with archives.damage_guard(wheel.name, _DAMAGED):
            listed = members(archive, about.file)
            info_folder, _ = _dist_info(archive, listed, about)
            record = member_text(archive, listed, f"{info_folder}/RECORD", about.file).decode(
                "utf-8"
            )
            rows = {
                row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(record)) if len(row) == 3
            }
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
    mismatches += [
        Mismatch(name, "record-surplus", "RECORD lists it, the wheel does not hold it")
        for name in surplus
    ]
    return tuple(sorted((one for one in mismatches if one), key=lambda mismatch: mismatch.member))
