"""``sparkwright build``: estimate the time, build the wheels, and audit them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkwright.audit import policy, report
from sparkwright.audit.report import AuditReport
from sparkwright.builder import pipeline
from sparkwright.builder.compile import costs
from sparkwright.builder.environment import toolchain
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.cli import argtypes, context, stages
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

_WORK = {
    "headers": "pack its headers",
    "backend": "run its build backend",
    "graft": "compile libraries, graft them onto the official wheel",
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``build``."""
    parser = parsers["build"]
    parser.set_defaults(run=build)
    stages.add_planning(parser)
    argtypes.add_compiling(parser)
    add = parser.add_argument
    add(
        "--only",
        default="",
        metavar="UNIT",
        help="compile only this source, always, and make no wheel",
    )
    add(
        "--unit-timeout",
        type=argtypes.whole(1, 10**6),
        default=0,
        metavar="MINUTES",
        help="end a compiler that uses no CPU for so long (default: 30)",
    )
    add(
        "--aot",
        action="store_true",
        help="also make the wheel of FlashInfer's modules, compiled ahead of time",
    )
    add(
        "--again",
        action="store_true",
        help="rebuild finished wheels in another folder from their build records, and fail if "
        "one differs without an explanation",
    )
    add(
        "wheels",
        nargs="*",
        metavar="WHEEL|FORK",
        help="with --again: wheels to rebuild (default: each fork's last build)",
    )
    add(
        "--cached",
        action="store_true",
        help="with --again: use the compiler cache; quick, but proves nothing",
    )
    add(
        "--elsewhere",
        type=Path,
        metavar="DIR",
        help="with --again: rebuild in this new folder, and keep it (default: a temporary one)",
    )
    add(
        "--container",
        action="store_true",
        help="build in a container without network, privileges or root",
    )
    add(
        "--platform",
        choices=("linux/arm64", "linux/amd64"),
        default="",
        help="with --container: platform of the image (default: the engine's)",
    )
    add(
        "--base",
        default="",
        metavar="IMAGE@sha256:HEX",
        help="with --container: base image (default: `image` in environment.yaml)",
    )


def build(arguments: argparse.Namespace) -> int:
    """Build and audit every fork; show failed audits, and raise for the first."""
    if (arguments.base or arguments.platform) and not arguments.container:
        raise UsageError("usage", "--base and --platform belong to --container.")
    if (arguments.wheels or arguments.cached or arguments.elsewhere) and not arguments.again:
        raise UsageError("usage", "Wheels, --cached and --elsewhere belong to --again.")
    session = context.checkout(arguments)
    if arguments.container:
        from sparkwright.builder import container

        status, document = container.build(
            session, arguments.words, base=arguments.base, platform=arguments.platform
        )
        console.document(document)
        return status
    if arguments.again:
        return _again(session, arguments)
    if arguments.only:
        return _only(session, arguments.only)
    announce(session, ahead=arguments.aot)
    pairs = []
    for fork in session.forks:
        for built in _wheels(session, fork, ahead=arguments.aot):
            audit_report = stages.audited(session, pipeline.wheel_path(session, built))
            pairs.append((built, audit_report))
            if not audit_report.passed:
                report.show(audit_report, result=True)
    _show(session, pairs)
    wheels = [
        {"wheel": built, "path": str(pipeline.wheel_path(session, built)), "audit": audit_report}
        for built, audit_report in pairs
    ]
    console.document({"wheels": wheels})
    for _, audit_report in pairs:
        report.raise_for_findings(audit_report)
    return 0


def _only(session: RunContext, unit: str) -> int:
    """Compile one unit; show its cost and the path of its object."""
    forks = [fork for fork in session.forks if session.project.fork(fork).build == "graft"]
    if len(forks) != 1:
        raise UsageError(
            "usage",
            "--only compiles a unit of one fork that is grafted.",
            todo="Name the fork with --fork.",
        )
    unit_build = pipeline.compile_unit(session, forks[0], unit)
    cost = f"{duration(unit_build.seconds)} of CPU, {unit_build.megabytes} MB"
    console.result(f"{unit_build.fork}: {unit_build.unit}: {cost}")
    for path in unit_build.objects:
        console.result(path)
    console.document({"unit": unit_build})
    return 0


def _wheels(session: RunContext, fork: str, *, ahead: bool) -> Iterator[BuiltWheel]:
    """Yield the wheel of *fork*, and that of its modules that are compiled ahead of time."""
    built = pipeline.build(session, fork)
    yield built
    if ahead and (spec := flashinfer_aot.load(session.project, fork)):
        yield flashinfer_aot.build(session, spec, built)


def announce(session: RunContext, *, ahead: bool = False) -> None:
    """Show the work for each fork, and how long it should take here."""
    console.note(
        f"stack {session.project.stack} for {session.project.spec.arch} on {session.machine}; "
        f"cache: {session.store.root}"
    )
    for fork in session.forks:
        if pipeline.current(session, fork) is None:
            work = _WORK[session.project.fork(fork).build]
            console.note(f"  {fork}: {work}, {_about(estimate(session, fork))}")
        spec = flashinfer_aot.load(session.project, fork) if ahead else None
        if spec and not flashinfer_aot.stored(session, spec):
            name = spec.distribution
            last = session.store.get("duration", pipeline.record_name(session, name), float)
            console.note(f"  {name}: compile {fork}'s modules, {_about(last)}")


def _about(seconds: float | None) -> str:
    no_estimate = "without an estimate on this machine yet"
    return f"about {duration(seconds)}" if seconds else no_estimate


def estimate(session: RunContext, fork: str) -> float:
    """
    Return the seconds that building *fork* should take here; 0 if there is no measurement.

    The last build on this machine counts, else the cost records, divided by the cores. They do not
    cover targets beyond the default ones.
    """
    last = session.store.get("duration", pipeline.record_name(session, fork), float)
    if not last and toolchain.settings(session, fork).needs_vendored:
        return 0
    return last or costs.build_seconds(session.project, fork, session.jobs or os.cpu_count() or 1)


def _show(session: RunContext, pairs: list[tuple[BuiltWheel, AuditReport]]) -> None:
    rows = []
    for built, audit_report in pairs:
        units = ", ".join(f"{count} {state}" for state, count in built.counts.items() if count)
        verdict = "pass" if audit_report.passed else f"{len(audit_report.findings)} findings"
        hashes = [built.sha256[:16], audit_report.device_code[:16] or "–"]
        rows.append([built.filename, size(built.size), units or "–", verdict, *hashes])
    console.table(
        "wheels",
        ["wheel", ">size", "CUDA units", "audit", "sha256", "device code"],
        rows,
        result=True,
    )
    names = " ".join(str(pipeline.wheel_path(session, built)) for built, _ in pairs)
    console.note(f"install: python -m pip install {names}")


def _again(session: RunContext, arguments: argparse.Namespace) -> int:
    """Build each wheel again from its record, compare the two, and fail if one differs."""
    from sparkwright.audit import reproduce

    if arguments.wheels:
        wheels = [_wheel(session, name) for name in arguments.wheels]
    else:
        wheels = [path for fork in session.forks if (path := pipeline.last_wheel(session, fork))]
    if not wheels:
        todo = "Run `sparkwright build`, or name a wheel."
        raise SourceError("not-provided", "There is no wheel to build again.", todo=todo)
    if arguments.elsewhere and len(wheels) > 1:
        raise UsageError("usage", "--elsewhere holds one build; name one wheel or fork.")
    # Refuse unusable wheels before hours are spent on the others.
    records = [reproduce.read_record(path) for path in wheels]
    contexts = [
        reproduce.rebuild_session(session, path, record)
        for path, record in zip(wheels, records, strict=True)
    ]
    rebuilds = []
    for own, path, record in zip(contexts, wheels, records, strict=True):
        rules = policy.load(own.project.audit_file, own.project.spec.arch)
        separate = reproduce.separate_store(own, arguments.elsewhere, cached=arguments.cached)
        with console.step(f"build {path.name} again, elsewhere"), separate as other:
            rebuilds.append(reproduce.reproduce(other, path, record, rules))
    for rebuild in rebuilds:
        reproduce.show(rebuild)
    console.document({"rebuilds": rebuilds})
    for rebuild in rebuilds:
        reproduce.raise_for_difference(rebuild)
    return 0


def _wheel(session: RunContext, name: str) -> Path:
    """Return the wheel file *name*, or the last build of the fork *name*."""
    if name.endswith(".whl"):
        if not Path(name).is_file():
            raise SourceError("not-provided", f"There is no wheel {name}.")
        return Path(name)
    session.project.fork(name)
    if path := pipeline.last_wheel(session, name):
        return path
    raise SourceError(
        "not-provided",
        f"The wheel of {name} that this checkout makes is not in {session.output}.",
        todo="Run `sparkwright build` first.",
    )
