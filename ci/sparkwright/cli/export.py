"""``sparkwright export``: the commits of a worktree back to patch files; or the check that the files are what commits give."""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import export, ledger, series, upstream_revisions, worktree
from sparkwright.cli.rebase import command, only_fork
from sparkwright.core.console import console
from sparkwright.forks.context import Session


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Write the series of one fork from its worktree; with --check, see that every series is in the exported form."""
    if arguments.check:
        checked = {fork: export.check(session, fork, upstream_revisions.of_source(session, fork)) for fork in session.forks}
        console.document({"checked": checked})
        return 0
    fork = only_fork(session, made=True)
    changed = from_worktree(session, fork, arguments.drop) if worktree.folder_of(session, fork).exists() else _again(session, fork)
    for line in changed or ["nothing changed"]:
        console.result(line)
    console.document({"fork": fork, "changed": changed})
    return 0


def from_worktree(session: Session, fork: str, drop: list[str]) -> list[str]:
    """Write what the worktree of *fork* holds, remove it, and return what changed, a line each."""
    made_for, files = export.collect(session, fork, drop)
    for name, says in made_for.dropped.items():
        console.note(f"dropped: {name}, {says}")
    changed = export.write(session, fork, files, made_for.files)
    worktree.abort(session, fork)
    book = ledger.load(session.project.root, fork)
    gone = [name for name in (*made_for.dropped, *drop) if book and name in {one.name for one in book.carried(session.project.stack)}]
    for name in gone:
        console.warn(f"the ledger still carries {name}: {command(session, fork, 'pick')} {name[1:]} --drop")
    return changed


def _again(session: Session, fork: str) -> list[str]:
    """Write the series anew from its own patches: the same bytes, unless somebody edited a file."""
    series.names(session.project.series_folder(fork))
    return export.write(session, fork, export.rendered(session, fork, upstream_revisions.of_source(session, fork)))
