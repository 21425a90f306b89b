"""The stages of a build: ``lock``, ``fetch``, ``apply``, ``plan``, ``build`` and ``audit``."""

import argparse
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit import policy, report
from sparkwright.audit.wheel import cached_audit
from sparkwright.builder import configure, pins, pipeline, plan as arch_plan, pylock, toolchain
from sparkwright.builder.workspace import Workspace, source_tree
from sparkwright.cherry_picks import series
from sparkwright.cli import options
from sparkwright.core.console import console, size
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import fetch as sources, package_index, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    MACHINES,
    UNRESOLVED,
    ForkLock,
    SourceError,
    VendoredLock,
    earlier_lock,
    read_lock,
    render_lock,
)

#: Requirements of G6's lm-eval that have no wheels, or that only tasks need that G6 does not ask.
HARNESS_EXCLUDED = ("nltk", "rouge-score", "sqlitedict", "tiktoken", "word2number")


_TARGET: options.Options = {
    "--target": {
        "choices": MACHINES,
        "default": "",
        "help": "machine that the wheels are for (default: this one)",
    },
}
_COMPILED: options.Options = {
    **_TARGET,
    "--targets": {
        **options.REPEATED,
        "metavar": "NAMES",
        "help": "CMake targets to compile, separated by commas; `all` for every one",
    },
}
#: The options of the commands that have some.
_OPTIONS: Mapping[str, options.Options] = {
    "lock": {
        **options.FORCE_PIN,
        "--tools": {
            **options.FLAG,
            "help": "also lock the tools and the harness of G6 anew, at their newest versions",
        },
    },
    "fetch": _COMPILED,
    "plan": {**_COMPILED, **options.FORCE_PIN},
    "build": {
        **_COMPILED,
        "--jobs": {
            "type": options.number(int, 1, 4096),
            "default": 0,
            "help": "units compiled at once (default: one per core)",
        },
        "--memory": {
            "type": options.number(float, 0.5, 1e6, "gigabytes"),
            "default": 0,
            "metavar": "GB",
            "help": "memory of all compilers together (default: 85 %% of the available memory)",
        },
        "--output": {
            "type": Path,
            "metavar": "DIR",
            "help": "folder for the wheels (default: dist)",
        },
    },
    "audit": {
        **_TARGET,
        "wheels": {
            "nargs": "*",
            "type": Path,
            "metavar": "WHEEL",
            "help": "wheels to audit (default: those of the last build)",
        },
        "--judge": {
            "choices": ("stack", "any"),
            "help": "by the stack's policy, or by the rules for any wheel (default: stack for a "
            "wheel with our build record, else any)",
        },
    },
}


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the stages."""
    options.define(
        parsers,
        {
            "lock": lock,
            "fetch": fetch,
            "apply": apply,
            "plan": plan,
            "build": build,
            "audit": audit,
        },
        _OPTIONS,
    )


def lock(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Write ``lock.yaml``, and with --tools, or if they do not satisfy ``requirements.in``,
    ``pylock.toml`` and the lock of G6's harness; report unresolved sources.
    """
    context = options.checkout(arguments)
    if context.offline:
        raise SourceError(
            "offline", "lock needs the index and the upstream hosts, which --offline forbids."
        )
    project = context.project
    with project.editing():
        locked = resolve.resolve(context, earlier_lock(project))
        pins.check(context, locked, force=arguments.force_pin)
        context.store.write(project.lock_file, render_lock(locked).encode())
        pylock.lock(context.store, project.build_folder, again=arguments.tools)
        excluded = map("--no-emit-package={}".format, HARNESS_EXCLUDED)
        harness = project.root / "ci" / "gates" / "harness"
        pylock.lock(context.store, harness, *excluded, again=arguments.tools)
        grafts = context.grafts
        if grafts and not toolchain.installed(context):
            console.note("to read the sources of FetchContent from CMake, run fetch and lock again")
            grafts = []
        for fork in grafts:
            try:
                lock_vendored(context, fork)
            except SparkwrightError as error:
                console.warn(
                    f"{fork}: not all sources of FetchContent were read: {error.what} "
                    f"({error.reference})"
                )
        written = read_lock(project)
    unresolved = resolve.unresolved(project, written)
    for line in unresolved:
        console.warn(f"unresolved: {line}")
    return {"lock": written, "unresolved": unresolved}


def lock_vendored(context: RunContext, fork: str) -> None:
    """
    Write the sources that CMake downloads for *fork* to the lock file.

    CMake is configured for all targets with the sources that the lock pins, repeated
    until it needs no others: a source may download further sources. If the lock does not resolve
    all of them, it is configured for those targets that a build compiles then.

    Raises:
        source-unlocked: CMake needs a download that cannot be pinned.
        source-unresolved: A host does not answer; the lock marks the source as unresolved.
        And the errors of applying and configuring.
    """
    tools, name = toolchain.obtain(context), Workspace.name(context, fork)
    while True:
        # A copy reads the lock file again.
        context = dataclasses.replace(context)
        locked = context.lock.forks[fork]
        unresolved = locked.unresolved(locked.fetched)
        context = dataclasses.replace(context, targets=() if unresolved else ("all",))
        with context.store.lock(name):
            workspace = Workspace(context, tools, fork, "lock")
            workspace.fill(source_tree(context, fork).tree)
            try:
                workspace.configure()
                if unresolved:
                    console.note(f"{fork}: CMake was read without {', '.join(unresolved)}")
                return
            except SourceError as error:
                if error.reference != "source-unlocked":
                    raise
                with context.store.lock("objects"):
                    locked = _pinned(
                        context, fork, workspace.declarations(), workspace.settings.sources
                    )
                if locked == context.lock.forks[fork]:
                    raise
        forks = {**context.lock.forks, fork: locked}
        context.store.write(
            context.project.lock_file,
            render_lock(msgspec.structs.replace(context.lock, forks=forks)).encode(),
        )


def _pinned(
    context: RunContext,
    fork: str,
    declared: Iterable[configure.Declaration],
    present: Collection[str],
) -> ForkLock:
    """
    Return the lock of *fork* with exactly the sources *declared* in place of those that were
    *present*.
    """
    spec, locked = context.project.fork(fork), context.lock.forks[fork]
    wanted = [
        declaration
        for declaration in declared
        if declaration.name not in spec.ignored and declaration.pinnable
    ]
    changed = [
        declaration
        for declaration in wanted
        if configure.mismatch(declaration, locked.fetched.get(declaration.name))
    ]
    stay = {declaration.name for declaration in wanted if declaration not in changed}
    gone = {declaration.name for declaration in changed}.union(present) - stay
    # A source may have submodules (``name/path``).
    entries = {
        name: entry
        for name, entry in locked.vendored.items()
        if (top := name.split("/")[0]) not in locked.fetched or top not in gone
    }
    for declaration in changed:
        entries |= resolve.pin(
            context,
            spec,
            declaration.name,
            VendoredLock(
                declaration.url,
                declaration.ref,
                UNRESOLVED,
                UNRESOLVED,
                kind="fetchcontent",
                modules=declaration.modules,
            ),
        )
    return msgspec.structs.replace(locked, vendored=dict(sorted(entries.items())))


def fetch(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Bring the sources with those that the targets vendor, the picks and the base wheels into the
    store, and install the tools.
    """
    context = options.checkout(arguments)
    fetched, bases, rows = [], [], []
    for fork in context.forks:
        source = sources.fetch(context, fork, again=True)
        fetched.append(source)
        state = f"not git: {source.git_error}" if source.git_error else ""
        state = state if source.resolved else "unresolved"
        rows.append([fork, source.kind, source.origin, source.tree[:12], state])
        series.load_series(context, fork)
        if base := context.lock.forks[fork].bases.get(context.machine):
            package_index.obtain_locked(context, base)
            bases.append(base)
            rows.append([fork, "base", base.filename, base.sha256[:12], ""])
        pipeline.check_vendored(context, fork)
        settings, vendored = toolchain.settings(context, fork), context.lock.forks[fork]
        rows += [
            [fork, "vendored", name, vendored.fetched[name].tree[:12], ""]
            for name in settings.sources
        ]
        rows += [[fork, "not compiled", name, "", why] for name, why in settings.unlocked.items()]
    tools = toolchain.target(context, toolchain.obtain(context))
    console.table("in the store", ["fork", "kind", "origin", "tree or hash", ""], rows, result=True)
    return {"sources": fetched, "bases": bases, "tools": tools.key}


def apply(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the tree of each fork after every patch and rule."""
    context = options.checkout(arguments)
    trees = [source_tree(context, fork) for fork in context.forks]
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
    pins.check(context, context.lock, force=arguments.force_pin)
    plans = []
    for fork in context.forks:
        if context.project.fork(fork).build != "graft":
            console.note(f"{fork}: nothing is compiled")
            continue
        pipeline.check_vendored(context, fork)
        with context.store.lock(Workspace.name(context, fork)):
            # A source that cannot be built is refused before gigabytes of tools are fetched.
            source = source_tree(context, fork)
            pipeline.check_source(context, source)
            plans.append(arch_plan.obtain(context, toolchain.obtain(context), source))
        arch_plan.show(plans[-1], result=True)
    for planned in plans:
        arch_plan.check(planned)
    return {"plans": plans}


def build(arguments: argparse.Namespace) -> None:
    """Build and audit every fork; show failed audits, and raise for the first."""
    context = options.checkout(arguments)
    console.note(
        f"stack {context.project.stack} for {context.project.spec.arch} on {context.machine}; "
        f"cache: {context.store.root}"
    )
    # A policy that is not valid must not cost an hour of compiling.
    policy.load(context.project.audit_file, context.project.spec.arch)
    if context.grafts:
        pins.check(context, context.lock)
    rows, audits, wheels = [], [], []
    for fork in context.forks:
        built = pipeline.build(context, fork)
        path = pipeline.wheel_path(context, built)
        audit_report = cached_audit(context, path, "stack", fetch=True)
        audits.append(audit_report)
        if not audit_report.passed:
            report.show(audit_report, result=True)
        units = ", ".join(f"{count} {state}" for state, count in built.counts.items() if count)
        verdict = "pass" if audit_report.passed else f"{len(audit_report.findings)} findings"
        hashes = [built.sha256[:16], audit_report.device_code[:16] or "–"]
        rows.append([built.filename, size(built.size), units or "–", verdict, *hashes])
        wheels.append({"wheel": built, "path": str(path), "audit": audit_report})
    console.table(
        "wheels",
        ["wheel", ">size", "CUDA units", "audit", "sha256", "device code"],
        rows,
        result=True,
    )
    for sentence in dict.fromkeys(text for audited in audits for text in audited.deviations):
        console.note(sentence)
    console.note(f"install: python -m pip install {' '.join(str(w['path']) for w in wheels)}")
    console.document({"wheels": wheels})
    report.raise_for_findings(*audits)


def audit(arguments: argparse.Namespace) -> None:
    """
    Audit the named wheels, or those of the last build; fail if one has a finding.

    Raises:
        not-provided: There is none.
    """
    context = options.checkout(arguments)
    built = (pipeline.last_wheel(context, fork) for fork in context.forks)
    wheels = arguments.wheels or list(filter(None, built))
    missing = [f"not a file: {path}" for path in wheels if not path.is_file()]
    if missing or not wheels:
        raise SourceError(
            "not-provided",
            "There is no such wheel.",
            details=missing,
            todo="Run `sparkwright build`, or name a wheel.",
        )
    reports = [cached_audit(context, path, arguments.judge) for path in wheels]
    report.show(*reports, result=True)
    console.document({"reports": reports})
    report.raise_for_findings(*reports)
