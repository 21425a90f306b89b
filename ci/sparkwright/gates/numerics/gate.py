"""
G1, numerics without a GPU: the converters of the patched trees, compiled for the host and swept against the reference of NVFP4.

What it proves of inline PTX is what stands around the instruction: which value goes to which operand, the order of nibbles and bytes, the
scale before and after. The instruction itself is evaluated as the PTX ISA describes it; that a GPU does the same is settled by G2.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from sparkwright.core.process import Limits
from sparkwright.gates.core.verdict import Check, declare, failed, invalid, not_run
from sparkwright.gates.numerics import coding, e2m1, nvfp4, pythonsource, sweeps, values
from sparkwright.gates.numerics.converter import Broken, Callee, ConverterInvalid, Program
from sparkwright.gates.numerics.pythonsource import Table, Template
from sparkwright.gates.numerics.units import Converter, Unit
from sparkwright.gates.numerics.values import Inputs

TITLE = "numerics without a GPU"

#: Those of our own reference, of the converters of the trees (tables in Python among them), and of trees that cannot be made.
CHECKS = (
    *declare("reference-bf16", "reference-fp16", "reference-fp32", "reference-scale", "reference-swizzle", measured=True),
    *sweeps.CHECKS,
    *declare("*-tree", role="reports"),
)

#: Reference → what it means, and what to do.
REASONS: Mapping[str, str] = {
    "reference-wrong": "Our own reference disagrees with ml_dtypes or with itself. A fault of ours, or of the installed ml_dtypes.",
    "converter-wrong": "The tree converts some values to another code, value or place than NVFP4 has. Mend it; the samples say which.",
    "policy-differs": "The tree does otherwise than ci/gates/numerics.yaml says, where public references differ. Decide which is right.",
    "policy-unknown": "The tree does what no public reference does. Mend it, or name the answer in differences.py with its source.",
    "converter-missing": "The tree has no such file or name any more. Find where the conversion is done now, and change the policy.",
    "converter-outside": "The file is reached through a link that leads out of the tree, which is not followed.",
    "converter-uncompilable": "The header, or the call in the policy, does not compile for the host; the compiler's words follow.",
    "converter-unreadable": "An asm statement, PTX instruction or Python table is not understood here. Teach native/ptx.hpp, or ask G2.",
    "converter-crashed": "The compiled converter ended abnormally.",
    "converter-slow": "The compiler or the converter did not end in its time; it was ended.",
    "converter-output": "The converter's program did not write as many answers as it was asked.",
    "headers-missing": "Headers that the converter takes for granted (CUDA, torch) are not here; `sparkwright plan` installs them.",
    "tree-missing": "The source tree of that fork was not made for this run.",
}


class NumericsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/numerics.yaml``: which converters the trees have.

    Attributes:
        limits: Of each compiler and of each converter. No mismatch is allowed, so there is no other threshold (gates.md §3.3).
        units, tables, templates: See there.
    """

    limits: Limits
    units: tuple[Unit, ...] = ()
    tables: tuple[Table, ...] = ()
    templates: tuple[Template, ...] = ()

    @property
    def forks(self) -> tuple[str, ...]:
        """The forks whose trees it names, sorted."""
        named = {unit.fork for unit in self.units} | {one.fork for one in self.tables} | {one.fork for one in self.templates}
        return tuple(sorted(named - {""}))

    def __post_init__(self) -> None:
        names = [one.name for unit in self.units for one in unit.converters]
        names += [one.name for one in self.tables] + [one.name for one in self.templates]
        if len(set(names)) != len(names):
            raise ValueError(f"a converter is named twice: {sorted(name for name in names if names.count(name) > 1)}")


def run(trees: Mapping[str, Path], policy: NumericsPolicy, includes: Sequence[Path], scratch: Path) -> tuple[Check, ...]:
    """
    Judge the converters of *policy*.

    Args:
        trees: Fork → the folder that holds its source tree, patched and rewritten; not written to.
        includes: Folders with the headers of the toolkit and of torch, as the builds have them.
        scratch: An empty folder; what is compiled lies there, and may be thrown away afterwards.

    Raises:
        tool-missing: There is no C++ compiler.
    """
    # Compilers are what takes the time; threads only wait for them.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        units = [pool.submit(_unit, one, trees, policy, includes, scratch / f"unit-{i}") for i, one in enumerate(policy.units)]
        templates = [pool.submit(_template, one, trees, policy, scratch / one.name) for one in policy.templates]
        parts = [part.result() for part in (*units, *templates)]
    return (*reference(), *(check for part in parts for check in part), *(_table(table, trees) for table in policy.tables))


def reference() -> Iterator[Check]:
    """Yield the checks of the reference itself, against ml_dtypes where that is an oracle."""
    for name, inputs in (("bf16", values.every("bf16")), ("fp16", values.every("fp16")), ("fp32", values.fp32_ties())):
        yield _same(f"reference-{name}", inputs.only(~np.isnan(inputs.values)))
    every = values.every("bf16")
    inputs = every.only(~np.signbit(every.values) & ~np.isnan(every.values))
    clamped = np.minimum(inputs.values, np.float32(nvfp4.SCALE_MAX)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    wrong = np.flatnonzero(clamped != nvfp4.scale_encode(inputs.values))
    yield _own(coding.judged("reference-scale", len(clamped), wrong, iter(()), "UE4M3 after the clamp, against ml_dtypes"))
    codes = np.arange(300 * 7, dtype=np.int64).astype(np.uint8).reshape(300, 7)
    back = nvfp4.unswizzle(nvfp4.swizzle(codes), 300, 7)
    wrong = np.flatnonzero(back != codes)
    yield _own(coding.judged("reference-swizzle", codes.size, wrong, iter(()), "300 × 7 scales swizzled and back"))


def _same(name: str, inputs: Inputs) -> Check:
    with np.errstate(over="ignore"):
        oracle = inputs.values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    wrong = np.flatnonzero(oracle != e2m1.encode(inputs.values))
    return _own(coding.judged(name, len(oracle), wrong, iter(()), f"E2M1 of {inputs.format} values, against ml_dtypes"))


def _own(check: Check) -> Check:
    return msgspec.structs.replace(check, reference="reference-wrong") if check.state == "fail" else check


def _unit(unit: Unit, trees: Mapping[str, Path], policy: NumericsPolicy, includes: Sequence[Path], scratch: Path) -> list[Check]:
    if unit.fork and unit.fork not in trees:
        return _not_run(unit.converters, f"the source tree of {unit.fork} was not made", "tree-missing")
    needed = unit.headers if unit.fork else (*unit.headers, unit.files[0])
    if absent := [name for name in needed if not any((folder / name).exists() for folder in includes)]:
        return _not_run(unit.converters, f"{', '.join(absent)} is not installed here", "headers-missing")
    return _swept(unit, trees.get(unit.fork, scratch), policy, includes, scratch)


def _not_run(converters: Sequence[Converter], says: str, reference_: str) -> list[Check]:
    return [not_run(f"{one.name}-{suffix}", says, reference_) for one in converters for suffix, _ in sweeps.judges(one)]


def _swept(unit: Unit, tree: Path, policy: NumericsPolicy, includes: Sequence[Path], scratch: Path) -> list[Check]:
    scratch.mkdir(parents=True, exist_ok=True)
    program: Callee
    try:
        program = Program(unit, tree, includes, scratch, policy.limits)
    except ConverterInvalid as error:
        program = Broken(error)
    return [check for one in unit.converters for check in sweeps.checks(one, program)]


def _template(template: Template, trees: Mapping[str, Path], policy: NumericsPolicy, scratch: Path) -> list[Check]:
    one = Converter(template.name, "encode", "", lanes=template.lanes)
    if template.fork not in trees:
        return _not_run([one], f"the source tree of {template.fork} was not made", "tree-missing")
    try:
        ptx = pythonsource.text(pythonsource.parsed(trees[template.fork], template.fork, template.files), template)
    except ConverterInvalid as error:
        return list(sweeps.checks(one, Broken(error)))
    return _swept(pythonsource.unit(template, ptx, scratch / "tree"), scratch / "tree", policy, (), scratch)


def _table(table: Table, trees: Mapping[str, Path]) -> Check:
    if table.fork not in trees:
        return not_run(f"{table.name}-table", f"the source tree of {table.fork} was not made", "tree-missing")
    try:
        return coding.compare_table(table.name, pythonsource.values(pythonsource.parsed(trees[table.fork], table.fork, table.files), table))
    except ConverterInvalid as error:
        make = failed if error.reference == "converter-missing" else invalid
        return make(f"{table.name}-table", error.says, error.reference)
