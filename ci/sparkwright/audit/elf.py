"""
What an ELF file says about itself: a host library's needs, and a cubin's real target.

A cubin's file name (``….sm_121.cubin``) and its ELF flags are the same for ``sm_121`` and ``sm_121f``; only ``-arch`` among the
ptxas options in its ``.note.nv.tkinfo`` section tells them apart. As an ELF note: name ``NVIDIA Corp``, type 2000, and a
description of six little-endian words (2, object, tool, version, build, options), of which the last five are offsets into the
NUL-terminated strings that follow (seen with CUDA 13.0.88).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sparkwright.build import elf as reading
from sparkwright.build.elf import version_text, wanted_versions

MAGIC = b"\x7fELF"
#: The machine number of a cubin (EM_CUDA); a wheel may carry one bare.
CUDA = 190
MACHINES = {**reading.MACHINES, CUDA: "cuda"}
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")

#: A note holds one command line; a larger one is not a note.
_LARGEST_NOTE = 1 << 16
_TKINFO, _TKINFO_VERSION = 2000, 2
#: The sections of one function: its instructions, its constants.
_FUNCTION = re.compile(r"(\.text|\.nv\.constant\d)\.(.+)")
_ARCH_OPTION = re.compile(r"(?:^|\s)(?:-arch|--gpu-name)[ =](sm_\d+[af]?)(?=\s|$)")


class ElfUnreadable(ValueError):
    """The file begins like ELF but cannot be read as such."""


class Host(msgspec.Struct, frozen=True):
    """
    What a shared library or program asks of its machine.

    Attributes:
        machine: As in platform tags (``x86_64``, ``aarch64``), ``cuda`` for a bare cubin, else the ELF number.
        rpath: The entries of DT_RPATH and DT_RUNPATH.
        glibc: The highest GLIBC version wanted, such as ``2.28``; empty when none is.
        fatbin: The sha256 over the sections that hold device code; empty when there are none.
    """

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    glibc: str
    glibcxx: str
    fatbin: str

    @property
    def device(self) -> bool:
        """True when the file holds device code of any kind."""
        return bool(self.fatbin) or self.machine == MACHINES[CUDA]


class Cubin(msgspec.Struct, frozen=True):
    """
    One piece of machine code for a GPU.

    Attributes:
        target: What ptxas was asked for (``sm_121f``); empty when the note is missing or of an unknown version.
        kernels: The mangled names of the functions that it holds.
    """

    target: str
    kernels: tuple[str, ...]


def version_key(version: str) -> tuple[int, ...]:
    """Return ``2.28`` as numbers that compare; what is not a number counts as nothing."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _hash_sections(elf: Any, stream: BinaryIO) -> str:
    sha, found = hashlib.sha256(), False
    for section in elf.iter_sections():
        if section.name not in FATBIN_SECTIONS:
            continue
        found = True
        # Raw bytes, not pyelftools' data(), which would inflate a section that claims to be compressed.
        stream.seek(section["sh_offset"])
        rest = section["sh_size"]
        while rest > 0 and (block := stream.read(min(rest, 1 << 20))):
            sha.update(block)
            rest -= len(block)
    return sha.hexdigest() if found else ""


def host(path: Path) -> Host:
    """
    Return what the library or program at *path* says about itself.

    Raises:
        ElfUnreadable: Its headers contradict each other.
    """
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as stream:
        try:
            elf = ELFFile(stream)
            number = reading.machine(stream)
            needed, rpath = reading.dynamic(elf)
            wanted = wanted_versions(stream)
            fatbin = _hash_sections(elf, stream)
        except Exception as error:  # pyelftools lets through whatever its parser trips over in a damaged file
            raise ElfUnreadable(f"{type(error).__name__}: {error}") from error
    return Host(
        MACHINES.get(number, str(number)), needed, rpath,
        version_text(wanted.get("GLIBC", ())), version_text(wanted.get("GLIBCXX", ())), fatbin,
    )  # fmt: skip


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    position = 0
    while position + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<3I", data, position)
        begin = position + 12 + (name_size + 3) // 4 * 4
        yield data[position + 12 : position + 12 + name_size].rstrip(b"\0"), kind, data[begin : begin + size]
        position = begin + (size + 3) // 4 * 4


def note_target(data: bytes) -> str:
    """Return the target named by the bytes of a ``.note.nv.tkinfo`` section, or an empty string when they do not tell."""
    for name, kind, description in _notes(data):
        if name != b"NVIDIA Corp" or kind != _TKINFO or len(description) < 24:
            continue
        version, *_, options = struct.unpack_from("<6I", description)
        if version != _TKINFO_VERSION:
            continue
        line = description[24:][options:].split(b"\0", 1)[0].decode("ascii", "replace")
        if found := _ARCH_OPTION.search(line):
            return found[1]
    return ""


def code(path: Path) -> dict[str, str]:
    """
    Return the functions of the cubin at *path*: mangled name → sha256 of the code and of what describes it.

    Raises:
        ElfUnreadable: It is not an ELF file that can be read.
    """
    from elftools.elf.elffile import ELFFile

    parts: dict[str, list[str]] = {}
    with path.open("rb") as stream:
        try:
            for section in ELFFile(stream).iter_sections():
                if found := _FUNCTION.fullmatch(section.name):
                    stream.seek(section["sh_offset"])
                    parts.setdefault(found[2], []).append(f"{found[1]} {hashlib.sha256(stream.read(section['sh_size'])).hexdigest()}")
        except Exception as error:  # as in host()
            raise ElfUnreadable(f"{type(error).__name__}: {error}") from error
    return {name: hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest() for name, found in parts.items()}


def cubin(path: Path) -> Cubin:
    """
    Return the real target and the kernels of the cubin at *path*.

    Raises:
        ElfUnreadable: It is not an ELF file that can be read.
    """
    from elftools.elf.elffile import ELFFile

    target, kernels = "", []
    with path.open("rb") as stream:
        try:
            for section in ELFFile(stream).iter_sections():
                if section.name == ".note.nv.tkinfo" and section["sh_size"] <= _LARGEST_NOTE:
                    stream.seek(section["sh_offset"])
                    target = note_target(stream.read(section["sh_size"]))
                elif section.name.startswith(".text."):
                    kernels.append(section.name.removeprefix(".text."))
        except Exception as error:  # as in host()
            raise ElfUnreadable(f"{type(error).__name__}: {error}") from error
    return Cubin(target, tuple(sorted(kernels)))
