"""
Preflight: run all checks that need no compiler and report every failure together.

A build takes the better part of an hour, and each of these failures would end it late: a syntax
error in a patched Python file, versions that do not fit together, a damaged base, an
output folder that cannot be written.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from sparkwright.builder import BuildError, pins, toolchain
from sparkwright.builder.workspace import SourceTree, rules_of, vendored_trees
from sparkwright.core.console import console
from sparkwright.core.git import blob_id
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.forks.context import RunContext


def check_output(context: RunContext) -> None:
    """
    Check that wheels can be written to the output folder.

    Raises:
        early-check-failed: They cannot.
    """
    try:
        context.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=context.output):
            pass
    except OSError as error:
        raise BuildError(
            "early-check-failed",
            "There is no folder for the wheels.",
            details=[f"output: {context.output} cannot be written: {error.strerror}"],
        ) from error


def check_vendored(context: RunContext, fork: str) -> None:
    """
    Fetch the vendored sources that the targets of this run need, before the tools, and print the
    external projects that it leaves out.

    Raises:
        source-unresolved: As `toolchain.settings`.
        rule-mismatch, source-mismatch, source-unreachable, offline: As `vendored_trees`.
    """
    settings = toolchain.settings(context, fork)
    vendored_trees(context, fork, settings.sources, rules_of(context, fork).rules)
    for project, why in settings.unlocked.items():
        console.note(f"{fork}: {project} is not compiled: {why}")


def check(context: RunContext, source: SourceTree, base: Path | None = None) -> None:
    """
    Check that *source* can be built on this machine; without an official wheel for a graft, only
    what does not depend on it.

    Raises:
        early-check-failed: It cannot; every finding is listed.
        base-mismatch: See `check_base`.
    """
    with console.step(f"check {source.fork} before it is built"):
        findings = [*python_syntax(context, source)]
        findings += pins.disagreements(context) if base else []
        if findings:
            raise BuildError(
                "early-check-failed",
                f"{source.fork} cannot be built.",
                details=findings,
                data={"findings": findings},
            )
        if base:
            check_base(context, source, base)


def python_syntax(context: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the syntax errors of changed Python files."""
    changes = context.objects.changes(source.source.tree, source.tree)
    for path in (path for path in changes if path.endswith((".py", ".pyi"))):
        # A link, a submodule or a removed file has no content.
        text = context.objects.blob(source.tree, path) or b""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(text, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield f"{path}:{getattr(error, 'lineno', 0)}: {getattr(error, 'msg', error)}"


def check_base(context: RunContext, source: SourceTree, base: Path) -> None:
    """
    Check that *base* was built from the same source, before the series.

    Raises:
        base-mismatch: A Python file that both have differs.
    """
    settings = toolchain.settings(context, source.fork)
    tree = context.objects.paths(source.source.tree, settings.package)
    with zip_file(base) as wheel:
        names = [
            name for name in zip_members(wheel, base.name) if name.endswith(".py") and name in tree
        ]
        differing = [
            name
            for name in names
            if name not in settings.version_files and blob_id(wheel.read(name)) != tree[name][1]
        ]
    if differing or not names:
        raise BuildError(
            "base-mismatch",
            f"{base.name} was not built from {source.source.origin}.",
            details=[f"{len(differing)} of {len(names)} Python files differ", *differing[:10]],
        )
    console.note(f"{base.name}: its {len(names)} Python files are those of the source")
