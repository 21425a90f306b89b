"""
ELF files and the device code in them, read as hostile: every offset, count and name is bounded
before it is used.

pyelftools would read the same, but follows names and a section table of any stride without an end,
so that a file of some megabytes keeps it busy for hours. Only what Linux loads and CUDA makes is
read: 64 bits, little-endian. What a library asks of the loader is read by its segments, as the
loader does, whatever its section table states. Numbers are those of the System V ABI.

Fatbins are the containers in which nvcc puts the device code of a translation unit. NVIDIA does not
publish the format; this is what nvcc 13.0 writes and cuobjdump 13.5 reads alike
(`tests/unit/test_audit.py` compares the two). A section holds containers one after the
other, with zeros between them: magic, version 1, size of the header, size of the rest. A container
holds entries: kind (1 PTX, 2 cubin), version 0x0101, sizes, the arch as a number, flags, and the
stored bytes, which may be compressed. The flags also tell ``sm_120a`` (bit 20) and ``sm_120f`` (bit
21) from ``sm_120``, as the driver needs to know before it decompresses anything; the ptxas options
in the cubin state the same a second time (`sparkwright.audit.device_code`).
"""

from __future__ import annotations

import functools
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")
#: Manylinux tags with a name instead of a version of glibc (PEP 600), by that version's minor.
LEGACY_TAGS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
MAGIC = b"\x7fELF"
#: ``e_machine`` of a cubin.
CUDA = 190
#: ``e_machine`` → the name in platform tags.
MACHINES = {62: "x86_64", 183: "aarch64"}
RELOCATABLE_FATBIN = "__nv_relfatbin"
FATBIN_SECTIONS = (".nv_fatbin", RELOCATABLE_FATBIN)
#: Section types without bytes in the file: NOBITS, and a GPU's global, local, shared and reserved
#: shared memory (SHT_CUDA_GLOBAL, _LOCAL, _SHARED, _RESERVED_SHARED; seen with CUDA 11.8 to 13.2).
NO_BYTES = frozenset((8, 0x70000007, 0x70000009, 0x7000000A, 0x70000015))
#: Section types: symbols of an object file, dynamic symbols, versions that a library needs, and the
#: version of each dynamic symbol. Segment types: loaded, dynamic.
_SYMBOLS, _DYNAMIC_SYMBOLS, _VERSIONS_NEEDED, _SYMBOL_VERSIONS = 2, 11, 0x6FFFFFFE, 0x6FFFFFFF
_LOAD, _DYNAMIC = 1, 2
#: Entries of the dynamic section: strings and their size, names, paths.
_STRTAB, _STRSZ, _NEEDED, _PATHS = 5, 10, 1, (15, 29)
#: Bindings of a symbol: global, weak, unique; one that is asked for weakly may stay unresolved.
_DEFINED, _REQUIRED = (1, 2, 10), (1,)

#: A cubin of CUTLASS has some ten thousand sections, and mangled names of some thousand bytes.
MOST_SECTIONS, MOST_SEGMENTS = 1 << 20, 1 << 12
MOST_NAME_BYTES, _LONGEST_NAME = 1 << 28, 1 << 20
_MOST_DYNAMIC = 1 << 16

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
#: A library of which versions are needed, and a needed version.
_VERSIONED_FILE, _NEEDED_VERSION = struct.Struct("<HHIII"), struct.Struct("<IHHII")
#: A needed version among the strings of the dynamic section; a linker may share its bytes with the
#: end of another string.
_VERSION = re.compile(rb"(GLIBC|GLIBCXX|CXXABI|GCC)_(\d{1,9}(?:\.\d{1,9})+)\0")

FATBIN_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_FATBIN_ENTRY = struct.Struct("<HHIQII4xI8xQ8xQ")
_FATBIN_VERSION, _ENTRY_VERSION = 1, 0x0101
_KINDS: dict[int, Literal["ptx", "cubin"]] = {1: "ptx", 2: "cubin"}
_LZ4, _ZSTD, _EXACT, _FAMILY = 0x2000, 0x8000, 1 << 20, 1 << 21

#: The largest cubin of the official wheels has 17 MB; an entry that states more than this is
#: refused. A library of theirs has at most some hundred entries.
MOST_IMAGE_BYTES, MOST_ENTRIES = 512 * 1024**2, 100_000
#: LZ4 cannot encode more in a byte.
_LZ4_RATIO = 255

Buffer = bytes | mmap.mmap


class ElfUnreadable(ValueError):
    """The file begins like ELF and cannot be read as such, or its device code cannot."""


class ElfSection(msgspec.Struct, frozen=True):
    """An entry of the section table; its bytes lie inside the file."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


class SharedObject(msgspec.Struct, frozen=True):
    """
    What a shared library or program asks of its machine.

    Attributes:
        machine: As in platform tags (``x86_64``, ``aarch64``), else the ELF number.
        needed: The libraries that the loader brings with it (DT_NEEDED).
        rpath: The entries of DT_RPATH and DT_RUNPATH.
        versions: The highest versions that it needs of glibc (``GLIBC``), libstdc++ (``GLIBCXX``),
            its ABI (``CXXABI``) and GCC's runtime (``GCC``).
        fatbins: Offset and size of each section that holds device code.
        symbols: The dynamic symbols that it defines.
        imports: The dynamic symbols of other libraries that it cannot do without, each with the
            version that it needs, such as ``GLIBC_2.28``, or none.
    """

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    versions: dict[str, tuple[int, ...]]
    fatbins: tuple[tuple[int, int], ...]
    symbols: frozenset[str]
    imports: dict[str, str]


class _Strings:
    """
    The string table in *size* bytes from *offset*; the names read from it are bounded together.
    """

    def __init__(self, data: Buffer, offset: int, size: int, what: str) -> None:
        _check_bounds(data, offset, size, what)
        self._data, self._offset, self._end = data, offset, offset + size
        self._left = MOST_NAME_BYTES

    def name(self, offset: int) -> str:
        begin = self._offset + offset
        end = self._data.find(b"\0", begin, min(self._end, begin + _LONGEST_NAME))
        self._left -= end - begin
        if begin >= self._end or end < 0 or self._left < 0:
            raise ElfUnreadable(f"a name at offset {begin} has no end, or all are too long")
        return self._data[begin:end].decode("utf-8", "replace")


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


def sections(data: Buffer) -> tuple[ElfSection, ...]:
    """
    Return the section table; empty without one.

    Raises:
        ElfUnreadable: A section or a name lies outside the file, or the names are too long
            together.
    """
    _, names, entries, _ = _header(data)
    if not entries:
        return ()
    if names >= len(entries):
        raise ElfUnreadable(
            f"the names of its {len(entries)} sections should be in section {names}"
        )
    begin, length = entries[names][4:6]
    strings = _Strings(data, begin, length, "the table of section names")
    listed = []
    for name, kind, _, _, offset, size, link, _, _, _ in entries:
        section = ElfSection(strings.name(name) if length else "", kind, offset, size, link)
        # The first entry is empty but for the numbers that do not fit into the header.
        if kind and kind not in NO_BYTES:
            _check_bounds(data, offset, size, f"section {section.name[:80]}")
        listed.append(section)
    return tuple(listed)


def shared_object(data: Buffer) -> SharedObject:
    """
    Return the needs of the library, program or object file in *data*.

    Raises:
        ElfUnreadable: Its headers contradict each other or its size.
    """
    machine, _, _, segments = _header(data)
    loads, entries = [], list[tuple[int, int]]()
    for kind, _, offset, address, _, size, _, _ in segments:
        if kind in (_LOAD, _DYNAMIC):
            _check_bounds(data, offset, size, "a segment")
        if kind == _LOAD:
            loads.append((offset, address, size))
        elif kind == _DYNAMIC:
            end = offset + min(size // 16, _MOST_DYNAMIC) * 16
            pairs = struct.iter_unpack("<QQ", data[offset:end])
            # An entry of zeros is the last one.
            entries += takewhile(lambda pair: pair[0] != 0, pairs)
    values = dict(entries)
    size = values.get(_STRSZ, 0) if _STRTAB in values else 0
    begin = _file_offset(loads, values[_STRTAB], size) if size else 0
    strings = _Strings(data, begin, size, "the table of its strings")
    versions: dict[str, tuple[int, ...]] = {}
    for match in _VERSION.finditer(data, begin, begin + size):
        name, version = match[1].decode(), version_key(match[2].decode())
        versions[name] = max(versions.get(name, ()), version)
    listed = sections(data)
    symbols = set(_symbols(data, listed, _DYNAMIC_SYMBOLS))
    return SharedObject(
        machine=MACHINES.get(machine, str(machine)),
        needed=tuple(strings.name(value) for tag, value in entries if tag == _NEEDED),
        rpath=tuple(filter(None, (strings.name(value) for tag, value in entries if tag in _PATHS))),
        versions=versions,
        fatbins=tuple(
            (section.offset, section.size)
            for section in listed
            if section.name in FATBIN_SECTIONS and section.kind not in NO_BYTES
        ),
        symbols=frozenset(name for name, _, defined in symbols if defined),
        imports={name: version for name, version, defined in symbols if not defined},
    )


def object_symbols(data: Buffer) -> dict[str, bool]:
    """
    Return the symbols of the object file in *data*: whether it defines them for others, or requires
    them.

    Raises:
        ElfUnreadable: As `shared_object`.
    """
    return {name: defined for name, _, defined in _symbols(data, sections(data), _SYMBOLS)}


def version_key(version: str) -> tuple[int, ...]:
    """Return ``2.28`` as numbers that compare; a part that is not a number is left out."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def version_text(version: Sequence[int]) -> str:
    """Return ``(2, 28)`` as people write it; empty for none."""
    return ".".join(map(str, version))


def _check_bounds(data: Buffer, offset: int, size: int, what: str) -> None:
    if offset > len(data) or size > len(data) - offset:
        raise ElfUnreadable(
            f"{what} lies beyond the end of the file (offset {offset}, {size} bytes, of "
            f"{len(data)})"
        )


def _header(data: Buffer) -> tuple[int, int, list[Any], list[Any]]:
    """
    Return the machine, the section of the section names, the sections' and the segments' entries.
    """
    if len(data) < 64 or data[:4] != MAGIC:
        raise ElfUnreadable("it is shorter than a header, or does not begin like ELF")
    if data[4:6] != b"\x02\x01":
        raise ElfUnreadable(f"it is not 64-bit little-endian (class {data[4]}, data {data[5]})")
    _, machine, _, _, segments, at, _, _, *sizes = _HEADER.unpack_from(data)
    segment_size, segment_count, section_size, section_count, names = sizes
    if at and section_size == _SECTION.size and (section_count == 0 or names == 0xFFFF):
        # More entries than fit into 16 bits: the numbers stand in the first entry.
        _check_bounds(data, at, _SECTION.size, "the section table")
        first = _SECTION.unpack_from(data, at)
        section_count, names = section_count or first[5], first[6] if names == 0xFFFF else names
    tables = []
    for what, form, offset, size, count, most in (
        ("section", _SECTION, at, section_size, section_count, MOST_SECTIONS),
        ("segment", _SEGMENT, segments, segment_size, segment_count, MOST_SEGMENTS),
    ):
        if count and size != form.size:
            raise ElfUnreadable(f"an entry of its {what} table has {size} bytes")
        if count > most:
            raise ElfUnreadable(f"it has {count} {what}s, more than any library")
        _check_bounds(data, offset, size * count, f"the {what} table")
        tables.append(list(form.iter_unpack(data[offset : offset + size * count])))
    return machine, names, tables[0], tables[1]


def _file_offset(loads: Sequence[tuple[int, int, int]], address: int, size: int) -> int:
    """Return the offset of the *size* bytes of strings that the loader maps at *address*."""
    for offset, begin, length in loads:
        if begin <= address and address + size <= begin + length:
            return offset + address - begin
    raise ElfUnreadable(f"its strings are in no segment (address {address:#x}, {size} bytes)")


def _symbols(
    data: Buffer, listed: Sequence[ElfSection], kind: int
) -> Iterator[tuple[str, str, bool]]:
    """
    Yield each symbol of the tables of *kind* that the file defines for others (True) or requires
    (False), with the version that it needs.
    """
    names, numbers = dict[int, str](), b""
    for section in listed if kind == _DYNAMIC_SYMBOLS else ():
        if section.kind == _VERSIONS_NEEDED:
            names.update(_needed_versions(data, section, _linked_strings(data, listed, section)))
        elif section.kind == _SYMBOL_VERSIONS:
            numbers = data[section.offset : section.offset + section.size]
    for section in listed:
        if section.kind != kind:
            continue
        strings = _linked_strings(data, listed, section)
        end = section.offset + section.size // _SYMBOL.size * _SYMBOL.size
        table = _SYMBOL.iter_unpack(data[section.offset : end])
        for position, (name, info, _, index, _, _) in enumerate(table):
            if info >> 4 in (_DEFINED if index else _REQUIRED):
                number = int.from_bytes(numbers[2 * position : 2 * position + 2], "little")
                yield strings.name(name), names.get(number, ""), bool(index)


def _linked_strings(data: Buffer, listed: Sequence[ElfSection], section: ElfSection) -> _Strings:
    if section.link >= len(listed):
        raise ElfUnreadable("the names of its symbols are in no section")
    table = listed[section.link]
    return _Strings(data, table.offset, table.size, "the table of symbol names")


def _needed_versions(
    data: Buffer, section: ElfSection, strings: _Strings
) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each version in the *section* of those needed."""
    file, entry, count = section.offset, 0, 0
    # An entry has 16 bytes, so that no more than these are read, wherever the offsets lead.
    for _ in range(section.size // _NEEDED_VERSION.size):
        begin = entry if count else file
        _check_bounds(data, begin, _NEEDED_VERSION.size, "a version of its symbols")
        if count:
            _, _, number, name, step = _NEEDED_VERSION.unpack_from(data, begin)
            yield number, strings.name(name)
            entry, count = entry + step, count - 1
        else:
            _, count, _, offset, step = _VERSIONED_FILE.unpack_from(data, begin)
            entry, file = file + offset, file + step


# Fatbins.


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


def fatbin_entries(data: Buffer, parts: Iterable[tuple[int, int]]) -> Iterator[FatbinEntry]:
    """
    Yield the entries of the containers in *parts* (offset, size) of *data*, in their order.

    Raises:
        ElfUnreadable: A version or a kind is not supported, a size leads out of its section, or
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
            if (magic, version) != (FATBIN_MAGIC, _FATBIN_VERSION):
                raise ElfUnreadable(
                    f"no fatbin begins with {magic:#010x} of version {version} at offset "
                    f"{position}; supported is {FATBIN_MAGIC:#010x} of version {_FATBIN_VERSION}"
                )
            if header < _CONTAINER.size or rest > end - position - header:
                raise ElfUnreadable(
                    f"a fatbin at offset {position} ends beyond its section: {rest} bytes"
                )
            position += header
            for entry in _container_entries(data, position, position + rest, container):
                count += 1
                if count > MOST_ENTRIES:
                    raise ElfUnreadable(f"it holds more than {MOST_ENTRIES} entries")
                yield entry
            container += 1
            position += rest


def _container_entries(
    data: Buffer, position: int, end: int, container: int
) -> Iterator[FatbinEntry]:
    while position < end:
        where = f"an entry at offset {position}"
        if end - position < _FATBIN_ENTRY.size:
            raise ElfUnreadable(f"{where} has no room for its header")
        kind, version, header, size, packed, _, number, flags, whole = _FATBIN_ENTRY.unpack_from(
            data, position
        )
        if version != _ENTRY_VERSION or kind not in _KINDS:
            raise ElfUnreadable(
                f"{where} is of version {version:#06x} and kind {kind}; supported is version "
                f"{_ENTRY_VERSION:#06x}, and the kinds 1 and 2"
            )
        if header < _FATBIN_ENTRY.size or size > end - position - header or packed > size:
            raise ElfUnreadable(f"{where} ends beyond its fatbin: {size} bytes")
        arch = f"sm_{number}{'a' if flags & _EXACT else 'f' if flags & _FAMILY else ''}"
        compression: Literal["", "lz4", "zstd"] = (
            "lz4" if flags & _LZ4 else "zstd" if flags & _ZSTD else ""
        )
        stored, whole = (packed or size, whole) if compression else (size, size)
        most = stored * _LZ4_RATIO if compression == "lz4" else MOST_IMAGE_BYTES
        if compression and whole > min(most, MOST_IMAGE_BYTES):
            raise ElfUnreadable(f"{where} states that it unpacks to {whole} bytes")
        position += header
        yield FatbinEntry(_KINDS[kind], arch, position, stored, whole, compression, container)
        position += size


def unpack(data: Buffer, entry: FatbinEntry) -> bytes:
    """
    Return the bytes of *entry*; PTX without the zeros at its end.

    Raises:
        ElfUnreadable: They do not decompress to the size that the table states.
    """
    import lz4.block
    import zstandard

    content = data[entry.offset : entry.offset + entry.stored]
    what = f"the {entry.compression} data at offset {entry.offset}"
    try:
        if entry.compression == "lz4":
            content = bytes(lz4.block.decompress(content, uncompressed_size=entry.size))
        elif entry.compression == "zstd":
            unpacker = zstandard.ZstdDecompressor(max_window_size=MOST_IMAGE_BYTES)
            with unpacker.stream_reader(content) as stream:
                # A byte more than the table states would show that the table is wrong.
                content = stream.read(entry.size + 1)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
        raise ElfUnreadable(f"{what}: {error}") from error
    if len(content) != entry.size:
        raise ElfUnreadable(f"{what} unpacks to {len(content)} bytes, the table says {entry.size}")
    return content.rstrip(b"\0") if entry.kind == "ptx" else content


def promised_glibc(platforms: Iterable[str]) -> tuple[int, ...]:
    """Return the lowest glibc that ``manylinux`` tags of *platforms* promise; empty without one."""
    text = " ".join(platforms)
    for minor, name in LEGACY_TAGS.items():
        text = text.replace(f"{name}_", f"manylinux_2_{minor}_")
    matches = filter(None, map(_MANYLINUX.fullmatch, text.split()))
    return min(((int(match[1]), int(match[2])) for match in matches), default=())


@functools.cache
def _systems(machine: str) -> dict[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """
    Return auditwheel's table of what the ``manylinux`` tags for *machine* promise besides glibc:
    glibc → the newest versions of libstdc++, its ABI and GCC's runtime.
    """
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.policy import WheelPolicies

    systems = dict[tuple[int, ...], dict[str, tuple[int, ...]]]()
    for policy in WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine)):
        if glibc := promised_glibc([policy.name]):
            systems[glibc] = {
                name: max(map(version_key, policy.symbol_versions[name]))
                for name in ("GLIBCXX", "CXXABI", "GCC")
            }
    return systems


def required_glibc(library: SharedObject) -> tuple[int, ...]:
    """
    Return the glibc of the oldest system that has all that *library* needs; empty if no
    ``manylinux`` tag promises it.
    """
    fitting = [
        glibc for glibc in _systems(library.machine) if newer_symbols(library, glibc) <= {"GLIBC"}
    ]
    return max(library.versions.get("GLIBC", ()), min(fitting)) if fitting else ()


def newer_symbols(library: SharedObject, glibc: tuple[int, ...]) -> set[str]:
    """Return the names of those `SharedObject.versions` that a tag of *glibc* does not promise."""
    older = [system for system in _systems(library.machine).items() if system[0] <= glibc]
    offered = {**max(older, default=((), {}))[1], "GLIBC": glibc}
    return {name for name, version in library.versions.items() if version > offered.get(name, ())}
