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
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.builder.toolchain import Toolchain
from sparkwright.builder.workspace import source_tree
from sparkwright.core.process import Limits
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError
from sparkwright.gates.core.verdict import Check, declare, failed, invalid, not_run
from sparkwright.gates.numerics import checks
from sparkwright.gates.numerics.converter_specs import Converter, Unit
from sparkwright.gates.numerics.converters import ConverterInvalid, Program

TITLE = "numerics without a GPU"

CHECKS = (*checks.CHECKS, *declare("*-tree", role="reports"))

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
    "tree-missing": "The source tree of that fork was not made for this run.",
    "source-not-here": "The source tree cannot be made here, as its source is not reachable or not "
    "locked.",
}

_UNAVAILABLE = {"source-unlocked", "source-unreachable", "source-unresolved"}


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
    each that cannot be made here.

    Raises:
        SparkwrightError: A tree that should be available cannot be made.
    """
    trees, missing = dict[str, Path](), list[Check]()
    for fork in policy.forks:
        try:
            tree = source_tree(context, fork).tree
        except SourceError as error:
            if error.reference not in _UNAVAILABLE:
                raise
            missing.append(not_run(f"{fork}-tree", error.what, "source-not-here"))
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
        return checks.check(converter, functools.partial(program.call, converter))
    except ConverterInvalid as error:
        return _unjudged(converter, error)


def _unjudged(converter: Converter, error: ConverterInvalid) -> Check:
    make = {"converter-missing": failed, "tree-missing": not_run, "headers-missing": not_run}
    name = f"{converter.name}-{checks.SUFFIXES[converter.kind]}"
    return make.get(error.reason, invalid)(name, error.message, error.reason)
