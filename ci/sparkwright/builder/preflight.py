"""
Preflight: run all checks that need no compiler and report every failure together.

A build takes the better part of an hour, and each of these failures would end it late: a syntax
error in a patched Python file, a lost ``#endif``, versions that do not fit together, a full disk,
too little memory, a damaged base.
"""

from __future__ import annotations

import ast
import contextlib
import platform
import re
import shutil
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja_file import SUFFIXES
from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive, graft
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import config, digest
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks import package_index
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

_PYTHON_SUFFIXES = frozenset((".py", ".pyi"))
_C_SUFFIXES = frozenset(
    (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hpp", ".inc", ".inl")
)
#: Comments and literals, in which a ``#`` is no directive, and numbers and names, which must not be
#: taken for the start of one ([lex.phases]).
_TOKENS = re.compile(
    r"""
      (?P<hidden>
          \\[ \t]*\n | //(?:\\[ \t]*\n|[^\n])* | /\*.*?(?:\*/|\Z)
        | (?:u8|[uUL])?R"(?P<mark>[^ ()\\\t\v\f\n]{0,16})\(.*?(?:\)(?P=mark)"|\Z)
        | "(?:\\.|[^"\\\n])*"?
        | '(?:\\.|[^'\\\n])*'?
      )
    | \.?\d(?:'?[\w.])*
    | \w+
    """,
    re.DOTALL | re.VERBOSE,
)
#: Stands for a line break inside a comment, a literal or a continued line.
_BREAK = "\x01"
_CONDITIONAL = re.compile(
    r"^[ \t\v\f\x01]*(?:\#|%:)[ \t\v\f\x01]*(if|ifdef|ifndef|elif|elifdef|elifndef|else|endif)\b",
    re.MULTILINE,
)


def check(session: RunContext, source: SourceTree, *, building: bool = True) -> None:
    """
    Check that *source* can be built on this machine.

    Args:
        building: Check this machine and the base of a graft too, not only the source.

    Raises:
        early-check-failed: It cannot; every failure is listed. A single failure with a reference of
            its own is raised unchanged.
    """
    settings = toolchain.spec(session.project).forks[source.fork]
    # Generators: each runs below.
    checks: list[Iterable[str]] = [
        python_syntax(session.objects, source),
        conditionals(session.objects, source),
        build_requirements(session, source),
        fork_requirements(
            session, filter(None, settings.requires.values()), "environment.yaml (requires)"
        ),
    ]
    if building:
        checks.append(output_folder(session.output))
        checks.append(disk_space(session, source.fork, settings))
    if building and session.project.fork(source.fork).build == "graft":
        checks.append(host_compiler(session))
        checks.append(memory(session, source))
        checks.append(base_wheel(session, source, settings))
    findings: list[str] = []
    errors: list[SparkwrightError] = []
    with console.step(f"check {source.fork} before it is built"):
        for lines in checks:
            try:
                findings += lines
            except SparkwrightError as error:
                errors.append(error)
    if len(errors) == 1 and not findings:
        raise errors[0]
    count = len(findings) + len(errors)
    for failure in errors:
        details = (f"  {line}" for line in failure.details)
        findings += [f"{failure.what} ({failure.reference})", *details]
        findings.append(f"  what to do: {failure.todo}")
    if findings:
        what = f"{source.fork} cannot be built: {count} {'finding' if count == 1 else 'findings'}."
        raise BuildError("early-check-failed", what, details=findings, data={"findings": findings})


# The source.


def _changed_files(
    objects: Objects, source: SourceTree, suffixes: frozenset[str]
) -> Iterator[tuple[str, bytes]]:
    for path, status in objects.changes(source.source.tree, source.tree).items():
        if status != "D" and PurePosixPath(path).suffix in suffixes:
            # A link or a submodule has no content.
            yield path, objects.blob(source.tree, path) or b""


def python_syntax(objects: Objects, source: SourceTree) -> Iterator[str]:
    """
    Yield the syntax errors of changed Python files, for the oldest Python that the project admits
    and this one.
    """
    from packaging.specifiers import SpecifierSet

    # `build_requirements` reports a table that cannot be read.
    oldest = sys.version_info[1]
    with contextlib.suppress(ValueError):
        admitted = SpecifierSet(_table(objects, source, "project").get("requires-python", ""))
        oldest = next((minor for minor in range(7, oldest) if f"3.{minor}" in admitted), oldest)
    for path, text in _changed_files(objects, source, _PYTHON_SUFFIXES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text, path, feature_version=(3, oldest))
                compile(text, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield f"{path}:{error.lineno or 0}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            yield f"{path}: cannot be read as Python: {error or type(error).__name__}"


def conditionals(objects: Objects, source: SourceTree) -> Iterator[str]:
    """
    Yield the unbalanced conditionals in changed C, C++ and CUDA files, if upstream's file is
    balanced.
    """
    for path, text in _changed_files(objects, source, _C_SUFFIXES):
        if not unbalanced(objects.blob(source.source.tree, path) or b""):
            yield from (f"{path}:{line}: {fault}" for line, fault in unbalanced(text))


def unbalanced(data: bytes) -> list[tuple[int, str]]:
    """
    Return the unbalanced preprocessor conditionals of a C, C++ or CUDA file: line, from 1, and
    fault.
    """

    def hide(match: re.Match[str]) -> str:
        return _BREAK * match[0].count("\n") or " " if match["hidden"] else match[0]

    # Latin-1 decodes any byte; comments are in whatever encoding their author used.
    text = _TOKENS.sub(hide, data.decode("latin-1").replace("\r\n", "\n"))
    faults: list[tuple[int, str]] = []
    opened: list[tuple[int, str]] = []
    for match in _CONDITIONAL.finditer(text):
        line, name = 1 + len(re.findall(r"[\n\x01]", text[: match.start(1)])), match[1]
        if name.startswith("if"):
            opened.append((line, f"#{name} without #endif"))
        elif not opened:
            faults.append((line, f"#{name} without #if"))
        elif name == "endif":
            opened.pop()
    return sorted([*faults, *opened])


# Versions.


def _table(objects: Objects, source: SourceTree, name: str) -> dict[str, Any]:
    """
    Return the table *name* of pyproject.toml, empty if there is none.

    Raises:
        ValueError: The file cannot be read.
    """
    text = (objects.blob(source.tree, "pyproject.toml") or b"").decode()
    table: dict[str, Any] = tomllib.loads(text).get(name, {})
    return table


def build_requirements(session: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the build requirements of *source* that this Python or the locked tools do not meet."""
    if session.project.fork(source.fork).build != "headers":
        try:
            yield from _unmet_requirements(session, source)
        except ValueError as error:
            yield f"pyproject.toml: {error}"


def _unmet_requirements(session: RunContext, source: SourceTree) -> Iterator[str]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    here = platform.python_version()
    wanted = _table(session.objects, source, "project").get("requires-python", "")
    if here not in SpecifierSet(wanted):
        yield f"pyproject.toml: {source.fork} wants Python {wanted}; this is {here}"
    locked = {
        canonicalize_name(name): WheelName.of(file).version
        for name, file, _ in pylock.wheels(session.project)
    }
    for text in _table(session.objects, source, "build-system").get("requires", []):
        requirement = Requirement(text)
        # A graft uses few of the tools that upstream lists; a tool that is not locked is not used.
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            needs = f"building {source.fork} requires {text}"
            yield f"pyproject.toml: {needs}, and pylock.toml has {version}"


def fork_requirements(
    session: RunContext, requirements: Iterable[str], origin: str
) -> Iterator[str]:
    """Yield the *requirements* on forks of the stack that their locked versions do not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    forks = {
        canonicalize_name(settings.distribution): name
        for name, settings in toolchain.spec(session.project).forks.items()
        if settings.distribution
    }
    for requirement in map(Requirement, requirements):
        fork = forks.get(canonicalize_name(requirement.name))
        lock = session.lock.forks[fork] if fork else None
        try:
            version = lock and Version(
                lock.sdist.version if lock.sdist else lock.git.ref if lock.git else ""
            )
        except InvalidVersion:
            continue
        local = f"{version}+{session.project.spec.label}"
        if version and not requirement.specifier.contains(local, prereleases=True):
            stated = f"the wheel would require {requirement}"
            yield f"{origin}: {stated}, and the stack's {fork} is {version}"


# This machine.


def output_folder(folder: Path) -> Iterator[str]:
    """Yield the reason why the wheel could not be written to *folder*."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".sparkwright-"):
            pass
    except OSError as error:
        yield f"output: {folder} cannot be written: {error.strerror} ({existing})"


def disk_space(session: RunContext, fork: str, settings: ForkEnvironment) -> Iterator[str]:
    """Yield a finding if the build takes more than the cache directory's file system has free."""
    need = settings.disk.get(session.project.fork(fork).build, 0) * 1_000_000
    free = shutil.disk_usage(session.store.root).free
    # A build folder that exists has some of it already.
    folder = session.store.root / "work" / session.project.stack / fork
    if need > free:
        need -= sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    if need > free:
        yield (
            f"disk: building {fork} takes about {need / 1e9:.1f} GB in the cache directory "
            f"({session.store.root}), where {free / 1e9:.1f} GB are free"
        )


def host_compiler(session: RunContext) -> Iterator[str]:
    """Yield the C++ compiler that is not installed; its version is CMake's to judge."""
    if not session.cross and not toolchain.compiler(session):
        raise CommandError(
            "tool-missing", f"{' '.join(toolchain.host_compiler())} is not installed."
        )
    yield from ()


def memory(session: RunContext, source: SourceTree) -> Iterator[str]:
    """
    Yield the units whose recorded compile took more memory than compilers may use here; none if a
    build folder or a compiler cache may have their objects.
    """
    folder = session.store.root / "work" / session.project.stack / source.fork
    cache = config.config().compiler_cache.tool != "none" and shutil.which("ccache")
    if (session.cached and cache) or any(folder.glob("*/build/.ninja_log")):
        return
    budget, costs = ninja.memory_budget(session.memory), Costs.of(session, source.fork)
    for path in session.objects.paths(source.tree):
        if PurePosixPath(path).suffix in SUFFIXES:
            cost = costs.expected(path)
            if cost.measured and cost.megabytes > budget:
                taken = f"compiling {path} takes {cost.megabytes / 1000:.1f} GB, as measured"
                yield f"memory: {taken}; compilers may hold {budget / 1000:.1f} GB here"


# The base of a graft.


def base_wheel(session: RunContext, source: SourceTree, settings: ForkEnvironment) -> Iterator[str]:
    """
    Yield the requirements of the official wheel that the stack does not meet.

    Raises:
        source-mismatch: Its file in the store is not the one that the lock names.
        base-mismatch, requirement-mismatch: As `graft.check_base`.
    """
    from email.parser import BytesParser

    locked = session.lock.forks[source.fork].bases.get(session.machine)
    if locked is None:
        return
    path = package_index.path_of(session.store, locked.sha256, locked.filename)
    # The store may have held it for weeks since its download was verified.
    if (sha256 := digest.sha256_file(path)) != locked.sha256:
        raise SourceError(
            "source-mismatch",
            f"{path.name} in the store is no longer the file that the lock names.",
            details=[f"lock: {locked.sha256}", f"file: {sha256}"],
            todo=f"Remove {path}; the next run fetches it again.",
        )
    graft.check_base(session, source, path, settings)
    with zip_file(path) as wheel:
        metadata = wheel.read(f"{WheelName.of(path.name).info}/METADATA")
    # The requirements that the graft keeps, without those of extras.
    remaining = archive.change_requirements(metadata, dict.fromkeys(settings.requires, ""))
    lines = BytesParser().parsebytes(remaining, headersonly=True).get_all("Requires-Dist") or []
    plain = (line for line in map(str, lines) if "extra ==" not in line)
    yield from fork_requirements(session, plain, path.name)
