"""
Two wheels compared: every member byte by byte, and where they differ, what kind of difference it is.

A library differs for reasons that matter (its code) and for some that do not (a build id, a symbol table, the name of a folder in a
message). Sections tell them apart. What device code is in a library is another question, which `sparkwright.audit.code` answers.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sparkwright.build import wheelfile
from sparkwright.forks.archive import zip_file

#: What a difference is, from the harmless to the grave; the gravest that applies is given.
Kind = Literal["follows", "build-id", "symbols", "paths", "text", "data", "device", "code", "absent"]

MEANS: dict[Kind, str] = {
    "follows": "it lists the other members, so it differs where they do",
    "build-id": "equal but for the build id",
    "symbols": "equal but for the symbol table, which no program needs",
    "paths": "equal but for strings that hold paths",
    "text": "text",
    "data": "other bytes",
    "device": "device code, and nothing of the host's but what follows from it",
    "code": "sections of the host's code or data",
    "absent": "only one of the wheels has it",
}

BUILD_ID = ".note.gnu.build-id"
SYMBOLS = (".symtab", ".strtab", ".shstrtab", ".symtab_shndx", ".gnu_debuglink", ".comment")
DEVICE = (".nv_fatbin", "__nv_relfatbin", ".nvFatBinSegment")

#: What is shown of a difference; a wheel may hold thousands.
_SHOWN = 8
_STRING = re.compile(rb"[\x20-\x7e]{4,}")


class MemberDifference(msgspec.Struct, frozen=True):
    """A member that is not the same in both wheels: what *kind* of difference it is, and its particulars."""

    name: str
    kind: Kind
    says: tuple[str, ...] = ()


class WheelDifference(msgspec.Struct, frozen=True):
    """
    What differs between two wheels.

    Attributes:
        members: By name; empty where all bytes that would be installed are equal.
        archive: How the zip archives differ beyond that: order, dates, modes, compression.
        equal: How many members are the same.
    """

    members: tuple[MemberDifference, ...]
    archive: tuple[str, ...]
    equal: int


def compare(one: Path, other: Path) -> WheelDifference:
    """
    Return what differs between the wheels *one* and *other*.

    Raises:
        WheelInvalid: One is damaged. ArchiveUnsafe: A member's name leaves its folder.
    """
    with _opened(one) as (first, found), _opened(other) as (second, again):
        differing = [
            MemberDifference(name, "absent", (f"only in {(one if name in found else other).name}",)) for name in found.keys() ^ again.keys()
        ]
        common = sorted(found.keys() & again.keys())
        for name in common:
            if _hash(first, name) != _hash(second, name):
                differing.append(_differing(name, first.read(name), second.read(name)))
        equal = len(common) - sum(member.kind != "absent" for member in differing)
        return WheelDifference(tuple(sorted(differing, key=lambda member: member.name)), tuple(_archive(found, again)), equal)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    with zip_file(path) as wheel:
        yield wheel, wheelfile.members(wheel, path.name)


def _hash(wheel: zipfile.ZipFile, name: str) -> str:
    with wheel.open(name) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # a member can be read into a buffer


def _archive(found: dict[str, zipfile.ZipInfo], again: dict[str, zipfile.ZipInfo]) -> Iterator[str]:
    common = [name for name in found if name in again]
    if common != [name for name in again if name in found]:
        yield "the members stand in another order"
    fields = {
        "dates": "date_time", "modes": "external_attr", "compression methods": "compress_type", "extra fields": "extra",
        "flags": "flag_bits",
    }  # fmt: skip
    for what, field in fields.items():
        if count := sum(getattr(found[name], field) != getattr(again[name], field) for name in common):
            yield f"{count} members have other {what}"
    same = [name for name in common if (found[name].CRC, found[name].compress_type) == (again[name].CRC, again[name].compress_type)]
    if count := sum(found[name].compress_size != again[name].compress_size for name in same):
        yield f"{count} members of equal content are packed to another size: another release of the compressing library"


def _differing(name: str, one: bytes, other: bytes) -> MemberDifference:
    if one[:4] == other[:4] == b"\x7fELF":
        return elf(name, one, other)
    if name.endswith(".dist-info/RECORD"):
        return MemberDifference(name, "follows", tuple(_rows(one, other))[:_SHOWN])
    try:
        pairs = enumerate(zip(one.decode().splitlines(), other.decode().splitlines(), strict=False), start=1)
    except UnicodeDecodeError:
        at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))
        return MemberDifference(name, "data", (f"from byte {at} on; {len(one)} and {len(other)} bytes",))
    lines = [f"line {number}: {before.strip()!r}, {after.strip()!r}" for number, (before, after) in pairs if before != after]
    return MemberDifference(name, "text", tuple(lines[:_SHOWN]) or (f"{len(one)} and {len(other)} bytes",))


def _rows(one: bytes, other: bytes) -> Iterator[str]:
    rows = [{tuple(row) for row in csv.reader(io.StringIO(text.decode("utf-8", "replace")))} for text in (one, other)]
    for name in sorted({row[0] for row in rows[0] ^ rows[1] if row}):
        yield f"another hash of {name}"


def elf(name: str, one: bytes, other: bytes) -> MemberDifference:
    """Return how two ELF files that are not equal differ, section by section."""
    try:
        first, second = _sections(one), _sections(other)
    except Exception as error:  # pyelftools lets through whatever its parser trips over in a damaged file
        return MemberDifference(name, "data", (f"it cannot be read as ELF: {error}",))
    names = [part for part in sorted(first.keys() | second.keys()) if first.get(part) != second.get(part)]
    if one[18:20] != other[18:20]:
        return MemberDifference(name, "code", ("it is for another machine",))
    strings = [(first.get(part, b""), second.get(part, b"")) for part in names if part not in DEVICE]
    only = sorted({text for before, after in strings for text in set(_STRING.findall(before)) ^ set(_STRING.findall(after))})
    says = [f"sections: {', '.join(names) or 'none; bytes between them'}"]
    says += [f"string: {text.decode()[:160]}" for text in only if b"/" in text][:_SHOWN]
    return MemberDifference(name, _kind(names, first, second), tuple(says))


def _kind(names: list[str], first: dict[str, bytes], second: dict[str, bytes]) -> Kind:
    # What links and loads a fatbin follows from its size; so do the offsets of all sections behind it.
    rest = [name for name in names if name not in (BUILD_ID, *SYMBOLS)]
    if not rest:
        return "symbols" if any(name != BUILD_ID for name in names) else "build-id" if names else "data"
    if all(name in DEVICE for name in rest):
        return "device"
    if all(_only_paths(first.get(name, b""), second.get(name, b"")) for name in rest):
        return "paths"
    return "code"


def _only_paths(one: bytes, other: bytes) -> bool:
    """Are two sections equal once the strings in them that hold a slash are left out?"""
    left = [_STRING.sub(lambda match: b"" if b"/" in match[0] else match[0], data).rstrip(b"\0") for data in (one, other)]
    return left[0] == left[1]


def _sections(data: bytes) -> dict[str, bytes]:
    """Return the bytes of each section by name; equal names are joined."""
    from elftools.elf.elffile import ELFFile

    found: dict[str, bytes] = defaultdict(bytes)
    stream: Any = io.BytesIO(data)
    for section in ELFFile(stream).iter_sections():
        size = 0 if section["sh_type"] == "SHT_NOBITS" else section["sh_size"]
        # Raw bytes, not pyelftools' data(), which would inflate a section that claims to be compressed.
        found[section.name] += data[section["sh_offset"] : section["sh_offset"] + size]
    return dict(found)
