"""What a shared library wants from the system that loads it."""

from __future__ import annotations

import re
import struct
from typing import Any, BinaryIO

import msgspec

#: ``e_machine`` (ELF specification, and the tables of the processors' own) → the name in platform tags.
MACHINES = {62: "x86_64", 183: "aarch64"}

#: The dynamic entries that are read, and where pyelftools puts their strings.
_STRINGS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)")


def version_text(version: tuple[int, ...]) -> str:
    """Return ``(2, 28)`` as people write it; empty for none."""
    return ".".join(map(str, version))


class Wants(msgspec.Struct, frozen=True):
    """
    What the headers of a library say.

    Attributes:
        machine: As in platform tags, else the ELF number.
        needed: The libraries that the loader brings with it (DT_NEEDED).
        rpath: The entries of DT_RPATH and DT_RUNPATH.
    """

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]


def wants(library: BinaryIO) -> Wants:
    """Return what the headers of *library* say."""
    from elftools.elf.elffile import ELFFile

    elf, number = ELFFile(library), machine(library)
    needed, rpath = dynamic(elf)
    return Wants(MACHINES.get(number, str(number)), needed, rpath)


def machine(library: BinaryIO) -> int:
    """Return the ``e_machine`` number of *library*; pyelftools knows no name for every vendor's."""
    library.seek(0)
    header = library.read(20)
    if len(header) < 20:
        return 0
    return int(struct.unpack_from("<H" if header[5] == 1 else ">H", header, 18)[0])


def dynamic(elf: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the needed libraries of *elf* (pyelftools' file), and its search paths."""
    from elftools.elf.dynamic import DynamicSection

    needed: list[str] = []
    rpath: list[str] = []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if attribute := _STRINGS.get(tag.entry.d_tag):
                    (needed if attribute == "needed" else rpath).append(getattr(tag, attribute))
    return tuple(needed), tuple(part for part in rpath if part)


def defined_versions(library: BinaryIO) -> set[str]:
    """Return the symbol versions that *library* itself defines, such as ``GLIBC_2.36``."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerDefSection

    sections = [section for section in ELFFile(library).iter_sections() if isinstance(section, GNUVerDefSection)]
    return {entry.name for section in sections for _, entries in section.iter_versions() for entry in entries}


def wanted_versions(library: BinaryIO) -> dict[str, tuple[int, ...]]:
    """Return the highest version of glibc, libstdc++ and its ABI that *library* wants (its ``.gnu.version_r``)."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    found: dict[str, tuple[int, ...]] = {}
    for section in ELFFile(library).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                for auxiliary in auxiliaries:
                    if match := _VERSION.fullmatch(auxiliary.name):
                        version = tuple(int(part) for part in match[2].split("."))
                        found[match[1]] = max(found.get(match[1], ()), version)
    return found
