"""
The FP4 ops of an installed wheel, run in its own environment, held against the reference and so against one another.

The quantiser must give the reference's scales, and its codes wherever the reciprocals' roundings cannot matter: the kernel's are
approximate, and a value that lies within 2⁻²⁰ of half way between two codes may go either way (counted, not failed). The products of
every backend are judged by `fuzz.judge`, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.core import process
from sparkwright.core.process import Ended, Limits
from sparkwright.gates.core.verdict import Check, Figure, Sample, failed, invalid, not_run, passed
from sparkwright.gates.device import fuzz
from sparkwright.gates.device.fuzz import Case
from sparkwright.gates.device.gpu import NO_LIMIT
from sparkwright.gates.numerics import e2m1, nvfp4

SCRIPT = Path(__file__).parent / "inside" / "ops.py"

REASONS: Mapping[str, str] = {
    "no-environment": "No environment was named in which the wheel and torch are installed.",
    "op-absent": "The environment has no such op or package. In a recipe that needs it, the wheel was built without it.",
    "op-refused": "The op is there and says that it cannot run on this GPU. On a Spark: it was not compiled for it.",
    "op-broken": "The op throws an error that is not about the kind of GPU: a launch that fails, an illegal address, missing PTX.",
    "op-crashed": "The process ended in the op, or did not end in its time.",
    "quantise-wrong": "The built quantiser gives other scales or codes than NVFP4 has.",
}

BACKENDS: Mapping[str, str] = {
    "marlin": "Marlin (weights in FP4, products in bfloat16)",
    "cutlass": "CUTLASS (both operands in FP4)",
    "b12x": "b12x (both operands in FP4)",
    "emulation": "vLLM's emulation",
}
NAMES: tuple[str, ...] = ("op-quantise", *(f"op-gemm-{backend}" for backend in BACKENDS))

#: As in `inside/ops.py`: bfloat16, the same NaN as in FP32, cut.
_POISON = 0x7FED

#: Relative distance from half way between two codes within which approximate reciprocals may decide.
_NEAR = 2.0**-20


class OpsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    How the ops are tried.

    Attributes:
        seconds: For all shapes of one op.
        quantise, gemm: Shapes of each.
        repeats: Runs of each product, which must agree in every bit.
        tolerance: Of products, times the largest magnitude of the result.
        required: Ops (``quantise`` and names of `BACKENDS`) without which the gate does not pass; the others inform.
    """

    seconds: float
    quantise: int
    gemm: int
    repeats: int
    tolerance: float
    required: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := set(self.required) - {"quantise", *BACKENDS}:
            raise ValueError(f"ops: nothing is known of {', '.join(sorted(unknown))}")
        if self.seconds <= 0 or min(self.quantise, self.gemm) < 1 or self.repeats < 2 or not 0 < self.tolerance < 1:
            raise ValueError("ops: at least one shape of each and two repeats; the tolerance is between 0 and 1")


class Said(msgspec.Struct, frozen=True):
    """One line of ``inside/ops.py``; see there."""

    name: str = ""
    begins: str = ""
    absent: str = ""
    refused: str = ""
    broken: str = ""
    torch: str = ""


class Answers(msgspec.Struct, frozen=True):
    """What the environment said: of each job by name, and of itself where it could do nothing; *last* is the job that was begun last."""

    jobs: dict[str, Said]
    absent: str
    last: str
    ended: Ended


def checks(policy: OpsPolicy, python: Path | None, scratch: Path, libraries: Sequence[Path] = ()) -> tuple[Check, ...]:
    """
    Run the ops in the environment of *python*.

    Args:
        libraries: Libraries to load in place of those of the installed vllm.
    """
    if python is None:
        absent = "no environment with the wheel and torch was named"
        return tuple(not_run(name, absent, "no-environment", required=needed(policy, name)) for name in NAMES)
    shapes = [_matrix(seed) for seed in range(policy.quantise)]
    cases = [fuzz.case("op", seed) for seed in range(policy.gemm)]

    def asked(name: str, jobs: list[dict[str, object]]) -> Answers:
        listed, log = scratch / f"{name}.json", scratch / f"{name}.log"
        listed.write_bytes(msgspec.json.encode({"libraries": [str(path) for path in libraries], "jobs": jobs}))
        return _answers(log, process.run_limited([str(python), str(SCRIPT), str(listed)], Limits(policy.seconds, NO_LIMIT, 2000), log))

    # A process for each, as a CUDA error stays with the process that made it.
    quantised = asked(NAMES[0], [_quantise_job(number, one, scratch) for number, one in enumerate(shapes)])
    made = [_quantised(quantised, shapes, scratch)]
    for backend in BACKENDS:
        answers = asked(f"op-gemm-{backend}", [_product_job(number, one, backend, policy, scratch) for number, one in enumerate(cases)])
        made.append(_product(answers, backend, cases, policy, scratch))
    return tuple(msgspec.structs.replace(check, required=needed(policy, check.name)) for check in made)


def needed(policy: OpsPolicy, name: str) -> bool:
    """Does the gate pass only with the check *name* of `NAMES`?"""
    return name.removeprefix("op-").removeprefix("gemm-") in policy.required


def _answers(log: Path, ended: Ended) -> Answers:
    jobs, absent, last = {}, "", ""
    for line in log.read_bytes().splitlines():
        try:
            said = msgspec.json.decode(line, type=Said)
        except msgspec.MsgspecError:
            continue
        if said.name:
            jobs[said.name] = said
        elif said.begins:
            last = said.begins
        elif said.absent:
            absent = said.absent
    return Answers(jobs, absent, last, ended)


def _matrix(seed: int) -> tuple[NDArray[np.float32], np.float32]:
    random = np.random.default_rng([seed, 4])
    rows, columns = int(random.choice((1, 3, 17, 64, 129, 150))), int(random.choice((64, 128, 256, 1024, 4096)))
    values = random.normal(0, 10.0 ** random.integers(-3, 3), (rows, columns))
    matrix = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return matrix, nvfp4.tensor_scale(matrix)


def _quantise_job(number: int, one: tuple[NDArray[np.float32], np.float32], scratch: Path) -> dict[str, object]:
    matrix, scale = one
    source = scratch / f"quantise-{number}.values"
    source.write_bytes(matrix.astype(ml_dtypes.bfloat16).tobytes())
    rows, columns = matrix.shape
    about = {"op": "quantise", "name": f"quantise-{number}", "rows": rows, "columns": columns, "tensor_scale": float(scale)}
    return {**about, "values": str(source), "out": str(scratch / f"quantise-{number}.out")}


def _product_job(number: int, one: Case, backend: str, policy: OpsPolicy, scratch: Path) -> dict[str, object]:
    rows, columns, depth, _ = one.shape
    parts = {
        "a": e2m1.pack(one.a),
        "a_scales": nvfp4.swizzle(one.a_scales),
        "b": e2m1.pack(one.b[0]),
        "b_scales": nvfp4.swizzle(one.b_scales[0]),
        "b_plain_scales": one.b_scales[0],
        "activations": fuzz.activations(one).astype(ml_dtypes.bfloat16),
    }
    paths = {}
    for part, array in parts.items():
        path = scratch / f"gemm-{number}.{part}"
        path.write_bytes(np.ascontiguousarray(array).tobytes())
        paths[part] = str(path)
    name = f"{backend}-{number}"
    about = {"op": backend, "name": name, "rows": rows, "columns": columns, "depth": depth, "repeats": policy.repeats}
    return {**about, "alpha": float(one.alpha[0]), **paths, "out": str(scratch / f"{name}.out")}


def _unable(name: str, about: str, jobs: Sequence[str], answers: Answers) -> Check | None:
    """Return why the check *name* of *jobs* cannot be judged, or None where all of them ran."""
    if answers.absent:
        return not_run(name, f"{about}: {answers.absent}", "op-absent")
    for job in jobs:
        said = answers.jobs.get(job)
        if said is None:
            if job == answers.last or answers.ended.late or answers.ended.status:
                return invalid(name, f"{about}: the process ended in {answers.last} (status {answers.ended.status})", "op-crashed")
            return invalid(name, f"{about}: no answer about {job}", "op-crashed")
        if said.absent:
            return not_run(name, f"{about}: {said.absent}", "op-absent")
        if said.broken:
            return failed(name, f"{about}, {job}: {said.broken}", "op-broken")
        if said.refused:
            return not_run(name, f"{about}: {said.refused}", "op-refused")
    return None


def _quantised(answers: Answers, shapes: Sequence[tuple[NDArray[np.float32], np.float32]], scratch: Path) -> Check:
    name, about = "op-quantise", "scaled_fp4_quant"
    jobs = [f"quantise-{number}" for number in range(len(shapes))]
    if unable := _unable(name, about, jobs, answers):
        return unable
    wrong_scales = wrong = near = 0
    samples = []
    for job, (matrix, scale) in zip(jobs, shapes, strict=True):
        try:
            found = quantise_differences(matrix, scale, fuzz.read(scratch / f"{job}.out", 2 * matrix.size + 512))
        except (OSError, ValueError) as error:
            return invalid(name, f"{about}, {job}: {error}", "op-crashed")
        wrong_scales, wrong, near = wrong_scales + found[0], wrong + found[1], near + found[2]
        samples += [Sample(f"{job}: {sample.case}", sample.expected, sample.actual) for sample in found[3]]
    figures = [Figure("wrong scales", wrong_scales, bound=0), Figure("wrong codes", wrong, bound=0)]
    figures.append(Figure("other codes beside a tie", near))
    values = sum(matrix.size for matrix, _ in shapes)
    if wrong_scales or wrong:
        says = f"{about}: {wrong_scales} scales and {wrong} of {values} codes differ from the reference"
        return failed(name, says, "quantise-wrong", figures=figures, samples=samples)
    says = f"{about}: all scales and codes of {values} values are the reference's ({near} beside a tie differ)"
    return passed(name, says, figures=figures)


def quantise_differences(matrix: NDArray[np.float32], scale: np.float32, written: bytes) -> tuple[int, int, int, list[Sample]]:
    """
    Return how many scales and codes in *written* (packed codes, then swizzled scales) differ from the reference, how many more codes differ
    beside a tie, and samples.

    Raises:
        ValueError: There are more or fewer bytes than the matrix takes.
    """
    rows, columns = matrix.shape
    wanted = nvfp4.quantise(matrix, scale)
    half = rows * columns // 2
    data = np.frombuffer(written, np.uint8)
    if len(data) < half:
        raise ValueError(f"{len(data)} bytes in place of codes and scales")
    scales = nvfp4.unswizzle(data[half:], rows, columns // nvfp4.BLOCK)
    codes, reference = e2m1.unpack(data[:half].reshape(rows, -1)), e2m1.unpack(wanted.codes)
    inverse = np.where(wanted.scales == 0, 0.0, np.float64(scale) / np.maximum(nvfp4.scale_decode(wanted.scales).astype(np.float64), 1e-30))
    exact = np.abs(matrix.astype(np.float64) * np.repeat(inverse, nvfp4.BLOCK, axis=1))
    beside = (np.abs(exact[..., None] - e2m1.TIES) <= _NEAR * e2m1.TIES).any(axis=-1)
    differs = codes != reference
    wrong = differs & ~beside
    samples = [
        Sample(f"row {at[0]}, column {at[1]}: {matrix[tuple(at)]:g}", f"code {reference[tuple(at)]:#x}", f"code {codes[tuple(at)]:#x}")
        for at in np.argwhere(wrong)[:3]
    ]
    return int((scales != wanted.scales).sum()), int(wrong.sum()), int((differs & beside).sum()), samples


def widened(words: NDArray[np.uint16]) -> fuzz.Words:
    """Return bfloat16 *words* as the FP32 words that `fuzz.judge` reads, with its poison for this one's."""
    return np.where(words == _POISON, np.uint32(fuzz.POISON), words.astype(np.uint32) << 16)


def _product(answers: Answers, backend: str, cases: Sequence[Case], policy: OpsPolicy, scratch: Path) -> Check:
    name, about = f"op-gemm-{backend}", BACKENDS[backend]
    jobs = [f"{backend}-{number}" for number in range(len(cases))]
    if unable := _unable(name, about, jobs, answers):
        return unable
    found, rounded, values = [], 0, 0
    for job, one in zip(jobs, cases, strict=True):
        size = one.shape[0] * one.shape[1] + 2 * fuzz.GUARD
        try:
            written = fuzz.read(scratch / f"{job}.out", 2 * size * policy.repeats)
        except OSError as error:
            return invalid(name, f"{about}, {job}: {error.strerror}", "op-crashed")
        if len(written) != 2 * size * policy.repeats:
            return invalid(name, f"{about}, {job}: not the {2 * size * policy.repeats} bytes of output that it was asked for", "op-crashed")
        words = np.frombuffer(written, np.uint16)
        runs = [widened(words[run * size : (run + 1) * size]) for run in range(policy.repeats)]
        found += list(fuzz.judge(one, runs, policy.tolerance, exactly=False))
        right = fuzz.expected(one).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        rounded += int((words[fuzz.GUARD : size - fuzz.GUARD] != right.reshape(-1)).sum())
        values += right.size
    figures = [Figure("products", len(cases)), Figure("values", values), Figure("values that are not the nearest bfloat16", rounded)]
    if found:
        worst = min(found, key=lambda one: fuzz.WRONGS.index(one.wrong))
        seen = ", ".join(sorted({one.wrong for one in found}))
        samples = [one.sample for one in found]
        return failed(name, f"{about}: {seen} in {len(cases)} products", worst.wrong, figures=figures, samples=samples)
    said = f"{len(cases)} products, {policy.repeats} runs each, agree with the reference"
    return passed(name, f"{about}: {said}; {rounded} of {values} values are not the nearest bfloat16", figures=figures)
