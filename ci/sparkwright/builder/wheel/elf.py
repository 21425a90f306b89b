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

import functools
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
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
#: Segment types: loaded, dynamic.
_LOAD, _DYNAMIC = 1, 2
#: Entries of the dynamic segment: strings and their size, names, paths; symbols, the version of
#: each, the versions that the library needs; two tables of hashes; relocations and their sizes.
_STRTAB, _STRSZ, _NEEDED, _PATHS = 5, 10, 1, (15, 29)
_SYMTAB, _SYMBOL_VERSIONS, _VERSIONS_NEEDED = 6, 0x6FFFFFF0, 0x6FFFFFFE
_HASH, _GNU_HASH, _RELOCATIONS = 4, 0x6FFFFEF5, ((7, 8), (23, 2))
_TABLES = (_STRTAB, _SYMTAB, _SYMBOL_VERSIONS, _VERSIONS_NEEDED, _HASH, _GNU_HASH, 7, 23)
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
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_(\d{1,9}(?:\.\d{1,9})+)")

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
            versions that it needs, such as ``GLIBC_2.28``, or an empty one.
    """

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    versions: dict[str, tuple[int, ...]]
    fatbins: tuple[tuple[int, int], ...]
    symbols: frozenset[str]
    imports: dict[str, tuple[str, ...]]


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
    for name, kind, _, _, offset, size, *_ in entries:
        section = ElfSection(strings.name(name) if length else "", kind, offset, size)
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
    loads, begin, end = list[tuple[int, int, int]](), 0, 0
    for kind, _, offset, address, _, size, _, _ in segments:
        if kind == _LOAD:
            _check_bounds(data, offset, size, "a segment")
            loads.append((offset, address, size))
    for kind, _, _, address, *_ in segments:
        if kind == _DYNAMIC:
            begin, end = _mapped(loads, address)
    end = begin + min((end - begin) // 16, _MOST_DYNAMIC) * 16
    pairs = struct.iter_unpack("<QQ", data[begin:end])
    # An entry of zeros is the last one.
    entries = list(takewhile(lambda pair: pair[0] != 0, pairs))
    values = dict(entries)
    tables = {tag: _mapped(loads, values[tag])[0] for tag in _TABLES if values.get(tag)}
    strings = _Strings(
        data, tables.get(_STRTAB, 0), values.get(_STRSZ, 0), "the table of its strings"
    )
    names = dict[int, str]()
    if _VERSIONS_NEEDED in tables:
        needed = _needed_versions(data, tables[_VERSIONS_NEEDED], strings)
        names.update(islice(needed, _MOST_DYNAMIC))
    versions: dict[str, tuple[int, ...]] = {}
    for match in filter(None, map(_VERSION.fullmatch, names.values())):
        versions[match[1]] = max(versions.get(match[1], ()), version_key(match[2]))
    symbols, imports = set[str](), dict[str, set[str]]()
    if _SYMTAB in tables:
        count = _symbol_count(data, tables, values)
        begin, numbers = tables.get(_SYMBOL_VERSIONS, 0), b""
        if begin:
            numbers = data[begin : begin + 2 * count]
        for position, name, defined in _symbols(data, tables[_SYMTAB], count, strings):
            if defined:
                symbols.add(name)
            else:
                number = int.from_bytes(numbers[2 * position : 2 * position + 2], "little")
                imports.setdefault(name, set()).add(names.get(number & 0x7FFF, ""))
    return SharedObject(
        machine=MACHINES.get(machine, str(machine)),
        needed=tuple(strings.name(value) for tag, value in entries if tag == _NEEDED),
        rpath=tuple(filter(None, (strings.name(value) for tag, value in entries if tag in _PATHS))),
        versions=versions,
        fatbins=tuple(
            (section.offset, section.size)
            for section in sections(data)
            if section.name in FATBIN_SECTIONS and section.kind not in NO_BYTES
        ),
        symbols=frozenset(symbols),
        imports={name: tuple(sorted(texts)) for name, texts in imports.items()},
    )


def version_key(version: str) -> tuple[int, ...]:
    """Return ``2.28`` as numbers that compare; a part that is not a number is left out."""
    return tuple(map(int, filter(str.isdigit, version.split("."))))


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


def _mapped(loads: Sequence[tuple[int, int, int]], address: int) -> tuple[int, int]:
    """Return the offset of what the loader maps at *address*, and that of its segment's end."""
    for offset, begin, size in loads:
        if begin <= address < begin + size:
            return offset + address - begin, offset + size
    raise ElfUnreadable(f"a table that the loader reads is in no segment (address {address:#x})")


def _numbers(
    data: Buffer, form: Literal["I", "Q"], offset: int, count: int = 1
) -> "memoryview[int]":
    """Return *count* numbers of *form* (``I``, ``Q``) from *offset*."""
    size = struct.calcsize(form) * count
    _check_bounds(data, offset, size, "a table that the loader reads")
    return memoryview(data[offset : offset + size]).cast(form)


def _symbol_count(data: Buffer, tables: Mapping[int, int], values: Mapping[int, int]) -> int:
    """
    Return the number of dynamic symbols, which is written nowhere: up to the last one that others
    find by its hash, or a relocation asks for.
    """
    count = 0
    if _HASH in tables:
        count = _numbers(data, "I", tables[_HASH], 2)[1]
    if _GNU_HASH in tables:
        buckets, first, filters, _ = _numbers(data, "I", tables[_GNU_HASH], 4)
        begin = tables[_GNU_HASH] + 16 + 8 * filters
        last = max(_numbers(data, "I", begin, buckets), default=0)
        # The last hash of a bucket is odd.
        while (
            last >= first and not _numbers(data, "I", begin + 4 * (buckets + last - first))[0] & 1
        ):
            last += 1
        count = max(count, last + 1)
    for tag, size in _RELOCATIONS:
        if tag in tables:
            # Address, symbol and kind, addend.
            words = _numbers(data, "Q", tables[tag], values.get(size, 0) // 24 * 3)
            count = max(count, (max(words[1::3], default=0) >> 32) + 1)
    return count


def _symbols(
    data: Buffer, begin: int, count: int, strings: _Strings
) -> Iterator[tuple[int, str, bool]]:
    """
    Yield the number and the name of each symbol of the table at *begin* that the file defines for
    others (True) or requires (False).
    """
    _check_bounds(data, begin, count * _SYMBOL.size, "the table of its symbols")
    table = _SYMBOL.iter_unpack(data[begin : begin + count * _SYMBOL.size])
    for position, (name, info, _, index, _, _) in enumerate(table):
        if info >> 4 in (_DEFINED if index else _REQUIRED):
            yield position, strings.name(name), bool(index)


def _needed_versions(data: Buffer, file: int, strings: _Strings) -> Iterator[tuple[int, str]]:
    """
    Yield the number and the name of each version that is needed of the *file* at that offset and of
    those after it: without an end, if they lead back.
    """
    next_file = file
    while next_file:
        _check_bounds(data, file, _VERSIONED_FILE.size, "a version of its symbols")
        _, _, _, step, next_file = _VERSIONED_FILE.unpack_from(data, file)
        entry = file
        while step:
            entry += step
            _check_bounds(data, entry, _NEEDED_VERSION.size, "a version of its symbols")
            _, _, number, name, step = _NEEDED_VERSION.unpack_from(data, entry)
            yield number, strings.name(name)
        file += next_file


# Fatbins.


class FatbinEntry(msgspec.Struct, frozen=True):
    """
    A cubin or a PTX text.

    Attributes:
        arch: As the table states it (``sm_121f``); a cubin's own note may differ.
        begin, end: Where the entry, header and bytes, lies in the file.
        offset, stored: Where its bytes lie in the file, and how many.
        size: Its uncompressed size.
        container: The number of its container: one per translation unit.
    """

    kind: Literal["ptx", "cubin"]
    arch: str
    begin: int
    end: int
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
    count = 0
    for number, (begin, end) in enumerate(_containers(data, parts)):
        for entry in _container_entries(data, begin, end, number):
            count += 1
            if count > MOST_ENTRIES:
                raise ElfUnreadable(f"it holds more than {MOST_ENTRIES} entries")
            yield entry


def without_entries(
    data: Buffer,
    parts: Iterable[tuple[int, int]],
    select: Callable[[Sequence[FatbinEntry]], Sequence[FatbinEntry]],
) -> bytes:
    """
    Return *data* with only those entries of each fatbin in *parts* (offset, size) that *select*
    returns. If it returns none of a fatbin, its table stays, and its entries hold zeros.

    Offsets in the file stay: zeros follow the entries of a fatbin.

    Raises:
        ElfUnreadable: As `fatbin_entries`.
    """
    changed = bytearray(data)
    for number, (begin, end) in enumerate(_containers(data, parts)):
        entries = list(_container_entries(data, begin, end, number))
        if remaining := b"".join(data[entry.begin : entry.end] for entry in select(entries)):
            changed[begin:end] = remaining.ljust(end - begin, b"\0")
            # The size of the rest ends the header.
            struct.pack_into("<Q", changed, begin - 8, len(remaining))
            continue
        for entry in entries:
            changed[entry.offset : entry.offset + entry.stored] = bytes(entry.stored)
    return bytes(changed)


def _containers(data: Buffer, parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield where the entries of each container in *parts* (offset, size) begin and end."""
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
            yield position + header, position + header + rest
            position += header + rest


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
        begin, position = position, position + header
        end_of_entry = position + size
        yield FatbinEntry(
            _KINDS[kind], arch, begin, end_of_entry, position, stored, whole, compression, container
        )
        position = end_of_entry


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
                # One byte more than the table states is asked for; if it comes, the table is wrong.
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
    promised = list[tuple[int, ...]]()
    for tag in text.split():
        if match := _MANYLINUX.fullmatch(tag):
            promised.append((int(match[1]), int(match[2])))
    return min(promised, default=())


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
