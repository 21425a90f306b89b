"""
The device code of a wheel: one digest for all of it, and where two wheels' device code differs, down to the kernel.

The digest covers what a GPU of the stack could load. Of a library compiled here these are its cubins of the stack's generation and all
its PTX, each by its sha256 and in sorted order, so that neither link order nor compression changes it; of a library that came with the
official wheel, its fatbin sections as they are. Python, host code and the version label are no part of it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sparkwright.audit import cubin, device_images, elf, elf_sections, wheel_reader
from sparkwright.audit.elf_sections import Buffer, ElfUnreadable
from sparkwright.audit.fatbin import FatbinUnreadable
from sparkwright.audit.policy import AuditPolicy
from sparkwright.core.console import console
from sparkwright.core.digest import canonical, sha256_bytes
from sparkwright.core.store import room_guard

#: In the names of functions and variables with internal linkage, nvcc puts a hash of the real path of their source.
_INTERNAL = re.compile(rb"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(?=_\d+_)")


class Piece(msgspec.Struct, frozen=True):
    """
    One cubin or PTX file.

    Attributes:
        arch: Its real target.
        sha256: Of its bytes.
        unnamed: The sha256 with the hashes of source paths in names left out.
        kernels: Mangled name of each function → sha256 of its code; none for PTX.
    """

    arch: str
    sha256: str
    unnamed: str
    kernels: dict[str, str] = {}


class LibraryCode(msgspec.Struct, frozen=True):
    """
    The device code of one member.

    Attributes:
        pieces: None for a library that came with the official wheel, and for one that cannot be read.
        unreadable: What keeps its device code from being read; its digest is then that of its fatbin sections.
    """

    name: str
    digest: str
    pieces: tuple[Piece, ...] = ()
    unreadable: str = ""


class WheelCode(msgspec.Struct, frozen=True):
    """The device code of a wheel; *digest* is the audit report's."""

    digest: str
    libraries: tuple[LibraryCode, ...]


class CodeDifference(msgspec.Struct, frozen=True):
    """
    A library whose device code differs.

    Attributes:
        unreadable: What keeps one of the two from being read.
        names_only: It is the same code, under names that hold another hash of the source's folder.
        pieces: How many cubins and PTX files differ, of how many in the first wheel.
        kernels: The kernels whose code differs, or that only one wheel has.
    """

    name: str
    names_only: bool
    pieces: tuple[int, int]
    kernels: tuple[str, ...]
    unreadable: str = ""


def of_pieces(hashes: Iterable[str]) -> str:
    """Return a library's digest from the sha256 of its cubins and PTX files."""
    return sha256_bytes(canonical(sorted(hashes)))


def of_libraries(digests: Iterable[str]) -> str:
    """Return a wheel's digest from those of its libraries; empty without any."""
    parts = sorted({one for one in digests if one})
    return sha256_bytes(canonical(parts)) if parts else ""


def of(wheel: Path, policy: AuditPolicy, scratch: Path) -> WheelCode:
    """
    Return the device code of *wheel*, without judging it.

    Args:
        scratch: An existing folder for the libraries while they are read, one at a time.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `sparkwright.audit.wheel.audit`.
    """
    about = wheel_reader.subject(wheel)
    found: list[LibraryCode] = []

    def visit(binary: wheel_reader.Binary) -> None:
        try:
            with elf_sections.mapped(binary.path) as data:
                found.extend(_library(binary, data, policy, about.name))
        except ElfUnreadable:
            return

    with (
        room_guard(scratch),
        tempfile.TemporaryDirectory(prefix="code-", dir=scratch) as folder,
        console.progress(f"device code of {wheel.name}", 0, "bytes") as progress,
    ):
        wheel_reader.walk(wheel, about, Path(folder), visit, progress.update)
    return WheelCode(of_libraries(one.digest for one in found), tuple(sorted(found, key=lambda one: one.name)))


def _library(binary: wheel_reader.Binary, data: Buffer, policy: AuditPolicy, distribution: str) -> list[LibraryCode]:
    host = elf.host(data)
    if not host.device:
        return []
    whole, wants = host.fatbin or binary.sha256, policy.library(distribution, binary.name)
    if not (wants and wants.role == "target"):
        return [LibraryCode(binary.name, whole)]
    try:
        pieces = _pieces(data, host, policy.generation)
    except (FatbinUnreadable, ElfUnreadable) as error:
        return [LibraryCode(binary.name, whole, unreadable=str(error))]
    return [LibraryCode(binary.name, of_pieces(piece.sha256 for piece in pieces), tuple(sorted(pieces, key=lambda piece: piece.sha256)))]


def _pieces(data: Buffer, host: elf.Host, generation: str) -> list[Piece]:
    return [_piece(form, own) for form, own in device_images.forms(data, host, generation, whole_ptx=True) if own]


def _piece(form: device_images.Form, own: bytes) -> Piece:
    kernels = {_unnamed(name.encode()).decode(): sha256 for name, sha256 in cubin.functions(own).items()} if form.kind == "cubin" else {}
    return Piece(form.target, form.sha256, sha256_bytes(_unnamed(own)), kernels)


def _unnamed(data: bytes) -> bytes:
    return _INTERNAL.sub(rb"\g<1>00000000", data)


def compare(one: WheelCode, other: WheelCode) -> tuple[CodeDifference, ...]:
    """Return the libraries whose device code differs, by name."""
    first, second = ({library.name: library for library in code.libraries} for code in (one, other))
    missing = LibraryCode("", "")
    pairs = [(name, first.get(name, missing), second.get(name, missing)) for name in sorted(first.keys() | second.keys())]
    return tuple(_differing(name, before, after) for name, before, after in pairs if before.digest != after.digest)


def _differing(name: str, before: LibraryCode, after: LibraryCode) -> CodeDifference:
    shared = {piece.sha256 for piece in before.pieces} & {piece.sha256 for piece in after.pieces}
    old, new = ([piece for piece in library.pieces if piece.sha256 not in shared] for library in (before, after))
    names_only = bool(old) and sorted(piece.unnamed for piece in old) == sorted(piece.unnamed for piece in new)
    kernels = sorted({kernel for kernel, _ in _codes(old) ^ _codes(new)})
    pieces = (max(len(old), len(new)), len(before.pieces))
    return CodeDifference(name, names_only, pieces, tuple(kernels), before.unreadable or after.unreadable)


def _codes(pieces: Sequence[Piece]) -> set[tuple[str, str]]:
    return {(f"{kernel} ({piece.arch})", sha256) for piece in pieces for kernel, sha256 in piece.kernels.items()}
