"""
``sparkwright export``: the commits of a worktree back to patch files; or the check that the files
are what commits give.
"""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import ledger, rebase, series
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.cli.rebase import command, only_fork
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Write the series of one fork from its worktree; with --check, check that every series is in the
    exported form.
    """
    if arguments.check:
        console.document(
            {"checked": {fork: rebase.check(Upstream(session, fork)) for fork in session.forks}}
        )
        return 0
    fork = only_fork(session, worktree=True)
    if rebase.folder_of(session, fork).exists():
        changed = from_worktree(session, fork, arguments.drop)
    else:
        series.names(session.project.series_folder(fork))
        changed = rebase.write(session, fork, rebase.rendered(Upstream(session, fork)))
    for line in changed or ["nothing changed"]:
        console.result(line)
    console.document({"fork": fork, "changed": changed})
    return 0


def from_worktree(session: RunContext, fork: str, drop: list[str]) -> list[str]:
    """
    Write the series from the worktree of *fork*, remove the worktree, and return a line per change.
    """
    state, files = rebase.collect(session, fork, drop)
    for name, reason in state.gone.items():
        console.note(f"dropped: {name}, {reason}")
    changed = rebase.write(session, fork, files, state.files)
    rebase.abort(session, fork)
    book = ledger.load(session.project.root, fork)
    carried = {record.name for record in book.carried(session.project.stack)} if book else set()
    for name in [name for name in (*state.gone, *drop) if name in carried]:
        console.warn(
            f"the ledger still carries {name}: {command(session, fork, 'pick')} {name[1:]} --drop"
        )
    return changed
