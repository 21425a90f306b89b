"""
``sparkwright rebase``: the series as commits in a worktree, where a maintainer mends what does not
apply.
"""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import conflict, rebase, series
from sparkwright.cherry_picks.rebase import Rebased
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Make the worktree of one fork, or remove it with --abort."""
    upstream = Upstream(session, only_fork(session, worktree=arguments.abort))
    if arguments.abort:
        rebase.abort(session, upstream.fork)
        console.note(f"the worktree of {upstream.fork} is removed; the series is unchanged")
        console.document({"aborted": upstream.fork})
        return 0
    base = upstream.locked()
    if arguments.onto:
        base = upstream.named(arguments.onto, series.of(session, upstream.fork))
        if upstream.mirror and base.commit:
            upstream.mirror.tree(base.tree)
    rebased = rebase.start(upstream, base)
    console.document({"rebase": rebased})
    show(upstream, base, rebased)
    return 0


def only_fork(session: RunContext, *, worktree: bool = False) -> str:
    """
    Return the one fork that is meant: of several the one that has patches, or, with *worktree*, the
    one that has a worktree.

    Raises:
        UsageError: The stack has several, and the command line names none or several.
    """
    forks = list(session.forks)
    if len(forks) > 1 and worktree:
        forks = [fork for fork in forks if rebase.folder_of(session, fork).exists()] or forks
    if len(forks) > 1:
        forks = [fork for fork in forks if series.pins(session, fork)]
    if len(forks) != 1:
        raise UsageError("usage", "One fork at a time, please.", todo="Name it with --fork.")
    return forks[0]


def show(upstream: Upstream, base: Base, rebased: Rebased) -> None:
    """
    Print the outcome of every patch, and how to continue.

    Raises:
        patch-conflict: One waits in the worktree; the report is in the failure.
    """
    session, fork, folder = upstream.session, upstream.fork, rebased.folder
    rows = [[name, outcome] for name, outcome in rebased.outcomes.items()]
    console.table(f"{fork} on {base.name}", ["patch", "outcome"], rows, result=True)
    export = command(session, fork, "export")
    if not rebased.stopped:
        console.result(
            f"All of it is committed in {folder}; change what you like there, then: {export}"
        )
        return
    patches = series.of(session, fork)
    at = next(number for number, patch in enumerate(patches) if patch.name == rebased.stopped)
    resolve = f"resolve it in {folder}: git add FILE…, git am --continue"
    todo = (
        f"Resolve it in {folder} (git add FILE…, git am --continue), then {export}; until "
        f"then nothing reviewed is changed."
    )
    words = ["fetch", "-q", "--no-write-fetch-head", folder, "HEAD"]
    session.objects.run(words)
    tree = session.objects.resolve(f"{rebased.tip}^{{tree}}")
    raise conflict.explain(
        upstream, base, tree, patches[at], patches[:at], commands=(resolve, export), todo=todo
    )


def command(session: RunContext, fork: str, verb: str) -> str:
    """Return the command line of *verb* for this stack and fork."""
    return f"sparkwright {verb} --stack {session.project.stack} --fork {fork}"
