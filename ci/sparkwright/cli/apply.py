"""``sparkwright apply``: series and arch rules, with a tree id after every step."""

from __future__ import annotations

import argparse

from sparkwright.builder import source_tree
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Show each fork's way from the locked tree to the tree that is built."""
    trees = [source_tree.make(session, fork) for fork in session.forks]
    for tree in trees:
        rows = [[tree.source.tree, "source", tree.source.origin]]
        rows += [[step.tree, "patch", step.subject] for step in tree.steps]
        rows += [
            [tree.tree, "rule", f"{site.rule} at {site.file}:{site.line}"] for site in tree.sites
        ]
        console.table(tree.fork, ["tree", "step", "what"], rows, result=True)
    console.document({"trees": trees})
    return 0
