"""
G1, numerics without a GPU: the converters of the patched trees, compiled for the host and compared
with NVFP4's definition.

Inline PTX is evaluated as the PTX ISA describes it; what G1 shows is the code around it: the
operand order, the order of nibbles and bytes, and the scales.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        "The tree converts some values to another code, value or position than NVFP4 defines, or "
        "NaN to another than the policy states. The samples show them; correct the tree."
    ),
    "converter-missing": "The tree has no such file, name, list of numbers or PTX text. Find the "
    "conversion in the new tree, and change the policy.",
    "converter-uncompilable": "The source, or the call in the policy, does not compile for the "
    "host; the compiler's message follows.",
    "converter-unreadable": "An instruction of inline PTX is not defined. Define it in "
    "native/device.hpp, or leave the converter to G2.",
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
#: The inputs of a converter, as its program reads them, and the outputs that it has to give.
Cases = tuple[NDArray[Any], NDArray[Any]]

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


def missing_trees(context: RunContext, policy: NumericsPolicy) -> list[str]:
    """Return the policy's forks whose patched source tree the store does not hold."""
    forks = sorted({unit.fork for unit in policy.units} - {""})
    return [
        fork
        for fork in forks
        if context.store.get("source-tree", context.source_inputs(fork), str) is None
    ]


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
        folder.mkdir(parents=True)
        try:
            program = Program(unit, trees.get(unit.fork), includes, folder, policy.limits)
        except ConverterInvalid as error:
            return [_unjudged(converter, error) for converter in unit.converters]
        return [_check(converter, program) for converter in unit.converters]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(check for part in pool.map(unit_checks, policy.units) for check in part)


def _unjudged(converter: Converter, error: ConverterInvalid) -> Check:
    reason, message = error.args
    make = {"converter-missing": failed, "tree-missing": not_run}.get(reason, invalid)
    return make(f"{converter.name}-{SUFFIXES[converter.kind]}", message, reason)


def _check(converter: Converter, program: Program) -> Check:
    """Return the check of *converter*: all inputs at which it has to decide, against `nvfp4`."""
    inputs, expected = _CASES[converter.kind](converter)
    try:
        results = program.call(converter, inputs)
    except ConverterInvalid as error:
        return _unjudged(converter, error)
    if converter.kind == "quantise":
        codes = (results["codes"][:, None] >> _SHIFTS & np.uint64(0xF)).astype(np.uint8)
        factors, inputs, results = inputs["factor"], inputs["values"], results["scale"]
        errors = nvfp4.quantisation_errors(inputs, factors[:, None], codes, results[:, None])
        rows = np.flatnonzero(errors[0].any(axis=1) | errors[1].any(axis=1))
    else:
        rows = np.flatnonzero(~(results == expected))
    samples = []
    for row in rows[:8]:
        form = "{:g}" if expected.dtype.kind == "f" else "{:#x}"
        texts = (form.format(codes[row]) for codes in (expected, results))
        samples.append(Sample(f"{converter.format} {inputs[row]}", *texts))
    figures = (Figure("mismatches", len(rows), bound=0), Figure("inputs", len(results)))
    name = f"{converter.name}-{SUFFIXES[converter.kind]}"
    message = f"{len(rows):,} of {len(results):,} inputs differ from NVFP4's definition"
    return judged(name, message, "converter-wrong", not len(rows), figures, samples)


def _values(form: Format) -> NDArray[Any]:
    """
    Return values at which a converter has to decide: all of bf16 or fp16; for fp32 those of bf16,
    which ties and codes are among, with both neighbours, and each 65,537th pattern, which reach
    every exponent with mantissas that neither bf16 nor fp16 has.
    """
    if form != "fp32":
        return _HALVES.view(_TYPES[form])
    bits = _HALVES.astype(np.uint32)
    near = (bits << 16)[:, None] + np.array([-1, 0, 1]).astype(np.uint32)
    return np.concatenate([near.reshape(-1), bits * np.uint32(65537)]).view(np.float32)


def _encode(converter: Converter) -> Cases:
    """Return the inputs of *converter*, each in every lane, and beside others."""
    values, lanes = _values(converter.format), converter.lanes
    rolled = np.concatenate([np.roll(values, lane) for lane in range(lanes)])
    rows = rolled[: len(rolled) // lanes * lanes].reshape(-1, lanes)
    codes = nvfp4.encode(rows)
    if converter.nan == "keeps-sign":
        codes |= (np.isnan(rows) & np.signbit(rows)).astype(np.uint8) << 3
    packed = (codes.astype(np.uint64) << _SHIFTS[:lanes]).sum(axis=1)
    return rows, packed


def _decode(_: Converter) -> Cases:
    codes = np.arange(16, dtype=np.uint32)
    return codes, nvfp4.decode(codes)


def _scale(_: Converter) -> Cases:
    values = _values("fp32")
    values = values[~np.signbit(values) & ~np.isnan(values)]
    return values, nvfp4.scale_encode(values)


def _offset(_: Converter) -> Cases:
    inputs, expected = list[tuple[int, int, int]](), list[NDArray[Any]]()
    for width in (1, 4, 7, 12):
        inputs += [(row, column, width) for row in range(300) for column in range(width)]
        expected.append(nvfp4.swizzled_offsets(300, width).reshape(-1))
    return np.array(inputs, np.int32), np.concatenate(expected)


def _quantise(converter: Converter) -> Cases:
    """
    Return blocks that decide, with the tensor scales 1 and 2: every code times every normal scale;
    every value up to 6 beside a 6, which makes the scale 1; and every positive finite maximum, in
    all places and of both signs.
    """
    values = _values("bf16" if converter.format == "fp32" else converter.format)
    with np.errstate(invalid="ignore"):
        values = values[np.isfinite(values)].astype(np.float32)
    grid = nvfp4.decode(np.roll(np.arange(16, dtype=np.uint8), 3)) * nvfp4.SCALES[8:, None]
    small = values[np.abs(values) <= nvfp4.LARGEST]
    swept = np.insert(small[: len(small) // 15 * 15].reshape(-1, 15), 15, 6, axis=1)
    maxima = values[values > 0]
    index = np.arange(len(maxima))
    signed = np.where(index // 16 % 2, -maxima, maxima)
    single = np.eye(nvfp4.BLOCK, dtype=np.float32)[index % nvfp4.BLOCK] * signed[:, None]
    blocks = np.tile(np.concatenate([grid, swept, single]), (2, 1))
    kind = [("factor", np.float32), ("values", _TYPES[converter.format], nvfp4.BLOCK)]
    inputs = np.zeros(len(blocks), kind)
    inputs["factor"], inputs["values"] = np.repeat([1, 2], len(blocks) // 2), blocks
    largest = inputs["factor"] * (np.abs(blocks).max(axis=1) / np.float32(nvfp4.LARGEST))
    return inputs, nvfp4.scale_encode(largest)


_CASES: Mapping[Kind, Callable[[Converter], Cases]] = {
    "encode": _encode,
    "decode": _decode,
    "scale": _scale,
    "offset": _offset,
    "quantise": _quantise,
}
