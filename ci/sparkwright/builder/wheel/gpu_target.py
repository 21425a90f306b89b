"""
The targets of GPU code, and what a GPU gets from them.

A GPU of compute capability X.Y loads (CUDA C++ Programming Guide, "Binary Compatibility", "PTX
Compatibility", "Feature Set Compiler Targets") machine code for ``sm_XZ`` and ``sm_XZf`` if Z ≤ Y,
and for ``sm_XZa`` if Z = Y. The driver compiles PTX for ``compute_WZ`` for any GPU that is not
older; with ``f`` for the family from Z on, with ``a`` for exactly that GPU. FP4 instructions exist
on SM 12.x only under ``a`` and ``f``. No line of this was tried on a GB10.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from sparkwright.builder.wheel import elf

_TARGET = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")

#: From best to worst: what a GPU gets from a compiled unit.
SupportLevel = Literal["native", "family", "plain", "jit", "nothing"]
SUPPORT_LEVELS: Mapping[SupportLevel, str] = {
    "native": "machine code for exactly this GPU, with all its instructions",
    "family": "machine code of its family, with the FP4 instructions",
    "plain": "machine code without a feature set: it runs, and cannot hold FP4 instructions",
    "jit": "PTX alone: compiled when it is loaded (a slow first start), and only by a driver "
    "that knows its PTX version",
    "nothing": "no form that this GPU can load: it may be for other GPUs alone",
}

#: Levels without a compilation by the driver.
MACHINE_CODE = frozenset(("native", "family", "plain"))


def parsed(target: str) -> tuple[int, int, str]:
    """Return ``sm_121f`` as ``(12, 1, "f")``; ``(0, 0, "")`` for other text."""
    match = _TARGET.fullmatch(target)
    return (int(match[1]), int(match[2]), match[3]) if match else (0, 0, "")


def loads(target: str, device: tuple[int, int]) -> bool:
    """Return whether a GPU of capability *device* loads machine code for *target*."""
    major, minor, suffix = parsed(target)
    return major == device[0] and (minor == device[1] if suffix == "a" else minor <= device[1])


def compiles(target: str, device: tuple[int, int]) -> bool:
    """Return whether the driver compiles PTX for *target* for a GPU of capability *device*."""
    major, minor, suffix = parsed(target)
    if suffix == "a":
        return (major, minor) == device
    return major > 0 and (major, minor) <= device and (suffix != "f" or major == device[0])


def support_level(
    cubins: Iterable[str], ptx: Iterable[str], device: tuple[int, int]
) -> SupportLevel:
    """
    Return what a GPU of capability *device* gets from a unit with code for these targets.

    Machine code comes before PTX, and the nearest before one that is further away.
    """
    if loadable := [parsed(target) for target in cubins if loads(target, device)]:
        _, minor, suffix = max(loadable)
        return "plain" if not suffix else "native" if minor == device[1] else "family"
    return "jit" if any(compiles(target, device) for target in ptx) else "nothing"


def taken(unit: Sequence[elf.FatbinEntry], device: tuple[int, int]) -> list[elf.FatbinEntry]:
    """Return what a GPU of capability *device* may take of *unit*: machine code, else PTX."""
    cubins, texts = list[elf.FatbinEntry](), list[elf.FatbinEntry]()
    for entry in unit:
        if entry.kind == "cubin" and loads(entry.arch, device):
            cubins.append(entry)
        elif entry.kind == "ptx" and compiles(entry.arch, device):
            texts.append(entry)
    return cubins or texts


def trimmed(data: elf.Buffer, device: tuple[int, int]) -> bytes:
    """
    Return the library *data* without the device code that a GPU of capability *device* does not
    take.

    Raises:
        elf.ElfUnreadable: As `elf.shared_object` and `elf.fatbin_entries`.
    """
    return elf.without_entries(data, elf.shared_object(data).fatbins, partial(taken, device=device))
