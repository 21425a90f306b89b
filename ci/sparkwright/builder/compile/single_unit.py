"""One unit, compiled in the real environment: for a patch that is being written, and for what a unit costs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.builder import source_tree
from sparkwright.builder.arch import planning
from sparkwright.builder.compile import ninja as compiling
from sparkwright.builder.compile.ninja import Command, Run
from sparkwright.builder.environment import toolchain
from sparkwright.builder.workspace import Workspace
from sparkwright.core.console import console, duration
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import Session


class OneUnit(msgspec.Struct, frozen=True):
    """A unit that was compiled, with what that cost; *objects* are the files that it made, one for each target that compiles it."""

    fork: str
    unit: str
    seconds: float
    megabytes: int
    objects: tuple[str, ...]


def compile_unit(session: Session, fork: str, name: str) -> OneUnit:
    """
    Compile the unit of *fork* whose path is *name* or ends with it, whether or not it is up to date, and make no wheel.

    Raises:
        UsageError: No unit is called so, or several are.
        compile-failed: And what a build raises before and while it compiles.
    """
    tools, settings = toolchain.obtain(session), toolchain.spec(session.project).forks[fork]
    with session.store.lock(Workspace.name(session, fork)):
        planning.planned(session, tools, source_tree.make(session, fork), configured=True)
        workspace = Workspace(session, tools, settings, fork)
        source = workspace.room.inside(workspace.source)
        found = matching(compiling.commands(workspace.build), f"{source}/", name)
        unit = found[0].file.removeprefix(f"{source}/")
        inside = workspace.room.inside(workspace.build)
        objects = [Path(command.output) for command in found]
        objects = [path.relative_to(inside) if path.is_absolute() else path for path in objects]
        for path in objects:
            (workspace.build / path).unlink(missing_ok=True)
        # Its own cost is what is asked for, so the cache may keep the result and not give one.
        again = {"CCACHE_RECACHE": "true"}
        run = Run(session, tools, fork, workspace.folder, workspace.room, [str(path) for path in objects], workspace.environment(), again)
        costs = [outcome for outcome in run.compile().outcomes if outcome.unit == unit]
    made = tuple(str(workspace.build / path) for path in objects)
    return OneUnit(fork, unit, round(sum(cost.seconds for cost in costs), 2), max(cost.megabytes for cost in costs), made)


def matching(commands: Sequence[Command], root: str, name: str) -> list[Command]:
    """
    Return the compiler calls of the one unit that *name* means.

    Raises:
        UsageError: None is meant, or more than one.
    """
    units = sorted({command.file.removeprefix(root) for command in commands})
    wanted = name.removeprefix(root).removeprefix("./").strip("/")
    meant = [unit for unit in units if unit == wanted] or [unit for unit in units if f"/{unit}".endswith(f"/{wanted}")]
    if len(meant) == 1:
        return [command for command in commands if command.file.removeprefix(root) == meant[0]]
    if meant:
        raise UsageError("usage", f"{name!r} means {len(meant)} units.", details=meant, todo="Name more of the path.")
    names = {Path(unit).name: unit for unit in units}
    near = difflib.get_close_matches(Path(wanted).name, names, n=5, cutoff=0.5)
    details = [f"close to it: {names[one]}" for one in near] or [f"{len(units)} units, such as {units[0]}"] if units else ["no units"]
    raise UsageError(
        "usage", f"No unit is called {name!r}.", details=details, todo="Name a source by its path in the tree, or by the end of it."
    )


def show(one: OneUnit) -> None:
    """Print what the unit cost and where its objects are."""
    console.result(f"{one.fork}: {one.unit}: {duration(one.seconds)}, {one.megabytes} MB")
    for path in one.objects:
        console.result(path)
