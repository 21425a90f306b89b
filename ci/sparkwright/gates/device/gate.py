"""
G2, numerics on the GPU: the instructions, the kernels and the built ops of a wheel, executed on the device at hand.

What a GPU of another generation can answer it answers, and every row that it cannot says why. Nothing here loads CUDA into this process:
the probe, the driver and torch each run in one of their own, within a time, and may crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    declare,
    failed,
    invalid,
    not_run,
    passed,
)
from sparkwright.gates.device import fuzz, kernels, ops, probe
from sparkwright.gates.device import gpu as gpus
from sparkwright.gates.device.fuzz import Case
from sparkwright.gates.device.gpu import NO_LIMIT, Absent, Gpu
from sparkwright.gates.device.ops import OpsPolicy
from sparkwright.gates.device.probe import Probe, Toolkit

TITLE = "numerics on the GPU"

#: Reference → what it means, and what to do.
REASONS: Mapping[str, str] = {
    "no-gpu": "No CUDA GPU answers here. Run it on the Spark; rows that other GPUs can answer run there, too.",
    "no-toolkit": "There is no CUDA toolkit to compile the probe with; `sparkwright plan` installs the stack's.",
    "probe-uncompilable": "nvcc refuses the probe for this GPU; its last words follow. The toolkit may be older than the GPU.",
    "probe-crashed": "A program on the GPU ended abnormally. It may be at fault, or the driver: see the kernel's log for Xid.",
    "probe-slow": "A program on the GPU did not end in its time and was ended; the GPU may hang.",
    "probe-output": "A program answered less than it was asked, or something that is not an answer.",
    "conversion-wrong": "An instruction or converter gives another code than the format defines, for numbers. The samples say which.",
    "nan-differs": "Only NaNs come out otherwise than PTX defines (+6, 0x7f).",
    "instruction-absent": "The assembler does not know the instruction for this GPU. On a GB10 the wheel's FP4 code could not run then.",
    "opcode-missing": "The assembler takes the instruction and emits something else in its place.",
    "guard-written": "A kernel wrote outside its output. Nothing that shares the GPU's memory with it can be trusted.",
    "output-unwritten": "A kernel left part of its output as it was: a tile or a row that its grid does not cover.",
    "output-nan": "A kernel makes NaN out of numbers; a model then says token 0 for ever.",
    "output-wrong": "A product differs from the reference: a scale, a nibble or an index in the wrong place.",
    "output-varies": "Two runs of one kernel on the same input differ in their bits: a race, or an order of summing left to chance.",
    "kernel-unloadable": "The driver refuses machine code that fits this GPU by its name.",
    "code-unreadable": "The library's device code, or a table of it, is damaged or of an unknown form; the audit says more.",
    "code-foreign": "The library has no machine code for this GPU; on a Spark the audit says whether that is meant.",
    "wheel-unnamed": "No wheel was named whose kernels could be loaded.",
    **ops.REASONS,
}


class FuzzPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How the matrix products are fuzzed.

    Attributes:
        gemm, moe, rounded: Cases of each kind, with the seeds from 0 on (see `fuzz.case`).
        repeats: Runs of each, which must agree in every bit.
        tolerance: For cases whose sums round, times the largest magnitude of the result; exact cases have none.
    """

    gemm: int
    moe: int
    rounded: int
    repeats: int
    tolerance: float

    def __post_init__(self) -> None:
        if min(self.gemm, self.moe, self.rounded) < 1 or self.repeats < 2 or not 0 < self.tolerance < 1:
            raise ValueError("fuzz: at least one case of each kind and two repeats; the tolerance is between 0 and 1")


class DevicePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/device.yaml``.

    Attributes:
        compile: Limits of one compiler.
        seconds: Of each program on the GPU.
        loading: Seconds for loading all kernels of one library.
        fuzz, ops: See there.
    """

    compile: Limits
    seconds: float
    loading: float
    fuzz: FuzzPolicy
    ops: OpsPolicy

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.loading <= 0:
            raise ValueError("times are larger than zero")


class Backend(msgspec.Struct, frozen=True):
    """
    Something that computes the products of `fuzz`.

    Attributes:
        name: As it stands in checks (``plain``, ``e4m3``).
        about: What it is, for people.
        command: Called with the files of cases and of outputs and the number of repeats, returns the program to run.
    """

    name: str
    about: str
    command: Callable[[Path, Path, int], Sequence[str]]


#: Ways to the products on a GPU: by plain arithmetic, by the FP8 matrix instruction, by the block-scaled FP4 one.
INSTRUCTIONS: Mapping[str, str] = {
    "plain": "plain FP32 arithmetic",
    "e4m3": "the FP8 matrix instruction",
    "e2m1": "the block-scaled FP4 matrix instruction",
}

KINDS = ("gemm", "moe", "rounded")
FUZZED = tuple(f"{kind}-{instruction}" for instruction in INSTRUCTIONS for kind in KINDS)
#: ``kernels`` stands for those of every library of the wheel where none of them could be loaded.
CHECKS = (
    *declare("gpu"),
    *declare("e2m1-opcodes", *probe.ROWS, *FUZZED, kernels.NAME.format("*"), *ops.NAMES, measured=True),
    *declare("kernels", role="reports"),
)


def run(
    policy: DevicePolicy, scratch: Path, *, cuda: Path | None = None, wheel: Path | None = None, python: Path | None = None
) -> tuple[Check, ...]:
    """
    Judge the GPU at hand, and on it *wheel*.

    Args:
        scratch: An empty folder; what is compiled and extracted lies there, and may be thrown away afterwards.
        cuda: The toolkit's folder (`Toolchain.cuda`); without one nothing is compiled.
        wheel: Its kernels are loaded.
        python: The interpreter of an environment in which *wheel* and torch are installed; its ops are run there.

    Raises:
        tool-missing: The toolkit is not whole.
        wheel-invalid, archive-unsafe: *wheel* is not one that can be read.
    """
    gpu = gpus.ask(scratch)
    if isinstance(gpu, Absent):
        unneeded = {name for name in ops.NAMES if not ops.needed(policy.ops, name)} | {"e2m1-opcodes"}
        return tuple(not_run(name, gpu.absent, "no-gpu", required=name not in unneeded) for name in _names())
    toolkit = Toolkit(cuda) if cuda else None
    found = [passed("gpu", str(gpu))]
    with console.step(f"probe of {gpu.name}"):
        found += _probed(policy, gpu, toolkit, scratch)
    with console.step("kernels of the wheel"):
        found += _loaded(policy, gpu, wheel, scratch)
    with console.step("built ops"):
        found += ops.checks(policy.ops, python, scratch)
    return tuple(found)


def _names() -> list[str]:
    return ["gpu", "e2m1-opcodes", *probe.ROWS, *FUZZED, "kernels", *ops.NAMES]


def _probed(policy: DevicePolicy, gpu: Gpu, toolkit: Toolkit | None, scratch: Path) -> list[Check]:
    names = [name for name in _names() if name not in ("gpu", "kernels", *ops.NAMES)]
    if toolkit is None:
        return [not_run(name, "no CUDA toolkit was named to compile the probe with", "no-toolkit") for name in names]
    try:
        made = probe.compile_probe(toolkit, gpu.target, policy.compile, scratch)
    except probe.Uncompilable as error:
        return [invalid(name, str(error), "probe-uncompilable") for name in names]
    found = list(probe.row_checks(made, gpu, policy.seconds, scratch))
    for instruction in INSTRUCTIONS:
        found += _instruction(policy, gpu, made, instruction, scratch)
    return found


def _instruction(policy: DevicePolicy, gpu: Gpu, made: Probe, instruction: str, scratch: Path) -> Iterator[Check]:
    absent = made.refused.get("fp4_mma", "") if instruction == "e2m1" else ""
    if instruction == "e4m3" and (gpu.major, gpu.minor) < (8, 9):
        absent = f"SM {gpu.major}.{gpu.minor} has no FP8"
    if absent:
        for kind in KINDS:
            yield not_run(f"{kind}-{instruction}", f"{INSTRUCTIONS[instruction]}: {absent}", "instruction-absent")
        return
    # On SM 9.0 the assembler makes mma.sync for FP8 of the FP16 instruction; what is judged is the same product.
    made_of = " (made of HMMA)" if instruction == "e4m3" and not made.opcodes["QMMA"] else ""
    backend = Backend(
        instruction, f"{INSTRUCTIONS[instruction]}{made_of} of {gpu.name}",
        lambda cases, out, repeats: [str(made.program), "gemm", str(cases), str(out), str(repeats), instruction],
    )  # fmt: skip
    yield from fuzzed(backend, policy.fuzz, policy.seconds, scratch)


def fuzzed(backend: Backend, policy: FuzzPolicy, seconds: float, scratch: Path) -> Iterator[Check]:
    """Run the cases of *policy* on *backend*, and yield a check for each kind of them."""
    for kind, count in (("gemm", policy.gemm), ("moe", policy.moe), ("rounded", policy.rounded)):
        cases = [fuzz.case(kind, seed) for seed in range(count)]
        yield _fuzzed(f"{kind}-{backend.name}", cases, backend, policy, seconds, scratch)


def _fuzzed(name: str, cases: Sequence[Case], backend: Backend, policy: FuzzPolicy, seconds: float, scratch: Path) -> Check:
    source, out = scratch / f"{name}.cases", scratch / f"{name}.out"
    source.write_bytes(b"".join(fuzz.data(one) for one in cases))
    ended = process.run_limited(backend.command(source, out, policy.repeats), Limits(seconds, NO_LIMIT, 1000), scratch / f"{name}.log")
    if ended.late or ended.status:
        return probe.unanswered(name, ended)
    try:
        written = fuzz.outputs(cases, policy.repeats, fuzz.read(out, fuzz.output_bytes(cases, policy.repeats)))
        return judged(name, backend.about, [(one, runs) for one, runs in written], policy)
    except (OSError, ValueError) as error:
        return invalid(name, f"{backend.about}: {error}", "probe-output")


def judged(name: str, about: str, outputs: Sequence[tuple[Case, list[fuzz.Words]]], policy: FuzzPolicy) -> Check:
    """Return the check *name* of what a backend left in its *outputs*."""
    found = [one for case, runs in outputs for one in fuzz.judge(case, runs, policy.tolerance)]
    exact = sum(fuzz.exact(case) for case, _ in outputs)
    counts = {wrong: sum(one.count for one in found if one.wrong == wrong) for wrong in fuzz.WRONGS}
    figures = [Figure("cases", len(outputs)), Figure("exact cases", exact)]
    figures += [Figure(wrong, count, bound=0) for wrong, count in counts.items()]
    said = f"{len(outputs)} cases ({exact} of them exact), {policy.repeats} runs each"
    if not found:
        return passed(name, f"{about}: {said}, none wrong", figures=figures)
    worst = min(found, key=lambda one: fuzz.WRONGS.index(one.wrong))
    seen = ", ".join(f"{wrong}: {count} values" for wrong, count in counts.items() if count)
    return failed(name, f"{about}: {said}; {seen}", worst.wrong, figures=figures, samples=[one.sample for one in found])


def _loaded(policy: DevicePolicy, gpu: Gpu, wheel: Path | None, scratch: Path) -> tuple[Check, ...]:
    if wheel is None:
        return (not_run("kernels", "no wheel was named", "wheel-unnamed"),)
    return kernels.checks(wheel, gpu, policy.loading, scratch)


def table(checks: Sequence[Check], title: str = TITLE) -> None:
    """Print *checks* as a table, a row for each."""
    rows = [[check.name, check.state + (f" ({check.reason})" if check.reason else ""), check.message] for check in checks]
    console.table(title, ["check", "state", "what was seen"], rows, result=True)


