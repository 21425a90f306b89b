"""
``sparkwright status``: one table per stack of what it carries, why, and whether it is still needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime

from sparkwright.cherry_picks import drift
from sparkwright.cherry_picks.drift import Line
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Show every stack of the checkout, or the one that the command line names."""
    root, today = session.project.root, datetime.datetime.now(datetime.UTC).date()
    names = (
        [arguments.stack]
        if arguments.stack
        else sorted((path.parent.name for path in root.glob("forks/*/stack.yaml")), reverse=True)
    )
    made: dict[str, list[Line]] = {}
    for name in names:
        project = Project(root, name)
        forks = [
            fork for fork in project.spec.forks if not arguments.fork or fork in arguments.fork
        ]
        one = dataclasses.replace(session, project=project, forks=tuple(forks))
        made[name] = [line for fork in forks for line in drift.status(one, fork, today)]
        _show(name, made[name])
    console.document({"stacks": made})
    return 0


def _show(stack: str, lines: list[Line]) -> None:
    rows = [
        [
            f"{one.fork}{one.name}"
            if one.name.startswith("#")
            else f"{one.fork}/{one.name.removesuffix('.patch')}",
            f"{one.age} d" if one.age >= 0 else "?",
            one.here,
            one.needed,
            one.superseded,
            one.reason,
        ]
        for one in lines
    ]
    console.table(
        f"stack {stack}",
        ["patch", ">age", "here", "still needed?", "superseded by", "why"],
        rows,
        result=True,
    )
    picks = sum(one.name.startswith("#") for one in lines)
    console.result(
        f"{picks} picks and {len(lines) - picks} patches of ours, "
        f"{sum(one.lines for one in lines):,} lines of diff\n"
    )
