"""
Which units a change recompiles, known before anything is compiled.

ninja keeps the files that each unit read when it was compiled. A unit of which none has changed since stays as it is. Where the build
folder holds the tree that is to be built, ninja itself is asked; where it still holds another one, the files in which the two
differ are held against what each unit read.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.builder import source_tree
from sparkwright.builder.compile import ninja as compiling
from sparkwright.builder.compile.costs import Traces
from sparkwright.builder.compile.ninja import Run
from sparkwright.builder.environment.toolchain import ForkEnvironment, Toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.workspace import Workspace
from sparkwright.core.console import console, duration
from sparkwright.forks.context import Session

_OUTPUT = re.compile(r"^(\S.*): #deps \d+, deps mtime \d+ \((?:VALID|STALE)\)$")


class Recompiling(msgspec.Struct, frozen=True):
    """
    What the next build compiles, or takes from the compiler cache.

    Attributes:
        total: Units of the targets.
        seconds: The work of *units* as expected, on one core.
    """

    total: int
    units: tuple[str, ...]
    seconds: float


def predicted(session: Session, tools: Toolchain, settings: ForkEnvironment, source: SourceTree) -> Recompiling | None:
    """
    Return what a build of *source* would compile; None where its build folder was never configured, so that it would be everything.

    Callers hold the workspace's lock. A change of the commands themselves is foreseen only when the folder was configured since.

    Raises:
        command-failed: The build folder cannot be read.
    """
    workspace = Workspace(session, tools, settings, source.fork)
    if not (workspace.build / "build.ninja").exists():
        return None
    room = workspace.room
    run = Run(session, tools, source.fork, workspace.folder, room, tuple(settings.targets), workspace.environment())
    units = set(run.outstanding())
    if changed := set(_changed(session, workspace, source)):
        build, root = str(room.inside(workspace.build)), f"{room.inside(workspace.source)}/"
        read = included(run.tool("deps"), build)
        for command in compiling.commands(workspace.build):
            files = read.get(posixpath.normpath(posixpath.join(build, command.output)), frozenset())
            if changed & {command.file, *files}:
                units.add(command.file.removeprefix(root))
    traces, found = Traces.of(session, source.fork), tuple(sorted(units))
    return Recompiling(run.units(settings), found, round(sum(traces.expected(unit).seconds for unit in found), 1))


def _changed(session: Session, workspace: Workspace, source: SourceTree) -> Iterator[str]:
    """Yield the files, as compilers see them, in which the folders differ from the trees that a build would put there."""
    folders = {workspace.folder: source.tree}
    for need in session.project.fork(source.fork).needs:
        folders[session.store.root / "work" / session.project.stack / need / "needed"] = source_tree.make(session, need).tree
    for folder, tree in folders.items():
        if (folder / "index").exists():
            _, held, _ = session.objects.run(["write-tree", "--missing-ok"], env={"GIT_INDEX_FILE": str(folder / "index")})
            for change in session.objects.changes(held.decode().strip(), tree):
                yield str(workspace.room.inside(folder / "src" / change.path))


def included(lines: Sequence[str], build: str) -> dict[str, frozenset[str]]:
    """Return object → files that its compiler read, from the *lines* of ``ninja -t deps``; paths are made absolute from *build*."""
    found: dict[str, set[str]] = {}
    output = ""
    for line in lines:
        if match := _OUTPUT.match(line):
            output = posixpath.normpath(posixpath.join(build, match[1]))
            found[output] = set()
        elif line.startswith("    ") and output:
            found[output].add(posixpath.normpath(posixpath.join(build, line.strip())))
    return {output: frozenset(files) for output, files in found.items()}


def show(made: Recompiling | None, fork: str) -> None:
    """Say what the next build compiles."""
    if made is None:
        console.note(f"{fork}: nothing was compiled here yet; a build compiles every unit, or takes it from the compiler cache")
        return
    count = len(made.units)
    some = f", {duration(made.seconds)} of work: {', '.join(Path(unit).name for unit in made.units[:3])}" if count else ""
    more = ", …" if count > 3 else ""
    console.note(f"{fork}: a build compiles {count} of {made.total} units, or takes them from the compiler cache{some}{more}")
