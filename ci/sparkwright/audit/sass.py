"""
Device code, read with NVIDIA's own tools: what a library lists, the cubins and PTX in it, and the opcodes of its kernels.

Listing is cheap (89 MB: 0.8 s), extracting costs seconds, disassembling minutes; each is its own call, so that the audit pays
only for what a policy asks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright import process
from sparkwright.digest import sha256_file
from sparkwright.errors import ToolMissing

TRAP = "BPT.TRAP"

_LISTED_ELF = re.compile(r"^ELF file +\d+: .*\.(sm_\d+[a-z]?)\.cubin\s*$", re.MULTILINE)
_LISTED_PTX = re.compile(r"^PTX file +\d+: .*\.(sm_\d+[a-z]?)\.ptx\s*$", re.MULTILINE)
_PTX_TARGET = re.compile(r"^\.target +(sm_\d+[a-z]?)", re.MULTILINE)
#: A section's heading, or an instruction after its address and predicate: ``/*0050*/  @!P0 F2FP.SATFINITE.E2M1… R0, …``.
_LINE = re.compile(
    r"^(?:\.text\.(?P<kernel>\S+):|[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:\{[ \t]*)?(?:@!?U?P\w+[ \t]+)?(?P<opcode>[A-Z][A-Z0-9_.]*))",
    re.MULTILINE,
)


class CudaTools(msgspec.Struct, frozen=True):
    """
    Where NVIDIA's readers of device code lie.

    Attributes:
        folder: Holds ``cuobjdump`` and ``nvdisasm`` (``nvidia/cu13/bin`` of an environment with both wheels).
    """

    folder: Path

    def program(self, name: str) -> Path:
        """
        Return the program of that name.

        Raises:
            ToolMissing: The folder does not hold it.
        """
        path = self.folder / name
        if not path.is_file():
            raise ToolMissing(f"{name} is not in {self.folder}.")
        return path


class Unit(msgspec.Struct, frozen=True):
    """
    An extracted cubin or PTX file.

    Attributes:
        path: Where it lies, for as long as the audit of its library lasts.
        arch: The architecture in the tool's listing, such as ``sm_121``.
        sha256: Of its bytes.
    """

    path: Path
    arch: str
    sha256: str


def listed(library: Path, tools: CudaTools) -> tuple[Counter[str], Counter[str]]:
    """
    Return how many cubins and how many PTX files *library* has, by the arch in their names.

    Raises:
        CommandFailed: cuobjdump finds nothing that it can read.
    """
    program = tools.program("cuobjdump")
    elf = process.output([program, "--list-elf", library])
    ptx = process.output([program, "--list-ptx", library])
    return Counter(_LISTED_ELF.findall(elf)), Counter(_LISTED_PTX.findall(ptx))


def _extract(library: Path, tools: CudaTools, what: Sequence[str], folder: Path) -> tuple[Unit, ...]:
    folder.mkdir()
    # cuobjdump writes into its working folder, under names made from the library's own, which is ours.
    process.run([tools.program("cuobjdump"), *what, library], log=folder / "log", cwd=folder)
    paths = sorted([*folder.glob("*.cubin"), *folder.glob("*.ptx")])
    return tuple(Unit(path, path.name.rsplit(".", 2)[-2], sha256_file(path)) for path in paths)


def extract_cubins(library: Path, generation: str, tools: CudaTools, folder: Path) -> tuple[Unit, ...]:
    """
    Write the cubins of *library* whose arch name begins with *generation* (``sm_12``) into the new *folder*.

    Raises:
        CommandFailed: cuobjdump could not read the library.
    """
    return _extract(library, tools, ["--extract-elf", f".{generation}"], folder)


def extract_ptx(library: Path, tools: CudaTools, folder: Path) -> tuple[Unit, ...]:
    """
    Write all PTX of *library* into the new *folder*; the arch is the one of its ``.target`` line.

    Raises:
        CommandFailed: cuobjdump could not read the library.
    """
    units = []
    for unit in _extract(library, tools, ["--extract-ptx", "all"], folder):
        found = _PTX_TARGET.search(unit.path.read_text("utf-8", "replace"))
        units.append(msgspec.structs.replace(unit, arch=found[1] if found else unit.arch))
    return tuple(units)


def count_opcodes(text: str) -> dict[str, Counter[str]]:
    """Return how often each opcode with its modifiers occurs in nvdisasm's *text*, by kernel."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for found in _LINE.finditer(text):
        if found["kernel"]:
            current = counts.setdefault(found["kernel"], Counter())
        else:
            current[found["opcode"]] += 1
    return counts


def opcodes(cubin: Path, tools: CudaTools) -> dict[str, Counter[str]]:
    """
    Disassemble *cubin* and return its opcode counts by kernel.

    Raises:
        CommandFailed: nvdisasm could not read it, or took more than an hour.
    """
    return count_opcodes(process.output([tools.program("nvdisasm"), "--print-code", cubin], timeout=3600))


def matching(counts: Mapping[str, int], pattern: str) -> int:
    """Return how many of the counted opcodes match the regular expression *pattern*."""
    found = partial(re.compile(pattern).search)
    return sum(count for opcode, count in counts.items() if found(opcode))
