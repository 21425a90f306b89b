"""
What can fail without a compiler fails first, and all of it in one answer.

A build takes the better part of an hour; a syntax error in a patched Python file would be met by whoever imports it, a lost ``#endif`` by
the last unit that includes the header. Each check here yields what it finds, a line each, and none stops at its first finding.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from sparkwright.builder import preprocessor, vendored, versions
from sparkwright.builder.compile import resources
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive as wheelfile
from sparkwright.builder.wheel import graft
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import download
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError


def check(session: Session, source: SourceTree, *, building: bool = True) -> None:
    """
    Require that *source* can be built here, as far as that can be known without compiling.

    Args:
        building: Look at this machine and at the base of a graft, too, and not at the source alone.

    Raises:
        early-check-failed: It cannot; every finding is listed. One failure that has a class of its own is raised as it is.
    """
    checks: list[Callable[[Session, SourceTree], Iterator[str]]] = [python, conditionals, versions.versions]
    if building:
        checks += [
            resources.output,
            resources.disk,
            resources.memory,
            base,
            sources,
        ]
    lines: list[str] = []
    errors: list[SparkwrightError] = []
    with console.step(f"check {source.fork} before it is built"):
        for one in checks:
            try:
                lines += one(session, source)
            except SparkwrightError as error:
                errors.append(error)
    if len(errors) == 1 and not lines:
        raise errors[0]
    count = len(lines) + len(errors)
    lines += [line for error in errors for line in _lines(error)]
    if lines:
        what = f"{source.fork} cannot be built: {count} {'finding' if count == 1 else 'findings'}."
        raise BuildError("early-check-failed", what, details=lines, data={"findings": lines})


def _lines(error: SparkwrightError) -> Iterator[str]:
    """Yield what *error* says, as one finding of several lines."""
    yield f"{error.what} ({error.reference})"
    yield from (f"  {line}" for line in error.details)
    yield f"  what to do: {error.todo}"


def _changed(session: Session, source: SourceTree, suffixes: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    changes = session.objects.changes(source.source.tree, source.tree)
    for change in changes:
        if change.status != "D" and PurePosixPath(change.path).suffix in suffixes:
            # Nothing where the path is a link or a submodule.
            yield change.path, session.objects.blob(source.tree, change.path) or b""


def python(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield what is no Python among the changed files, by the grammar of the oldest Python that the project admits, and of this one."""
    oldest = versions.oldest_python(session, source)
    for path, text in _changed(session, source, frozenset((".py", ".pyi"))):
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


def conditionals(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield the unbalanced conditionals that patches brought into C, C++ and CUDA files; what upstream has is upstream's."""
    for path, text in _changed(session, source, preprocessor.SUFFIXES):
        before = Counter(fault.what for fault in preprocessor.balance(_text(session.objects.blob(source.source.tree, path) or b"")))
        for fault in preprocessor.balance(_text(text)):
            if before[fault.what]:
                before[fault.what] -= 1
            else:
                yield f"{path}:{fault.line}: {fault.what}"


def _text(data: bytes) -> str:
    # Every byte is a character then; comments are in whatever encoding their author had.
    return data.decode("latin-1")


def base(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield what is wrong with the official wheel that a graft begins with: its hash, its layout, what it would require."""
    settings = toolchain.spec(session.project).forks[source.fork]
    locked = session.lock.forks[source.fork].bases.get(session.machine)
    if session.project.fork(source.fork).build != "graft" or locked is None:
        # What has no base, and should have one, is refused where it is asked for.
        return
    path = download.obtain(session.store, locked.name, locked.filename, locked.sha256, offline=session.offline)
    # It was right when it came. What the store has held for weeks is read once more before an hour is spent on it.
    if (found := digest.sha256_file(path)) != locked.sha256:
        what, details = f"{path.name} in the store is no longer the file that the lock names.", [f"lock: {locked.sha256}", f"file: {found}"]
        raise SourceError("source-mismatch", what, details=details, todo=f"Remove {path}; the next run fetches it again.")
    graft.compare(session, source, path, settings)
    yield from versions.forks(session, _required(path, settings), path.name)


def sources(session: Session, source: SourceTree) -> Iterator[str]:
    """Raise where a vendored source that the targets need cannot be had; nothing is yielded."""
    if toolchain.settings(session, source.fork).needs_vendored:
        vendored.fetch(session, source.fork)
    yield from ()


def _required(wheel: Path, settings: ForkEnvironment) -> list[str]:
    """Return what the graft of *wheel* will require as the official wheel does, extras aside."""
    from email.parser import BytesParser

    with zip_file(wheel) as archive:
        metadata = archive.read(f"{WheelName.of(wheel.name).info}/METADATA")
    text = wheelfile.requiring(metadata, dict.fromkeys(settings.requires, ""))
    found = BytesParser().parsebytes(text.partition(b"\n\n")[0]).get_all("Requires-Dist") or []
    return [str(line) for line in found if "extra ==" not in str(line)]
