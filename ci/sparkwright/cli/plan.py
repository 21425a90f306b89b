"""``sparkwright plan``: the arch of every CUDA unit, known before anything is compiled."""

from __future__ import annotations

import argparse

from sparkwright.builder import preflight, source_tree
from sparkwright.builder.arch import plan
from sparkwright.builder.environment import toolchain
from sparkwright.builder.workspace import Workspace
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Plan every fork that compiles; fail when a unit would not be native and is not kept with a
    reason.
    """
    compiled = [fork for fork in session.forks if session.project.fork(fork).build == "graft"]
    tools = toolchain.obtain(session) if compiled else None
    comparisons = []
    for fork in compiled:
        assert tools is not None
        with session.store.lock(Workspace.name(session, fork)):
            source = source_tree.make(session, fork)
            preflight.check(session, source, building=False)
            comparisons.append(plan.obtain(session, tools, source))
        plan.show(comparisons[-1].after, comparisons[-1].before, result=True)
    for fork in session.forks:
        if fork not in compiled:
            console.note(f"{fork}: nothing is compiled")
    for comparison in comparisons:
        plan.check(comparison.after, comparison.before)
    console.document({"plans": comparisons})
    return 0
