"""``sparkwright rebase``: the series as commits in a worktree, where a maintainer mends what does not apply."""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import already_upstream, apply_check, conflict, ledger, rebase, series, upstream_revisions, worktree
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.rebase import Rebased
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Make the worktree of one fork, or remove it with --abort."""
    fork = only_fork(session, made=arguments.abort)
    if arguments.abort:
        worktree.abort(session, fork)
        console.note(f"the worktree of {fork} is gone; the series is as it was")
        console.document({"aborted": fork})
        return 0
    base = base_of(session, fork, arguments.onto)
    made = rebase.start(session, fork, base)
    console.document({"rebase": made})
    show(session, fork, base, made)
    return 0


def only_fork(session: Session, *, made: bool = False) -> str:
    """
    Return the one fork that is meant: of several the one that has patches, or, with *made*, the one that has a worktree.

    Raises:
        UsageError: The stack has several, and the command line names none or several.
    """
    forks = list(session.forks)
    if len(forks) > 1 and made:
        forks = [fork for fork in forks if worktree.folder_of(session, fork).exists()] or forks
    if len(forks) > 1:
        forks = [fork for fork in forks if series.entries(session, fork)]
    if len(forks) != 1:
        raise UsageError("usage", "One fork at a time, please.", todo="Name it with --fork.")
    return forks[0]


def base_of(session: Session, fork: str, name: str) -> Base:
    """Return the base to work on, whole: the locked source, or what *name* means."""
    book = ledger.load(session.project.root, fork)
    mirror = session.mirror(book.url) if book else None
    if not name:
        return upstream_revisions.of_source(session, fork)
    base = upstream_revisions.named(session, fork, mirror, name, series.of(session, fork))
    if mirror is not None and base.commit:
        mirror.tree(base.tree)
    return base


def show(session: Session, fork: str, base: Base, made: Rebased) -> None:
    """
    Print what came of every patch, and how to go on.

    Raises:
        patch-conflict: One waits in the worktree; the report is in the failure.
    """
    rows = [
        [name, one.status, "; ".join(one.says) or (f"{one.moved} hunks at other lines" if one.moved else "")]
        for name, one in made.outcomes.items()
    ]
    console.table(f"{fork} on {base.name}", ["patch", "came out as", ""], rows, result=True)
    if not made.stopped:
        console.result(f"All of it is committed in {made.folder}; change what you like there, then: {command(session, fork, 'export')}")
        return
    patches = series.of(session, fork)
    at = next(number for number, one in enumerate(patches) if one.name == made.stopped)
    book = ledger.load(session.project.root, fork)
    mirror = session.mirror(book.url) if book else None
    taken = apply_check.taken_away(session.objects, base.tree, [patches[at]])
    error = conflict.error(conflict.explain(
        session.objects, session.objects.resolve(f"{made.tip}^{{tree}}"), patches[at], fork=fork, base=base.name, earlier=patches[:at],
        mirror=mirror, tip=(mirror.known(book.branch) or "") if mirror and book else "", origin=base.tree,
        evidence=already_upstream.evidence(session, mirror, base, patches[at], None, taken),
        commands=(f"resolve it in {made.folder}: git add FILE…, git am --continue", command(session, fork, "export")),
    ))  # fmt: skip
    raise PatchError(
        "patch-conflict",
        error.what, details=error.details, data=error.data,
        todo=f"Resolve it in {made.folder} (git add FILE…, git am --continue), then {command(session, fork, 'export')}; "
        "until then nothing reviewed is changed.",
    )  # fmt: skip


def _tip(session: Session, book: Ledger) -> str:
    """Return upstream's newest commit, brought now if it can be: the report names the commits behind a conflict."""
    try:
        return session.mirror(book.url).history(book.branch) or ""
    except SourceError as error:
        if error.reference not in {"offline", "source-unreachable"}:
            raise
        console.note(error.what)
        return ""


def command(session: Session, fork: str, verb: str) -> str:
    """Return the command line of *verb* for this stack and fork."""
    return f"sparkwright {verb} --stack {session.project.stack} --fork {fork}"
