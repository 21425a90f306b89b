"""
What a GPU gets from device code, by NVIDIA's rules of loading: pure functions of targets, with
nothing read from a file.

The rules (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility", "Feature Set
Compiler Targets"), for a GPU of compute capability X.Y: machine code for ``sm_XZ`` runs where Z ≤
Y; for ``sm_XZf``, of the same family, where Z ≤ Y; for ``sm_XZa`` where Z = Y alone. PTX for
``compute_WZ`` is compiled when it is loaded by any GPU that is not older; with ``f`` by the family
from Z on, with ``a`` by exactly that GPU. FP4 instructions exist on SM 12.x only under ``a`` and
``f``. No line of this was tried on a GB10.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

_TARGET = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")

#: The instructions of SM 12.x for FP4: the block-scaled matrix instruction, and the conversion.
FP4_OPCODES = (r"OMMA\..*E2M1", r"F2FP\..*E2M1")
#: Names of kernels that compute with FP4 or make it, in CUTLASS, vLLM and FlashInfer. A kernel of
#: CUTLASS for SM 9.0 or 10.0 is compiled for SM 12.x too, where it is never launched and is full of
#: traps.
FP4_KERNELS = re.compile(r"^(?!.*MainloopSm(?:90|10\d))(?=.*(?:fp4|e2m1))", re.IGNORECASE)

#: From best to worst: what one compiled unit gives.
Gain = Literal["native", "family", "plain", "jit", "nothing"]
GAINS: Mapping[Gain, str] = {
    "native": "machine code for exactly this GPU, with all its instructions",
    "family": "machine code of its family, with the FP4 instructions",
    "plain": "machine code without a feature set: it runs, and cannot hold FP4 instructions",
    "jit": "PTX alone: compiled when it is loaded (a slow first start), and only by a driver "
    "that knows its PTX version",
    "nothing": "no form that this GPU can load",
}

#: What the kernels for FP4 hold, of the code that would be loaded.
Fp4 = Literal["instructions", "traps", "no-instructions", "no-kernels", "not-read"]
FP4: Mapping[Fp4, str] = {
    "instructions": "its FP4 kernels hold FP4 instructions",
    "traps": "an FP4 kernel traps instead",
    "no-instructions": "its FP4 kernels hold none of the FP4 instructions",
    "no-kernels": "no kernel is named for FP4",
    "not-read": "its FP4 kernels were not disassembled",
}


class Spark(msgspec.Struct, frozen=True):
    """
    What a GPU gets from one library.

    Attributes:
        device: The compute capability, such as ``12.1``.
        units: How many compiled units give what, best first; units that give nothing may well be
            kernels for other GPUs alone. targets: The real targets of the machine code that would
            be loaded, with their number. jit: The targets of the PTX that would be compiled when it
            is loaded. fp4: See `FP4`. instructions: FP4 instructions in the code that would be
            loaded, by pattern. traps: Kernels named for FP4 that hold a trap.
    """

    device: str
    units: dict[str, int] = {}
    targets: dict[str, int] = {}
    jit: dict[str, int] = {}
    fp4: Fp4 = "no-kernels"
    instructions: dict[str, int] = {}
    traps: int = 0

    @property
    def says(self) -> str:
        """
        A few words for a table, such as ``35 family, 6 jit (20 for other GPUs alone); its FP4
        kernels hold FP4 instructions``.
        """
        if not self.units:
            return "no device code"
        counts = ", ".join(
            f"{count} {gain}" for gain, count in self.units.items() if gain != "nothing"
        )
        if not counts:
            return "nothing for this GPU"
        others = self.units.get("nothing", 0)
        counts += f" ({others} for other GPUs alone)" if others else ""
        return counts if self.fp4 == "no-kernels" else f"{counts}; {FP4[self.fp4]}"


def parsed(target: str) -> tuple[int, int, str] | None:
    """Return ``sm_121f`` as 12, 1 and ``f``; None for what is no target."""
    found = _TARGET.fullmatch(target)
    return (int(found[1]), int(found[2]), found[3]) if found else None


def capability(arch: str) -> tuple[int, int]:
    """Return the compute capability that an architecture in CMake's spelling (``12.1f``) is for."""
    major, _, minor = arch.rstrip("af").partition(".")
    return int(major), int(minor)


def loads(target: str, device: tuple[int, int]) -> bool:
    """Return whether a GPU of capability *device* loads machine code for *target*."""
    named = parsed(target)
    if named is None:
        return False
    major, minor, suffix = named
    return major == device[0] and (minor == device[1] if suffix == "a" else minor <= device[1])


def compiles(target: str, device: tuple[int, int]) -> bool:
    """Return whether the driver compiles PTX for *target* for a GPU of capability *device*."""
    named = parsed(target)
    if named is None:
        return False
    major, minor, suffix = named
    if suffix == "a":
        return (major, minor) == device
    return (major, minor) <= device and (suffix != "f" or major == device[0])


def chosen(cubins: Iterable[str], ptx: Iterable[str], device: tuple[int, int]) -> tuple[Gain, str]:
    """
    Return what a GPU of capability *device* gets from a unit with code for these targets, and the
    target of what it would take.

    Machine code comes before PTX, and the nearest before one that is further away.
    """

    def nearest(targets: Iterable[str]) -> str:
        return max(
            targets,
            key=lambda target: ((parsed(target) or (0, 0, ""))[:2], "fa".find(target[-1])),
            default="",
        )

    if best := nearest(target for target in cubins if loads(target, device)):
        _, minor, suffix = parsed(best) or (0, 0, "")
        return ("plain" if not suffix else "native" if minor == device[1] else "family"), best
    if best := nearest(target for target in ptx if compiles(target, device)):
        return "jit", best
    return "nothing", ""


def of_units(units: Iterable[Sequence[Sequence[str]]], device: tuple[int, int]) -> Spark:
    """
    Return what a GPU of capability *device* gets from *units*, each the targets of its cubins and
    of its PTX; FP4 is left open.
    """
    gains: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    jit: Counter[str] = Counter()
    for cubins, ptx in units:
        gain, target = chosen(cubins, ptx, device)
        gains[gain] += 1
        if target:
            (jit if gain == "jit" else targets)[target] += 1
    ordered: dict[str, int] = {gain: gains[gain] for gain in GAINS if gains[gain]}
    return Spark(
        f"{device[0]}.{device[1]}",
        ordered,
        dict(sorted(targets.items())),
        dict(sorted(jit.items())),
    )


def fp4(kernels: int, instructions: Mapping[str, int], traps: int) -> Fp4:
    """
    Return what the FP4 kernels that were disassembled hold.

    Args:
        kernels: How many there are.
        instructions: How many FP4 instructions they hold, by pattern.
        traps: How many of them hold a trap.
    """
    if not kernels:
        return "no-kernels"
    if traps:
        return "traps"
    return "instructions" if any(instructions.values()) else "no-instructions"
