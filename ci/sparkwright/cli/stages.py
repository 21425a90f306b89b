"""The stages ``fetch``, ``apply``, ``plan`` and ``audit``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sparkwright.audit import policy, report, wheel, wheel_reader
from sparkwright.builder import pipeline, preflight, source_tree
from sparkwright.builder.arch import plan as arch_plan
from sparkwright.builder.environment import toolchain
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.builder.workspace import Workspace
from sparkwright.cli import options
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks import fetch as sources
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import MACHINES

#: Version of the audit; a new one makes stored audits invalid.
FORM = 7


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the stages."""
    parsers["fetch"].set_defaults(run=fetch)
    parsers["apply"].set_defaults(run=apply)
    add_planning(parsers["plan"])
    parsers["plan"].set_defaults(run=plan)
    _add_target(parsers["audit"])
    parsers["audit"].add_argument(
        "wheels",
        nargs="*",
        type=Path,
        metavar="WHEEL",
        help="wheels to audit (default: those of the last build)",
    )
    parsers["audit"].add_argument(
        "--judge",
        choices=("auto", "stack", "any"),
        default="auto",
        help="by the stack's policy, or by the rules for any wheel (default: stack for a wheel "
        "with our build record, else any)",
    )
    parsers["audit"].set_defaults(run=audit)


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options that change what is planned and built."""
    _add_target(parser)
    parser.add_argument(
        "--targets",
        action="append",
        default=[],
        metavar="NAMES",
        help="CMake targets to compile, separated by commas; `all` for every one",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        choices=MACHINES,
        default="",
        help="machine that the wheels are for (default: this one)",
    )


def fetch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bring the sources and base wheels for this machine into the store, and install the tools."""
    context = options.checkout(arguments)
    fetched, bases, rows = [], [], []
    for fork in context.forks:
        source = sources.fetch(context, fork)
        fetched.append(source)
        state = "" if source.resolved else "unresolved"
        rows.append([fork, source.kind, source.origin, source.tree[:12], state])
        if base := context.lock.forks[fork].bases.get(context.machine):
            package_index.obtain(
                context.store, base.name, base.filename, base.sha256, offline=context.offline
            )
            bases.append(base)
            rows.append([fork, "base", base.filename, base.sha256[:12], ""])
    tools = toolchain.obtain(context)
    console.table("in the store", ["fork", "kind", "origin", "tree or hash", ""], rows, result=True)
    return {"sources": fetched, "bases": bases, "tools": tools.key}


def apply(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the tree of each fork after every patch and rule."""
    context = options.checkout(arguments)
    trees = [source_tree.make(context, fork) for fork in context.forks]
    for tree in trees:
        rows = [[tree.source.tree, "source", tree.source.origin]]
        rows += [[step.tree, "patch", step.subject] for step in tree.steps]
        rows += [
            [tree.tree, "rule", f"{site.rule} at {site.file}:{site.line}"] for site in tree.sites
        ]
        console.table(tree.fork, ["tree", "step", "what"], rows, result=True)
    return {"trees": trees}


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan every fork that compiles; fail if a unit's architecture breaks the rules."""
    context = options.checkout(arguments)
    plans = []
    for fork in context.forks:
        if context.project.fork(fork).build != "graft":
            console.note(f"{fork}: nothing is compiled")
            continue
        tools = toolchain.obtain(context)
        with context.store.lock(Workspace.name(context, fork)):
            source = source_tree.make(context, fork)
            preflight.check(context, source, building=False)
            plans.append(arch_plan.obtain(context, tools, source))
        arch_plan.show(plans[-1], result=True)
    for planned in plans:
        arch_plan.check(planned)
    return {"plans": plans}


def audit(arguments: argparse.Namespace) -> int:
    """Audit the named wheels, or those of the last build; fail if one has a finding."""
    context = options.checkout(arguments)
    wheels = arguments.wheels or [path for fork in context.forks for path in _built(context, fork)]
    if not wheels:
        todo = "Run `sparkwright build`, or name a wheel."
        raise SourceError("not-provided", "There is no wheel to audit.", todo=todo)
    reports = []
    for path in wheels:
        kind = policy_kind(path) if arguments.judge == "auto" else arguments.judge
        reports.append(audited(context, path, kind))
    report.show(*reports, result=True)
    console.document({"reports": reports})
    for audit_report in reports:
        report.raise_for_findings(audit_report)
    return 0


def policy_kind(path: Path) -> Literal["stack", "any"]:
    """Return ``stack`` for a wheel that holds our build record, else ``any``."""
    return "stack" if wheel_reader.contents(path, wheel_reader.subject(path)).ours else "any"


def audited(
    context: RunContext, path: Path, judged: Literal["stack", "any"] = "stack"
) -> report.AuditReport:
    """Return the audit of the wheel at *path*, from the store if its inputs are unchanged."""
    rules = policy.load(context.project.audit_file, context.project.spec.arch)
    inputs = {
        "wheel": digest.sha256_file(path),
        "name": path.name,
        "policy": rules,
        "judged": judged,
        "form": FORM,
    }
    key = digest.key("audit", inputs)
    if stored := context.store.get("audit", key, report.AuditReport):
        return stored
    programs, scratch = toolchain.obtain(context).cuda / "bin", context.store.folder("work")
    with console.step(f"audit {path.name}"):
        result = wheel.audit(path, rules, programs, scratch=scratch, judged=judged)
    context.store.put("audit", key, result)
    return result


def _built(context: RunContext, fork: str) -> list[Path]:
    """Return the wheels that the last build of *fork* made, if they still exist."""
    spec = flashinfer_aot.load(context.project, fork)
    modules = flashinfer_aot.stored(context, spec) if spec else None
    wheels = filter(None, (pipeline.current(context, fork), modules))
    return [path for built in wheels if (path := pipeline.wheel_path(context, built)).exists()]
