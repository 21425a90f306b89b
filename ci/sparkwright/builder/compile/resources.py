"""Is there room for a build on this machine: where its wheel goes, on the disk, in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja_file import SUFFIXES
from sparkwright.builder.environment import toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.core.console import console
from sparkwright.forks import context as sessions
from sparkwright.forks.context import Session


def output(session: Session, _source: SourceTree) -> Iterator[str]:
    """Yield why the wheel could not be put where it is to go."""
    place = session.output
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".sparkwright-"):
            pass
    except OSError as error:
        yield f"output: {place} cannot be written: {error.strerror} ({existing})"


def disk(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield for which folder the file system has less room than the build will take."""
    settings = toolchain.spec(session.project).forks[source.fork]
    need = settings.disk.get(session.project.fork(source.fork).build, 0) * 1_000_000
    free, work = shutil.disk_usage(session.store.root).free, session.store.root / "work" / session.project.stack / source.fork
    # Walking through a build folder takes a while, and is needed only where room is short.
    if need > free and need - _size(work) > free:
        yield (
            f"disk: building {source.fork} takes about {need / 1e9:.1f} GB in the cache directory "
            f"({session.store.root}), where {free / 1e9:.1f} GB are free"
        )


def memory(session: Session, source: SourceTree) -> Iterator[str]:
    """
    Yield the units of which it was measured that their compiler takes more than compilers may hold here.

    A build folder that has compiled before, or a compiler cache, may have their objects: then it is a warning, and the build decides.
    """
    fork, budget = source.fork, ninja.memory_budget(session.memory)
    if session.project.fork(fork).build != "graft":
        return
    costs = Costs.of(session, fork)
    paths = [path for path in session.objects.paths(source.tree) if PurePosixPath(path).suffix in SUFFIXES]
    too_large = {
        path: cost.megabytes
        for path in paths
        for cost in [costs.expected(path)]
        if cost.measured and cost.megabytes > budget
    }
    begun = any((session.store.root / "work" / session.project.stack / fork).glob("*/build/.ninja_log"))
    cached = session.cached and sessions.config().compiler_cache.tool != "none" and shutil.which("ccache")
    for path, megabytes in sorted(too_large.items(), key=lambda item: -item[1]):
        line = f"memory: compiling {path} takes {megabytes / 1000:.1f} GB, as measured; compilers may hold {budget / 1000:.1f} GB here"
        if begun or cached:
            console.warn(f"{line}; unless its object is at hand, the build will end there")
        else:
            yield line


def _size(folder: Path) -> int:
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files if not file.is_symlink())
