"""Compile one unit in the real environment: for a patch that is being written, and for its cost."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.builder import source_tree
from sparkwright.builder.arch import plan
from sparkwright.builder.compile import ninja
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja import BuildFolder
from sparkwright.builder.compile.ninja_file import CompileEdge
from sparkwright.builder.environment import toolchain
from sparkwright.builder.workspace import Workspace
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext


class SingleUnit(msgspec.Struct, frozen=True):
    """
    A compiled unit with its cost.

    Attributes:
        objects: A file for each target that compiles the unit.
    """

    fork: str
    unit: str
    seconds: float
    megabytes: int
    objects: tuple[str, ...]


def compile_unit(session: RunContext, fork: str, name: str) -> SingleUnit:
    """
    Compile the unit of *fork* whose path is *name* or ends with it, up to date or not; make no
    wheel.

    Raises:
        UsageError: No unit has this name, or several have.
        compile-failed: And what a build raises before and while it compiles.
    """
    tools, settings = toolchain.obtain(session), toolchain.settings(session, fork)
    with session.store.lock(Workspace.name(session, fork)):
        plan.obtain(session, tools, source_tree.make(session, fork), configured=True)
        workspace = Workspace(session, tools, settings, fork)
        folder = BuildFolder.of(
            session, tools, fork, workspace.folder, workspace.sandbox, workspace.environment()
        )
        edges = matching(folder.edges(), name)
        goals = [edge.output for edge in edges]
        for output in goals:
            (folder.path / output).unlink(missing_ok=True)
        # The cache may store the object, but not give one: the cost is what is asked for.
        env, limits = {"CCACHE_RECACHE": "true"}, ninja.limits(session)
        calls = [
            call
            for call in folder.compile(goals, Costs.of(session, fork), limits, env)
            if call.output in goals
        ]
    return SingleUnit(
        fork,
        edges[0].unit,
        round(sum(call.seconds for call in calls), 2),
        max(call.megabytes for call in calls),
        tuple(str(folder.path / output) for output in goals),
    )


def matching(edges: Sequence[CompileEdge], name: str) -> list[CompileEdge]:
    """
    Return the edges that compile the unit *name*.

    Raises:
        UsageError: No unit has this name, or several have.
    """
    units = sorted({edge.unit for edge in edges})
    # A compiler names a unit by its path in the sandbox, a person by the end of its path.
    wanted = name.removeprefix("./").strip("/")
    exact = [unit for unit in units if unit == wanted or name.endswith(f"/{unit}")]
    matches = exact or [unit for unit in units if f"/{unit}".endswith(f"/{wanted}")]
    if len(matches) == 1:
        return [edge for edge in edges if edge.unit == matches[0]]
    last = Path(wanted).name
    similar = difflib.get_close_matches(last, [Path(unit).name for unit in units], n=5, cutoff=0.5)
    raise UsageError(
        "usage",
        f"{name!r} means {len(matches)} units.",
        details=matches or [unit for unit in units if Path(unit).name in similar],
        todo="Name a source by its path in the tree, or by the end of it.",
    )
