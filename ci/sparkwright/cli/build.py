"""``sparkwright build``: estimate the time, build the wheels, and audit them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkwright.audit import policy, report
from sparkwright.builder import pipeline
from sparkwright.builder.compile import costs
from sparkwright.builder.environment.sandbox import VARIABLE
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.cli import options, stages
from sparkwright.core.console import console, duration, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``build``."""
    parser = parsers["build"]
    parser.set_defaults(run=build)
    stages.add_planning(parser)
    options.add_compiling(parser)
    add = parser.add_argument
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
        type=Path,
        metavar="WHEEL",
        help="with --again: wheels to rebuild (default: the last build of each --fork)",
    )
    add(
        "--container",
        action="store_true",
        help="build in a container without network, privileges or root",
    )
    add(
        "--base",
        default="",
        metavar="IMAGE@sha256:HEX",
        help="with --container: base image (default: `image` in environment.yaml)",
    )


def build(arguments: argparse.Namespace) -> int:
    """Build and audit every fork; show failed audits, and raise for the first."""
    if arguments.base and not arguments.container:
        raise UsageError("usage", "--base belongs to --container.")
    if arguments.wheels and not arguments.again:
        raise UsageError("usage", "Wheels belong to --again.")
    if arguments.container and arguments.target:
        what = "The builder image has no cross compiler, so --target does not go with --container."
        raise UsageError("usage", what)
    context = options.checkout(arguments)
    # In the container the same command line runs again.
    if arguments.container and VARIABLE not in os.environ:
        from sparkwright.builder import container

        status, document = container.build(context, arguments.words, base=arguments.base)
        console.document(document)
        return status
    if arguments.again:
        return _again(context, arguments.wheels)
    console.note(
        f"stack {context.project.stack} for {context.project.spec.arch} on {context.machine}; "
        f"cache: {context.store.root}"
    )
    for fork in context.forks:
        if pipeline.current(context, fork) is None:
            jobs = context.jobs or os.cpu_count() or 1
            seconds = costs.build_seconds(context.project, fork, jobs)
            console.note(f"  {fork}: about {duration(seconds)} for its default targets")
    audits = []
    for fork in context.forks:
        for built in _wheels(context, fork, ahead=arguments.aot):
            audit_report = stages.audited(context, pipeline.wheel_path(context, built))
            audits.append((built, audit_report))
            if not audit_report.passed:
                report.show(audit_report, result=True)
    _show(context, audits)
    for _, audit_report in audits:
        report.raise_for_findings(audit_report)
    return 0


def _wheels(context: RunContext, fork: str, *, ahead: bool) -> Iterator[pipeline.BuiltWheel]:
    """Yield the wheel of *fork*, and that of its modules that are compiled ahead of time."""
    built = pipeline.build(context, fork)
    yield built
    if ahead and (spec := flashinfer_aot.load(context.project, fork)):
        yield flashinfer_aot.build(context, spec, built)


def _show(
    context: RunContext, audits: list[tuple[pipeline.BuiltWheel, report.AuditReport]]
) -> None:
    rows, wheels = [], []
    for built, audit_report in audits:
        units = ", ".join(f"{count} {state}" for state, count in built.counts.items() if count)
        verdict = "pass" if audit_report.passed else f"{len(audit_report.findings)} findings"
        hashes = [built.sha256[:16], audit_report.device_code[:16] or "–"]
        rows.append([built.filename, size(built.size), units or "–", verdict, *hashes])
        path = str(pipeline.wheel_path(context, built))
        wheels.append({"wheel": built, "path": path, "audit": audit_report})
    columns = ["wheel", ">size", "CUDA units", "audit", "sha256", "device code"]
    console.table("wheels", columns, rows, result=True)
    console.note(f"install: python -m pip install {' '.join(str(w['path']) for w in wheels)}")
    console.document({"wheels": wheels})


def _again(context: RunContext, wheels: list[Path]) -> int:
    """Build each wheel again from its record, compare the two, and fail if one differs."""
    from sparkwright.audit import reproduce

    built = (pipeline.last_wheel(context, fork) for fork in context.forks)
    wheels = wheels or [path for path in built if path]
    missing = [f"not a file: {path}" for path in wheels if not path.is_file()]
    if missing or not wheels:
        todo = "Run `sparkwright build`, or name a wheel."
        what = "There is no wheel to build again."
        raise SourceError("not-provided", what, details=missing, todo=todo)
    # Refuse unusable wheels before hours are spent on the others.
    records = [(path, reproduce.read_record(path)) for path in wheels]
    contexts = [reproduce.rebuild_context(context, path, record) for path, record in records]
    rebuilds = []
    for own, (path, record) in zip(contexts, records, strict=True):
        rules = policy.load(own.project.audit_file, own.project.spec.arch)
        separate = reproduce.separate_store(own)
        with console.step(f"build {path.name} again, elsewhere"), separate as other:
            rebuilds.append(reproduce.reproduce(other, path, record, rules))
    for rebuild in rebuilds:
        reproduce.show(rebuild)
    console.document({"rebuilds": rebuilds})
    for rebuild in rebuilds:
        reproduce.raise_for_difference(rebuild)
    return 0
