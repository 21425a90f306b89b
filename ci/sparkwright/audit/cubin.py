"""
What a cubin says about itself: its real target, and its functions.

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

import msgspec

from sparkwright.audit import elf_sections as tables
from sparkwright.audit.elf_sections import Buffer

#: A note holds one command line; a larger one is not a note.
_LARGEST_NOTE = 1 << 16
_TKINFO, _TKINFO_VERSION = 2000, 2
#: The sections of one function: its instructions, its constants.
_FUNCTION = re.compile(r"(\.text|\.nv\.constant\d)\.(.+)")
_ARCH_OPTION = re.compile(r"(?:^|\s)(?:-arch|--gpu-name)[ =](sm_\d+[af]?)(?=\s|$)")


class Cubin(msgspec.Struct, frozen=True):
    """
    One piece of machine code for a GPU.

    Attributes:
        target: What ptxas was asked for (``sm_121f``); empty when the note is missing or of an unknown version.
        kernels: The mangled names of the functions that it holds.
    """

    target: str
    kernels: tuple[str, ...]


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    position = 0
    while position + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<3I", data, position)
        begin = position + 12 + (name_size + 3) // 4 * 4
        if begin + size > len(data):
            return
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


def functions(data: Buffer) -> dict[str, str]:
    """
    Return the functions of the cubin in *data*: mangled name → sha256 of the code and of what describes it.

    Raises:
        ElfUnreadable: It is not an ELF file that can be read.
    """
    parts: dict[str, list[str]] = {}
    for section in tables.sections(data):
        if found := _FUNCTION.fullmatch(section.name):
            own = b"" if section.kind == tables.NO_BITS else data[section.offset : section.offset + section.size]
            parts.setdefault(found[2], []).append(f"{found[1]} {hashlib.sha256(own).hexdigest()}")
    return {name: hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest() for name, found in parts.items()}


def read(data: Buffer) -> Cubin:
    """
    Return the real target and the kernels of the cubin in *data*.

    Raises:
        ElfUnreadable: It is not an ELF file that can be read.
    """
    target, kernels = "", []
    for section in tables.sections(data):
        if section.name == ".note.nv.tkinfo" and section.size <= _LARGEST_NOTE:
            target = note_target(data[section.offset : section.offset + section.size])
        elif section.name.startswith(".text."):
            kernels.append(section.name.removeprefix(".text."))
    return Cubin(target, tuple(sorted(kernels)))
