"""
``sparkwright build``: the main job. Says what it will do and how long that takes, does it, audits
the result.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator

from sparkwright.audit import report
from sparkwright.audit.report import AuditReport
from sparkwright.builder import container, pipeline
from sparkwright.builder.compile import costs, single_unit
from sparkwright.builder.environment import toolchain
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.cli import audit
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext

_HOW = {
    "headers": "pack its headers",
    "backend": "run its build backend",
    "graft": "compile libraries, graft them onto the official wheel",
}


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Build and audit every fork; a wheel that fails its audit is shown, and fails the verb."""
    if arguments.container:
        status, document = container.build(
            session, arguments.words, base=arguments.base, platform=arguments.platform
        )
        console.document(document)
        return status
    if arguments.base or arguments.platform:
        raise UsageError(
            "usage",
            "--base and --platform say what the container is made of; without --container there "
            "is none.",
        )
    if arguments.only:
        return _only(session, arguments.only)
    announce(session, ahead=arguments.aot)
    pairs = []
    for fork in session.forks:
        for built in _built(session, fork, ahead=arguments.aot):
            made = audit.audited(session, pipeline.wheel_path(session, built))
            pairs.append((built, made))
            if not made.passed:
                report.show(made, result=True)
    _show(session, pairs)
    console.document(
        {
            "wheels": [
                {"wheel": built, "path": str(pipeline.wheel_path(session, built)), "audit": made}
                for built, made in pairs
            ]
        }
    )
    for _, made in pairs:
        report.raise_for_findings(made)
    return 0


def _only(session: RunContext, unit: str) -> int:
    """Compile one unit; say what it cost and where its object is."""
    forks = [fork for fork in session.forks if session.project.fork(fork).build == "graft"]
    if len(forks) != 1:
        raise UsageError(
            "usage",
            "--only compiles a unit of one fork that is grafted.",
            todo="Name the fork with --fork.",
        )
    made = single_unit.compile_unit(session, forks[0], unit)
    cost = f"{duration(made.seconds)} of CPU, {made.megabytes} MB"
    console.result(f"{made.fork}: {made.unit}: {cost}")
    for path in made.objects:
        console.result(path)
    console.document({"unit": made})
    return 0


def _built(session: RunContext, fork: str, *, ahead: bool) -> Iterator[BuiltWheel]:
    """Yield the wheel of *fork*, and that of its modules which are compiled ahead of time."""
    built = pipeline.build(session, fork)
    yield built
    if ahead and (spec := flashinfer_aot.load(session.project, fork)):
        yield flashinfer_aot.build(session, spec, built)


def announce(session: RunContext, *, ahead: bool = False) -> None:
    """Say what will be done for each fork, and how long it should take here."""
    console.note(
        f"stack {session.project.stack} for {session.project.spec.arch} on {session.machine}; "
        f"cache: {session.store.root}"
    )
    for fork in session.forks:
        if pipeline.current(session, fork) is None:
            expected = estimate(session, fork)
            about = (
                f"about {duration(expected)}"
                if expected
                else "for which this machine has no estimate yet"
            )
            console.note(f"  {fork}: {_HOW[session.project.fork(fork).build]}, {about}")
        if (
            ahead
            and (spec := flashinfer_aot.load(session.project, fork))
            and not flashinfer_aot.stored(session, spec)
        ):
            last = session.store.get(
                "duration", pipeline.record_name(session, spec.distribution), float
            )
            about = (
                f"about {duration(last)}" if last else "for which this machine has no estimate yet"
            )
            console.note(f"  {spec.distribution}: compile {fork}'s modules, {about}")


def estimate(session: RunContext, fork: str) -> float:
    """
    Return the seconds that building *fork* should take here.

    This machine's last build counts; without one, the work that was measured elsewhere, shared
    among the cores. Builds of targets beyond the core were not measured: 0.
    """
    last = session.store.get("duration", pipeline.record_name(session, fork), float)
    if not last and toolchain.settings(session, fork).needs_vendored:
        return 0
    return last or costs.build_seconds(session.project, fork, session.jobs or os.cpu_count() or 1)


def _show(session: RunContext, pairs: list[tuple[BuiltWheel, AuditReport]]) -> None:
    rows = []
    for built, made in pairs:
        units = (
            ", ".join(f"{count} {verdict}" for verdict, count in built.counts.items() if count)
            or "–"
        )
        verdict = "pass" if made.passed else f"{len(made.findings)} findings"
        rows.append(
            [
                built.filename,
                size(built.size),
                units,
                verdict,
                built.sha256[:16],
                made.device_code[:16] or "–",
            ]
        )
    console.table(
        "wheels",
        ["wheel", ">size", "CUDA units", "audit", "sha256", "device code"],
        rows,
        result=True,
    )
    names = " ".join(str(pipeline.wheel_path(session, built)) for built, _ in pairs)
    console.note(f"install: python -m pip install {names}")
    if not any(tag in platform.machine() for tag in ("aarch64", "arm64")):
        console.note(
            "no GB10 here: that the kernels run, and how fast, is not shown (gates: not-run)"
        )
