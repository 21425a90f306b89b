"""
Every kernel of a wheel, loaded: the GPU's own driver decides whether the machine code that fits it by name really runs there.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.audit import device_code
from sparkwright.audit import wheel as audit_wheel
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import Buffer, ElfUnreadable
from sparkwright.core import process
from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, invalid, not_run, passed
from sparkwright.gates.device import gpu as gpus
from sparkwright.gates.device.gpu import NO_LIMIT, Gpu

#: Section type of a symbol table, the first fields of a symbol (name, info, other, section), and its type and flag for a function that a
#: host can launch (STO_CUDA_ENTRY).
_SYMBOLS = 2
_SYMBOL = struct.Struct("<IBBH16x")
_FUNCTION, _ENTRY = 2, 0x10

#: A driver that crashes at so many cubins in one library is not asked about the rest.
_MOST_CRASHES = 5
#: Of the check of a library.
NAME = "kernels-{}"


class Cubin(msgspec.Struct, frozen=True):
    """Machine code at *path*, for *arch*, with the mangled names of the *kernels* that a host can launch."""

    path: Path
    arch: str
    kernels: tuple[str, ...]


class Line(msgspec.Struct, frozen=True):
    """
    One line of ``inside/driver.py load``.

    Attributes:
        begins: The cubin that is about to be loaded.
        number: The cubin that was; *error* is the driver's, empty where it took it.
        refused: Kernels that it does not find or describe, with the driver's error.
        held: How many functions the driver counts in it; -1 where it cannot.
        absent: Why nothing can be loaded.
    """

    begins: int = -1
    number: int = -1
    error: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    held: int = -1
    absent: str = ""


def entries(cubin: Buffer) -> tuple[str, ...]:
    """
    Return the mangled names of the kernels in the symbol table of *cubin*.

    Raises:
        ElfUnreadable: It is no ELF file, or its tables lead out of it.
    """
    listed = elf.sections(cubin)
    found = set()
    for table in (one for one in listed if one.kind == _SYMBOLS):
        if table.link >= len(listed):
            raise ElfUnreadable("its symbols name no table of strings")
        names = listed[table.link]
        text = bytes(cubin[names.offset : names.offset + names.size])
        for name, info, other, place in _SYMBOL.iter_unpack(cubin[table.offset : table.offset + table.size // _SYMBOL.size * _SYMBOL.size]):
            if info & 15 == _FUNCTION and place and other & _ENTRY:
                found.add(text[name : max(text.find(b"\0", name), name)].decode("ascii", "replace"))
    return tuple(sorted(found))


def fitting(library: Path, gpu: Gpu, folder: Path) -> tuple[Cubin, ...] | None:
    """
    Write the cubins of *library* that the rules let run on *gpu* into *folder* and return them; None where it holds no device code.

    Raises:
        ElfUnreadable: The library, or a cubin in it, is damaged.
    """
    with elf.mapped(library) as data:
        host = elf.shared_object(data)
        if not host.fatbins:
            return None
        found: list[Cubin] = []
        for entry in elf.fatbin_entries(data, host.fatbins):
            if entry.kind == "cubin" and device_code.loads(entry.arch, (gpu.major, gpu.minor)):
                found.append(_written(elf.unpack(data, entry), entry.arch, folder / f"{len(found):05}.{entry.arch}.cubin"))
        return tuple(found)


def _written(cubin: bytes, arch: str, path: Path) -> Cubin:
    path.write_bytes(cubin)
    return Cubin(path, arch, entries(cubin))


def load(cubins: Sequence[Cubin], seconds: float, scratch: Path) -> dict[int, Line]:
    """
    Have the driver load *cubins* and return what came of each, by number; one that ended the process has the error ``crashed``.

    Args:
        seconds: For all of them; those beyond have no line.
    """
    listed = scratch / "cubins.json"
    listed.write_bytes(msgspec.json.encode([{"path": str(one.path), "kernels": one.kernels} for one in cubins]))
    found: dict[int, Line] = {}
    start, crashes = 0, 0
    while start < len(cubins) and crashes < _MOST_CRASHES:
        log = scratch / f"load-{start}.log"
        command = [sys.executable, str(gpus.DRIVER), "load", str(listed), str(start)]
        ended = process.run_limited(command, Limits(seconds, NO_LIMIT, 200), log)
        begun = start
        for line in _lines(log):
            begun = max(begun, line.begins)
            if line.absent:
                return {number: Line(number=number, error=line.absent) for number in range(len(cubins))}
            if line.number >= 0:
                found[line.number] = line
        if ended.late or begun in found:
            break
        found[begun] = Line(number=begun, error=f"crashed (status {ended.status})")
        start, crashes = begun + 1, crashes + 1
    return found


def _lines(log: Path) -> Iterator[Line]:
    with log.open("rb") as stream:
        for text in stream:
            try:
                yield msgspec.json.decode(text, type=Line)
            except msgspec.MsgspecError:
                continue


def judged(name: str, cubins: Sequence[Cubin], found: dict[int, Line]) -> Check:
    """Return the check *name*: were all *cubins* taken, and all of their kernels found?"""
    total, samples, bad = sum(len(one.kernels) for one in cubins), [], 0
    for number, cubin in enumerate(cubins):
        line = found.get(number)
        if line is None:
            return invalid(name, f"the driver was not asked about {cubin.path.name} and later ones in its time", "probe-slow")
        if line.error:
            bad += len(cubin.kernels)
            samples.append(Sample(f"{cubin.path.name}, {len(cubin.kernels)} kernels", "loads", line.error))
        bad += len(line.refused)
        samples += [Sample(f"{cubin.path.name}: {kernel}"[:300], "loads", error) for kernel, error in line.refused]
    archs = ", ".join(sorted({one.arch for one in cubins}))
    figures = [Figure("cubins", len(cubins)), Figure("kernels", total), Figure("kernels that do not load", bad, bound=0)]
    if bad:
        return failed(name, f"{bad} of {total} kernels for {archs} do not load", "kernel-unloadable", figures=figures, samples=samples)
    return passed(name, f"all {total} kernels of {len(cubins)} cubins for {archs} load", figures=figures)


def checks(wheel: Path, gpu: Gpu, seconds: float, scratch: Path) -> tuple[Check, ...]:
    """
    Return a check for each library of *wheel* that holds device code.

    Args:
        seconds: For the kernels of one library.

    Raises:
        wheel-invalid, archive-unsafe: See `sparkwright.audit.wheel`.
    """
    made: list[Check] = []

    def visit(binary: audit_wheel.Binary) -> None:
        with tempfile.TemporaryDirectory(prefix="kernels-", dir=scratch) as folder:
            if check := library(binary.path, binary.name, gpu, seconds, Path(folder)):
                made.append(check)

    audit_wheel.walk(wheel, audit_wheel.read_subject(wheel), scratch, visit)
    return tuple(sorted(made, key=lambda check: check.name))


def check_name(member: str) -> str:
    """Return the name of the check of the library *member*."""
    return NAME.format(Path(member).name.partition(".")[0].strip("_").lower().replace("_", "-"))


def library(path: Path, member: str, gpu: Gpu, seconds: float, folder: Path) -> Check | None:
    """Return the check of the library at *path*, called *member* in its wheel; None where it holds no device code."""
    name = check_name(member)
    try:
        cubins = fitting(path, gpu, folder)
    except ElfUnreadable as error:
        return invalid(name, f"{member}: {error}", "code-unreadable")
    if cubins is None:
        return None
    if not cubins:
        return not_run(name, f"{member} has no machine code for SM {gpu.major}.{gpu.minor}", "code-foreign", required=False)
    return judged(name, cubins, load(cubins, seconds, folder))
