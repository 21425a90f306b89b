"""
The device code of a library and of a wheel: its cubins and PTX texts, their real targets, and one
digest for all of it.

A cubin's file name (``….sm_121.cubin``) and its ELF flags are the same for ``sm_121`` and
``sm_121f``; only ``-arch`` among the ptxas options in its ``.note.nv.tkinfo`` section tells them
apart. As an ELF
note: name ``NVIDIA Corp``, type 2000, and a description of six little-endian words (2, object,
    tool, version, build, options), of which the last five are offsets into the NUL-terminated
    strings that follow (seen with CUDA 13.0.88).

The digest covers what a GPU of the stack could load. For a library compiled here these are its
cubins of the stack's generation and all its PTX, each by its sha256 and in sorted order, so that
neither link order nor compression changes it; for a library that came with the official wheel, its
fatbin sections as they are. Python, host code and the version label are no part of it.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.audit import wheel_reader
from sparkwright.audit.policy import AuditPolicy, is_generation
from sparkwright.builder.wheel import elf, fatbin
from sparkwright.builder.wheel.elf import Buffer, ElfUnreadable, SharedObject
from sparkwright.builder.wheel.fatbin import Entry, FatbinUnreadable
from sparkwright.core.console import console
from sparkwright.core.digest import canonical, sha256_bytes
from sparkwright.core.store import room_guard

#: A note holds one command line; a larger one is not a note.
_LARGEST_NOTE = 1 << 16
_TKINFO, _TKINFO_VERSION = 2000, 2
_ARCH_OPTION = re.compile(r"(?:^|\s)(?:-arch|--gpu-name)[ =](sm_\d+[af]?)(?=\s|$)")
_PTX_TARGET = re.compile(rb"^\.target +(sm_\d+[af]?)", re.MULTILINE)
#: The directive stands at the top, after comments.
_PTX_HEAD = 1 << 14
#: In names with internal linkage nvcc puts a hash of the real path of their source.
_INTERNAL = re.compile(rb"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(?=_\d+_)")


class DeviceImage(msgspec.Struct, frozen=True):
    """
    A cubin or a PTX text of a library.

    Attributes:
        container: The number of its fatbin in the library: one per translation unit.
        listed: The target in the fatbin's table, by which a driver chooses; empty for a bare cubin.
        target: The target that the code itself states; ``sm_121?`` where it should and does not,
            and
            *listed* where it was not unpacked.
        sha256: Of the unpacked bytes; empty where they were not unpacked whole.
        kernels: The mangled names of a cubin's functions.
    """

    kind: Literal["ptx", "cubin"]
    container: int
    listed: str
    target: str
    sha256: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def contradicted(self) -> bool:
        """True when the table states one target and the code another."""
        stated = self.kind == "cubin" and bool(self.listed) and not self.target.endswith("?")
        return stated and self.listed != self.target


class LibraryCode(msgspec.Struct, frozen=True):
    """
    The device code of one member.

    Attributes:
        images: The sha256 of each image, and its sha256 without the hashes of source paths in
            names;
            empty for a library of the official wheel, and for one that cannot be read.
        unreadable: Why its device code cannot be read; its digest is then that of its fatbin
            sections.
    """

    name: str
    digest: str
    images: tuple[tuple[str, str], ...] = ()
    unreadable: str = ""


class WheelCode(msgspec.Struct, frozen=True):
    """The device code of a wheel; *digest* is the audit report's."""

    digest: str
    libraries: tuple[LibraryCode, ...]


class CodeDifference(msgspec.Struct, frozen=True):
    """
    A library whose device code differs.

    Attributes:
        names_only: It is the same code, under names that hold another hash of the source's folder.
        images: How many cubins and PTX texts differ, of how many in the first wheel.
        unreadable: Why one of the two cannot be read.
    """

    name: str
    names_only: bool
    images: tuple[int, int]
    unreadable: str = ""


def note_target(data: bytes) -> str:
    """
    Return the target that the bytes of a ``.note.nv.tkinfo`` section state; empty without one.
    """
    position = 0
    while position + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<3I", data, position)
        begin = position + 12 + (name_size + 3) // 4 * 4
        if begin + size > len(data):
            break
        name, description = (
            data[position + 12 : position + 12 + name_size],
            data[begin : begin + size],
        )
        position = begin + (size + 3) // 4 * 4
        if name.rstrip(b"\0") != b"NVIDIA Corp" or kind != _TKINFO or size < 24:
            continue
        version, *_, options = struct.unpack_from("<6I", description)
        line = description[24:][options:].split(b"\0", 1)[0].decode("ascii", "replace")
        if version == _TKINFO_VERSION and (match := _ARCH_OPTION.search(line)):
            return match[1]
    return ""


def read_cubin(data: Buffer) -> tuple[str, tuple[str, ...]]:
    """
    Return the target that ptxas was given for the cubin in *data* (``sm_121f``; empty when the note
    is missing or of an unknown version), and the mangled names of its kernels.

    Raises:
        ElfUnreadable: It is not an ELF file that can be read.
    """
    target, kernels = "", []
    for section in elf.sections(data):
        if section.name == ".note.nv.tkinfo" and section.size <= _LARGEST_NOTE:
            target = note_target(data[section.offset : section.offset + section.size])
        elif section.name.startswith(".text."):
            kernels.append(section.name.removeprefix(".text."))
    return target, tuple(sorted(kernels))


def images(
    data: Buffer, library: SharedObject, generation: str, *, whole_ptx: bool
) -> Iterator[tuple[DeviceImage, bytes]]:
    """
    Yield the images of the library in *data*, with the unpacked bytes of its cubins of *generation*
    and of its PTX.

    Args:
        whole_ptx: Unpack PTX to its end, and not only as far as its target.

    Raises:
        FatbinUnreadable: As `fatbin.entries` and `fatbin.unpack`.
        ElfUnreadable: A cubin cannot be read.
    """
    if library.machine == elf.CUDA:
        yield _cubin(data, Entry("cubin", "", 0, len(data), len(data), "", 0))
    for entry in fatbin.entries(data, library.fatbins):
        if entry.kind == "cubin" and is_generation(entry.arch, generation):
            yield _cubin(data, entry)
        elif entry.kind == "cubin":
            yield DeviceImage("cubin", entry.container, entry.arch, entry.arch), b""
        else:
            text = fatbin.unpack(data, entry, None if whole_ptx else _PTX_HEAD)
            match = _PTX_TARGET.search(text[:_PTX_HEAD])
            target, sha256 = (
                match[1].decode() if match else entry.arch,
                sha256_bytes(text) if whole_ptx else "",
            )
            yield DeviceImage("ptx", entry.container, entry.arch, target, sha256), text


def _cubin(data: Buffer, entry: Entry) -> tuple[DeviceImage, bytes]:
    content = fatbin.unpack(data, entry)
    target, kernels = read_cubin(content)
    target = target or f"{entry.arch or 'sm'}?"
    return DeviceImage(
        "cubin", entry.container, entry.arch, target, sha256_bytes(content), kernels
    ), content


def by_container(listed: Iterable[DeviceImage]) -> dict[int, list[DeviceImage]]:
    """Return the images of each fatbin."""
    groups: dict[int, list[DeviceImage]] = {}
    for image in listed:
        groups.setdefault(image.container, []).append(image)
    return groups


def targets(listed: Iterable[DeviceImage], kind: Literal["ptx", "cubin"]) -> list[str]:
    """Return the targets of the images of that kind."""
    return [image.target for image in listed if image.kind == kind]


def sections_digest(data: Buffer, library: SharedObject) -> str:
    """Return the sha256 over the sections that hold device code; empty when there are none."""
    sha = hashlib.sha256()
    with memoryview(data) as view:
        for offset, size in library.fatbins:
            sha.update(view[offset : offset + size])
    return sha.hexdigest() if library.fatbins else ""


def library_digest(hashes: Iterable[str]) -> str:
    """Return a library's digest from the sha256 of its cubins and PTX texts."""
    return sha256_bytes(canonical(sorted(hashes)))


def wheel_digest(digests: Iterable[str]) -> str:
    """Return a wheel's digest from those of its libraries; empty without any."""
    parts = sorted({digest for digest in digests if digest})
    return sha256_bytes(canonical(parts)) if parts else ""


def read_wheel(wheel: Path, policy: AuditPolicy, scratch: Path) -> WheelCode:
    """
    Return the device code of *wheel*, without judging it.

    Args:
        scratch: An existing folder for the libraries while they are read, one at a time.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `sparkwright.audit.wheel.audit`.
    """
    subject = wheel_reader.subject(wheel)
    libraries: list[LibraryCode] = []

    def visit(binary: wheel_reader.Binary) -> None:
        try:
            with elf.mapped(binary.path) as data:
                if code := _library(binary, data, policy, subject.name):
                    libraries.append(code)
        except ElfUnreadable:
            return

    with (
        room_guard(scratch),
        tempfile.TemporaryDirectory(prefix="code-", dir=scratch) as folder,
        console.progress(f"device code of {wheel.name}", 0, "bytes") as progress,
    ):
        wheel_reader.walk(wheel, subject, Path(folder), visit, progress.update)
    ordered = tuple(sorted(libraries, key=lambda library: library.name))
    return WheelCode(wheel_digest(library.digest for library in ordered), ordered)


def _library(
    binary: wheel_reader.Binary, data: Buffer, policy: AuditPolicy, distribution: str
) -> LibraryCode | None:
    library = elf.shared_object(data)
    if not library.has_device_code:
        return None
    whole, wants = (
        sections_digest(data, library) or binary.sha256,
        policy.library(distribution, binary.name),
    )
    if not (wants and wants.role == "target"):
        return LibraryCode(binary.name, whole)
    try:
        unpacked = list(images(data, library, policy.generation, whole_ptx=True))
    except (FatbinUnreadable, ElfUnreadable) as error:
        return LibraryCode(binary.name, whole, unreadable=str(error))
    hashes = sorted(
        (image.sha256, sha256_bytes(_INTERNAL.sub(rb"\g<1>00000000", content)))
        for image, content in unpacked
        if image.sha256
    )
    return LibraryCode(binary.name, library_digest(sha256 for sha256, _ in hashes), tuple(hashes))


def compare(first: WheelCode, second: WheelCode) -> tuple[CodeDifference, ...]:
    """Return the libraries whose device code differs, by name."""
    before, after = (
        {library.name: library for library in code.libraries} for code in (first, second)
    )
    missing = LibraryCode("", "")
    pairs = [
        (name, before.get(name, missing), after.get(name, missing))
        for name in sorted(before | after)
    ]
    return tuple(
        _difference(name, *libraries)
        for name, *libraries in pairs
        if libraries[0].digest != libraries[1].digest
    )


def _difference(name: str, before: LibraryCode, after: LibraryCode) -> CodeDifference:
    old, new = (
        [unnamed for sha256, unnamed in library.images if sha256 not in dict(other.images)]
        for library, other in ((before, after), (after, before))
    )
    names_only = bool(old) and sorted(old) == sorted(new)
    count = (max(len(old), len(new)), len(before.images))
    return CodeDifference(name, names_only, count, before.unreadable or after.unreadable)
