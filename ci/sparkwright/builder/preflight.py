"""
Preflight: run all checks that need no compiler and report every failure together.

A build takes the better part of an hour, and each of these failures would end it late: a syntax
error in a patched Python file, versions that do not fit together, a missing compiler, a damaged
base.
"""

from __future__ import annotations

import platform
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkwright.builder import BuildError, pylock, toolchain
from sparkwright.builder.wheel import archive, graft
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.workspace import SourceTree
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.forks import package_index
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError


def check(context: RunContext, source: SourceTree, *, building: bool = True) -> None:
    """
    Check that *source* can be built on this machine.

    Args:
        building: Check this machine and the base of a graft too, not only the source.

    Raises:
        early-check-failed: It cannot; every finding is listed.
        tool-missing, source-mismatch, base-mismatch, requirement-mismatch: The compiler or the base
            of a graft fails, and there is no other finding.
    """
    with console.step(f"check {source.fork} before it is built"):
        findings = [*python_syntax(context, source), *build_requirements(context, source)]
        findings += output_folder(context.output) if building else []
        if building and context.project.fork(source.fork).build == "graft":
            try:
                toolchain.require_compiler(context)
                findings += base_wheel(context, source)
            except SparkwrightError as error:
                if not findings:
                    raise
                findings += [f"{error.what} ({error.reference})", *error.details, error.todo]
    if findings:
        raise BuildError(
            "early-check-failed",
            f"{source.fork} cannot be built.",
            details=findings,
            data={"findings": findings},
        )


def python_syntax(context: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the syntax errors of changed Python files."""
    for path, status in context.objects.changes(source.source.tree, source.tree).items():
        if status == "D" or not path.endswith((".py", ".pyi")):
            continue
        # A link or a submodule has no content.
        text = context.objects.blob(source.tree, path) or b""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(text, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield f"{path}:{getattr(error, 'lineno', 0)}: {getattr(error, 'msg', error)}"


def build_requirements(context: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the build requirements of *source* that this Python or the locked tools do not meet."""
    if context.project.fork(source.fork).build == "headers":
        return
    locked = {
        canonicalize_name(name): WheelName.of(file).version
        for name, file, _ in pylock.wheels(context.project)
    }
    here = platform.python_version()
    try:
        text = (context.objects.blob(source.tree, "pyproject.toml") or b"").decode()
        tables = tomllib.loads(text)
        wanted = tables.get("project", {}).get("requires-python", "")
        if here not in SpecifierSet(wanted):
            yield f"pyproject.toml: {source.fork} wants Python {wanted}; this is {here}"
        for text in tables.get("build-system", {}).get("requires", []):
            requirement = Requirement(text)
            # A graft uses few of the tools that upstream lists; one that is not locked is not used.
            version = locked.get(canonicalize_name(requirement.name))
            applies = not requirement.marker or requirement.marker.evaluate()
            if (
                version
                and applies
                and not requirement.specifier.contains(version, prereleases=True)
            ):
                needs = f"building {source.fork} requires {text}"
                yield f"pyproject.toml: {needs}, and pylock.toml has {version}"
    except ValueError as error:
        yield f"pyproject.toml: {error}"


def output_folder(folder: Path) -> Iterator[str]:
    """Yield the reason why no wheel could be written to *folder*."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield f"output: {folder} cannot be written: {error.strerror}"


def base_wheel(context: RunContext, source: SourceTree) -> Iterator[str]:
    """
    Yield the requirements of the official wheel that the stack does not meet.

    Raises:
        source-mismatch: Its file in the store is not the one that the lock names.
        base-mismatch, requirement-mismatch: As `graft.check_base`.
    """
    locked = context.lock.forks[source.fork].bases.get(context.machine)
    if locked is None:
        return
    settings = toolchain.spec(context.project).forks[source.fork]
    path = package_index.path_of(context.store, locked.sha256, locked.filename)
    # The store may have held it for weeks since its download was verified.
    if (sha256 := sha256_file(path)) != locked.sha256:
        raise SourceError(
            "source-mismatch",
            f"{path.name} in the store is no longer the file that the lock names.",
            details=[f"lock: {locked.sha256}", f"file: {sha256}"],
            todo=f"Remove {path}; the next run fetches it again.",
        )
    graft.check_base(context, source, path, settings)
    with zip_file(path) as wheel:
        metadata = wheel.read(f"{WheelName.of(path.name).info}/METADATA")
    # The requirements that the graft keeps, without those of extras.
    remaining = archive.change_requirements(metadata, dict.fromkeys(settings.requires, ""))
    lines = BytesParser().parsebytes(remaining, headersonly=True).get_all("Requires-Dist") or []
    plain = [line for line in map(str, lines) if "extra ==" not in line]
    forks = {
        canonicalize_name(other.distribution): name
        for name, other in toolchain.spec(context.project).forks.items()
    }
    for requirement in map(Requirement, [*plain, *filter(None, settings.requires.values())]):
        fork = forks.get(canonicalize_name(requirement.name))
        lock = context.lock.forks[fork] if fork else None
        if lock is None:
            continue
        version = lock.sdist.version if lock.sdist else lock.git.ref.lstrip("v") if lock.git else ""
        local = f"{version}+{context.project.spec.label}"
        if not requirement.specifier.contains(local, prereleases=True):
            stated = f"the wheel would require {requirement}"
            yield f"{path.name}: {stated}, and the stack's {fork} is {version}"
