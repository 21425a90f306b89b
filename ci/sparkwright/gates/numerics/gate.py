"""
G1, numerics without a GPU: the converters of the patched trees, compiled for the host and compared
with NVFP4's definition.

Inline PTX is evaluated as the PTX ISA describes it; what G1 shows is the code around it: the
operand order, the order of nibbles and bytes, and the scales. G2 shows that a GPU does the same.
"""

from __future__ import annotations

import concurrent.futures
import functools
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
    not_run,
    passed,
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

Call = Callable[[NDArray[Any]], NDArray[Any]]

#: The end of the name of a converter's check, which begins with the converter's name.
SUFFIXES: Mapping[Kind, str] = {
    "encode": "sweep",
    "decode": "table",
    "scale": "scale-cast",
    "offset": "swizzle",
    "quantise": "blocks",
}
_PATTERNS = np.arange(1 << 16, dtype=np.uint32)
_TYPES: Mapping[Format, Any] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
#: Where the codes of a 64-bit result lie.
_SHIFTS = np.arange(16, dtype=np.uint64) * np.uint64(4)


class Cases(NamedTuple):
    """
    Inputs of a converter, and what it has to make of them.

    Attributes:
        inputs: As its program reads them.
        shown: The same, as people read them.
        expected: The results.
        convention: The inputs for which public references differ, and the policy states a result.
    """

    inputs: NDArray[Any]
    shown: NDArray[Any]
    expected: NDArray[Any]
    convention: NDArray[np.bool_]


def check(converter: Converter, call: Call) -> Check:
    """Return the check of *converter*, of which *call* returns the results for an array."""
    cases = CASES[converter.kind](converter)
    results = call(cases.inputs)
    if converter.kind == "quantise":
        wrong, results = _quantisation(converter, cases, results), results["scale"]
    else:
        wrong = ~(results == cases.expected)
    places = np.flatnonzero(wrong)
    figures = (
        Figure("mismatches", float(len(places)), bound=0),
        Figure("inputs", float(len(wrong))),
    )
    name = f"{converter.name}-{SUFFIXES[converter.kind]}"
    message = f"{len(places):,} of {len(wrong):,} inputs differ from NVFP4's definition"
    if not len(places):
        return passed(name, message, figures=figures)
    samples = [
        Sample(f"{converter.format} {cases.shown[place]}", _text(cases.expected[place]),
               _text(results[place]))
        for place in places[:8]
    ]  # fmt: skip
    reason = "policy-differs" if cases.convention[places].all() else "converter-wrong"
    return failed(name, message, reason, figures=figures, samples=samples)


def _text(result: Any) -> str:
    return f"{result:g}" if isinstance(result, np.floating) else f"{int(result):#x}"


def neighbours(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each of *points*, the next float32 below it, and the next above it."""
    ends = (np.float32(-np.inf), np.float32(np.inf))
    return np.concatenate([np.nextafter(points, ends[0]), points, np.nextafter(points, ends[1])])


def as_float(bits: NDArray[Any], form: Format) -> NDArray[np.float32]:
    """Return the values of *bits*."""
    with np.errstate(invalid="ignore"):
        return np.asarray(bits.view(_TYPES[form]).astype(np.float32))


def patterns(form: Format) -> NDArray[Any]:
    """
    Return the inputs of a converter as bits: for 16 bits, all of them; for fp32, all bf16 and fp16
    values, every tie and code with its neighbours, NaNs, and each 65,537th pattern, which reach
    every exponent with mantissas that neither bf16 nor fp16 has.
    """
    halves = _PATTERNS.astype(np.uint16)
    if form != "fp32":
        return halves
    points = neighbours(np.concatenate([nvfp4.TIES, nvfp4.MAGNITUDES[1:]]))
    values = np.concatenate([points, -points, as_float(halves, "fp16")]).view(np.uint32)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    return np.concatenate([values, nans, _PATTERNS << 16, _PATTERNS * np.uint32(65537)])


def _encode(converter: Converter) -> Cases:
    lanes, bits = converter.lanes, patterns(converter.format)
    # Each input comes in every lane, and beside others.
    bits = np.concatenate([np.roll(bits, lane) for lane in range(lanes)])
    bits = bits[: len(bits) // lanes * lanes]
    values = as_float(bits, converter.format)
    codes, nan = nvfp4.encode(values), np.isnan(values)
    zero = codes & 0x7 == 0
    if converter.nan == "keeps-sign":
        codes |= (nan & np.signbit(values)).astype(np.uint8) << 3
    if converter.zero == "dropped":
        codes[zero] = 0
    packed = (codes.reshape(-1, lanes).astype(np.uint64) << _SHIFTS[:lanes]).sum(axis=1)
    convention = (nan | zero).reshape(-1, lanes).any(axis=1)
    return Cases(bits.reshape(-1, lanes), values.reshape(-1, lanes), packed, convention)


def _plain(inputs: NDArray[Any], expected: NDArray[Any]) -> Cases:
    return Cases(inputs, inputs, expected, np.zeros(len(inputs), bool))


def _scale(_: Converter) -> Cases:
    halves = [as_float(_PATTERNS.astype(np.uint16), form) for form in ("bf16", "fp16")]
    ties = neighbours((nvfp4.SCALES[:-1] + nvfp4.SCALES[1:]) / np.float32(2))
    values = np.concatenate([*halves, ties])
    values = values[~np.signbit(values) & ~np.isnan(values)]
    return _plain(values, nvfp4.scale_encode(values))


def _offset(_: Converter) -> Cases:
    shapes = [np.indices((300, width)).reshape(2, -1) for width in (1, 4, 7, 12)]
    places = np.concatenate(
        [np.insert(shape, 2, shape[1].max() + 1, axis=0) for shape in shapes], 1
    )
    return _plain(places.T.astype(np.int32), nvfp4.swizzled_offset(*places))


def _quantise(converter: Converter) -> Cases:
    """
    Return blocks that decide, with the tensor scales 1 and 2: every code times every normal scale;
    every value up to 6 beside a 6, which makes the scale 1; and every positive finite maximum, in
    all places and of both signs.
    """
    form: Format = "bf16" if converter.format == "fp32" else converter.format
    values = as_float(_PATTERNS.astype(np.uint16), form)
    grid = nvfp4.decode(np.roll(np.arange(16, dtype=np.uint8), 3)) * nvfp4.SCALES[8:, None]
    small = values[np.abs(values) <= nvfp4.LARGEST]
    swept = np.insert(small[: len(small) // 15 * 15].reshape(-1, 15), 15, 6, axis=1)
    maxima = values[(values > 0) & np.isfinite(values)]
    index = np.arange(len(maxima))
    single = np.zeros((len(maxima), nvfp4.BLOCK), np.float32)
    single[index, index % 16] = np.where(index // 16 % 2, -maxima, maxima)
    blocks = np.concatenate([grid, swept, single] * 2)
    doubled = np.arange(len(blocks)) >= len(blocks) // 2
    scale = np.where(doubled, np.float32(2), np.float32(1))[:, None]
    bits = blocks.astype(_TYPES[converter.format])
    inputs = np.concatenate([scale.view(np.uint8), bits.view(np.uint8)], axis=1)
    scales = nvfp4.scale_encode(np.abs(blocks).max(axis=1) / np.float32(nvfp4.LARGEST))
    return Cases(inputs, blocks, scales, doubled)


def _quantisation(converter: Converter, cases: Cases, results: NDArray[Any]) -> NDArray[np.bool_]:
    codes = (results["codes"][:, None] >> _SHIFTS & np.uint64(0xF)).astype(np.uint8)
    scale = np.where(cases.convention, 2.0 if converter.tensor_scale == "multiplies" else 0.5, 1.0)
    scaled = scale[:, None]
    wrong = nvfp4.quantisation_errors(cases.shown, scaled, codes, results["scale"][:, None])
    return np.asarray(wrong[0].any(axis=1) | wrong[1].any(axis=1))


CASES: Mapping[Kind, Callable[[Converter], Cases]] = {
    "encode": _encode,
    "decode": lambda _: _plain(np.arange(16, dtype=np.uint32), nvfp4.VALUES),
    "scale": _scale,
    "offset": _offset,
    "quantise": _quantise,
}


TITLE = "numerics without a GPU"

CHECKS = (
    *declare(*(f"*-{suffix}" for suffix in SUFFIXES.values()), measured=True),
    *declare("*-tree", role="reports"),
)

#: Reason → its meaning, and what to do.
REASONS: Mapping[str, str] = {
    "converter-wrong": "The tree converts some values to another code, value or place than NVFP4 "
    "has. The samples show them; correct the tree.",
    "policy-differs": "The tree differs from ci/gates/numerics.yaml where public references "
    "differ. Decide which is right.",
    "converter-missing": "The tree has no such file or name. Find the conversion in the new tree, "
    "and change the policy.",
    "converter-outside": "The file is a link that leaves the tree, which is not followed.",
    "converter-uncompilable": "The source, or the call in the policy, does not compile for the "
    "host; the compiler's message follows.",
    "converter-unreadable": "An asm statement, instruction or Python table is not understood. "
    "Define the instruction in native/device.hpp, or leave the converter to G2.",
    "converter-crashed": "The compiled converter ended abnormally.",
    "converter-slow": "The compiler or the converter did not end in its time and was ended.",
    "converter-output": "The converter's program wrote another number of results than inputs.",
    "headers-missing": "Headers of CUDA or torch are not installed; `sparkwright plan` does that.",
    "tree-missing": "The store has no source tree of that fork as the checkout is now: run "
    "`sparkwright apply`.",
}

class NumericsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/numerics.yaml``: the converters of the trees. No mismatch is allowed.

    Attributes:
        limits: Of each compiler and of each converter.
    """

    limits: Limits
    units: tuple[Unit, ...] = ()

    @property
    def forks(self) -> tuple[str, ...]:
        """The forks of all units, sorted."""
        return tuple(sorted({unit.fork for unit in self.units} - {""}))

    def __post_init__(self) -> None:
        names = [converter.name for unit in self.units for converter in unit.converters]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"a converter is named twice: {', '.join(repeated)}")


def source_trees(
    context: RunContext, policy: NumericsPolicy
) -> tuple[dict[str, Path], tuple[Check, ...]]:
    """
    Return the source trees of the policy's forks, patched and rewritten, by fork, and a check for
    each that the store does not hold.
    """
    trees, missing = dict[str, Path](), list[Check]()
    for fork in policy.forks:
        tree = context.store.get("source-tree", context.source_inputs(fork), str)
        if tree is None:
            message = f"the source tree of {fork} is not in the store; `sparkwright apply` makes it"
            missing.append(not_run(f"{fork}-tree", message, "tree-missing"))
            continue
        # A folder of its own, since a build may write to the one that it compiles.
        folder = context.store.folder("work", context.project.stack, fork, "gate")
        with context.store.lock(f"gate-{context.project.stack}-{fork}"):
            context.objects.checkout(tree, folder / "src", folder / "index")
        trees[fork] = folder / "src"
    return trees, tuple(missing)


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
        trees: Fork → its source tree, patched and rewritten; not written to.
        includes: Folders with the headers of the toolkit and of torch, as in the builds.
        scratch: A folder for all files that are written.
    """

    def unit_checks(index: int, unit: Unit) -> list[Check]:
        if unit.fork and unit.fork not in trees:
            raise ConverterInvalid("tree-missing", f"the source tree of {unit.fork} was not made")
        needed = unit.headers if unit.fork else (*unit.headers, unit.files[0])
        found = {name for name in needed for folder in includes if (folder / name).exists()}
        if missing := ", ".join(name for name in needed if name not in found):
            raise ConverterInvalid("headers-missing", f"{missing} is not installed")
        folder = scratch / f"{index}-{unit.converters[0].name}-{len(unit.converters)}"
        folder.mkdir(parents=True)
        program = Program(unit, trees.get(unit.fork, folder), includes, folder, policy.limits)
        return [_check(converter, program) for converter in unit.converters]

    def guarded(index: int, unit: Unit) -> list[Check]:
        try:
            return unit_checks(index, unit)
        except ConverterInvalid as error:
            if len(unit.converters) == 1:
                return [_unjudged(converter, error) for converter in unit.converters]
        # A converter that does not compile leaves the others of its file as they are.
        single = [msgspec.structs.replace(unit, converters=(one,)) for one in unit.converters]
        return [check for one in single for check in guarded(index, one)]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(
            check
            for part in pool.map(guarded, range(len(policy.units)), policy.units)
            for check in part
        )


def _check(converter: Converter, program: Program) -> Check:
    try:
        return check(converter, functools.partial(program.call, converter))
    except ConverterInvalid as error:
        return _unjudged(converter, error)


def _unjudged(converter: Converter, error: ConverterInvalid) -> Check:
    make = {"converter-missing": failed, "tree-missing": not_run, "headers-missing": not_run}
    name = f"{converter.name}-{SUFFIXES[converter.kind]}"
    return make.get(error.reason, invalid)(name, error.message, error.reason)
