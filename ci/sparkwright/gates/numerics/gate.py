"""
G1, numerics without a GPU: the converters of the patched trees, compiled for the host and compared
with NVFP4's definition.

Inline PTX is evaluated as the PTX ISA describes it; what G1 shows is the code around it: the
operand order, the order of nibbles and bytes, and the scales. G2 shows that a GPU does the same.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkwright.builder.toolchain import Toolchain
from sparkwright.core.process import Limits
from sparkwright.forks.context import RunContext
from sparkwright.gates.core.verdict import (
    Check,
    Figure,
    Sample,
    declare,
    failed,
    invalid,
    judged,
    not_run,
)
from sparkwright.gates.numerics import nvfp4
from sparkwright.gates.numerics.converters import (
    Converter,
    ConverterInvalid,
    Format,
    Kind,
    Program,
    Unit,
)

#: The end of the name of a converter's check, which begins with the converter's name.
SUFFIXES: Mapping[Kind, str] = {
    "encode": "sweep",
    "decode": "table",
    "scale": "scale-cast",
    "offset": "swizzle",
    "quantise": "blocks",
}

CHECKS = declare(*(f"*-{suffix}" for suffix in SUFFIXES.values()), measured=True)

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "converter-wrong": (
        "The tree converts some values to another code, value or position "
        "than NVFP4 defines. The samples show them; correct the tree."
    ),
    "policy-differs": "The tree differs from ci/gates/numerics.yaml where public references "
    "differ. Decide which is right.",
    "converter-missing": "The tree has no such file, name, list of numbers or PTX text. Find the "
    "conversion in the new tree, and change the policy.",
    "converter-uncompilable": "The source, or the call in the policy, does not compile for the "
    "host; the compiler's message follows.",
    "converter-unreadable": "An asm statement or instruction is not understood. Define the "
    "instruction in native/device.hpp, or leave the converter to G2.",
    "converter-crashed": "The compiled converter ended abnormally.",
    "converter-slow": "The compiler or the converter exceeded its time and was ended.",
    "converter-output": "The converter's program wrote another number of results than inputs.",
    "tree-missing": "The store has no source tree of that fork as the checkout is now: run "
    "`sparkwright apply`.",
}

_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
_TYPES: Mapping[Format, Any] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
#: Where the codes of a 64-bit result lie.
_SHIFTS = np.arange(16, dtype=np.uint64) * np.uint64(4)


class NumericsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/numerics.yaml``: the converters of the trees. No mismatch is allowed.

    Attributes:
        limits: Of each compiler and of each converter.
    """

    limits: Limits
    units: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        names = [converter.name for unit in self.units for converter in unit.converters]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"a converter is named twice: {', '.join(repeated)}")


class Cases(NamedTuple):
    """
    The inputs of a converter, and the outputs that it has to give.

    Attributes:
        inputs: As its program reads them.
        shown: The same, as people read them.
        expected: The results.
        convention: The inputs for which public references differ.
    """

    inputs: NDArray[Any]
    shown: NDArray[Any]
    expected: NDArray[Any]
    convention: NDArray[np.bool_]


def source_trees(context: RunContext, policy: NumericsPolicy) -> dict[str, Path]:
    """Return the patched source trees of the policy's forks that the store holds."""
    trees = dict[str, Path]()
    for fork in sorted({unit.fork for unit in policy.units} - {""}):
        tree = context.store.get("source-tree", context.source_inputs(fork), str)
        if tree is not None:
            # A folder of its own, since a build may write to the one that it compiles.
            folder = context.store.folder("work", context.project.stack, fork, "gate")
            with context.store.lock(f"gate-{context.project.stack}-{fork}"):
                context.objects.checkout(tree, folder / "src", folder / "index")
            trees[fork] = folder / "src"
    return trees


def include_folders(tools: Toolchain) -> tuple[Path, ...]:
    """Return the folders of the toolkit's and torch's headers, as the builds search them."""
    torch = sorted(tools.root.glob("lib/python3.*/site-packages/torch/include"))
    return (tools.cuda / "include", tools.cuda / "include" / "cccl", *torch)


def run(
    trees: Mapping[str, Path], policy: NumericsPolicy, includes: Sequence[Path], scratch: Path
) -> tuple[Check, ...]:
    """
    Return the checks of the converters of *policy*, in its order.

    Args:
        trees: As from `source_trees`; not written to.
        includes: Folders with the headers of the toolkit and of torch, as in the builds.
        scratch: A folder for all files that are written.
    """

    def unit_checks(unit: Unit) -> list[Check]:
        folder = scratch / unit.converters[0].name
        try:
            if unit.fork and unit.fork not in trees:
                message = f"the source tree of {unit.fork} is not in the store"
                raise ConverterInvalid("tree-missing", f"{message}; `sparkwright apply` makes it")
            folder.mkdir(parents=True)
            program = Program(unit, trees.get(unit.fork, folder), includes, folder, policy.limits)
        except ConverterInvalid as error:
            return [_unjudged(converter, error) for converter in unit.converters]
        return [_check(converter, program) for converter in unit.converters]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(check for part in pool.map(unit_checks, policy.units) for check in part)


def _unjudged(converter: Converter, error: ConverterInvalid) -> Check:
    make = {"converter-missing": failed, "tree-missing": not_run}
    return make.get(error.reason, invalid)(
        f"{converter.name}-{SUFFIXES[converter.kind]}", error.message, error.reason
    )


def _check(converter: Converter, program: Program) -> Check:
    """Return the check of *converter*: all inputs at which it has to decide, against `nvfp4`."""
    cases = _CASES[converter.kind](converter)
    try:
        results = program.call(converter, cases.inputs)
    except ConverterInvalid as error:
        return _unjudged(converter, error)
    if converter.kind == "quantise":
        codes = (results["codes"][:, None] >> _SHIFTS & np.uint64(0xF)).astype(np.uint8)
        results, factor = results["scale"], np.where(cases.convention, 2.0, 1.0)[:, None]
        errors = nvfp4.quantisation_errors(cases.shown, factor, codes, results[:, None])
        rows = np.flatnonzero(errors[0].any(axis=1) | errors[1].any(axis=1))
    else:
        rows = np.flatnonzero(~(results == cases.expected))
    figures = (Figure("mismatches", len(rows), bound=0), Figure("inputs", len(results)))
    samples = [
        Sample(
            f"{converter.format} {cases.shown[row]}",
            *(f"{code:g}" if code.dtype.kind == "f" else f"{code:#x}"
              for code in (cases.expected[row], results[row])),
        )
        for row in rows[:8]
    ]  # fmt: skip
    name = f"{converter.name}-{SUFFIXES[converter.kind]}"
    message = f"{len(rows):,} of {len(results):,} inputs differ from NVFP4's definition"
    reason = "policy-differs" if cases.convention[rows].all() else "converter-wrong"
    return judged(name, message, reason, not len(rows), figures, samples)


def _neighbours(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each of *points*, the next float32 below it, and the next above it."""
    ends = (np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf))
    return np.concatenate([points, *ends])


def _values(bits: NDArray[Any], form: Format) -> NDArray[np.float32]:
    """Return the values of *bits*."""
    with np.errstate(invalid="ignore"):
        return np.asarray(bits.view(_TYPES[form]).astype(np.float32))


def _encode(converter: Converter) -> Cases:
    """
    Return the inputs of *converter*.

    For bf16 and fp16 these are all 65,536 patterns. For fp32: all bf16 and fp16 values, every tie
    and code with both neighbours, and each 65,537th pattern, which reach every exponent with
    mantissas that neither bf16 nor fp16 has.
    """
    lanes = converter.lanes
    bits: NDArray[Any] = _HALVES
    if converter.format == "fp32":
        points = _neighbours(np.concatenate([nvfp4.TIES, nvfp4.MAGNITUDES[1:]]))
        exact = np.concatenate([points, -points, _values(_HALVES, "fp16")]).view(np.uint32)
        wide = _HALVES.astype(np.uint32)
        bits = np.concatenate([exact, wide << 16, wide * np.uint32(65537)])
    # Each input comes in every lane, and beside others.
    bits = np.concatenate([np.roll(bits, lane) for lane in range(lanes)])
    rows = bits[: len(bits) // lanes * lanes].reshape(-1, lanes)
    values = _values(rows, converter.format)
    codes, nan = nvfp4.encode(values), np.isnan(values)
    if converter.nan == "keeps-sign":
        codes |= (nan & np.signbit(values)).astype(np.uint8) << 3
    packed = (codes.astype(np.uint64) << _SHIFTS[:lanes]).sum(axis=1)
    return Cases(rows, values, packed, (nan | (codes & 0x7 == 0)).any(axis=1))


def _decode(_: Converter) -> Cases:
    codes = np.arange(16, dtype=np.uint32)
    return Cases(codes, codes, nvfp4.decode(codes), codes > 15)


def _scale(_: Converter) -> Cases:
    ties = _neighbours((nvfp4.SCALES[:-1] + nvfp4.SCALES[1:]) / np.float32(2))
    values = np.concatenate([_values(_HALVES, "bf16"), _values(_HALVES, "fp16"), ties])
    values = values[~np.signbit(values) & ~np.isnan(values)]
    return Cases(values, values, nvfp4.scale_encode(values), values < 0)


def _offset(_: Converter) -> Cases:
    shapes = [np.indices((300, width)).reshape(2, -1) for width in (1, 4, 7, 12)]
    inputs = [np.insert(shape, 2, shape[1].max() + 1, axis=0) for shape in shapes]
    triples = np.concatenate(inputs, axis=1).T.astype(np.int32)
    return Cases(triples, triples, nvfp4.swizzled_offset(*triples.T), triples[:, 0] < 0)


def _quantise(converter: Converter) -> Cases:
    """
    Return blocks that decide, with the tensor scales 1 and 2: every code times every normal scale;
    every value up to 6 beside a 6, which makes the scale 1; and every positive finite maximum, in
    all places and of both signs.
    """
    values = _values(_HALVES, "bf16" if converter.format == "fp32" else converter.format)
    grid = nvfp4.decode(np.roll(np.arange(16, dtype=np.uint8), 3)) * nvfp4.SCALES[8:, None]
    small = values[np.abs(values) <= nvfp4.LARGEST]
    swept = np.insert(small[: len(small) // 15 * 15].reshape(-1, 15), 15, 6, axis=1)
    maxima = values[(values > 0) & np.isfinite(values)]
    index = np.arange(len(maxima))
    single = np.zeros((len(maxima), nvfp4.BLOCK), np.float32)
    single[index, index % 16] = np.where(index // 16 % 2, -maxima, maxima)
    blocks = np.concatenate([grid, swept, single])
    scales = nvfp4.scale_encode(np.abs(blocks).max(axis=1) / np.float32(nvfp4.LARGEST))
    bits = blocks.astype(_TYPES[converter.format]).view(np.uint8)
    factors = [np.full((len(bits), 1), factor, np.float32).view(np.uint8) for factor in (1, 2)]
    inputs = np.concatenate([np.hstack([factor, bits]) for factor in factors])
    doubled = np.arange(len(inputs)) >= len(bits)
    return Cases(inputs, np.tile(blocks, (2, 1)), np.tile(scales, 2), doubled)


_CASES: Mapping[Kind, Callable[[Converter], Cases]] = {
    "encode": _encode,
    "decode": _decode,
    "scale": _scale,
    "offset": _offset,
    "quantise": _quantise,
}
