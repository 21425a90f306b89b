"""
G2, the wheel on a GPU: its device code is loaded, and its operators are compared with NumPy.

CUDA runs in processes of its own, each within a time, which may crash; what they write is judged
here. The architecture comes from the wheel's audit. Checks that need FP4 instructions do not run on
other GPUs, and are required of wheels for GPUs that have them.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.audit import wheel as wheel_audit
from sparkwright.bench.records import Positive
from sparkwright.builder import host_info
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.gpu_target import loads, parsed
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.store import translate_disk_full
from sparkwright.core.words import NOT_COMPILED
from sparkwright.gates import operators
from sparkwright.gates.core.ladder import DRIVER_FAILING
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

SCRIPTS = Path(__file__).parent / "target_env_scripts"
DRIVER, SCRIPT = SCRIPTS / "driver.py", SCRIPTS / "operators.py"

#: Megabytes: CUDA reserves more address space than a useful limit would allow.
NO_LIMIT = 1 << 30

#: The first generation with FP4 instructions (CUDA C++ Programming Guide, compute capabilities).
FP4_GENERATION = 10

#: Bytes between two tensors in the memory of a case; those beside outputs are compared.
GUARD = 4096

CHECKS = (*declare("gpu"), *declare("cubins", *operators.OPERATORS, measured=True))

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "no-gpu": "No CUDA GPU answers here. Run the gate on a GPU of the wheel's architecture.",
    "gpu-foreign": "The GPU does not run code for the wheel's architecture. Use another GPU.",
    "fp4-hardware-missing": "The GPU has no FP4 instructions, which SM 10.0 and later have.",
    "no-environment": "No environment with torch was named.",
    "probe-crashed": "A program on the GPU ended without its results. It may be at fault, or the "
    "driver: see the kernel's log for Xid.",
    "probe-slow": "A program on the GPU exceeded its time and was ended; the GPU may hang.",
    "kernel-unloadable": "The driver refuses machine code that is named for this GPU.",
    "code-unreadable": "The device code of a library is damaged; see the audit.",
    "code-foreign": "The wheel has no machine code for this GPU; see the audit.",
    "library-unloadable": "torch, or a library of the wheel, cannot be loaded in the environment. "
    "Install the wheel there with the packages of its lock; the audit names undefined symbols.",
    "op-absent": "The wheel has no such operator, or one with other arguments. A recipe that needs "
    "it cannot be served.",
    "op-refused": "The operator states that it was not compiled for this GPU.",
    "op-broken": "The operator raises an error: a failed launch, an illegal address, missing PTX.",
    "op-crashed": "The process crashed in the operator, exceeded its time, or left no results.",
    "guard-written": "The operator wrote outside its output.",
    "output-unwritten": "The operator left part of its output as it was: a tile or a row.",
    "output-nan": "The operator turns numbers into NaN.",
    "output-wrong": "A result differs by more than rounding: a wrong scale, nibble or index.",
    "output-varies": "Two runs with the same input differ: a race, or a random order of sums.",
}


class DevicePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/device.yaml``.

    Attributes:
        seconds: For each program on the GPU: it loads all cubins, or runs the cases of a check.
        libraries: Globs of the wheel's libraries with operators.
        repeats: Runs of each case, which must agree in every bit.
        roundings: Of a result in its type, which the allowed error follows from.
    """

    seconds: Positive
    libraries: tuple[str, ...]
    repeats: Annotated[int, msgspec.Meta(ge=2)]
    roundings: Positive


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
    gpu = next(iter(host_info.gpus()), host_info.GpuInfo("", "", ""))
    major, minor, _ = parsed(f"sm_{gpu.capability.replace('.', '')}")
    message, reason = f"{gpu.name}, SM {gpu.capability}, driver {gpu.driver}", "gpu-foreign"
    if not gpu.name:
        fault = host_info.driver_fault()
        message, reason = fault or "nvidia-smi shows no GPU", DRIVER_FAILING if fault else "no-gpu"
    elif loads(target, (major, minor)):
        return (passed("gpu", message), *_checks(policy, scratch, (major, minor), wheel, python))
    else:
        message = f"the wheel is for {target}; the GPU is {message}"
    return tuple(not_run(entry.name, message, reason) for entry in CHECKS)


def _checks(
    policy: DevicePolicy, scratch: Path, gpu: tuple[int, int], wheel: Path, python: Path | None
) -> Iterator[Check]:
    """Yield the checks on a GPU that runs the code of *wheel*."""
    with console.step("device code of the wheel"):
        try:
            cubins, libraries = unpack(wheel, gpu, policy.libraries, scratch)
        except elf.ElfUnreadable as error:
            yield invalid("cubins", f"the device code cannot be read: {error}", "code-unreadable")
            return
        yield load_check(cubins, policy.seconds, scratch)
    for name in operators.OPERATORS:
        with console.step(name):
            if gpu[0] < FP4_GENERATION and name.startswith("fp4-"):
                # It loads only the code of wheels for such GPUs.
                yield not_run(name, "the GPU has no FP4", "fp4-hardware-missing", required=False)
            elif python is None:
                yield not_run(name, "no environment was named", "no-environment")
            else:
                yield operator_check(name, policy, python, libraries, scratch / name)


def run_script(
    command: Sequence[str], seconds: float, log: Path
) -> tuple[process.Ended, list[Any]]:
    """Run *command*, and return its end and the JSON objects in the lines of its output."""
    ended = process.run_limited(command, process.Limits(seconds, NO_LIMIT, 4000), log)
    records = []
    for line in log.read_bytes().splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
    return ended, records


def unpack(
    wheel: Path, gpu: tuple[int, int], libraries: Sequence[str], scratch: Path
) -> tuple[list[str], list[Path]]:
    """
    Write the cubins of *wheel* that *gpu* loads, and its libraries with operators, into *scratch*.

    Return a name for people of each cubin, in the order of the files, and the libraries' paths.

    Args:
        libraries: Globs of the libraries with operators.

    Raises:
        ElfUnreadable: The device code of a library is damaged.
        wheel-invalid, archive-unsafe, disk-full: See `sparkwright.audit.wheel.members`.
    """
    cubins, copies = list[str](), list[Path]()
    for member in wheel_audit.members(wheel, scratch):
        with translate_disk_full(scratch):
            if any(fnmatchcase(member.name, glob) for glob in libraries):
                copies.append(Path(shutil.copy(member.path, scratch / Path(member.name).name)))
            for name, code in _cubins(member, gpu) if member.is_elf else ():
                (scratch / f"{len(cubins):06}.cubin").write_bytes(code)
                cubins.append(name)
    return cubins, copies


def _cubins(member: wheel_audit.Member, gpu: tuple[int, int]) -> Iterator[tuple[str, bytes]]:
    """Yield a name and the bytes of each cubin of *member* that *gpu* loads."""
    with elf.mapped(member.path) as data:
        for entry in elf.fatbin_entries(data, elf.shared_object(data).fatbins):
            if entry.kind == "cubin" and loads(entry.arch, gpu):
                yield f"{member.name}, unit {entry.container}", elf.unpack(data, entry)


def load_check(cubins: Sequence[str], seconds: float, scratch: Path) -> Check:
    """Return the check that the driver loads all *cubins* in *scratch*, and that there are any."""
    if not cubins:
        return failed("cubins", "the wheel has no machine code for this GPU", "code-foreign")
    ended, records = run_script(
        [sys.executable, str(DRIVER), str(scratch)], seconds, scratch / "load.log"
    )
    errors = [record["error"] for record in records if "error" in record]
    if len(errors) < len(cubins):
        message = (
            f"the driver's process ended at {cubins[len(errors)]}: status {ended.status}, "
            f"{ended.tail[-200:]}"
        )
        return invalid("cubins", message, "probe-slow" if ended.late else "probe-crashed")
    samples = [
        Sample(name, "loads", error) for name, error in zip(cubins, errors, strict=True) if error
    ]
    message = f"{len(samples)} of {len(cubins)} cubins do not load"
    figures = [
        Figure("cubins", len(cubins)),
        Figure("cubins that do not load", len(samples), bound=0),
    ]
    return judged("cubins", message, "kernel-unloadable", not samples, figures, samples)


def operator_check(
    name: str, policy: DevicePolicy, python: Path, libraries: Sequence[Path], scratch: Path
) -> Check:
    """Return the check *name*, whose cases the interpreter *python* runs in the new *scratch*."""
    scratch.mkdir()
    cases = operators.cases(name, policy.roundings)
    jobs = [
        _job(shape, case, policy.repeats, scratch / f"{number}.memory")
        for number, (shape, case) in enumerate(cases.items())
    ]
    document = {"libraries": list(map(str, libraries)), "jobs": jobs}
    (scratch / "jobs.json").write_bytes(msgspec.json.encode(document))
    ended, records = run_script(
        [str(python), str(SCRIPT), str(scratch / "jobs.json")], policy.seconds, scratch / "log"
    )
    last = records[-1] if records else {}
    for key, reason in (("absent", "op-absent"), ("unloadable", "library-unloadable")):
        if key in last:
            return not_run(name, last[key], reason)
    if "error" in last:
        refused = NOT_COMPILED.search(last["error"])
        make, reason = (not_run, "op-refused") if refused else (failed, "op-broken")
        return make(name, last["error"], reason)
    if len(records) < len(cases):
        message = f"the process ended with {ended.status} in {list(cases)[len(records)]}"
        return invalid(name, message, "op-crashed")
    faults, ratio = list[tuple[str, Sample]](), 0.0
    try:
        for case, job in zip(cases.values(), jobs, strict=True):
            case_faults, case_ratio = _compared(case, job)
            faults += case_faults
            ratio = max(ratio, case_ratio)
    except (OSError, ValueError) as error:
        return invalid(name, f"the results cannot be read: {error}", "op-crashed")
    reason, samples = faults[0][0] if faults else "", [sample for _, sample in faults]
    message = f"{len(cases)} cases; the largest error is {ratio:.2g} of the allowed"
    if samples:
        message = f"{samples[0].case}: {samples[0].actual}"
    figures = [Figure("cases", len(cases)), Figure("error, of the allowed", ratio, bound=1)]
    return judged(name, message, reason, not faults, figures, samples)


def _job(name: str, case: operators.Case, repeats: int, path: Path) -> dict[str, Any]:
    """Return *case* as the script reads it, with its tensors in the file *path*."""
    memory, tensors = bytearray(b"\xff" * GUARD), dict[str, tuple[Any, ...]]()

    def placed(key: str, array: NDArray[Any]) -> str:
        end = len(memory) + array.nbytes
        tensors[key] = (len(memory), end, array.dtype.name, array.shape)
        memory.extend(array.tobytes() + b"\xff" * (GUARD + -end % GUARD))
        return key

    for key, initial in case.outputs.items():
        placed(f"@{key}", initial)
    written, steps = len(memory), list[dict[str, Any]]()
    for number, step in enumerate(case.steps):
        arguments = {
            key: placed(f"@{number} {key}", value) if isinstance(value, np.ndarray) else value
            for key, value in step["arguments"].items()
        }
        steps.append({**step, "arguments": arguments})
    path.write_bytes(memory)
    return {
        "name": name,
        "memory": str(path),
        "tensors": tensors,
        "written": written,
        "steps": steps,
        "repeats": repeats,
        "results": str(path.with_suffix(".results")),
    }


def _compared(
    case: operators.Case, job: Mapping[str, Any]
) -> tuple[list[tuple[str, Sample]], float]:
    """Return what is wrong with the results of *job*, by reason, and the largest error's ratio."""
    size, repeats = job["written"], job["repeats"]
    runs = np.fromfile(job["results"], np.uint8, repeats * size).reshape(repeats, size)
    guards, values = np.ones(size, bool), dict[str, NDArray[Any]]()
    faults, ratios = list[tuple[str, str, str]](), list[float]()
    for key, initial in case.outputs.items():
        span = slice(*job["tensors"][f"@{key}"][:2])
        guards[span] = False
        values[key] = runs[0, span].view(initial.dtype).reshape(initial.shape)
        if initial.dtype.kind in "fV":
            unwritten = (runs[0, span].reshape(initial.size, -1) == 0xFF).all(axis=1).sum()
            nan = np.isnan(values[key].astype(np.float32)).sum()
            if unwritten:
                faults.append(("output-unwritten", key, f"{unwritten} values not written"))
            elif nan:
                faults.append(("output-nan", key, f"{nan} values are NaN"))
        if key not in case.unordered and (runs[:, span] != runs[0, span]).any():
            faults.append(("output-varies", key, "other bits in another run"))
    if (runs[:, guards] != 0xFF).any():
        faults.append(("guard-written", "outputs", "bytes beside them written"))
    derived = case.derived(values)
    for key, expected in case.expected.items():
        ratios.append(operators.error_ratio(expected, derived[key]))
        if ratios[-1] > 1:
            faults.append(("output-wrong", key, f"{ratios[-1]:.3g} of the allowed error"))
    samples = [(why, Sample(f"{job['name']}, {key}", "", text)) for why, key, text in faults]
    return samples, max(ratios)
