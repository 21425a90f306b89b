"""
``sparkwright bisect``: what changed something.

With a patch: the first upstream commit or release at which it stops applying, or is already there. With ``--run``: the commit, the
patch or the pieces of a stack that changed the answer of a command.
"""

from __future__ import annotations

import argparse
import dataclasses

from sparkwright.builder import bisect_axes
from sparkwright.builder.bisect_axes import Cause
from sparkwright.builder.bisect_command import Predicate
from sparkwright.cherry_picks import bisect, ledger, series, upstream_revisions
from sparkwright.cherry_picks.bisect import Turn
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cli.drift import MARKS
from sparkwright.cli.rebase import only_fork
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Search between two ends, by halves, and tell what turned and who did it."""
    fork = only_fork(session)
    if bool(arguments.run) == bool(arguments.patch):
        raise UsageError("usage", "bisect wants a patch, or --run and a command.")
    if arguments.run:
        return _measured(session, fork, arguments)
    patches = _upto(series.of(session, fork), arguments.patch, alone=arguments.alone)
    turn = _over_releases(session, fork, patches, arguments) if arguments.releases else _over_commits(session, fork, patches, arguments)
    console.table(
        f"{turn.patch}: {turn.tried[0]} of {turn.tried[1]} bases tried", ["", "base", "there it"],
        [["last", turn.last.base, MARKS[turn.last.state]], ["first", turn.first.base, MARKS[turn.first.state]]], result=True,
    )  # fmt: skip
    console.result(turn.commit)
    if turn.page:
        console.result(turn.page)
    for one in turn.first.evidence:
        if one.holds:
            console.result(f"already upstream by {one.test}: {one.says}")
    console.document({"turn": turn})
    return 0


def _measured(session: Session, fork: str, arguments: argparse.Namespace) -> int:
    """Search for what changed the answer of a command, and show every state that was asked about, whatever comes of it."""
    session = dataclasses.replace(session, forks=(fork,))
    predicate = Predicate(session, fork, arguments.run, build=arguments.build, repeat=arguments.repeat, fresh=arguments.fresh)
    cause = None
    with session.store.lock(f"bisect-{session.project.stack}-{fork}"):
        try:
            cause = _cause(session, fork, predicate, arguments)
        finally:
            rows = [[one.name, one.answer, " ".join(map(str, one.status)) or one.why, f"{one.seconds:.1f}"] for one in predicate.steps]
            console.table(f"bisect {fork} over {arguments.over}", ["state", "answer", "exit status", ">seconds"], rows, result=True)
            console.document({"cause": cause, "steps": predicate.steps})
    console.result(f"{cause.answers[0]}: {cause.last}\n{cause.answers[1]}: {cause.first}")
    for what in (*cause.what, *filter(None, [cause.page])):
        console.result(what)
    return 0


def _cause(session: Session, fork: str, predicate: Predicate, arguments: argparse.Namespace) -> Cause:
    if arguments.over == "patches":
        return bisect_axes.over_patches(session, fork, predicate)
    if arguments.over == "locks":
        if not (arguments.start and arguments.end):
            raise UsageError("usage", "--over locks wants two stacks or revisions of this checkout: --from and --to.")
        sides = [bisect_axes.side(session, fork, name) for name in (arguments.start, arguments.end)]
        return bisect_axes.over_locks(sides[0], sides[1], (arguments.start, arguments.end), predicate)
    book = ledger.require(session.project.root, fork)
    ends = bisect.ends(session, session.mirror(book.url), book, None, arguments.start, arguments.end)
    return bisect_axes.over_commits(session, fork, book, ends, predicate, bare=arguments.alone)


def _upto(patches: tuple[Patch, ...], name: str, *, alone: bool) -> list[Patch]:
    """Return the patch that *name* means, after those that it stands on."""
    called = [{one.name, one.name.removesuffix(".patch"), *([str(one.pick)] if one.pick else [])} for one in patches]
    at = next((number for number, words in enumerate(called) if name in words), None)
    if at is None:
        raise SourceError("not-provided", f"The series has no patch {name!r}.", details=[one.name for one in patches])
    return [patches[at]] if alone else list(patches[: at + 1])


def _over_commits(session: Session, fork: str, patches: list[Patch], arguments: argparse.Namespace) -> Turn:
    book = ledger.require(session.project.root, fork)
    start, end = bisect.ends(session, session.mirror(book.url), book, patches[-1], arguments.start, arguments.end)
    return bisect.over_commits(session, fork, book, patches, start, end)


def _over_releases(session: Session, fork: str, patches: list[Patch], arguments: argparse.Namespace) -> Turn:
    sdist = session.lock.forks[fork].sdist
    if sdist is None:
        raise SourceError("not-provided", f"{fork} has no releases on the package index.")
    found = upstream_revisions.between(session, sdist.name, arguments.start or sdist.version, arguments.end)
    return bisect.over_releases(session, fork, ledger.load(session.project.root, fork), patches, found)
