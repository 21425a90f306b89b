"""
Fatbins, the containers in which nvcc puts the device code of a translation unit, read without
NVIDIA's tools.

NVIDIA does not publish the format; this is what nvcc 13.0 writes and cuobjdump 13.5 reads alike
(`tests/unit/test_audit_fatbin.py` compares the two). A section holds containers one after the
other, with zeros between them: magic, version 1, size of the header, size of the rest. A container
holds entries: kind (1 PTX, 2 cubin), version 0x0101, sizes, the arch as a number, flags, and the
stored bytes, which may be compressed. The flags also tell ``sm_120a`` (bit 20) and ``sm_120f`` (bit
21) from ``sm_120``, as the driver needs to know before it decompresses anything; the ptxas options
in the cubin state the same a second time (`sparkwright.audit.device_code`).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from sparkwright.builder.wheel.elf import Buffer

MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQII4xI8xQ8xQ")
_VERSION, _ENTRY_VERSION = 1, 0x0101
_KINDS: dict[int, Literal["ptx", "cubin"]] = {1: "ptx", 2: "cubin"}
_LZ4, _ZSTD, _EXACT, _FAMILY = 0x2000, 0x8000, 1 << 20, 1 << 21

#: The largest cubin of the official wheels has 17 MB; an entry that states more than this is
#: refused. A library of theirs has at most some hundred entries.
MOST_BYTES, MOST_ENTRIES = 512 * 1024**2, 100_000
#: LZ4 cannot encode more in a byte.
_LZ4_RATIO = 255


class FatbinUnreadable(ValueError):
    """Device code contradicts itself, or has a form that is not supported."""


class FatbinEntry(msgspec.Struct, frozen=True):
    """
    A cubin or a PTX text.

    Attributes:
        arch: As the table states it (``sm_121f``); a cubin's own note may differ.
        offset, stored: Where its bytes lie in the file, and how many.
        size: Its uncompressed size.
        container: The number of its container: one per translation unit.
    """

    kind: Literal["ptx", "cubin"]
    arch: str
    offset: int
    stored: int
    size: int
    compression: Literal["", "lz4", "zstd"]
    container: int

    @property
    def target(self) -> str:
        """The arch as nvcc's options name it: ``compute_80`` for PTX."""
        return self.arch.replace("sm_", "compute_") if self.kind == "ptx" else self.arch


def entries(data: Buffer, parts: Iterable[tuple[int, int]]) -> Iterator[FatbinEntry]:
    """
    Yield the entries of the containers in *parts* (offset, size) of *data*, in their order.

    Raises:
        FatbinUnreadable: A version or a kind is not supported, a size leads out of its section, or
            there are too many entries.
    """
    count = container = 0
    for begin, size in parts:
        position, end = begin, begin + size
        while end - position >= _CONTAINER.size:
            magic, version, header, rest = _CONTAINER.unpack_from(data, position)
            if magic == 0 and position % 8 == 0 and not any(data[position : position + 8]):
                position += 8
                continue
            if (magic, version) != (MAGIC, _VERSION):
                supported = f"supported is {MAGIC:#010x} of version {_VERSION}"
                stated = f"{magic:#010x} of version {version} at offset {position}"
                raise FatbinUnreadable(f"no fatbin begins with {stated}; {supported}")
            if header < _CONTAINER.size or rest > end - position - header:
                what = f"a fatbin at offset {position} ends beyond its section: {rest} bytes"
                raise FatbinUnreadable(what)
            position += header
            for entry in _entries(data, position, position + rest, container):
                count += 1
                if count > MOST_ENTRIES:
                    raise FatbinUnreadable(f"it holds more than {MOST_ENTRIES} entries")
                yield entry
            container += 1
            position += rest


def _entries(data: Buffer, position: int, end: int, container: int) -> Iterator[FatbinEntry]:
    while position < end:
        where = f"an entry at offset {position}"
        if end - position < _ENTRY.size:
            raise FatbinUnreadable(f"{where} has no room for its header")
        kind, version, header, size, packed, _, number, flags, whole = _ENTRY.unpack_from(
            data, position
        )
        if version != _ENTRY_VERSION or kind not in _KINDS:
            supported = f"supported is version {_ENTRY_VERSION:#06x}, and the kinds 1 and 2"
            stated = f"version {version:#06x} and kind {kind}"
            raise FatbinUnreadable(f"{where} is of {stated}; {supported}")
        if header < _ENTRY.size or size > end - position - header or packed > size:
            raise FatbinUnreadable(f"{where} ends beyond its fatbin: {size} bytes")
        arch = f"sm_{number}{'a' if flags & _EXACT else 'f' if flags & _FAMILY else ''}"
        compression: Literal["", "lz4", "zstd"] = (
            "lz4" if flags & _LZ4 else "zstd" if flags & _ZSTD else ""
        )
        stored, whole = (packed or size, whole) if compression else (size, size)
        most = min(MOST_BYTES, stored * _LZ4_RATIO) if compression == "lz4" else MOST_BYTES
        if compression and whole > most:
            raise FatbinUnreadable(f"{where} states that it unpacks to {whole} bytes")
        position += header
        yield FatbinEntry(_KINDS[kind], arch, position, stored, whole, compression, container)
        position += size


def unpacked_bytes(data: Buffer, parts: Iterable[tuple[int, int]]) -> int:
    """
    Return the bytes to which the compressed entries in *parts* of *data* would unpack, up to the
    first that cannot be read.
    """
    total = 0
    with contextlib.suppress(FatbinUnreadable):
        for entry in entries(data, parts):
            total += entry.size if entry.compression else 0
    return total


def unpack(data: Buffer, entry: FatbinEntry) -> bytes:
    """
    Return the bytes of *entry*; PTX without the zeros at its end.

    Raises:
        FatbinUnreadable: They do not decompress to the size that the table states.
    """
    import lz4.block
    import zstandard

    content = data[entry.offset : entry.offset + entry.stored]
    what = f"the {entry.compression} data at offset {entry.offset}"
    try:
        if entry.compression == "lz4":
            content = bytes(lz4.block.decompress(content, uncompressed_size=entry.size))
        elif entry.compression == "zstd":
            unpacker = zstandard.ZstdDecompressor(max_window_size=MOST_BYTES)
            with unpacker.stream_reader(content) as stream:
                # A byte more than the table states would show that the table is wrong.
                content = stream.read(entry.size + 1)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
        raise FatbinUnreadable(f"{what}: {error}") from error
    if len(content) != entry.size:
        states = f"unpacks to {len(content)} bytes, the table says {entry.size}"
        raise FatbinUnreadable(f"{what} {states}")
    return content.rstrip(b"\0") if entry.kind == "ptx" else content
