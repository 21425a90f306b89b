"""``sparkwright plan``: what every CUDA unit will be compiled for, before minutes become an hour."""

from __future__ import annotations

import argparse

from sparkwright.build import plan, planning, sourcetree, toolchain
from sparkwright.build.workspace import Workspace
from sparkwright.console import console
from sparkwright.forks.session import Session


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Plan every fork that compiles; fail when a unit would not be native and is not kept with a reason."""
    compiled = [fork for fork in session.forks if session.project.fork(fork).build == "graft"]
    tools = toolchain.obtain(session) if compiled else None
    made = []
    for fork in compiled:
        assert tools is not None
        with session.store.lock(Workspace.name(session, fork)):
            made.append(planning.planned(session, tools, sourcetree.make(session, fork)))
        plan.show(made[-1].after, made[-1].before, result=True)
    for fork in session.forks:
        if fork not in compiled:
            console.note(f"{fork}: nothing is compiled")
    for one in made:
        plan.check(one.after, one.before)
    console.document({"plans": made})
    return 0
