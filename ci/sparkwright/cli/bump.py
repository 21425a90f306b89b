"""``sparkwright bump``: a fork to another upstream release, ending in a lock diff and a range-diff."""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import bases, bump, export, history, rebase
from sparkwright.cherry_picks.bump import Bump
from sparkwright.cherry_picks.drift import proof
from sparkwright.cli import drift
from sparkwright.cli.export import from_worktree
from sparkwright.cli.rebase import command, only_fork, show
from sparkwright.console import console
from sparkwright.errors import NotProvided, PatchConflict
from sparkwright.forks.session import Session


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Try the release, then write stack.yaml, lock.yaml, the ledger and the series; or leave a worktree where a person is needed."""
    fork = only_fork(session)
    if session.offline:
        raise NotProvided("bump asks the index and the upstream, which --offline forbids.", todo="Run it with a connection.")
    made = bump.plan(session, fork, arguments.to)
    _tell(made)
    if stuck := [one for one in made.trials if one.patch.startswith("#") and one.state in ("conflict", "likely-upstream")]:
        raise PatchConflict(
            f"{', '.join(one.patch for one in stuck)} of {fork} cannot go along to {arguments.to}.",
            details=[f"{one.patch}: {drift.MARKS[one.state]}; {proof(one)}" for one in stuck],
            todo=f"Drop each, or leave files out of it: {command(session, fork, 'pick')} NUMBER --drop, or --exclude PATH=REASON.",
        )
    before = export.line(session, fork, bases.of_source(session, fork))
    done = rebase.start(session, fork, made.base, files=made.files, gone=made.gone)
    if done.stopped:
        console.document({"bump": made, "rebase": done})
        show(session, fork, made.base, done)
    changed = from_worktree(session, fork, [])
    between = history.range_diff(session.objects, before, (done.base, done.tip))
    for line in (*changed, "", "range-diff of both series:", *between):
        console.result(line)
    console.document({"bump": made, "changed": changed, "range_diff": between})
    return 0


def _tell(made: Bump) -> None:
    rows = [[one.patch, drift.MARKS[one.state], made.gone.get(one.patch, "")] for one in made.trials]
    console.table(f"{made.fork} to {made.base.name}", ["patch", "on the new base it", "so it is dropped"], rows, result=True)
    for line in made.difference:
        console.result(line)
