"""
``sparkwright fetch``: every locked source, base wheel and tool, so that the rest works without a
network.
"""

from __future__ import annotations

import argparse

from sparkwright.builder.environment import toolchain
from sparkwright.core.console import console
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Bring the sources and the bases for this machine into the store, and install the tools."""
    fetched = [fetch.fetch(session, fork) for fork in session.forks]
    bases = []
    for fork in session.forks:
        if base := session.lock.forks[fork].bases.get(session.machine):
            package_index.obtain(
                session.store, base.name, base.filename, base.sha256, offline=session.offline
            )
            bases.append(base)
    tools = toolchain.obtain(session)
    rows = [
        [one.fork, one.kind, one.origin, one.tree[:12], "" if one.resolved else "unresolved"]
        for one in fetched
    ]
    rows += [["", "base", base.filename, base.sha256[:12], ""] for base in bases]
    console.table("in the store", ["fork", "kind", "origin", "tree or hash", ""], rows, result=True)
    console.document({"sources": fetched, "bases": bases, "tools": tools.key})
    return 0
