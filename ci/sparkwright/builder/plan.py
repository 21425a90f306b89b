"""
The arch plan: for every CUDA unit, whether CMake will compile it for the arch of the stack.

Configuring takes seconds and compiling most of an hour, so the plan runs CMake's configure before
and after the rules and reads the compiler flags that it generates. A unit with another arch fails
the plan unless it is listed under ``kept``, with a reason and with exactly that arch; the error
names the CMake call that decided its arch, from CMake's trace.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.configure import Call, TranslationUnit
from sparkwright.builder.wheel import gpu_target
from sparkwright.builder.workspace import (
    ArchRules,
    Site,
    SourceTree,
    Workspace,
    rules_of,
    source_tree,
)
from sparkwright.core.console import console
from sparkwright.core.files import content_key
from sparkwright.forks.context import RunContext

#: native: the target alone · kept: reviewed · folded: the family's, not the target · foreign:
#: another generation's · none: left to nvcc.
Verdict = Literal["native", "kept", "folded", "foreign", "none"]
#: Version of the stored record.
FORM = 9

#: An arch as CMake, torch or nvcc writes it: 12.1f, 121f-real, 8.0+PTX, code=sm_121f.
_ARCH = re.compile(
    r"(?:^|[;,\s<>=])(?:sm_|compute_)?\d+\.?\d[af]?(?:\+PTX|-real|-virtual)?(?=$|[;,\s<>])"
)


class PlannedUnit(TranslationUnit, frozen=True, kw_only=True):
    """
    A CUDA unit with its verdict.

    Attributes:
        reason: Why a unit is kept.
        call: The CMake call that decided its arch, as `_deciding_calls`; empty if none is known.
    """

    verdict: Verdict
    reason: str = ""
    call: str = ""

    @property
    def code(self) -> str:
        return " ".join(self.gencode) or "(nvcc's default)"


class ArchPlan(msgspec.Struct, frozen=True):
    """
    The arch of every CUDA unit.

    Attributes:
        arch: As the stack names it (``12.1f``).
        counts: Units by verdict.
        stale: Entries of ``kept`` and ``dropped`` that are not true, a line each.
        sites: The places that the rules changed.
        dropped: Source of a unit that the rules leave out → the reviewed reason.
    """

    fork: str
    arch: str
    counts: dict[str, int]
    units: tuple[PlannedUnit, ...]
    stale: tuple[str, ...]
    sites: tuple[Site, ...]
    dropped: dict[str, str] = {}

    @property
    def by_name(self) -> dict[tuple[str, str], PlannedUnit]:
        """The units by target and source."""
        return {(unit.target, unit.source): unit for unit in self.units}


class PlanComparison(msgspec.Struct, frozen=True):
    """The plan of a fork, and that of the same tree without the rules."""

    key: str
    after: ArchPlan
    before: ArchPlan

    @property
    def removed(self) -> list[PlannedUnit]:
        """The units that only the tree without the rules compiles; a rule can empty a list."""
        removed = self.before.by_name
        for name in self.after.by_name:
            removed.pop(name, None)
        return list(removed.values())


def obtain(
    context: RunContext,
    tools: toolchain.Toolchain,
    source: SourceTree,
    *,
    configured: bool = False,
) -> PlanComparison:
    """
    Return the plan of *source*, made if the store has none; it is not checked yet (`check`).

    Args:
        configured: Configure the build folder even if the plan is in the store.

    Raises:
        configure-failed, tool-missing: As `Workspace.configure`.
    """
    fork = context.project.fork(source.fork)
    key = content_key(
        "plan",
        {
            "form": FORM,
            "tree": source.tree,
            "patched": source.patched,
            "needs": {need: source_tree(context, need).tree for need in fork.needs},
            "tools": tools.key,
            "rules": rules_of(context, source.fork),
            "settings": msgspec.structs.replace(
                toolchain.settings(context, source.fork), requires={}
            ),
            "vendored": (context.lock.forks[source.fork].vendored, fork.ignored),
            "arch": context.project.spec.arch,
            "target": toolchain.target_key(context, tools),
            "compiler": toolchain.compiler(context),
        },
    )
    stored = context.store.get("plan", key, PlanComparison)
    if stored is None:
        stored = PlanComparison(key, *examine_both(context, tools, source))
        context.store.put("plan", key, stored)
    elif configured:
        _configure_and_examine(context, tools, source)
    return stored


def examine_both(
    context: RunContext, tools: toolchain.Toolchain, source: SourceTree
) -> tuple[ArchPlan, ArchPlan]:
    """
    Configure *source* and return its plan, and that of the same tree without the rules; callers
    hold the workspace's lock.
    """
    after = _configure_and_examine(context, tools, source)
    bare = msgspec.structs.replace(source, tree=source.patched, sites=())
    before = _configure_and_examine(context, tools, bare, "before") if after.sites else after
    return after, before


def _configure_and_examine(
    context: RunContext,
    tools: toolchain.Toolchain,
    source: SourceTree,
    variant: str = "build",
) -> ArchPlan:
    workspace = Workspace(context, tools, source.fork, variant)
    with console.step(
        f"plan {source.fork} ({'with' if variant == 'build' else 'without'} the rules)"
    ):
        rules = rules_of(context, source.fork)
        vendored = workspace.fill(source.tree, rules.rules if variant == "build" else ())
        units = workspace.configure()
    return examine(
        units,
        workspace.calls(),
        arch=context.project.spec.arch,
        rules=rules,
        fork=source.fork,
        sites=(*source.sites, *vendored),
    )


def examine(
    configured: Iterable[TranslationUnit],
    calls: Sequence[Call],
    *,
    arch: str,
    rules: ArchRules,
    fork: str,
    sites: Sequence[Site] = (),
) -> ArchPlan:
    """
    Give every CUDA unit of a configure its verdict.

    Args:
        calls: Those of the configure, in the order in which they ran.
        rules: Those of *fork*.
        sites: The changes of the rules in that tree.
    """
    units, counts, deciding = list[PlannedUnit](), Counter[str](), _deciding_calls(calls)
    exceptions = {entry.unit: entry for entry in rules.kept}
    by_source = dict[str, PlannedUnit]()
    for unit in configured:
        verdict, reason = _verdict(unit.gencode, arch), ""
        entry = exceptions.get(unit.source)
        if verdict != "native" and entry and _is_loadable(unit.gencode, entry.gencode, arch):
            verdict, reason = "kept", entry.reason
        call = deciding.get(unit.source) or deciding.get(unit.target)
        call = call or deciding.get("CMAKE_CUDA_ARCHITECTURES", "")
        counts[verdict] += 1
        fields = msgspec.structs.astuple(unit)
        planned = PlannedUnit(*fields, verdict=verdict, reason=reason, call=call)
        units.append(planned)
        by_source[unit.source] = planned
    return ArchPlan(
        fork=fork,
        arch=arch,
        counts=dict(counts),
        units=tuple(units),
        stale=tuple(_stale_entries(rules, by_source, arch)),
        sites=tuple(sites),
        dropped={entry.unit: entry.reason for entry in rules.dropped},
    )


def _target(arch: str) -> str:
    number = arch.replace(".", "")
    return f"compute_{number}:sm_{number}"


def _deciding_calls(calls: Iterable[Call]) -> dict[str, str]:
    """
    Return the last of *calls* that gave archs to a source, a target or a variable, by that name, as
    ``file:line: command`` with the archs.
    """
    deciding = dict[str, str]()
    for call in calls:
        if archs := list(filter(_ARCH.search, call.arguments)):
            text = f"{call.file}:{call.line}: {call.command}({' '.join(archs)})"
            folder = PurePosixPath(call.file).parent
            for name in ";".join(call.arguments).split(";"):
                deciding[name] = deciding[str(folder / name)] = text
    return deciding


def _generation(text: str) -> str:
    """Return 12 for ``12.1f``, ``121f``, ``compute_120:sm_120``; empty for ``native``."""
    match = re.search(r"(\d+)\.?\d[af]?$", text)
    return match[1] if match else ""


def _verdict(gencode: tuple[str, ...], arch: str) -> Verdict:
    if gencode == (_target(arch),):
        return "native"
    if not gencode:
        return "none"
    return "folded" if _generation(arch) in map(_generation, gencode) else "foreign"


def _is_loadable(gencode: tuple[str, ...], virtual: str, arch: str) -> bool:
    """
    Return whether all of *gencode* is for *virtual*, and a device of *arch* takes some of it.
    Nothing is loaded of ``default``, a unit without a kernel.
    """
    if virtual == "default":
        return not gencode
    major, minor, _ = gpu_target.parsed(f"sm_{arch.replace('.', '')}")
    device, taken = (major, minor), False
    for entry in gencode:
        own, _, code = entry.partition(":")
        if own != virtual:
            return False
        loads = gpu_target.loads if code.startswith("sm_") else gpu_target.compiles
        taken = taken or loads(code, device)
    return taken


def _stale_entries(
    rules: ArchRules, sources: Mapping[str, PlannedUnit], arch: str
) -> Iterator[str]:
    """Yield the entries of ``kept`` and ``dropped`` that are not true of the units by source."""
    for entry in rules.kept:
        unit = sources.get(entry.unit)
        if unit is None:
            yield f"kept: {entry.unit} matches no CUDA unit"
        elif unit.verdict != "kept":
            yield (
                f"kept: {unit.source} is listed at {entry.gencode}, which {arch} can run, but "
                f"CMake gives it {unit.code}"
            )
    for dropped in rules.dropped:
        if dropped.unit in sources:
            yield f"dropped: {dropped.unit} is compiled"


def check(plans: PlanComparison) -> None:
    """
    Raise unless every unit is native or kept, and every unit that the rules leave out has a reason.

    Raises:
        arch-mismatch: A unit is at another arch, an entry of ``kept`` or ``dropped`` is not true,
            or a unit is gone without a reason.
    """
    plan = plans.after
    failing = [unit for unit in plan.units if unit.verdict not in ("native", "kept")]
    lost = list[str]()
    for unit in plans.removed:
        if unit.source not in plan.dropped:
            lost.append(f"{unit.source} ({unit.code})")
    faults = {
        f"{len(failing)} of {len(plan.units)} CUDA units of {plan.fork} would not be compiled "
        f"for {plan.arch} ({_target(plan.arch)})": list(_explain(failing)),
        f"{len(plan.stale)} entries of archs.yaml are wrong for {plan.fork}": plan.stale,
        f"{len(lost)} unit(s) of {plan.fork} would no longer be compiled, without a reason": lost,
    }
    what, details = list[str](), list[str]()
    for text, lines in faults.items():
        if lines:
            what.append(text)
            details += lines
    if details:
        raise BuildError("arch-mismatch", f"{'; '.join(what)}.", details=details)


def _explain(failing: Iterable[PlannedUnit]) -> Iterator[str]:
    """Yield the failing units, by the call that decided and by gencode."""
    ordered = sorted(failing, key=attrgetter("call", "verdict", "code", "source"))
    for (call, verdict, code), group in groupby(ordered, attrgetter("call", "verdict", "code")):
        units = list(group)
        yield f"{verdict}, {code}: {len(units)} unit(s)"
        for unit in units:
            yield f"  {unit.source}"
        if call:
            yield f"  by {call}"


def show(plans: PlanComparison, *, result: bool = False) -> None:
    """
    Print how many units are compiled for what, and each unit that is kept or removed; those that
    fail are named by the error of `check`.

    Args:
        result: The tables are the result of the command.
    """
    plan, earlier, absent = plans.after, plans.before.by_name, "(not compiled)"
    rows, reasons = Counter[tuple[str, str, str]](), list[tuple[str, str, str]]()
    for unit in plan.units:
        before = earlier.get((unit.target, unit.source))
        rows[before.code if before else absent, unit.code, unit.verdict] += 1
        if unit.verdict == "kept":
            reasons.append((unit.source, unit.code, unit.reason))
    for unit in plans.removed:
        rows[unit.code, absent, "dropped"] += 1
        reasons.append((unit.source, absent, plan.dropped.get(unit.source, "")))
    console.table(
        f"{plan.fork}: CUDA units for {plan.arch}",
        ["before the rules", "after", "verdict", ">units"],
        [[*row, str(count)] for row, count in rows.most_common()],
        result=result,
    )
    if reasons:
        console.table("", ["not native", "gencode", "reason"], reasons, result=result)
