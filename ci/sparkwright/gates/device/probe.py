"""
The probe: a CUDA program of ours, compiled for the GPU at hand by the toolkit at hand, and what it says.

Whether the GPU converts to E2M1 by an instruction is answered three times: the assembler takes the instruction for this target or refuses
it, the opcode is counted in the probe's own machine code, and the instruction runs on all 2^32 inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, invalid, not_run, passed
from sparkwright.gates.device.gpu import NO_LIMIT, Gpu

SOURCES = Path(__file__).parent / "cuda"

#: What the assembler of a toolkit may or may not know for a target: the trial that compiles only there, and the macro that says so.
TRIALS: Mapping[str, str] = {"native": "SPARKWRIGHT_NATIVE", "fp4_mma": "SPARKWRIGHT_FP4_MMA"}

#: Rows of the probe, and what each holds against what.
ROWS: Mapping[str, str] = {
    "e2m1-software": "our converter to E2M1 against its definition",
    "e2m1-header": "our converter to E2M1 against the software path of CUDA's own header",
    "e2m1-native": "the GPU's own conversion to E2M1 against the definition",
    "e4m3-native": "the GPU's own conversion to E4M3 against the definition",
    "nvfp4-quantiser": "our quantiser bf16 → NVFP4 against the definition, all bf16 patterns among random ones",
}
#: The instruction that a row needs, where not every GPU of today has it.
NEEDS: Mapping[str, str] = {"e2m1-native": "native"}


class Toolkit(msgspec.Struct, frozen=True):
    """A CUDA toolkit in the folder *root*: ``bin``, ``include``, ``lib64``."""

    root: Path

    def program(self, name: str) -> Path:
        """Return nvcc or another of its programs; raise `tool-missing` where it is not there."""
        path = self.root / "bin" / name
        if not path.is_file():
            raise CommandError("tool-missing", f"{name} is not in {self.root / 'bin'}.")
        return path


class Probe(msgspec.Struct, frozen=True):
    """
    The compiled probe.

    Attributes:
        target: What it was compiled for, as it follows ``sm_``.
        refused: Trial → the assembler's words, for each instruction that it does not know for the target.
        opcodes: How often ``F2FP…E2M1`` and the matrix instructions for FP8, FP4 and FP16 stand in its machine code.
    """

    program: Path
    target: str
    refused: Mapping[str, str]
    opcodes: Mapping[str, int]


class Row(msgspec.Struct, frozen=True):
    """One line of the probe: *wrong* counts numbers and *wrong_nan* NaNs; a sample is input, expected and found as bits."""

    row: str
    inputs: int
    wrong: int
    wrong_nan: int
    ms: float
    samples: tuple[tuple[int, int, int], ...]


class Uncompilable(Exception):
    """The probe does not compile; the message holds the compiler's last words."""


def _nvcc(toolkit: Toolkit, target: str, source: Path, out: Path, limits: Limits, *options: str) -> process.Ended:
    arch = f"arch=compute_{target},code=sm_{target}"
    command = [str(toolkit.program("nvcc")), "-O3", "-std=c++17", f"-I{toolkit.root / 'include'}", "-gencode", arch]
    return process.run_limited([*command, *options, "-o", str(out), str(source)], limits, out.with_suffix(".log"))


def compile_probe(toolkit: Toolkit, target: str, limits: Limits, scratch: Path, sources: Path = SOURCES) -> Probe:
    """
    Compile the probe for *target* with every instruction that the assembler knows for it.

    Args:
        scratch: An existing folder for the program.

    Raises:
        Uncompilable: The compiler refuses it, or did not end in its time.
        tool-missing: The toolkit has no nvcc or no cuobjdump.
    """
    refused = {}
    for trial in TRIALS:
        ended = _nvcc(toolkit, target, sources / f"trial_{trial}.cu", scratch / f"{trial}.cubin", limits, "-cubin")
        if ended.late:
            raise Uncompilable("nvcc did not end in its time")
        if ended.status:
            errors = [line for line in ended.tail.splitlines() if "error" in line]
            refused[trial] = (errors or ended.tail.splitlines() or ["no word"])[0].partition("error")[2].lstrip(" :") or "no word"
    defines = [f"-D{macro}" for trial, macro in TRIALS.items() if trial not in refused]
    libraries = [f"-L{toolkit.root / name}" for name in ("lib64", "lib") if (toolkit.root / name).is_dir()]
    program = scratch / "probe"
    ended = _nvcc(toolkit, target, sources / "probe.cu", program, limits, *defines, *libraries, "-cudart", "static")
    if ended.late or ended.status:
        raise Uncompilable("nvcc did not end in its time" if ended.late else ended.tail[-600:])
    return Probe(program, target, refused, _opcodes(toolkit, program))


def _opcodes(toolkit: Toolkit, program: Path) -> dict[str, int]:
    try:
        code = process.output([toolkit.program("cuobjdump"), "--dump-sass", program])
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        raise Uncompilable(f"cuobjdump cannot read the probe: {error.details[-1] if error.details else error.what}") from error
    return {
        "F2FP…E2M1": sum("F2FP" in line and "E2M1" in line for line in code.splitlines()),
        **{name: sum(f" {name}." in line for line in code.splitlines()) for name in ("QMMA", "OMMA", "HMMA")},
    }


def _value(bits: int) -> str:
    return f"fp32 {bits:#010x} = {struct.unpack('<f', struct.pack('<I', bits))[0]:.9g}"


def _row_check(row: Row) -> Check:
    about = ROWS.get(row.row, row.row)
    figures = [Figure("inputs", row.inputs), Figure("mismatches", row.wrong, bound=0), Figure("NaN mismatches", row.wrong_nan, bound=0)]
    figures.append(Figure("time", row.ms, "ms"))
    if not row.wrong and not row.wrong_nan:
        return passed(row.row, f"{about}: none of {row.inputs} inputs differs, {row.ms:.1f} ms", figures=figures)
    place = (lambda bits: f"byte {bits}") if row.row == "nvfp4-quantiser" else _value
    samples = [Sample(place(given), f"code {wanted:#x}", f"code {got:#x}") for given, wanted, got in row.samples]
    reference = "conversion-wrong" if row.wrong else "nan-differs"
    says = f"{about}: {row.wrong} numbers and {row.wrong_nan} NaNs of {row.inputs} inputs differ"
    return failed(row.row, says, reference, figures=figures, samples=samples)


def row_checks(probe: Probe, gpu: Gpu, seconds: float, scratch: Path) -> Iterator[Check]:
    """Run the probe's sweeps and yield a check for each of `ROWS`, and one for the opcodes."""
    yield opcodes_check(probe)
    log = scratch / "rows.log"
    ended = process.run_limited([str(probe.program), "rows"], Limits(seconds, NO_LIMIT, 10), log)
    answered = {}
    for line in log.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.MsgspecError:
            continue
        answered[row.row] = _row_check(row)
    for name, about in ROWS.items():
        if name in answered:
            yield answered[name]
        elif NEEDS.get(name) in probe.refused:
            yield not_run(name, f"{about}: {gpu.name} has no such instruction ({probe.refused[NEEDS[name]]})", "instruction-absent")
        elif name == "e4m3-native" and (gpu.major, gpu.minor) < (8, 9):
            yield not_run(name, f"{about}: SM {gpu.major}.{gpu.minor} has no FP8", "instruction-absent")
        else:
            yield unanswered(name, ended)


def opcodes_check(probe: Probe) -> Check:
    """Say whether conversion to E2M1 is native for the target, from the probe's own machine code."""
    count = probe.opcodes["F2FP…E2M1"]
    figures = [Figure(f"{name} in the probe", number) for name, number in probe.opcodes.items()]
    if "native" in probe.refused:
        says = f"conversion to E2M1 is not native to sm_{probe.target}: {probe.refused['native']}"
        return not_run("e2m1-opcodes", says, "instruction-absent", required=False)
    if not count:
        says = f"the assembler takes the conversion for sm_{probe.target}, and there is no F2FP…E2M1 in its output"
        return failed("e2m1-opcodes", says, "opcode-missing", figures=figures)
    return passed("e2m1-opcodes", f"conversion to E2M1 is native to sm_{probe.target}: {count} F2FP…E2M1 in the probe", figures=figures)


def unanswered(name: str, ended: process.Ended) -> Check:
    """Return the check *name* of a program that ended without an answer to it."""
    if ended.late:
        return invalid(name, "the program did not end in its time", "probe-slow")
    if ended.status:
        return invalid(name, f"the program ended with status {ended.status}: {ended.tail[-300:]}", "probe-crashed")
    return invalid(name, "the program did not answer this", "probe-output")
