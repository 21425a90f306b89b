"""
G2, the wheel on a GPU: its device code is loaded, its operators are compared with NumPy, and the
GPU's conversion to E2M1 with its definition.

CUDA runs in processes of its own, each within a time, which may crash; what they write is judged
here. The architecture comes from the wheel's audit. Checks that need FP4 instructions do not run on
other GPUs, and are required of wheels for GPUs that have them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.audit import device_code
from sparkwright.audit import wheel as wheel_audit
from sparkwright.builder.wheel import elf
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.process import Ended, Limits
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.device import operators
from sparkwright.gates.device.operators import Bounds, Case

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


TITLE = "the wheel on a GPU"

SCRIPT = Path(__file__).parent / "target_env_scripts" / "operators.py"

#: Bytes on either side of an output, as in the script.
GUARD = 4096

#: The first generation with FP4 instructions (CUDA C++ Programming Guide, compute capabilities).
FP4_GENERATION = 10

CHECKS = (*declare("gpu"), *declare("cubins", "fp4-conversion", *operators.CASES, measured=True))

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "no-gpu": "No CUDA GPU answers here. Run the gate on a GPU of the wheel's architecture.",
    "gpu-foreign": "The GPU does not run code for the wheel's architecture. Use another GPU.",
    "fp4-hardware-missing": "The GPU has no FP4 instructions, which SM 10.0 and later have.",
    "wheel-unnamed": "No wheel was named.",
    "no-environment": "No environment with torch was named.",
    "probe-crashed": "A program on the GPU ended abnormally. It may be at fault, or the driver: "
    "see the kernel's log for Xid.",
    "probe-slow": "A program on the GPU did not end in its time and was ended; the GPU may hang.",
    "probe-output": "A program on the GPU wrote something else than its results.",
    "conversion-wrong": "The GPU converts numbers to other codes than E2M1 defines.",
    "nan-differs": "The GPU converts NaN to another code than PTX defines (+6).",
    "kernel-unloadable": "The driver refuses machine code that fits this GPU by its name.",
    "code-unreadable": "The device code of a library is damaged; see the audit.",
    "code-foreign": "The wheel has no machine code for this GPU; see the audit.",
    "op-absent": "The wheel has no such operator, or one with other arguments. A recipe that needs "
    "it cannot be served.",
    "op-refused": "The operator states that it was not compiled for this GPU.",
    "op-broken": "The operator raises an error: a failed launch, an illegal address, missing PTX.",
    "op-crashed": "The process ended in the operator, or did not end in its time.",
    "guard-written": "The operator wrote outside its output.",
    "output-unwritten": "The operator left part of its output as it was: a tile or a row.",
    "output-nan": "The operator makes NaN of numbers.",
    "output-wrong": "A result differs by more than rounding: a wrong scale, nibble or index.",
    "output-varies": "Two runs with the same input differ: a race, or a random order of sums.",
}

#: In lower case: the errors of vLLM's entry points for a GPU that they were not compiled for.
_REFUSALS = (
    "no compiled",
    "not compiled",
    "not implemented",
    "notimplemented",
    "recompile",
    "supported",
    "requires",
)


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
    seconds: float
    repeats: int
    bounds: Bounds
    required: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.required) - set(operators.CASES)):
            raise ValueError(f"operators: there is no check {', '.join(unknown)}")
        if self.seconds <= 0 or self.repeats < 2:
            raise ValueError("operators: a time above zero and two repeats at least")


class DevicePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/device.yaml``.

    Attributes:
        seconds: For each program that calls the driver alone.
    """

    seconds: float
    operators: OperatorPolicy


def run(
    policy: DevicePolicy,
    scratch: Path,
    *,
    wheel: Path | None = None,
    target: str = "",
    python: Path | None = None,
    script: Path = SCRIPT,
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
    if target and int(target.removeprefix("sm_").rstrip("af")[:-1]) < FP4_GENERATION:
        required -= {"fp4-conversion", *operators.NEEDS_FP4}
    names = [entry.name for entry in CHECKS]
    gpu = ask(policy.seconds, scratch)
    unable = _unable(gpu, wheel, target)
    if unable:
        return tuple(
            not_run(name, unable[1], unable[0], required=name in required) for name in names
        )
    assert wheel is not None
    assert not isinstance(gpu, str)
    message = f"{gpu.name}, SM {gpu.major}.{gpu.minor}, driver for CUDA {gpu.driver / 1000:g}"
    checks = [passed("gpu", message)]
    with console.step("device code of the wheel"):
        code = unpack(wheel, gpu, policy.operators.libraries, scratch)
        checks.append(load_check(code, policy.seconds, scratch))
    for name in names[2:]:
        with console.step(name):
            if gpu.major < FP4_GENERATION and name in {"fp4-conversion", *operators.NEEDS_FP4}:
                check = not_run(name, f"{message} has no FP4", "fp4-hardware-missing")
            elif name == "fp4-conversion":
                check = conversion_check(gpu, policy.seconds, scratch)
            elif python is None:
                check = not_run(name, "no environment was named", "no-environment")
            else:
                command = [str(python), str(script)]
                check = operator_check(name, policy.operators, command, code.libraries, scratch)
        checks.append(msgspec.structs.replace(check, required=name in required))
    return tuple(checks)


def _unable(gpu: Gpu | str, wheel: Path | None, target: str) -> tuple[str, str] | None:
    """Return the reason and message why nothing can be run; None if it can."""
    if isinstance(gpu, str):
        return "no-gpu", gpu
    if wheel is None:
        return "wheel-unnamed", "no wheel was named"
    if not device_code.loads(target, (gpu.major, gpu.minor)):
        return "gpu-foreign", f"the wheel is for {target}; {gpu.name} is SM {gpu.major}.{gpu.minor}"
    return None


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
    cases = list(operators.CASES[name](np.random.default_rng(0), policy.bounds))
    jobs = [_job(number, case, policy.repeats, folder) for number, case in enumerate(cases)]
    document = {"libraries": [str(path) for path in libraries], "jobs": jobs}
    (folder / "jobs.json").write_bytes(msgspec.json.encode(document))
    arguments = [*command, str(folder / "jobs.json")]
    ended, records = run_script(arguments, policy.seconds, folder / "log")
    for record in records:
        if message := record.get("absent") or record.get("unloadable"):
            return not_run(name, message, "op-absent")
        if message := record.get("error"):
            if any(word in message.lower() for word in _REFUSALS):
                return not_run(name, message, "op-refused")
            return failed(name, message, "op-broken")
    if len(records) < len(cases):
        message = f"the process ended with {ended.status} in {cases[len(records)].name}"
        return invalid(name, message, "op-crashed")
    try:
        return judged(
            name,
            [
                (case, _results(case, policy.repeats, job))
                for case, job in zip(cases, jobs, strict=True)
            ],
        )
    except (OSError, ValueError) as error:
        return invalid(name, f"the results cannot be read: {error}", "probe-output")


def _job(number: int, case: Case, repeats: int, folder: Path) -> dict[str, Any]:
    """Return *case* as the script reads it, with its arrays in files."""
    files = 0

    def encoded(value: Any) -> Any:
        nonlocal files
        if isinstance(value, str) and value.startswith("@"):
            return {"name": value[1:]}
        if isinstance(value, list):
            return [encoded(one) for one in value]
        if not isinstance(value, np.ndarray):
            return value
        files += 1
        path = folder / f"{number}-{files}.bin"
        transposed = value.ndim == 2 and not value.flags.c_contiguous
        array = value.T if transposed else value
        path.write_bytes(np.ascontiguousarray(array).tobytes())
        about = {"dtype": array.dtype.name, "shape": array.shape, "transposed": transposed}
        return {"file": str(path), **about}

    steps = [
        {**step, "arguments": {key: encoded(one) for key, one in step["arguments"].items()}}
        for step in case.steps
    ]
    return {
        "name": case.name,
        "outputs": {key: encoded(initial) for key, initial in case.outputs.items()},
        "steps": steps,
        "returned": list(case.returned),
        "repeats": repeats,
        "results": str(folder / f"{number}.results"),
    }


def _results(case: Case, repeats: int, job: Mapping[str, Any]) -> list[dict[str, NDArray[Any]]]:
    """Return the bytes of outputs (with guard zones) and returned values, for each run."""
    sizes = {name: array.nbytes + 2 * GUARD for name, array in case.outputs.items()}
    sizes |= {name: array.nbytes for name, array in case.returned.items()}
    with Path(job["results"]).open("rb") as stream:
        written = np.frombuffer(stream.read(repeats * sum(sizes.values()) + 1), np.uint8)
    runs = written.reshape(repeats, sum(sizes.values()))
    cuts = np.cumsum(list(sizes.values()))[:-1]
    return [dict(zip(sizes, np.split(run, cuts), strict=True)) for run in runs]


def judged(name: str, results: Sequence[tuple[Case, list[dict[str, NDArray[Any]]]]]) -> Check:
    """Return the check *name* of the results of all runs of its cases."""
    faults, ratios = list[tuple[str, Sample]](), list[float]()
    for case, runs in results:
        values = dict[str, NDArray[Any]]()
        for key, initial in {**case.outputs, **case.returned}.items():
            guard = GUARD if key in case.outputs else 0
            inner = [run[key][guard : len(run[key]) - guard] for run in runs]
            values[key] = inner[0].view(initial.dtype).reshape(initial.shape)
            messages = _output_faults(initial, values[key])
            if any((run[key][:guard] != 0xFF).any() or (run[key][len(one) + guard :] != 0xFF).any()
                   for run, one in zip(runs, inner, strict=True)):  # fmt: skip
                messages["guard-written"] = "bytes beside it written"
            if case.repeatable and any((one != inner[0]).any() for one in inner):
                messages["output-varies"] = "other bits in another run"
            faults += [
                (why, Sample(f"{case.name}, {key}", "", text)) for why, text in messages.items()
            ]
        derived = case.derived(values)
        for key, expected in case.expected.items():
            ratios.append(operators.error_ratio(expected, derived[key]))
            if ratios[-1] > 1:
                sample = Sample(f"{case.name}, {key}", "", f"{ratios[-1]:.3g} of the allowed error")
                faults.append(("output-wrong", sample))
    figures = [Figure("cases", len(results)), Figure("error, of the allowed", max(ratios), bound=1)]
    if not faults:
        message = f"{len(results)} cases; the largest error is {max(ratios):.2g} of the allowed"
        return passed(name, message, figures=figures)
    reason, sample = min(faults, key=lambda one: list(REASONS).index(one[0]))
    samples = [sample for _, sample in faults]
    message = f"{sample.case}: {sample.actual}"
    return failed(name, message, reason, figures=figures, samples=samples)


def _output_faults(initial: NDArray[Any], values: NDArray[Any]) -> dict[str, str]:
    """Return the values that were not written, or are NaN, by the reason."""
    if not (np.issubdtype(initial.dtype, np.floating) or initial.dtype.kind == "V"):
        return {}
    written = np.ascontiguousarray(values).view(np.uint8).reshape(values.size, -1)
    if unwritten := int((written == 0xFF).all(axis=1).sum()):
        return {"output-unwritten": f"{unwritten} values not written"}
    nan = int(np.isnan(values.astype(np.float32)).sum())
    return {"output-nan": f"{nan} values are NaN"} if nan else {}
