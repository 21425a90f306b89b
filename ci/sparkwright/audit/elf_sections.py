"""
The tables of an ELF file, read as hostile: every offset and count is held against the file's size before anything is read.

Only what Linux loads and CUDA makes is read: 64 bits, little-endian. Names and numbers are those of the System V ABI, and for version
needs of the Linux Standard Base.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

MAGIC = b"\x7fELF"
#: Section types: string table, no bytes in the file, dynamic symbols.
STRINGS, NO_BITS, DYNAMIC_SYMBOLS = 3, 8, 11
#: Segment types.
LOAD, DYNAMIC = 1, 2

#: A cubin of CUTLASS has some ten thousand sections, and mangled names of some thousand bytes.
MOST_SECTIONS = 1 << 20
MOST_SEGMENTS = 1 << 12
LONGEST_NAME = 1 << 20
MOST_NAME_BYTES = 1 << 28

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")

Buffer = bytes | mmap.mmap


class ElfUnreadable(ValueError):
    """The file begins like ELF but cannot be read as such."""


class Header(msgspec.Struct, frozen=True):
    """The numbers of the file header that are of use; *sections* and *segments* are offset, size of an entry, count."""

    machine: int
    sections: tuple[int, int, int]
    segments: tuple[int, int, int]
    names: int


class Section(msgspec.Struct, frozen=True):
    """One entry of the section table; its bytes lie inside the file."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


class Segment(msgspec.Struct, frozen=True):
    """One entry of the program header table; its bytes lie inside the file."""

    kind: int
    offset: int
    address: int
    size: int


def mapped(path: Path) -> mmap.mmap:
    """
    Return the file at *path* in memory, page by page as it is read.

    Raises:
        ElfUnreadable: It is empty.
    """
    with path.open("rb") as stream:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ElfUnreadable("it is empty") from error


def bounded(data: Buffer, offset: int, size: int, what: str) -> None:
    """Raise `ElfUnreadable` when the *size* bytes from *offset* do not lie in *data*."""
    if offset > len(data) or size > len(data) - offset:
        raise ElfUnreadable(f"{what} lies beyond the end of the file (offset {offset}, {size} bytes, of {len(data)})")


def header(data: Buffer) -> Header:
    """
    Return the file header.

    Raises:
        ElfUnreadable: It is not that of a 64-bit little-endian file, or its tables are not in the file.
    """
    if len(data) < 64 or data[:4] != MAGIC:
        raise ElfUnreadable("it is shorter than a header, or does not begin like ELF")
    if data[4:6] != b"\x02\x01":
        raise ElfUnreadable(f"it is not 64-bit little-endian (class {data[4]}, data {data[5]})")
    _, machine, _, _, at_segments, at_sections, _, _, *sizes = _HEADER.unpack_from(data)
    segment_size, segment_count, section_size, section_count, names = sizes
    if at_sections and section_size == _SECTION.size and (section_count == 0 or names == 0xFFFF):
        # More entries than fit into 16 bits: the numbers stand in the first entry.
        bounded(data, at_sections, _SECTION.size, "the section table")
        first = _SECTION.unpack_from(data, at_sections)
        section_count, names = section_count or first[5], first[6] if names == 0xFFFF else names
    tables = {"section": (at_sections, section_size, section_count), "segment": (at_segments, segment_size, segment_count)}
    for what, (offset, size, count) in tables.items():
        if count and size != (_SECTION if what == "section" else _SEGMENT).size:
            raise ElfUnreadable(f"an entry of its {what} table has {size} bytes")
        if count > (MOST_SECTIONS if what == "section" else MOST_SEGMENTS):
            raise ElfUnreadable(f"it has {count} {what}s, more than any library")
        bounded(data, offset, size * count, f"the {what} table")
    return Header(machine, tables["section"], tables["segment"], names)


def text(data: Buffer, offset: int, end: int) -> str:
    """
    Return the NUL-terminated string at *offset*, which ends before *end*.

    Raises:
        ElfUnreadable: It does not, or is longer than `LONGEST_NAME`.
    """
    stop = data.find(b"\0", offset, min(end, offset + LONGEST_NAME))
    if offset >= end or stop < 0:
        raise ElfUnreadable(f"a name at offset {offset} has no end")
    return data[offset:stop].decode("utf-8", "replace")


def sections(data: Buffer) -> tuple[Section, ...]:
    """
    Return the section table; empty without one.

    Raises:
        ElfUnreadable: A section or a name lies outside the file, or the names are longer than those of any library together.
    """
    found = header(data)
    offset, size, count = found.sections
    if not count:
        return ()
    entries = list(_SECTION.iter_unpack(data[offset : offset + size * count]))
    if found.names >= count:
        raise ElfUnreadable(f"the names of its {count} sections are said to be in section {found.names}")
    begin, length = entries[found.names][4:6]
    bounded(data, begin, length, "the table of section names")
    made, total = [], 0
    for name, kind, _, _, at, bytes_, link, _, _, _ in entries:
        named = text(data, begin + name, begin + length) if length else ""
        total += len(named)
        if total > MOST_NAME_BYTES:
            raise ElfUnreadable(f"the names of its sections are more than {MOST_NAME_BYTES} bytes")
        # The first entry is empty but for the numbers that found no place in the header.
        if kind not in (0, NO_BITS):
            bounded(data, at, bytes_, f"section {named[:80]}")
        made.append(Section(named, kind, at, bytes_, link))
    return tuple(made)


def segments(data: Buffer) -> Iterator[Segment]:
    """
    Yield the segments that the loader would look at.

    Raises:
        ElfUnreadable: One lies outside the file.
    """
    offset, size, count = header(data).segments
    for kind, _, at, address, _, in_file, _, _ in _SEGMENT.iter_unpack(data[offset : offset + size * count]):
        if kind in (LOAD, DYNAMIC):
            bounded(data, at, in_file, "a segment")
            yield Segment(kind, at, address, in_file)
