"""
What a host library says about itself, as the loader would read it: by its segments, whatever its section table says.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence

import msgspec

from sparkwright.audit import elf_sections as tables
from sparkwright.audit.elf_sections import Buffer, ElfUnreadable, Section, bounded, text
from sparkwright.builder.wheel import elf as reading
from sparkwright.builder.wheel.elf import version_text

#: The machine number of a cubin (EM_CUDA); a wheel may carry one bare.
CUDA = 190
MACHINES = {**reading.MACHINES, CUDA: "cuda"}
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")

#: Entries of the dynamic section, by number: where the strings are and how many bytes, version needs and how many, names, search paths.
_STRTAB, _STRSZ, _VERNEED, _VERNEED_COUNT, _NEEDED, _SONAME, _PATHS = 5, 10, 0x6FFFFFFE, 0x6FFFFFFF, 1, 14, (15, 29)
_MOST_DYNAMIC = 1 << 16
#: Functions of CUDA's driver API; cuFile, which begins alike, is another library.
_DRIVER = re.compile(r"cu(?!File)[A-Z]\w*")
_VERSION = re.compile(r"(GLIBC|GLIBCXX)_(\d+(?:\.\d+)+)")


class Host(msgspec.Struct, frozen=True):
    """
    What a shared library or program asks of its machine.

    Attributes:
        machine: As in platform tags (``x86_64``, ``aarch64``), ``cuda`` for a bare cubin, else the ELF number.
        rpath: The entries of DT_RPATH and DT_RUNPATH.
        glibc: The highest GLIBC version wanted, such as ``2.28``; empty when none is.
        soname: The name under which the loader knows it; empty without one.
        fatbins: Offset and size of each section that holds device code.
        fatbin: The sha256 over those sections; empty when there are none.
        symbols: The dynamic symbols that it defines. *driver*: those of CUDA's driver that it cannot do without.
    """

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    glibc: str
    glibcxx: str
    soname: str
    fatbins: tuple[tuple[int, int], ...]
    fatbin: str
    symbols: frozenset[str] = frozenset()
    driver: tuple[str, ...] = ()

    @property
    def device(self) -> bool:
        """True when the file holds device code of any kind."""
        return bool(self.fatbins) or self.machine == MACHINES[CUDA]


def version_key(version: str) -> tuple[int, ...]:
    """Return ``2.28`` as numbers that compare; what is not a number counts as nothing."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def host(data: Buffer) -> Host:
    """
    Return what the library or program in *data* says about itself, as the loader would read it.

    Raises:
        ElfUnreadable: Its headers contradict each other or its size.
    """
    found, listed = tables.header(data), tables.sections(data)
    entries, strings = _dynamic(data)
    needed = tuple(_string(data, strings, value) for tag, value in entries if tag == _NEEDED)
    rpath = tuple(part for tag, value in entries if tag in _PATHS and (part := _string(data, strings, value)))
    soname = next((_string(data, strings, value) for tag, value in entries if tag == _SONAME), "")
    wanted = _versions(data, dict(entries), strings)
    symbols = list(_symbols(data, listed))
    device = [section for section in listed if section.name in FATBIN_SECTIONS and section.kind != tables.NO_BITS]
    fatbins = tuple((section.offset, section.size) for section in device)
    return Host(
        MACHINES.get(found.machine, str(found.machine)), needed, rpath, wanted.get("GLIBC", ""), wanted.get("GLIBCXX", ""),
        soname, fatbins, _hash(data, fatbins), frozenset(name for name, bound in symbols if bound),
        tuple(sorted({name for name, bound in symbols if not bound and _DRIVER.fullmatch(name)})),
    )  # fmt: skip


def _hash(data: Buffer, parts: Sequence[tuple[int, int]]) -> str:
    if not parts:
        return ""
    sha = hashlib.sha256()
    with memoryview(data) as view:
        for offset, size in parts:
            sha.update(view[offset : offset + size])
    return sha.hexdigest()


def _placed(data: Buffer, address: int, size: int, what: str) -> int:
    """Return where the *size* bytes that the loader puts to *address* lie in the file."""
    for segment in tables.segments(data):
        if segment.kind == tables.LOAD and segment.address <= address and address + size <= segment.address + segment.size:
            return segment.offset + address - segment.address
    raise ElfUnreadable(f"{what} is in no segment of the file (address {address:#x}, {size} bytes)")


def _dynamic(data: Buffer) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return the entries of the dynamic segment, and where its strings begin and end."""
    entries: list[tuple[int, int]] = []
    for segment in tables.segments(data):
        if segment.kind == tables.DYNAMIC:
            size = min(segment.size // 16, _MOST_DYNAMIC) * 16
            for tag, value in struct.iter_unpack("<QQ", data[segment.offset : segment.offset + size]):
                if tag == 0:
                    break
                entries.append((tag, value))
    named = dict(entries)
    if _STRTAB not in named:
        return entries, (0, 0)
    size = named.get(_STRSZ, 0)
    begin = _placed(data, named[_STRTAB], size, "the table of its strings")
    return entries, (begin, begin + size)


def _string(data: Buffer, strings: tuple[int, int], offset: int) -> str:
    return text(data, strings[0] + offset, strings[1])


def _versions(data: Buffer, named: dict[int, int], strings: tuple[int, int]) -> dict[str, str]:
    """Return the highest version of glibc and libstdc++ that is wanted (DT_VERNEED: chains of files, and of versions of each)."""
    highest: dict[str, tuple[int, ...]] = {}
    count = named.get(_VERNEED_COUNT, 0)
    if not count or _VERNEED not in named:
        return {}
    at = _placed(data, named[_VERNEED], 16, "the table of wanted versions")
    left = _MOST_DYNAMIC
    for _ in range(min(count, _MOST_DYNAMIC)):
        bounded(data, at, 16, "a file in the table of wanted versions")
        _, versions, _, first, following = struct.unpack_from("<HHIII", data, at)
        place = at + first
        for _ in range(versions):
            if (left := left - 1) < 0:
                raise ElfUnreadable(f"it wants more than {_MOST_DYNAMIC} versions")
            bounded(data, place, 16, "a version in the table of wanted versions")
            _, _, _, name, step = struct.unpack_from("<IHHII", data, place)
            if match := _VERSION.fullmatch(_string(data, strings, name)):
                version = version_key(match[2])
                highest[match[1]] = max(highest.get(match[1], ()), version)
            place += step
            if not step:
                break
        at += following
        if not following:
            break
    return {name: version_text(version) for name, version in highest.items()}


def _symbols(data: Buffer, listed: Sequence[Section]) -> Iterator[tuple[str, bool]]:
    """Yield each dynamic symbol that it gives to others (True), or has to get from them (False)."""
    for section in listed:
        if section.kind != tables.DYNAMIC_SYMBOLS:
            continue
        if section.link >= len(listed):
            raise ElfUnreadable("the names of its symbols are in no section")
        strings = listed[section.link]
        total = 0
        for name, info, _, index, _, _ in struct.iter_unpack("<IBBHQQ", data[section.offset : section.offset + section.size // 24 * 24]):
            # Bound globally, weakly or uniquely, and to a section of this file: what the loader gives to others. What is wanted weakly
            # may stay away.
            if info >> 4 in ((1, 2, 10) if index else (1,)):
                named = text(data, strings.offset + name, strings.offset + strings.size)
                total += len(named)
                if total > tables.MOST_NAME_BYTES:
                    raise ElfUnreadable(f"the names of its symbols are more than {tables.MOST_NAME_BYTES} bytes")
                yield named, bool(index)
