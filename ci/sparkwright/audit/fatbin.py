"""
Fatbins, the containers in which nvcc puts the forms of one unit's device code, read without NVIDIA's tools.

NVIDIA does not publish the format; this is what nvcc 13.0 writes and cuobjdump 13.5 reads alike (`tests/unit/test_fatbin.py` compares the
two). A section holds containers one after the other, with zeros between them: magic, version 1, size of the header, size of the rest. In
a container lie its entries: kind (1 PTX, 2 cubin), version 0x0101, sizes, the arch as a number, flags, and the stored bytes, which may be
packed. The flags also tell ``sm_120a`` (bit 20) and ``sm_120f`` (bit 21) from ``sm_120``, as the driver needs to know before it unpacks
anything; the ptxas options in the cubin say the same a second time (`sparkwright.audit.elf`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from sparkwright.audit.elf_sections import Buffer

MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQII4xI8xQ8xQ")
_VERSION, _ENTRY_VERSION = 1, 0x0101
_KINDS: dict[int, Literal["ptx", "cubin"]] = {1: "ptx", 2: "cubin"}
_LZ4, _ZSTD, _EXACT, _FAMILY = 0x2000, 0x8000, 1 << 20, 1 << 21

#: The largest cubin of the official wheels is 17 MB; what says that it is larger than this is not unpacked.
MOST_BYTES = 512 * 1024**2
#: Of one library: the wheels' have at most some hundreds.
MOST_ENTRIES = 100_000
#: No form of LZ4 can say more in a byte.
_LZ4_RATIO = 255


class FatbinUnreadable(ValueError):
    """Device code in a form that is not known here, or that contradicts itself."""


class Entry(msgspec.Struct, frozen=True):
    """
    One form of a unit's device code.

    Attributes:
        arch: As the table says (``sm_121f``); what the cubin itself says is in its note.
        offset, stored: Where its bytes lie in the file, and how many.
        size: How many bytes it is unpacked.
        unit: The number of its container: one per compiled unit.
    """

    kind: Literal["ptx", "cubin"]
    arch: str
    offset: int
    stored: int
    size: int
    packing: Literal["", "lz4", "zstd"]
    unit: int


def entries(data: Buffer, offset: int, size: int, unit: int = 0) -> Iterator[Entry]:
    """
    Yield the entries of the containers in the *size* bytes of *data* from *offset*, in their order.

    Args:
        unit: The number of the first container.

    Raises:
        FatbinUnreadable: A version or a kind that is not known, or a size that leads out of its place; the message says which.
    """
    position, end = offset, offset + size
    while end - position >= _CONTAINER.size:
        magic, version, header, rest = _CONTAINER.unpack_from(data, position)
        if magic == 0 and position % 8 == 0 and not any(data[position : position + 8]):
            position += 8
            continue
        if magic != MAGIC or version != _VERSION:
            what = f"a fatbin of version {version}" if magic == MAGIC else f"no fatbin begins with {magic:#010x}"
            raise FatbinUnreadable(f"{what}, at offset {position}; known is version {_VERSION}")
        if header < _CONTAINER.size or rest > end - position - header:
            raise FatbinUnreadable(f"a fatbin at offset {position} ends beyond its section: {rest} bytes")
        yield from _container(data, position + header, position + header + rest, unit)
        unit, position = unit + 1, position + header + rest


def _container(data: Buffer, position: int, end: int, unit: int) -> Iterator[Entry]:
    while position < end:
        if end - position < _ENTRY.size:
            raise FatbinUnreadable(f"an entry at offset {position} has no room for its header")
        kind, version, header, size, packed, _, number, flags, whole = _ENTRY.unpack_from(data, position)
        if version != _ENTRY_VERSION or kind not in _KINDS:
            known = f"known is version {_ENTRY_VERSION:#06x}, and the kinds 1 and 2"
            raise FatbinUnreadable(f"an entry of version {version:#06x} and kind {kind}, at offset {position}; {known}")
        if header < _ENTRY.size or size > end - position - header or packed > size:
            raise FatbinUnreadable(f"an entry at offset {position} ends beyond its fatbin: {size} bytes")
        yield _entry(kind, number, flags, position + header, (packed or size, whole, size), unit)
        position += header + size


def _entry(kind: int, number: int, flags: int, offset: int, sizes: tuple[int, int, int], unit: int) -> Entry:
    stored, whole, padded = sizes
    suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
    packing: Literal["", "lz4", "zstd"] = "lz4" if flags & _LZ4 else "zstd" if flags & _ZSTD else ""
    if not packing:
        return Entry(_KINDS[kind], f"sm_{number}{suffix}", offset, padded, padded, "", unit)
    if whole > MOST_BYTES or (packing == "lz4" and whole > stored * _LZ4_RATIO):
        raise FatbinUnreadable(f"an entry at offset {offset} says that it unpacks to {whole} bytes")
    return Entry(_KINDS[kind], f"sm_{number}{suffix}", offset, stored, whole, packing, unit)


def unpack(data: Buffer, entry: Entry, most: int | None = None) -> bytes:
    """
    Return the bytes of *entry*, or the first *most* of them.

    Raises:
        FatbinUnreadable: They do not unpack to the size that the table names.
    """
    wanted = entry.size if most is None else min(entry.size, most)
    if not entry.packing:
        return bytes(data[entry.offset : entry.offset + wanted])
    packed = data[entry.offset : entry.offset + entry.stored]
    try:
        found = _zstd(packed, wanted, whole=most is None) if entry.packing == "zstd" else lz4(packed, wanted)
    except ValueError as error:
        raise FatbinUnreadable(f"the {entry.packing} data at offset {entry.offset}: {error}") from error
    if len(found) != wanted:
        said = f"unpacks to {len(found)} bytes, the table says {entry.size}"
        raise FatbinUnreadable(f"the {entry.packing} data at offset {entry.offset} {said}")
    return found


def _zstd(packed: bytes, wanted: int, *, whole: bool) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MOST_BYTES).stream_reader(packed) as stream:
            # One byte more than the table names would say that the table lies.
            return stream.read(wanted + whole)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def lz4(packed: bytes, wanted: int) -> bytes:
    """
    Return the first *wanted* bytes of a block of LZ4 (its block format, version 1.6.1; CUDA before 13.0 packs so).

    Raises:
        ValueError: It ends early, or copies from before its beginning.
    """
    out, at, end = bytearray(), 0, len(packed)

    def length(nibble: int, at: int) -> tuple[int, int]:
        while nibble >= 15 and at < end:
            at += 1
            nibble += packed[at - 1]
            if packed[at - 1] != 255:
                break
        return nibble, at

    while at < end and len(out) < wanted:
        token = packed[at]
        count, at = length(token >> 4, at + 1)
        if count > end - at:
            raise ValueError("its literals end beyond the data")
        out += packed[at : at + count]
        at += count
        if at >= end:
            break
        if end - at < 2:
            raise ValueError("a match has no offset")
        back = packed[at] | packed[at + 1] << 8
        count, at = length(token & 15, at + 2)
        count = min(count + 4, wanted - len(out))
        if not 0 < back <= len(out):
            raise ValueError(f"a match {back} bytes back, with {len(out)} bytes written")
        begin = len(out) - back
        # A match may run into what it writes itself, which repeats its first bytes.
        piece = bytes(out[begin : begin + count])
        out += piece if back >= count else (piece * (count // back + 1))[:count]
    return bytes(out[:wanted])
