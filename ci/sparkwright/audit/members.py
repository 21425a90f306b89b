"""
A wheel read as hostile: names only compared and never written to, RECORD against the bytes; `zipped` has the limits of the archive.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable
from email.parser import BytesParser
from pathlib import Path
from typing import IO

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkwright.audit import zipped
from sparkwright.audit.sections import MAGIC
from sparkwright.errors import WheelInvalid
from sparkwright.forks.archive import damage_guard, opened, zip_file

_ENTRY = b"PK\x01\x02"
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")
_BUILD_RECORD = "sparkwright.json"


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
    What the directory and the metadata of a wheel say.

    Attributes:
        names: Of all members.
        python: Its ``Requires-Python``; empty without one.
        requires: Its ``Requires-Dist``.
        ours: Whether it holds a build record of sparkwright.
    """

    names: tuple[str, ...]
    python: str
    requires: tuple[str, ...]
    ours: bool


class Mismatch(msgspec.Struct, frozen=True):
    """A member on which RECORD and the archive disagree: *rule* is the finding's, *message* says how."""

    member: str
    rule: str
    message: str


class Binary(msgspec.Struct, frozen=True):
    """An ELF member: its name in the wheel, where its bytes were put, their sha256 and count."""

    name: str
    path: Path
    sha256: str
    size: int


def _hash_and_count(wheel: Path) -> tuple[str, int]:
    sha, entries = hashlib.sha256(), 0
    with wheel.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
            entries += block.count(_ENTRY)
    return sha.hexdigest(), entries


def subject(wheel: Path) -> Subject:
    """
    Return what the file name and the bytes of *wheel* say.

    Raises:
        WheelInvalid: The file is missing, its name is not a wheel's, or its directory is longer than any wheel's.
    """
    try:
        if wheel.exists() and not wheel.is_file():
            raise OSError("It is no file.")  # a pipe would be waited for
        name, version, _, tags = parse_wheel_filename(wheel.name)
        sha256, entries = _hash_and_count(wheel)
    except (InvalidWheelFilename, OSError) as error:
        raise WheelInvalid(f"{wheel.name} is not a wheel.", details=[str(error)]) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; stored archives inside count a little too.
    if entries > 2 * zipped.MOST_MEMBERS:
        raise WheelInvalid(f"{wheel.name} has more than {zipped.MOST_MEMBERS} members.")
    return Subject(wheel.name, sha256, wheel.stat().st_size, name, str(version), tuple(sorted({tag.platform for tag in tags})))


def _dist_info(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], about: Subject) -> tuple[str, Contents]:
    folders = {name.split("/")[0] for name in members if "/" in name and name.split("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise WheelInvalid(f"{about.file} has {len(folders)} .dist-info folders instead of one.", details=sorted(folders))
    folder = folders.pop()
    metadata = BytesParser().parsebytes(zipped.text(archive, members, f"{folder}/METADATA", about.file), headersonly=True)
    said = (canonicalize_name(str(metadata["Name"])), str(metadata["Version"]))
    if said != (about.name, about.version):
        raise WheelInvalid(f"{about.file} holds another distribution.", details=[f"METADATA: {said[0]} {said[1]}"])
    contents = Contents(
        tuple(sorted(members)), str(metadata["Requires-Python"] or ""), tuple(map(str, metadata.get_all("Requires-Dist", ()))),
        f"{folder}/{_BUILD_RECORD}" in members,
    )  # fmt: skip
    return folder, contents


def contents(wheel: Path, about: Subject) -> Contents:
    """
    Return what the directory and the metadata of *wheel* say.

    Raises:
        WheelInvalid, ArchiveUnsafe: As `walk`.
    """
    with zip_file(wheel) as archive:
        return _dist_info(archive, zipped.checked(archive, about.file), about)[1]


def _stream_hash(stream: IO[bytes], sink: Path) -> tuple[str, bool]:
    """Hash *stream*; when it begins like ELF, also write it to *sink* and say so."""
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


def _compare(name: str, said: tuple[str, str] | None, sha256: str, size: int) -> Mismatch | None:
    if said is None:
        return Mismatch(name, "record-missing", "RECORD does not list it")
    digest = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
    if said[0].rstrip("=") != digest:
        return Mismatch(name, "record-mismatch", f"RECORD says {said[0] or 'no hash'}, the bytes are {digest}")
    if said[1] not in ("", str(size)):
        return Mismatch(name, "record-mismatch", f"RECORD says {said[1]} bytes, there are {size}")
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
        WheelInvalid: The archive is damaged, too large, or is another distribution than its name says.
        ArchiveUnsafe: A member's name leaves its folder, or it is a link.
    """
    found: list[Mismatch | None] = []
    binary, done = folder / "library", 0
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(opened(wheel))
        with damage_guard(wheel.name, WheelInvalid):
            members = zipped.checked(archive, about.file)
            info_folder, _ = _dist_info(archive, members, about)
            record = zipped.text(archive, members, f"{info_folder}/RECORD", about.file).decode("utf-8")
            said = {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(record)) if len(row) == 3}
        unsigned = {f"{info_folder}/{name}" for name in _UNSIGNED}
        for name, info in sorted(members.items()):
            with damage_guard(wheel.name, WheelInvalid), archive.open(info) as stream:
                sha256, is_binary = _stream_hash(stream, binary)
            if name not in unsigned:
                found.append(_compare(name, said.get(name), sha256, info.file_size))
            if is_binary:
                visit(Binary(name, binary, sha256, info.file_size))
                binary.unlink()
            done += info.file_size
            advance(done, name)
    surplus = said.keys() - members.keys() - unsigned
    found += [Mismatch(name, "record-surplus", "RECORD lists it, the wheel does not hold it") for name in surplus]
    return tuple(sorted((mismatch for mismatch in found if mismatch), key=lambda mismatch: mismatch.member))
