"""
G2, the wheel on a GPU: its device code is loaded, its operators are compared with NumPy, and the
GPU's conversion to E2M1 with its definition.

CUDA runs in processes of its own, each within a time, which may crash; what they write is judged
here. The architecture comes from the wheel's audit. Checks that need FP4 instructions do not run on
other GPUs, and are required of wheels for GPUs that have them.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sparkwright.audit import wheel as wheel_audit
from sparkwright.bench.records import Positive
from sparkwright.builder import host_info
from sparkwright.builder.host_info import GpuInfo
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.gpu_target import loads, parsed
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.process import Ended, Limits
from sparkwright.core.store import translate_disk_full
from sparkwright.core.words import NOT_COMPILED
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    judged,
    not_run,
    passed,
)
from sparkwright.gates.device import operators
from sparkwright.gates.device.operators import Case, ErrorBounds

SCRIPTS = Path(__file__).parent / "target_env_scripts"
DRIVER, SCRIPT = SCRIPTS / "driver.py", SCRIPTS / "operators.py"
PTX = Path(__file__).parent / "e2m1_probe.ptx"

#: Megabytes: CUDA reserves more address space than a useful limit would allow.
NO_LIMIT = 1 << 30

#: The first generation with FP4 instructions (CUDA C++ Programming Guide, compute capabilities).
FP4_GENERATION = 10

#: Bytes on either side of an output, as in the script.
GUARD = 4096

#: The checks that need FP4 instructions.
NEEDS_FP4 = {"fp4-conversion", *(name for name in operators.OPERATORS if name.startswith("fp4-"))}

CHECKS = (
    *declare("gpu"),
    *declare("cubins", "fp4-conversion", *operators.OPERATORS, measured=True),
    *declare(*operators.UNTESTED, role="reports"),
)

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "no-gpu": "No CUDA GPU answers here. Run the gate on a GPU of the wheel's architecture.",
    "gpu-foreign": "The GPU does not run code for the wheel's architecture. Use another GPU.",
    "fp4-hardware-missing": "The GPU has no FP4 instructions, which SM 10.0 and later have.",
    "no-environment": "No environment with torch was named.",
    "probe-crashed": "A program on the GPU ended without its results. It may be at fault, or the "
    "driver: see the kernel's log for Xid.",
    "probe-slow": "A program on the GPU exceeded its time and was ended; the GPU may hang.",
    "conversion-wrong": "The GPU converts numbers to other codes than E2M1 defines.",
    "nan-differs": "The GPU converts NaN to another code than PTX defines (+6).",
    "kernel-unloadable": "The driver refuses machine code that is named for this GPU.",
    "code-unreadable": "The device code of a library is damaged; see the audit.",
    "code-foreign": "The wheel has no machine code for this GPU; see the audit.",
    "op-absent": "The wheel has no such operator, or one with other arguments. A recipe that needs "
    "it cannot be served.",
    "op-untested": "The gate has no cases for this operator of the wheel: only a served model that "
    "uses it shows whether it is right.",
    "op-refused": "The operator states that it was not compiled for this GPU.",
    "op-broken": "The operator raises an error: a failed launch, an illegal address, missing PTX.",
    "op-crashed": "The process crashed in the operator, exceeded its time, or left no results.",
    "guard-written": "The operator wrote outside its output.",
    "output-unwritten": "The operator left part of its output as it was: a tile or a row.",
    "output-nan": "The operator turns numbers into NaN.",
    "output-wrong": "A result differs by more than rounding: a wrong scale, nibble or index.",
    "output-varies": "Two runs with the same input differ: a race, or a random order of sums.",
}


class OperatorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The operators of the wheel.

    Attributes:
        libraries: Globs of the wheel's libraries with operators.
        seconds: For all cases of one check.
        repeats: Runs of each case, which must agree in every bit.
        bounds: The errors that rounding explains.
        required: The checks that decide, where the wheel's architecture has their instructions.
    """

    libraries: tuple[str, ...]
    seconds: Positive
    repeats: Annotated[int, Meta(ge=2)]
    bounds: ErrorBounds
    required: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.required) - set(operators.OPERATORS)):
            raise ValueError(f"operators: there is no check {', '.join(unknown)}")


class DevicePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/device.yaml``.

    Attributes:
        seconds: For each program that calls the driver alone.
    """

    seconds: Positive
    operators: OperatorPolicy


#: The compute capability of a GPU, as major and minor number.
Capability = tuple[int, int]

#: A name for people, and the path, of each cubin.
Cubins = list[tuple[str, Path]]


def run(
    policy: DevicePolicy, scratch: Path, wheel: Path, target: str, python: Path | None = None
) -> tuple[Check, ...]:
    """
    Return the checks of *wheel* on the first GPU.

    Args:
        scratch: An empty folder for all files that are written.
        target: The wheel's architecture (``sm_121f``), from its audit.
        python: The interpreter of an environment with torch.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: The wheel cannot be read.
    """
    required = {"gpu", "cubins", "fp4-conversion", *policy.operators.required}
    if 0 < parsed(target)[0] < FP4_GENERATION:
        required -= NEEDS_FP4
    gpu = next(iter(host_info.gpus()), GpuInfo("", "", ""))
    major, minor, _ = parsed(f"sm_{gpu.capability.replace('.', '')}")
    message = f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}"
    if not gpu.name:
        checks = [not_run(entry.name, "nvidia-smi shows no GPU", "no-gpu") for entry in CHECKS]
    elif not loads(target, (major, minor)):
        message = f"the wheel is for {target}; the GPU is {message}"
        checks = [not_run(entry.name, message, "gpu-foreign") for entry in CHECKS]
    else:
        checks = [passed("gpu", message)]
        checks += _checks(policy, scratch, (major, minor), wheel, python)
    return tuple(
        msgspec.structs.replace(check, required=check.name in required) for check in checks
    )


def _checks(
    policy: DevicePolicy, scratch: Path, gpu: Capability, wheel: Path, python: Path | None
) -> Iterator[Check]:
    """Yield the checks on a GPU that runs the code of *wheel*."""
    with console.step("device code of the wheel"):
        try:
            cubins, libraries = unpack(wheel, gpu, policy.operators.libraries, scratch)
        except elf.ElfUnreadable as error:
            yield invalid("cubins", f"the device code cannot be read: {error}", "code-unreadable")
            return
        yield load_check(cubins, policy.seconds, scratch)
    for name in ("fp4-conversion", *operators.OPERATORS):
        with console.step(name):
            if gpu[0] < FP4_GENERATION and name in NEEDS_FP4:
                yield not_run(name, "the GPU has no FP4", "fp4-hardware-missing")
            elif name == "fp4-conversion":
                yield conversion_check(gpu, policy.seconds, scratch)
            elif python is None:
                yield not_run(name, "no environment was named", "no-environment")
            else:
                yield operator_check(
                    name, policy.operators, [str(python), str(SCRIPT)], libraries, scratch
                )
    for name, operator in operators.UNTESTED.items():
        yield not_run(name, f"no case calls {operator}", "op-untested")


def run_script(command: Sequence[str], seconds: float, log: Path) -> tuple[Ended, list[Any]]:
    """Run *command*, and return its end and the JSON objects in the lines of its output."""
    ended = process.run_limited(command, Limits(seconds, NO_LIMIT, 4000), log)
    records = []
    for line in log.read_bytes().splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
    return ended, records


def unpack(
    wheel: Path, gpu: Capability, libraries: Sequence[str], scratch: Path
) -> tuple[Cubins, list[Path]]:
    """
    Write the cubins of *wheel* that *gpu* loads, and its libraries with operators, into *scratch*.

    Args:
        libraries: Globs of the libraries with operators.

    Raises:
        ElfUnreadable: The device code of a library is damaged.
        wheel-invalid, archive-unsafe, disk-full: See `sparkwright.audit.wheel.members`.
    """
    cubins, copies = Cubins(), list[Path]()
    for member in wheel_audit.members(wheel, scratch):
        with translate_disk_full(scratch):
            if any(fnmatchcase(member.name, glob) for glob in libraries):
                copies.append(scratch / Path(member.name).name)
                shutil.copy(member.path, copies[-1])
            for name, code in _cubins(member, gpu) if member.is_elf else ():
                cubins.append((name, scratch / f"{len(cubins)}.cubin"))
                cubins[-1][1].write_bytes(code)
    return cubins, copies


def _cubins(member: wheel_audit.Member, gpu: Capability) -> Iterator[tuple[str, bytes]]:
    """Yield a name and the bytes of each cubin of *member* that *gpu* loads."""
    with elf.mapped(member.path) as data:
        for entry in elf.fatbin_entries(data, elf.shared_object(data).fatbins):
            if entry.kind == "cubin" and loads(entry.arch, gpu):
                yield f"{member.name}, unit {entry.container}", elf.unpack(data, entry)


def load_check(cubins: Cubins, seconds: float, scratch: Path) -> Check:
    """Return the check that the driver loads every one of *cubins*, and that there are any."""
    if not cubins:
        return failed("cubins", "the wheel has no machine code for this GPU", "code-foreign")
    listed = scratch / "cubins.json"
    listed.write_bytes(msgspec.json.encode([str(path) for _, path in cubins]))
    ended, records = run_script(
        [sys.executable, str(DRIVER), "load", str(listed)], seconds, scratch / "load.log"
    )
    results = [record for record in records if "error" in record]
    if len(results) < len(cubins):
        name = cubins[len(results)][0]
        return _unanswered("cubins", ended, f"the driver's process ended at {name}")
    samples = [
        Sample(name, "loads", result["error"])
        for (name, _), result in zip(cubins, results, strict=True)
        if result["error"]
    ]
    figures = [
        Figure("cubins", len(results)),
        Figure("kernels", sum(result["functions"] for result in results)),
        Figure("cubins that do not load", len(samples), bound=0),
    ]
    return judged(
        "cubins",
        f"{len(samples)} of {len(results)} cubins do not load",
        "kernel-unloadable",
        not samples,
        figures,
        samples,
    )


def conversion_check(gpu: Capability, seconds: float, scratch: Path, ptx: Path = PTX) -> Check:
    """Return the check of the GPU's conversion of all FP32 values to E2M1, by the kernel *ptx*."""
    source = scratch / "probe.ptx"
    source.write_text(ptx.read_text("utf-8").replace("TARGET", "sm_{}{}a".format(*gpu)), "utf-8")
    ended, records = run_script(
        [sys.executable, str(DRIVER), "sweep", str(source)], seconds, scratch / "probe.log"
    )
    if not records or "counters" not in records[-1]:
        return _unanswered("fp4-conversion", ended, "the sweep has no result")
    numbers, nans, bits = records[-1]["counters"]
    message = f"{numbers} numbers and {nans} NaNs of 2^32 inputs differ from E2M1's definition"
    figures = [Figure("mismatches", numbers, bound=0), Figure("NaN mismatches", nans, bound=0)]
    reason = "conversion-wrong" if numbers else "nan-differs"
    samples = [Sample(f"fp32 0x{bits:08x}")] if numbers or nans else []
    return judged("fp4-conversion", message, reason, not samples, figures, samples)


def _unanswered(name: str, ended: Ended, message: str) -> Check:
    reason = "probe-slow" if ended.late else "probe-crashed"
    return invalid(name, f"{message}: status {ended.status}, {ended.tail[-200:]}", reason)


def operator_check(
    name: str,
    policy: OperatorPolicy,
    command: Sequence[str],
    libraries: Sequence[Path],
    scratch: Path,
) -> Check:
    """Run the cases of the check *name* with the script *command*, and return the check."""
    folder = scratch / name
    folder.mkdir()
    cases = operators.cases(name, policy.bounds)
    jobs = [
        _job(folder / str(number), shape, case, policy.repeats)
        for number, (shape, case) in enumerate(cases.items())
    ]
    document = {"libraries": [str(path) for path in libraries], "jobs": jobs}
    (folder / "jobs.json").write_bytes(msgspec.json.encode(document))
    ended, records = run_script(
        [*command, str(folder / "jobs.json")], policy.seconds, folder / "log"
    )
    for record in records:
        if message := record.get("absent") or record.get("unloadable"):
            return not_run(name, message, "op-absent")
        if message := record.get("error"):
            if NOT_COMPILED.search(message):
                return not_run(name, message, "op-refused")
            return failed(name, message, "op-broken")
    if len(records) < len(cases):
        message = f"the process ended with {ended.status} in {list(cases)[len(records)]}"
        return invalid(name, message, "op-crashed")
    faults, ratios = list[tuple[str, Sample]](), list[float]()
    try:
        for (shape, case), job in zip(cases.items(), jobs, strict=True):
            values = dict[str, NDArray[Any]]()
            for key, guarded in _results(case, policy.repeats, Path(job["results"])).items():
                values[key], messages = _output(case, key, guarded)
                faults += [
                    (why, Sample(f"{shape}, {key}", "", text)) for why, text in messages.items()
                ]
            derived = case.derived(values)
            for key, expected in case.expected.items():
                ratios.append(operators.error_ratio(expected, derived[key]))
                if ratios[-1] > 1:
                    text = f"{ratios[-1]:.3g} of the allowed error"
                    faults.append(("output-wrong", Sample(f"{shape}, {key}", "", text)))
    except (OSError, ValueError) as error:
        return invalid(name, f"the results cannot be read: {error}", "op-crashed")
    figures = [Figure("cases", len(cases)), Figure("error, of the allowed", max(ratios), bound=1)]
    faults.sort(key=lambda fault: list(REASONS).index(fault[0]))
    samples = [sample for _, sample in faults]
    message = f"{len(cases)} cases; the largest error is {max(ratios):.2g} of the allowed"
    if samples:
        message = f"{samples[0].case}: {samples[0].actual}"
    return judged(name, message, faults[0][0] if faults else "", not faults, figures, samples)


def _job(prefix: Path, name: str, case: Case, repeats: int) -> dict[str, Any]:
    """Return *case* as the script reads it, with its arrays in files that begin with *prefix*."""
    files = itertools.count(1)

    def encoded(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("@"):
            return {"name": value[1:]}
        if isinstance(value, list):
            return [encoded(item) for item in value]
        if not isinstance(value, np.ndarray):
            return value
        path = Path(f"{prefix}-{next(files)}.bin")
        transposed = value.ndim == 2 and not value.flags.c_contiguous
        array = value.T if transposed else value
        path.write_bytes(np.ascontiguousarray(array).tobytes())
        return {
            "file": str(path),
            "dtype": array.dtype.name,
            "shape": array.shape,
            "transposed": transposed,
        }

    steps = [
        {**step, "arguments": {key: encoded(value) for key, value in step["arguments"].items()}}
        for step in case.steps
    ]
    return {
        "name": name,
        "outputs": {key: encoded(initial) for key, initial in case.outputs.items()},
        "steps": steps,
        "returned": list(case.returned),
        "repeats": repeats,
        "results": f"{prefix}.results",
    }


def _results(case: Case, repeats: int, path: Path) -> dict[str, NDArray[np.uint8]]:
    """Return the bytes of outputs (with guard zones) and returned values, a row for each run."""
    sizes = {
        **{name: array.nbytes + 2 * GUARD for name, array in case.outputs.items()},
        **{name: array.nbytes for name, array in case.returned.items()},
    }
    with path.open("rb") as stream:
        written = np.frombuffer(stream.read(repeats * sum(sizes.values()) + 1), np.uint8)
    parts = np.split(
        written.reshape(repeats, sum(sizes.values())), np.cumsum(list(sizes.values()))[:-1], axis=1
    )
    return dict(zip(sizes, parts, strict=True))


def _output(
    case: Case, key: str, guarded: NDArray[np.uint8]
) -> tuple[NDArray[Any], dict[str, str]]:
    """Return an output of the first run, and by reason what is wrong with it in any of them."""
    guard = GUARD if key in case.outputs else 0
    initial = case.outputs[key] if guard else case.returned[key]
    inner = guarded[:, guard : guarded.shape[1] - guard]
    values: NDArray[Any] = inner[0].copy().view(initial.dtype).reshape(initial.shape)
    messages = dict[str, str]()
    if np.issubdtype(initial.dtype, np.floating) or initial.dtype.kind == "V":
        unwritten = (inner[0].reshape(values.size, -1) == 0xFF).all(axis=1)
        nan = np.isnan(values.astype(np.float32))
        if unwritten.any():
            messages["output-unwritten"] = f"{unwritten.sum()} values not written"
        elif nan.any():
            messages["output-nan"] = f"{nan.sum()} values are NaN"
    if (np.delete(guarded, np.s_[guard : guarded.shape[1] - guard], axis=1) != 0xFF).any():
        messages["guard-written"] = "bytes beside it written"
    if case.repeatable and (inner != inner[0]).any():
        messages["output-varies"] = "other bits in another run"
    return values, messages
