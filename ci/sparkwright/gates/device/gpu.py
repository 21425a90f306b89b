"""
The GPU and its driver, called in a process of its own: the wheel's device code is loaded, and the
GPU's conversion to E2M1 is compared with its definition.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit import device_code
from sparkwright.audit import wheel as wheel_audit
from sparkwright.builder.wheel import elf
from sparkwright.core import process
from sparkwright.core.process import Ended, Limits
from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, invalid, passed

DRIVER = Path(__file__).parent / "target_env_scripts" / "driver.py"
PTX = Path(__file__).parent / "e2m1_probe.ptx"

#: Megabytes: CUDA reserves more address space than a useful limit would allow.
NO_LIMIT = 1 << 30


class Gpu(msgspec.Struct, frozen=True):
    """The first GPU, with the CUDA version of its driver as 1000 × major + 10 × minor."""

    name: str
    major: int
    minor: int
    driver: int


class WheelCode(msgspec.Struct):
    """
    The device code of a wheel that a GPU loads, and its operators.

    Attributes:
        cubins: A name for people, and the path, of each cubin.
        unreadable: A name, and the reason, of each library whose device code cannot be read.
        libraries: Copies of the libraries with operators.
    """

    cubins: list[tuple[str, Path]] = []
    unreadable: list[tuple[str, str]] = []
    libraries: list[Path] = []


def run_script(command: Sequence[str], seconds: float, log: Path) -> tuple[Ended, list[Any]]:
    """Run *command*, and return its end and the JSON objects in the lines of its output."""
    ended = process.run_limited(command, Limits(seconds, NO_LIMIT, 4000), log)
    records = []
    for line in log.read_bytes().splitlines():
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError:
            continue
    return ended, records


def ask(seconds: float, scratch: Path) -> Gpu | str:
    """Return the first GPU, or the reason why none answers."""
    command = [sys.executable, str(DRIVER), "facts"]
    ended, records = run_script(command, seconds, scratch / "facts.log")
    try:
        return msgspec.convert(records[-1], Gpu)
    except (IndexError, msgspec.ValidationError):
        return f"no GPU answers: {ended.tail[-200:] or f'status {ended.status}'}"


def unpack(wheel: Path, gpu: Gpu, operators: Sequence[str], scratch: Path) -> WheelCode:
    """
    Write the cubins of *wheel* that *gpu* loads, and its libraries with operators, into *scratch*.

    Args:
        operators: Globs of the libraries with operators.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: See `sparkwright.audit.wheel.walk`.
    """
    code, device = WheelCode(), (gpu.major, gpu.minor)

    def visit(binary: wheel_audit.Binary) -> None:
        if any(fnmatchcase(binary.name, glob) for glob in operators):
            copy = shutil.copy(binary.path, scratch / Path(binary.name).name)
            code.libraries.append(Path(copy))
        try:
            with elf.mapped(binary.path) as data:
                for entry in elf.fatbin_entries(data, elf.shared_object(data).fatbins):
                    if entry.kind == "cubin" and device_code.loads(entry.arch, device):
                        path = scratch / f"{len(code.cubins)}.cubin"
                        path.write_bytes(elf.unpack(data, entry))
                        code.cubins.append((f"{binary.name}, unit {entry.container}", path))
        except elf.ElfUnreadable as error:
            code.unreadable.append((binary.name, str(error)))

    wheel_audit.walk(wheel, wheel_audit.read_subject(wheel), scratch, visit)
    return code


def load_check(code: WheelCode, seconds: float, scratch: Path) -> Check:
    """Return the check that the driver loads every cubin of *code*."""
    if code.unreadable:
        samples = [Sample(library, "device code", reason) for library, reason in code.unreadable]
        message = f"the device code of {len(samples)} libraries cannot be read"
        return invalid("cubins", message, "code-unreadable", samples=samples)
    if not code.cubins:
        return failed("cubins", "the wheel has no machine code for this GPU", "code-foreign")
    listed = scratch / "cubins.json"
    listed.write_bytes(msgspec.json.encode([str(path) for _, path in code.cubins]))
    command = [sys.executable, str(DRIVER), "load", str(listed)]
    ended, records = run_script(command, seconds, scratch / "load.log")
    results = [record for record in records if "error" in record]
    if len(results) < len(code.cubins):
        name = code.cubins[len(results)][0]
        return _unanswered("cubins", ended, f"the driver's process ended at {name}")
    samples = [
        Sample(name, "loads", result["error"])
        for (name, _), result in zip(code.cubins, results, strict=True)
        if result["error"]
    ]
    figures = [
        Figure("cubins", len(results)),
        Figure("kernels", sum(result["functions"] for result in results)),
        Figure("cubins that do not load", len(samples), bound=0),
    ]
    message = f"{len(samples)} of {len(results)} cubins do not load"
    if samples:
        return failed("cubins", message, "kernel-unloadable", figures=figures, samples=samples)
    return passed("cubins", message, figures=figures)


def conversion_check(gpu: Gpu, seconds: float, scratch: Path, ptx: Path = PTX) -> Check:
    """Return the check of the GPU's conversion of all FP32 values to E2M1, by the kernel *ptx*."""
    source = scratch / "probe.ptx"
    text = ptx.read_text("utf-8").replace("TARGET", f"sm_{gpu.major}{gpu.minor}a")
    source.write_text(text, "utf-8")
    command = [sys.executable, str(DRIVER), "sweep", str(source)]
    ended, records = run_script(command, seconds, scratch / "probe.log")
    if not records or "counters" not in records[-1]:
        return _unanswered("fp4-conversion", ended, "the sweep has no result")
    numbers, nans, bits = records[-1]["counters"]
    message = f"{numbers} numbers and {nans} NaNs of 2^32 inputs differ from E2M1's definition"
    figures = [Figure("mismatches", numbers, bound=0), Figure("NaN mismatches", nans, bound=0)]
    if not numbers and not nans:
        return passed("fp4-conversion", message, figures=figures)
    reason = "conversion-wrong" if numbers else "nan-differs"
    samples = [Sample(f"fp32 0x{bits:08x}")]
    return failed("fp4-conversion", message, reason, figures=figures, samples=samples)


def _unanswered(name: str, ended: Ended, message: str) -> Check:
    if ended.late:
        return invalid(name, f"{message}: not in its time", "probe-slow")
    reason = "probe-crashed" if ended.status else "probe-output"
    return invalid(name, f"{message}: status {ended.status}, {ended.tail[-200:]}", reason)
