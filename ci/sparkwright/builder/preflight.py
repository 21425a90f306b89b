"""
Preflight: run all checks that need no compiler and report every failure together.

A build takes the better part of an hour, and each of these failures would end it late: a syntax
error in a patched Python file, a lost ``#endif``, versions that do not fit together, a full disk,
too little memory, a damaged base.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja_file import SUFFIXES
from sparkwright.builder.environment import cross, pylock, toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive, graft
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import config, digest
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks import download
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: Minor versions of Python 3: the oldest whose grammar `ast` knows, and one that does not exist
#: yet.
_OLDEST, _NEWEST = 7, 30

_PYTHON_SUFFIXES = frozenset((".py", ".pyi"))
_C_SUFFIXES = frozenset(
    (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hpp", ".inc", ".inl")
)
#: Tokens in which a ``#`` is no directive, and those that must not be taken for the start of one
#: ([lex.phases]).
_TOKENS = re.compile(
    r"""
      (?P<blank>\\[ \t]*\n | //(?:\\[ \t]*\n|[^\n])* | /\*.*?(?:\*/|\Z))
    | (?P<literal>
          (?:u8|[uUL])?R"(?P<mark>[^ ()\\\t\v\f\n]{0,16})\(.*?(?:\)(?P=mark)"|\Z)
        | "(?:\\.|[^"\\\n])*"?
        | '(?:\\.|[^'\\\n])*'?
      )
    | \.?\d(?:'?[\w.])*
    | \w+
    """,
    re.DOTALL | re.VERBOSE,
)
#: Stands for a newline inside a comment, a literal or a continued line.
_INNER_NEWLINE = "\x01"
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
            its own is raised
            unchanged.
    """
    settings = toolchain.spec(session.project).forks[source.fork]
    checks: list[Callable[[], Iterable[str]]] = [
        partial(python_syntax, session.objects, source),
        partial(conditionals, session.objects, source),
        partial(build_requirements, session, source),
        partial(
            fork_requirements, session, _set_requirements(settings), "environment.yaml (requires)"
        ),
    ]
    if building:
        checks += [
            partial(output_folder, session.output),
            partial(disk_space, session, source.fork, settings),
            partial(host_compiler, session, source.fork),
            partial(memory, session, source),
            partial(base_wheel, session, source, settings),
        ]
    lines: list[str] = []
    errors: list[SparkwrightError] = []
    with console.step(f"check {source.fork} before it is built"):
        for run in checks:
            try:
                lines += run()
            except SparkwrightError as error:
                errors.append(error)
    if len(errors) == 1 and not lines:
        raise errors[0]
    count = len(lines) + len(errors)
    lines += [line for error in errors for line in _error_lines(error)]
    if lines:
        what = f"{source.fork} cannot be built: {count} {'finding' if count == 1 else 'findings'}."
        raise BuildError("early-check-failed", what, details=lines, data={"findings": lines})


def _error_lines(error: SparkwrightError) -> Iterator[str]:
    yield f"{error.what} ({error.reference})"
    yield from (f"  {line}" for line in error.details)
    yield f"  what to do: {error.todo}"


def _set_requirements(settings: ForkEnvironment) -> list[str]:
    return [text for text in settings.requires.values() if text]


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
    oldest = oldest_python(_project(objects, source))
    for path, text in _changed_files(objects, source, _PYTHON_SUFFIXES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if oldest < sys.version_info[:2]:
                    ast.parse(text, path, feature_version=oldest)
                compile(text, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield f"{path}:{error.lineno or 0}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            yield f"{path}: cannot be read as Python: {error or type(error).__name__}"


def conditionals(objects: Objects, source: SourceTree) -> Iterator[str]:
    """
    Yield the unbalanced conditionals in C, C++ and CUDA files that upstream's file does not have.
    """
    for path, text in _changed_files(objects, source, _C_SUFFIXES):
        before = Counter(
            fault for _, fault in unbalanced(objects.blob(source.source.tree, path) or b"")
        )
        for line, fault in unbalanced(text):
            if before[fault]:
                before[fault] -= 1
            else:
                yield f"{path}:{line}: {fault}"


def unbalanced(data: bytes) -> list[tuple[int, str]]:
    """
    Return the unbalanced preprocessor conditionals of a C, C++ or CUDA file: line, from 1, and
    fault.
    """
    # Latin-1 decodes any byte; comments are in whatever encoding their author used.
    text = _TOKENS.sub(_without_newlines, data.decode("latin-1").replace("\r\n", "\n"))
    faults: list[tuple[int, str]] = []
    stack: list[tuple[int, str, bool]] = []
    for match in _CONDITIONAL.finditer(text):
        # A directive is on the line of its "#".
        line = 1 + len(re.findall(r"[\n\x01]", text[: match.start(1)].rstrip(" \t\v\f\x01")))
        name = match[1]
        if name.startswith("if"):
            stack.append((line, name, False))
        elif not stack:
            faults.append((line, f"#{name} without #if"))
        elif name == "endif":
            stack.pop()
        else:
            opening, opening_name, has_else = stack[-1]
            if has_else:
                faults.append((line, f"#{name} after #else"))
            stack[-1] = (opening, opening_name, has_else or name == "else")
    return sorted([*faults, *((line, f"#{name} without #endif") for line, name, _ in stack)])


def _without_newlines(match: re.Match[str]) -> str:
    newlines = _INNER_NEWLINE * match[0].count("\n")
    if match["blank"] is not None:
        return newlines or " "
    return f"_{newlines}" if match["literal"] is not None else match[0]


# Versions.


def _pyproject(objects: Objects, source: SourceTree) -> dict[str, Any]:
    try:
        return tomllib.loads((objects.blob(source.tree, "pyproject.toml") or b"").decode())
    except ValueError:
        return {}


def _project(objects: Objects, source: SourceTree) -> dict[str, Any]:
    project = _pyproject(objects, source).get("project")
    return project if isinstance(project, dict) else {}


def oldest_python(project: dict[str, Any]) -> tuple[int, int]:
    """
    Return the oldest Python that the ``[project]`` table admits; this Python if it does not say.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        admitted = SpecifierSet(
            str(project.get("requires-python", ">=" + platform.python_version()))
        )
    except InvalidSpecifier:
        return sys.version_info[:2]
    return 3, next(
        (minor for minor in range(_OLDEST, _NEWEST) if f"3.{minor}" in admitted),
        sys.version_info[1],
    )


def build_requirements(session: RunContext, source: SourceTree) -> Iterator[str]:
    """Yield the build requirements of *source* that this Python or the locked tools do not meet."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    if session.project.fork(source.fork).build == "headers":
        return
    wanted = str(_project(session.objects, source).get("requires-python", ""))
    try:
        if platform.python_version() not in SpecifierSet(wanted):
            yield (
                f"pyproject.toml: {source.fork} wants Python {wanted}; this is "
                f"{platform.python_version()}"
            )
    except InvalidSpecifier:
        yield f"pyproject.toml: requires-python {wanted!r} cannot be read"
    system = _pyproject(session.objects, source).get("build-system")
    texts = system.get("requires", []) if isinstance(system, dict) else []
    locked = {
        canonicalize_name(name): WheelName.of(file).version
        for name, file, _ in pylock.wheels(session.project)
    }
    for text in map(str, texts):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        # A graft uses few of the tools that upstream lists; a tool that is not locked is not used.
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(Version(version), prereleases=True):
            yield (
                f"pyproject.toml: building {source.fork} requires {text}, and pylock.toml has "
                f"{version}"
            )


def fork_requirements(
    session: RunContext, requirements: Iterable[str], origin: str
) -> Iterator[str]:
    """Yield the *requirements* on forks of the stack that their locked versions do not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    settings = toolchain.spec(session.project).forks
    forks = {
        canonicalize_name(fork.distribution): name
        for name, fork in settings.items()
        if fork.distribution
    }
    for requirement in map(Requirement, requirements):
        fork = forks.get(canonicalize_name(requirement.name), "")
        version = _upstream_version(session, fork) if fork else ""
        local = f"{version}+{session.project.spec.label}"
        if version and not requirement.specifier.contains(local, prereleases=True):
            yield (
                f"{origin}: the wheel would require {requirement}, and the stack's {fork} is "
                f"{version}"
            )


def _upstream_version(session: RunContext, fork: str) -> str:
    """Return upstream's version of *fork* in the lock, empty if it is not a version."""
    from packaging.version import InvalidVersion, Version

    lock = session.lock.forks[fork]
    text = lock.sdist.version if lock.sdist else lock.git.ref.removeprefix("v") if lock.git else ""
    try:
        return str(Version(text))
    except InvalidVersion:
        return ""


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
    # Measuring a build folder takes a while, and is needed only if space is short.
    if (
        need > free
        and need - _size(session.store.root / "work" / session.project.stack / fork) > free
    ):
        yield (
            f"disk: building {fork} takes about {need / 1e9:.1f} GB in the cache directory "
            f"({session.store.root}), where {free / 1e9:.1f} GB are free"
        )


def _size(folder: Path) -> int:
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files if not file.is_symlink())


def host_compiler(session: RunContext, fork: str) -> Iterator[str]:
    """
    Check that there is a C++ compiler where one is needed; its version is CMake's to judge.

    Raises:
        tool-missing: There is none.
    """
    if (
        session.project.fork(fork).build == "graft"
        and not session.cross
        and not cross.compiler(session)
    ):
        raise CommandError("tool-missing", f"{cross.driver(session)} is not installed.")
    yield from ()


def memory(session: RunContext, source: SourceTree) -> Iterator[str]:
    """
    Yield the units whose recorded compile took more memory than compilers may use here.

    It is a warning if a build folder or a compiler cache may have their objects.
    """
    fork, budget = source.fork, ninja.memory_budget(session.memory)
    if session.project.fork(fork).build != "graft":
        return
    costs = Costs.of(session, fork)
    paths = [
        path
        for path in session.objects.paths(source.tree)
        if PurePosixPath(path).suffix in SUFFIXES
    ]
    expected = {path: costs.expected(path) for path in paths}
    too_large = {
        path: cost.megabytes
        for path, cost in expected.items()
        if cost.measured and cost.megabytes > budget
    }
    begun = any(
        (session.store.root / "work" / session.project.stack / fork).glob("*/build/.ninja_log")
    )
    cached = (
        session.cached and config.config().compiler_cache.tool != "none" and shutil.which("ccache")
    )
    for path, megabytes in sorted(too_large.items(), key=lambda item: -item[1]):
        taken = f"memory: compiling {path} takes {megabytes / 1000:.1f} GB, as measured"
        line = f"{taken}; compilers may hold {budget / 1000:.1f} GB here"
        if begun or cached:
            console.warn(f"{line}; unless its object is at hand, the build will end there")
        else:
            yield line


# The base of a graft.


def base_wheel(session: RunContext, source: SourceTree, settings: ForkEnvironment) -> Iterator[str]:
    """
    Yield the requirements of the official wheel that the stack does not meet.

    Raises:
        source-mismatch: Its file in the store is not the one that the lock names.
        base-mismatch, requirement-mismatch: As `graft.check_base`.
    """
    locked = session.lock.forks[source.fork].bases.get(session.machine)
    if session.project.fork(source.fork).build != "graft" or locked is None:
        return
    path = download.path_of(session.store, locked.sha256, locked.filename)
    # The store may have held it for weeks since its download was verified.
    if (sha256 := digest.sha256_file(path)) != locked.sha256:
        raise SourceError(
            "source-mismatch",
            f"{path.name} in the store is no longer the file that the lock names.",
            details=[f"lock: {locked.sha256}", f"file: {sha256}"],
            todo=f"Remove {path}; the next run fetches it again.",
        )
    graft.check_base(session, source, path, settings)
    yield from fork_requirements(session, _requirements(path, settings), path.name)


def _requirements(wheel: Path, settings: ForkEnvironment) -> list[str]:
    """
    Return the requirements that a graft keeps from the official *wheel*, without those of extras.
    """
    from email.parser import BytesParser

    with zip_file(wheel) as opened:
        metadata = opened.read(f"{WheelName.of(wheel.name).info}/METADATA")
    header = archive.change_requirements(metadata, dict.fromkeys(settings.requires, "")).partition(
        b"\n\n"
    )[0]
    lines = BytesParser().parsebytes(header).get_all("Requires-Dist") or []
    return [str(line) for line in lines if "extra ==" not in str(line)]
