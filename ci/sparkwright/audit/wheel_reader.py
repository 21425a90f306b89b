"""
A wheel read as hostile: the names in it are compared and never written to, and RECORD is held
against the bytes; `sparkwright.forks.archive.zip_members` checks the limits of the archive
before anything is unpacked.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import BytesParser
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkwright.audit.report import AuditedWheel, AuditFinding
from sparkwright.builder.wheel import elf, fatbin
from sparkwright.builder.wheel.archive import BUILD_RECORD, member_text, records
from sparkwright.builder.wheel.graft import CompiledUnit
from sparkwright.core.console import console
from sparkwright.core.errors import WheelError
from sparkwright.core.store import translate_disk_full
from sparkwright.forks import archive as archives

_ENTRY = b"PK\x01\x02"
#: The files that RECORD cannot hold a hash of (PEP 376, PEP 427).
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")
#: Bytes that the compressed device code of all libraries may unpack to: minutes of work.
MOST_UNPACKED = 64 * 1024**3


class Contents(msgspec.Struct, frozen=True):
    """
    The statements of a wheel's directory and metadata.

    Attributes:
        names: Of all members.
        python: Its ``Requires-Python``; empty without one.
        requires: Its ``Requires-Dist``.
        ours: Whether it holds a build record of sparkwright.
        units: The unit manifest in that record.
    """

    names: tuple[str, ...] = ()
    python: str = ""
    requires: tuple[str, ...] = ()
    ours: bool = False
    units: tuple[CompiledUnit, ...] = ()


class Binary(msgspec.Struct, frozen=True):
    """An ELF member: its name in the wheel, the path of its copy, its sha256 and its size."""

    name: str
    path: Path
    sha256: str
    size: int


class _Units(msgspec.Struct):
    """The part of a build record that the audit reads."""

    units: tuple[CompiledUnit, ...] = ()


def subject(wheel: Path) -> AuditedWheel:
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
        what = f"{wheel.name} is not a wheel."
        raise WheelError("wheel-invalid", what, details=[str(error)]) from error
    # zipfile reads the whole directory into memory, so its length is bounded first; archives that
    # are members count a little too.
    if entries > 2 * archives.MOST_MEMBERS:
        what = f"{wheel.name} has more than {archives.MOST_MEMBERS} members."
        raise WheelError("wheel-invalid", what)
    platforms = tuple(sorted({tag.platform for tag in tags}))
    return AuditedWheel(
        wheel.name, sha.hexdigest(), wheel.stat().st_size, name, str(version), platforms
    )


def _metadata(
    archive: zipfile.ZipFile, listed: dict[str, zipfile.ZipInfo], about: AuditedWheel
) -> tuple[str, Message]:
    """Return the name of the ``.dist-info`` folder, and the METADATA in it."""
    folders = sorted({name.partition("/")[0] for name in listed if ".dist-info/" in name})
    if len(folders) != 1:
        what = f"{about.file} has {len(folders)} .dist-info folders instead of one."
        raise WheelError("wheel-invalid", what, details=folders)
    text = member_text(archive, listed, f"{folders[0]}/METADATA", about.file)
    metadata = BytesParser().parsebytes(text, headersonly=True)
    name, version = canonicalize_name(str(metadata["Name"])), str(metadata["Version"])
    if (name, version) != (about.name, about.version):
        what = f"{about.file} holds another distribution."
        raise WheelError("wheel-invalid", what, details=[f"METADATA: {name} {version}"])
    return folders[0], metadata


def contents(wheel: Path, about: AuditedWheel) -> Contents:
    """
    Return what the directory and the metadata of *wheel* state.

    Raises:
        wheel-invalid, archive-unsafe: As `walk`; also for a build record that is not one.
    """
    with archives.zip_file(wheel) as archive:
        listed = archives.zip_members(archive, about.file)
        folder, metadata = _metadata(archive, listed, about)
        record = f"{folder}/{BUILD_RECORD}"
        ours = record in listed
        text = member_text(archive, listed, record, about.file) if ours else b"{}"
        units = msgspec.json.decode(text, type=_Units).units
    requires = tuple(map(str, metadata.get_all("Requires-Dist", ())))
    python = str(metadata["Requires-Python"] or "")
    return Contents(tuple(sorted(listed)), python, requires, ours, units)


def walk(
    wheel: Path, about: AuditedWheel, scratch: Path, visit: Callable[[Binary], None]
) -> tuple[AuditFinding, ...]:
    """
    Read every member of *wheel* once, and return the differences between RECORD and the members.

    Args:
        scratch: An existing folder that holds an ELF member while *visit* is called with it, up to
            half a gigabyte for vLLM.

    Raises:
        wheel-invalid: The archive is damaged, holds more than any wheel, or is another distribution
            than its name states.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        disk-full: There is no room for a member.
    """
    damage_guard = partial(archives.damage_guard, wheel.name, partial(WheelError, "wheel-invalid"))
    findings, unpacked = list[AuditFinding](), 0
    with (
        archives.opened(wheel) as archive,
        translate_disk_full(scratch),
        tempfile.TemporaryDirectory(prefix="wheel-", dir=scratch) as folder,
        console.progress(f"reading {wheel.name}", about.size, "bytes") as progress,
    ):
        # Errors of *visit* are no damage of the archive.
        with damage_guard():
            listed = archives.zip_members(archive, about.file)
            info_folder, _ = _metadata(archive, listed, about)
            rows = records(archive, listed, info_folder, about.file)
        unsigned = {f"{info_folder}/{name}" for name in _UNSIGNED}
        copy = Path(folder, "library")
        for name, info in sorted(listed.items()):
            with damage_guard(), archive.open(info) as stream:
                sha256, is_binary = _stream_hash(stream, copy)
            if name not in unsigned:
                findings += _differences(name, rows.get(name), sha256, info.file_size)
            if is_binary:
                unpacked += _unpacked_bytes(copy)
                if unpacked > MOST_UNPACKED:
                    what = f"{about.file} holds more device code than any wheel."
                    raise WheelError("wheel-invalid", what, details=[f"library: {name}"])
                visit(Binary(name, copy, sha256, info.file_size))
                copy.unlink()
            progress.update(progress.done + info.compress_size, name)
    message = "RECORD lists it, the wheel does not hold it"
    lost = rows.keys() - listed.keys() - unsigned
    findings += [AuditFinding(name, "record-surplus", message) for name in lost]
    return tuple(sorted(findings))


def _stream_hash(stream: IO[bytes], copy: Path) -> tuple[str, bool]:
    """Return the sha256 of *stream*; write it to *copy* if it begins like ELF, and return so."""
    sha, block = hashlib.sha256(), stream.read(1 << 20)
    is_binary = block.startswith(elf.MAGIC)
    with copy.open("wb") if is_binary else contextlib.nullcontext() as output:
        while block:
            sha.update(block)
            if output is not None:
                output.write(block)
            block = stream.read(1 << 20)
    return sha.hexdigest(), is_binary


def _unpacked_bytes(library: Path) -> int:
    """Return the bytes that the device code of *library* would unpack to; 0 if it is unreadable."""
    with contextlib.suppress(elf.ElfUnreadable), elf.mapped(library) as data:
        return fatbin.unpacked_bytes(data, elf.shared_object(data).fatbins)
    return 0


def _differences(
    name: str, row: tuple[str, str] | None, sha256: str, size: int
) -> Iterator[AuditFinding]:
    digest = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
    if row is None:
        yield AuditFinding(name, "record-missing", "RECORD does not list it")
    elif row[0].rstrip("=") != digest or row[1] not in ("", str(size)):
        stated = f"{row[0] or 'no hash'} and {row[1]} bytes"
        message = f"RECORD has {stated}; it is {digest}, {size} bytes"
        yield AuditFinding(name, "record-mismatch", message)
