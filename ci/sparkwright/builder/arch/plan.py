"""
The plan: for every CUDA unit, whether CMake will compile it for the arch that the stack is for,
known before anything is compiled.

Only what CMake gives each compiler counts (DESIGN §7.3). A unit at another arch either is listed as
kept, with a reason and with exactly the arch it has, or it fails the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from sparkwright.builder.arch.diagnosis import Cause, Causes, generation, spell
from sparkwright.builder.arch.rules import ArchRules, Dropped, Kept, Site
from sparkwright.builder.configure import Configured, Unit
from sparkwright.builder.errors import BuildError
from sparkwright.core.console import console

#: native: the target alone · kept: reviewed · folded: the family's, not the target · foreign:
#: another generation's · none: left to nvcc.
Verdict = Literal["native", "kept", "folded", "foreign", "none"]
VERDICTS: tuple[Verdict, ...] = ("native", "kept", "folded", "foreign", "none")


class PlannedUnit(msgspec.Struct, frozen=True):
    """
    A CUDA unit with its verdict; *reason* says why a unit is kept, *cause* why one fails, *object*
    what it is compiled to.
    """

    target: str
    source: str
    gencode: tuple[str, ...]
    verdict: Verdict
    reason: str = ""
    cause: Cause | None = None
    object: str = ""

    @property
    def code(self) -> str:
        return " ".join(self.gencode) or "(nvcc's default)"


class Plan(msgspec.Struct, frozen=True):
    """
    What will be compiled for which arch.

    Attributes:
        arch: As the stack names it (``12.1f``).
        gencode: The same as a compiler's entry (``compute_121f:sm_121f``).
        counts: Units by verdict.
        stale: Entries of ``kept`` that are not true, a line each.
        sites: Where the rules were applied.
        dropped: The reviewed reasons for units that the rules leave out.
    """

    fork: str
    arch: str
    gencode: str
    counts: dict[str, int]
    units: tuple[PlannedUnit, ...]
    stale: tuple[str, ...]
    sites: tuple[Site, ...]
    dropped: tuple[Dropped, ...] = ()

    @property
    def failing(self) -> tuple[PlannedUnit, ...]:
        return tuple(unit for unit in self.units if unit.verdict not in ("native", "kept"))


def examine(
    configured: Configured,
    *,
    arch: str,
    rules: ArchRules,
    fork: str,
    read: Callable[[str], bytes],
    sites: Sequence[Site] = (),
) -> Plan:
    """
    Give every CUDA unit of *configured* its verdict, whatever that is.

    Args:
        rules: All of the stack's, applied or not.
        read: Returns the bytes of a file of the source tree that was configured.
        sites: What the rules changed in that tree; a rule without a site there counts as not
            applied.
    """
    applied = {site.rule for site in sites}
    pending = [rule for rule in rules.rules if rule.fork == fork and rule.name not in applied]
    causes = Causes(configured.calls, read, arch, pending)
    kept = [entry for entry in rules.kept if entry.fork == fork]
    cuda = [unit for unit in configured.units if unit.language == "CUDA"]
    units = tuple(_plan(unit, arch, kept, causes) for unit in cuda)
    counts = Counter(unit.verdict for unit in units)
    return Plan(
        fork=fork,
        arch=arch,
        gencode=_target(arch),
        counts={verdict: counts[verdict] for verdict in VERDICTS},
        units=units,
        stale=tuple(line for entry in kept for line in _stale(entry, units)),
        sites=tuple(sites),
        dropped=tuple(entry for entry in rules.dropped if entry.fork == fork),
    )


def gone(plan: Plan, before: Plan) -> list[PlannedUnit]:
    """Return the units of *before* that *plan* does not compile; a rule can empty a list."""
    present = {(unit.target, unit.source) for unit in plan.units}
    return [unit for unit in before.units if (unit.target, unit.source) not in present]


def check(plan: Plan, before: Plan | None = None) -> None:
    """
    Raise unless every unit of *plan* is native or kept, and every unit that it lost has a reason.

    Args:
        before: The plan of the same tree without the rules.

    Raises:
        arch-mismatch: A unit is at another arch, an entry of ``kept`` or ``dropped`` is not true,
            or a unit is gone without a reason.
    """
    total = len(plan.units)
    if plan.failing:
        what = (
            f"{len(plan.failing)} of {total} CUDA units of {plan.fork} would not be compiled "
            f"for {plan.arch} ({plan.gencode})."
        )
        raise BuildError("arch-mismatch", what, details=[*_explain(plan), *plan.stale])
    if plan.stale:
        todo = "Correct the entries under `kept` in archs.yaml: what they say is no longer so."
        raise BuildError(
            "arch-mismatch",
            f"{len(plan.stale)} entries under kept are not true for {plan.fork}.",
            details=plan.stale,
            todo=todo,
        )
    _check_gone(plan, gone(plan, before) if before else [])


def _check_gone(plan: Plan, lost: Sequence[PlannedUnit]) -> None:
    silent = [f"{unit.source} ({unit.code})" for unit in lost if not _dropped(plan, unit)]
    if silent:
        todo = (
            "Find the rule that empties their list; mend it, or list them under `dropped` in "
            "archs.yaml with the reason."
        )
        what = (
            f"{_units(len(silent))} of {plan.fork} would no longer be compiled, and nothing "
            f"says why."
        )
        raise BuildError("arch-mismatch", what, details=silent, todo=todo)
    compiled = [
        f"{entry.unit} is compiled"
        for entry in plan.dropped
        for unit in plan.units
        if entry.covers(unit.source)
    ]
    if compiled:
        todo = "Correct the entries under `dropped` in archs.yaml: what they say is no longer so."
        raise BuildError(
            "arch-mismatch",
            f"{len(compiled)} entries under dropped are not true for {plan.fork}.",
            details=compiled,
            todo=todo,
        )


def _dropped(plan: Plan, unit: PlannedUnit) -> str:
    return next((entry.reason for entry in plan.dropped if entry.covers(unit.source)), "")


def judge(
    configured: Configured,
    *,
    arch: str,
    rules: ArchRules,
    fork: str,
    read: Callable[[str], bytes],
    sites: Sequence[Site] = (),
) -> Plan:
    """Return the plan as `examine` does, or raise as `check` does."""
    plan = examine(configured, arch=arch, rules=rules, fork=fork, read=read, sites=sites)
    check(plan)
    return plan


def show(plan: Plan, before: Plan | None = None, *, result: bool = False) -> None:
    """
    Print how many units are compiled for what, and each unit that is kept or gone; those that fail
    are named by the error of `check`.

    Args:
        before: The plan of the same tree without the rules.
        result: The tables are what the verb was asked for.
    """
    earlier = {(unit.target, unit.source): unit.code for unit in before.units} if before else {}
    groups = Counter[tuple[str, str, str]](
        (earlier.get((unit.target, unit.source), "(not compiled)"), unit.code, unit.verdict)
        for unit in plan.units
    )
    # A rule can also empty a list, and the unit is gone: that is an effect to see, not a difference
    # to guess.
    lost = gone(plan, before) if before else []
    groups.update((unit.code, "(not compiled)", "dropped") for unit in lost)
    rows = [
        (old, new, verdict, str(count))
        for (old, new, verdict), count in sorted(
            groups.items(), key=lambda item: (-item[1], item[0])
        )
    ]
    skip = 0 if before else 1
    columns = ["before the rules", "after", "verdict", ">units"][skip:]
    console.table(
        f"{plan.fork}: CUDA units for {plan.arch}",
        columns,
        [row[skip:] for row in rows],
        result=result,
    )
    kept = [(unit.source, unit.code, unit.reason) for unit in plan.units if unit.verdict == "kept"]
    kept += [
        (unit.source, "(not compiled)", _dropped(plan, unit) or "nobody wrote it down")
        for unit in lost
    ]
    if kept:
        console.table("", ["not native", "gencode", "reason"], kept, result=result)


def _target(arch: str) -> str:
    return f"compute_{spell(arch)}:sm_{spell(arch)}"


def _plan(unit: Unit, arch: str, kept: list[Kept], causes: Causes) -> PlannedUnit:
    if unit.gencode == (_target(arch),):
        return PlannedUnit(unit.target, unit.source, unit.gencode, "native", object=unit.object)
    entry = next((entry for entry in kept if entry.covers(unit.source)), None)
    reason = ""
    if entry:
        if _runs(unit.gencode, entry.gencode, arch):
            return PlannedUnit(
                unit.target, unit.source, unit.gencode, "kept", entry.reason, object=unit.object
            )
        reason = (
            f"listed as kept at {entry.gencode} with PTX that a {arch} can compile, which "
            f"is not what CMake gives it"
        )
    return PlannedUnit(
        unit.target,
        unit.source,
        unit.gencode,
        _verdict(unit.gencode, arch),
        reason,
        causes.of(unit),
        unit.object,
    )


def _runs(gencode: tuple[str, ...], virtual: str, arch: str) -> bool:
    """
    Say whether all of *gencode* is for *virtual*, and a device of *arch* can load it: same
    generation, or PTX without a suffix.
    """
    if not gencode or any(entry.split(":")[0] != virtual for entry in gencode):
        return False
    return generation(virtual) == generation(arch) or (
        virtual[-1].isdigit() and f"{virtual}:{virtual}" in gencode
    )


def _verdict(gencode: tuple[str, ...], arch: str) -> Verdict:
    if not gencode:
        return "none"
    return (
        "folded" if any(generation(entry) == generation(arch) for entry in gencode) else "foreign"
    )


def _stale(entry: Kept, units: Sequence[PlannedUnit]) -> Iterator[str]:
    covered = [unit for unit in units if entry.covers(unit.source)]
    if not covered:
        yield f"kept: {entry.unit} matches no CUDA unit"
    for unit in covered:
        if unit.verdict == "native":
            yield (
                f"kept: {unit.source} is listed at {entry.gencode}, but CMake gives it {unit.code}"
            )


def _explain(plan: Plan) -> Iterator[str]:
    """Yield the failing units, by what decided them and by their gencode."""
    ordered = sorted(
        plan.failing, key=lambda unit: (unit.cause, unit.code, unit.reason, unit.source)
    )
    for cause, group in groupby(ordered, key=lambda unit: unit.cause):
        units = list(group)
        if cause:
            name = cause.variable or "a list without a name"
            holds = f' = "{cause.value}"' if cause.value else ""
            yield (
                f"{name}{holds}{f' ({cause.place})' if cause.place else ''} decides for "
                f"{_units(len(units))}: {cause.why}."
            )
            yield f"  to mend it, {cause.remedy}"
        for (code, verdict, reason), same in groupby(
            units, key=lambda unit: (unit.code, unit.verdict, unit.reason)
        ):
            listed = list(same)
            yield f"  {verdict}, {code}: {_units(len(listed))}{f'; {reason}' if reason else ''}"
            yield from (f"    {unit.source}" for unit in listed)


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count} units"
