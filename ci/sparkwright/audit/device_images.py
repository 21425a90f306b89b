"""
The compiled units of a library, each with the forms of its device code: PTX, and cubins with the target that they were really made for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from sparkwright.audit import cubin, elf, fatbin
from sparkwright.audit.elf_sections import Buffer
from sparkwright.audit.fatbin import Entry, FatbinUnreadable
from sparkwright.audit.policy import is_generation
from sparkwright.core.digest import sha256_bytes

_PTX_TARGET = re.compile(rb"^\.target +(sm_\d+[af]?)", re.MULTILINE)
#: The directive stands at the top, after comments.
_PTX_HEAD = 1 << 14


class Form(msgspec.Struct, frozen=True):
    """
    One form of a unit.

    Attributes:
        unit: The number of the compiled unit in its library.
        listed: The target in the fatbin's table, by which a driver chooses; empty for a bare cubin.
        target: The target that the form itself names; ``sm_121?`` where it should and does not, and *listed* where it was not unpacked.
        entry: Where its bytes lie.
        sha256: Of the unpacked bytes; empty where they were not unpacked whole.
        kernels: The mangled names of a cubin's functions.
    """

    kind: Literal["ptx", "cubin"]
    unit: int
    listed: str
    target: str
    entry: Entry
    sha256: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def contradicted(self) -> bool:
        """True when the table says one target and the code another."""
        return self.kind == "cubin" and bool(self.listed) and not self.target.endswith("?") and self.listed != self.target


def forms(data: Buffer, host: elf.Host, generation: str, *, whole_ptx: bool) -> Iterator[tuple[Form, bytes]]:
    """
    Yield the forms of the library in *data*, with the unpacked bytes of its cubins of *generation* and of its PTX.

    Args:
        whole_ptx: PTX is unpacked to its end, and not only as far as its target.

    Raises:
        FatbinUnreadable: As `fatbin.entries` and `fatbin.unpack`.
        ElfUnreadable: A cubin cannot be read.
    """
    for entry in _entries(data, host):
        if entry.kind == "ptx":
            yield _ptx(data, entry, whole=whole_ptx)
        elif entry.arch and not is_generation(entry.arch, generation):
            yield Form("cubin", entry.unit, entry.arch, entry.arch, entry), b""
        else:
            yield _cubin(data, entry)


def _entries(data: Buffer, host: elf.Host) -> Iterator[Entry]:
    if host.machine == elf.MACHINES[elf.CUDA]:
        yield Entry("cubin", "", 0, len(data), len(data), "", 0)
    unit = count = 0
    for offset, size in host.fatbins:
        for entry in fatbin.entries(data, offset, size, unit):
            unit, count = entry.unit, count + 1
            if count > fatbin.MOST_ENTRIES:
                raise FatbinUnreadable(f"it holds more than {fatbin.MOST_ENTRIES} entries")
            yield entry
        unit += 1


def _cubin(data: Buffer, entry: Entry) -> tuple[Form, bytes]:
    unpacked = fatbin.unpack(data, entry)
    found = cubin.read(unpacked)
    target = found.target or f"{entry.arch or 'sm'}?"
    return Form("cubin", entry.unit, entry.arch, target, entry, sha256_bytes(unpacked), found.kernels), unpacked


def _ptx(data: Buffer, entry: Entry, *, whole: bool) -> tuple[Form, bytes]:
    unpacked = fatbin.unpack(data, entry, None if whole else _PTX_HEAD).rstrip(b"\0")
    found = _PTX_TARGET.search(unpacked[:_PTX_HEAD])
    target = found[1].decode() if found else entry.arch
    return Form("ptx", entry.unit, entry.arch, target, entry, sha256_bytes(unpacked) if whole else ""), unpacked


def by_unit(found: Iterable[Form]) -> Mapping[int, tuple[Form, ...]]:
    """Return the forms of each unit."""
    made: dict[int, list[Form]] = {}
    for form in found:
        made.setdefault(form.unit, []).append(form)
    return {unit: tuple(listed) for unit, listed in made.items()}


def targets(listed: Iterable[Form], kind: Literal["ptx", "cubin"]) -> list[str]:
    """Return the targets of the forms of that kind."""
    return [form.target for form in listed if form.kind == kind]
