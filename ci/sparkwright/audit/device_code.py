"""
The device code of a library: its cubins and PTX texts, their real targets, what a GPU gets from
them, their instructions, and a digest of them all.

A cubin's file name (``….sm_121.cubin``) and its ELF flags are the same for ``sm_121`` and
``sm_121f``; only ``-arch`` among the ptxas options in its ``.note.nv.tkinfo`` section tells them
apart. As an ELF note: name ``NVIDIA Corp``, type 2000, and a description of six little-endian words
(version, object, tool, version, build, options), of which the last five are offsets into the
NUL-terminated strings that follow (seen with CUDA 12.8 and 12.9, versions 0x80 and 0x81, and with
CUDA 13, version 2). Where there is no such note (CUDA 12.6), a driver has nothing but the table.

The digest covers the code that a GPU of the stack could load. For a library compiled here these
are its cubins of the stack's generation and all its PTX, each by its sha256 and in sorted order, so
that neither link order nor compression changes it; for a library that came with the official wheel,
its fatbin sections as they are. Python, host code and the version label are no part of it.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.gpu_target import SUPPORT_LEVELS, parsed, support_level
from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.store import translate_disk_full

#: A note holds one command line; a larger one is not a note.
_LARGEST_NOTE = 1 << 16
#: Sizes of name and description, type, name, and the first word of the description.
_TKINFO = re.compile(
    rb"\x0c\0\0\0(.{4})\xd0\x07\0\0NVIDIA Corp\0(?=[\x02\x80\x81]\0\0\0)", re.DOTALL
)
_ARCH_OPTION = re.compile(rb"[\s\0](?:-arch|--gpu-name)[ =](sm_\d+[af]?)(?=[\s\0])")
_PTX_TARGET = re.compile(rb"^\.target +(sm_\d+[af]?)", re.MULTILINE)
#: The directive stands at the top, after comments.
_PTX_HEAD = 1 << 14

#: The instruction that ends a kernel with an error.
TRAP = "BPT.TRAP"
#: A section's heading, or an instruction after its address and predicate:
#: ``/*0050*/  @!P0 F2FP.SATFINITE.E2M1… R0, …``.
_LINE = re.compile(
    r"^(?:\.text\.(?P<kernel>\S+):|[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:\{[ \t]*)?(?:@!?U?P\w+[ \t]+)?"
    r"(?P<opcode>[A-Z][A-Z0-9_.]*))"
)


class DeviceImage(msgspec.Struct, frozen=True):
    """
    A cubin or a PTX text of a library.

    Attributes:
        container: The number of its fatbin in the library: one per translation unit.
        listed: The target in the fatbin's table, by which a driver chooses.
        target: The target that the code itself states; ``sm_121?`` if it should and does not, and
            *listed* if it was not unpacked.
        sha256: Of the unpacked bytes; empty if they were not unpacked whole.
        kernels: The mangled names of a cubin's functions.
    """

    kind: Literal["ptx", "cubin"]
    container: int
    listed: str
    target: str
    sha256: str = ""
    kernels: tuple[str, ...] = ()


class DeviceCode(msgspec.Struct, frozen=True):
    """
    The device code of a library.

    Attributes:
        digest: The library's part of a wheel's digest; empty without device code.
        fault: Why the images cannot be read; empty if they can.
    """

    images: tuple[DeviceImage, ...] = ()
    digest: str = ""
    fault: str = ""

    def counts(self, kind: Literal["ptx", "cubin"]) -> dict[str, int]:
        """Return the number of images of that kind by target, ``sm_80`` before ``sm_100``."""
        numbers = Counter(image.target for image in self.images if image.kind == kind)
        return dict(
            sorted(numbers.items(), key=lambda entry: (parsed(entry[0].rstrip("?")), entry[0]))
        )


def read(
    data: elf.Buffer,
    library: elf.SharedObject,
    generation: int,
    *,
    compiled: bool,
    visit: Callable[[DeviceImage, bytes], None] = lambda *_: None,
) -> DeviceCode:
    """
    Return the device code of the library in *data*.

    Args:
        generation: 12 for SM 12.x; cubins of others are listed, and not unpacked.
        compiled: The library was compiled here, so that its PTX is read, too, and its digest is
            that of its images.
        visit: Called with each image and its unpacked bytes, one at a time: all of them together
            may be larger than the memory.
    """
    if not library.fatbins:
        return DeviceCode()
    images, hashes = list[DeviceImage](), list[str]()
    try:
        for entry in elf.fatbin_entries(data, library.fatbins):
            is_cubin, target, kernels = entry.kind == "cubin", entry.arch, tuple[str, ...]()
            unpacked = parsed(entry.arch)[0] == generation if is_cubin else compiled
            content, sha256 = b"", ""
            if unpacked:
                content = elf.unpack(data, entry)
                sha256 = sha256_bytes(content)
                hashes.append(sha256)
            if is_cubin and unpacked:
                target, kernels = _read_cubin(content)
            elif match := _PTX_TARGET.search(content[:_PTX_HEAD]):
                target = match[1].decode()
            target = target or f"{entry.arch}?"
            images.append(
                DeviceImage(entry.kind, entry.container, entry.arch, target, sha256, kernels)
            )
            visit(images[-1], content)
    except elf.ElfUnreadable as error:
        return DeviceCode(digest=_sections_digest(data, library), fault=str(error))
    digest = (
        sha256_bytes(canonical(sorted(hashes))) if compiled else _sections_digest(data, library)
    )
    return DeviceCode(tuple(images), digest)


def read_file(path: Path, container: int) -> DeviceImage:
    """
    Return the cubin that is the file at *path*.

    Its flags, by which a driver chooses, state the capability, in another byte since version 8.

    Raises:
        elf.ElfUnreadable: As `_read_cubin`.
    """
    with elf.mapped(path) as data:
        target, _ = _read_cubin(data)
        listed = f"sm_{data[49 if data[8] >= 8 else 48]}"
    return DeviceImage("cubin", container, listed, target or f"{listed}?")


def _sections_digest(data: elf.Buffer, library: elf.SharedObject) -> str:
    """Return the sha256 over the fatbin sections as they are."""
    return sha256_bytes(b"".join(data[begin : begin + size] for begin, size in library.fatbins))


def _read_cubin(data: elf.Buffer) -> tuple[str, tuple[str, ...]]:
    """
    Return the target that ptxas was given for the cubin in *data* (``sm_121f``; empty when the note
    is missing or of an unknown version), and the mangled names of its kernels.

    Raises:
        elf.ElfUnreadable: It is not an ELF file that can be read.
    """
    target, kernels = "", []
    for section in elf.sections(data):
        if section.name == ".note.nv.tkinfo" and section.size <= _LARGEST_NOTE:
            note = data[section.offset : section.offset + section.size]
            for match in _TKINFO.finditer(note):
                size = int.from_bytes(match[1], "little")
                option = _ARCH_OPTION.search(note[match.end() : match.end() + size])
                if option and match.end() + size <= len(note):
                    target = target or option[1].decode()
        elif section.name.startswith(".text."):
            kernels.append(section.name.removeprefix(".text."))
    return target, tuple(sorted(kernels))


# What a GPU gets.


def gains(images: Iterable[DeviceImage], device: tuple[int, int]) -> dict[str, int]:
    """
    Return how many fatbins of *images* give a GPU of capability *device* each level of support,
    best first: a fatbin is a translation unit, of which the driver takes one image.
    """
    units: dict[int, dict[str, list[str]]] = {}
    for image in images:
        unit = units.setdefault(image.container, {"cubin": [], "ptx": []})
        # A driver takes the target of the table if the code states none.
        unit[image.kind].append(image.listed if image.target.endswith("?") else image.target)
    numbers = Counter(support_level(unit["cubin"], unit["ptx"], device) for unit in units.values())
    return {name: numbers[name] for name in SUPPORT_LEVELS if numbers[name]}


# Instructions.


def opcodes(
    cubin: bytes, *, scratch: Path, programs: Path, deadline: float
) -> dict[str, Counter[str]]:
    """
    Disassemble *cubin*, and count its opcodes with their modifiers by kernel.

    Args:
        scratch: Folder for the cubin and the output.
        programs: Holds ``nvdisasm`` (``nvidia/cu13/bin`` of an environment with its wheel).
        deadline: By `time.monotonic`.

    Raises:
        tool-missing: It does not hold it.
        command-failed: nvdisasm could not read the cubin, or the time is over.
        disk-full: There is no room for the cubin.
    """
    if not (program := programs / "nvdisasm").is_file():
        raise CommandError("tool-missing", f"nvdisasm is not in {programs}.")
    path, log = scratch / "cubin", scratch / "sass"
    with translate_disk_full(scratch):
        path.write_bytes(cubin)
    seconds = max(deadline - time.monotonic(), 0.001)
    process.run(
        ["timeout", "--signal=KILL", f"{seconds:.3f}", program, "--print-code", path],
        log=log,
        what=f"{program.name} cannot read a cubin, or takes longer than for any wheel.",
    )
    counts, current = dict[str, Counter[str]](), Counter[str]()
    with log.open(encoding="utf-8") as lines:
        for match in filter(None, map(_LINE.match, lines)):
            if match["kernel"]:
                current = counts.setdefault(match["kernel"], Counter())
            else:
                current[match["opcode"]] += 1
    return counts
