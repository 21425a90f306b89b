"""``sparkwright bisect``: the first upstream commit or release at which a patch stops applying, or is already there."""

from __future__ import annotations

import argparse

from sparkwright.cherry_picks import bases, bisect, ledger, series
from sparkwright.cherry_picks.bisect import Turn
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cli.drift import MARKS
from sparkwright.cli.rebase import only_fork
from sparkwright.console import console
from sparkwright.errors import NotProvided
from sparkwright.forks.session import Session


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Search between two ends, by halves, and tell what turned and who did it."""
    fork = only_fork(session)
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


def _upto(patches: tuple[Patch, ...], name: str, *, alone: bool) -> list[Patch]:
    """Return the patch that *name* means, after those that it stands on."""
    called = [{one.name, one.name.removesuffix(".patch"), *([str(one.pick)] if one.pick else [])} for one in patches]
    at = next((number for number, words in enumerate(called) if name in words), None)
    if at is None:
        raise NotProvided(f"The series has no patch {name!r}.", details=[one.name for one in patches])
    return [patches[at]] if alone else list(patches[: at + 1])


def _over_commits(session: Session, fork: str, patches: list[Patch], arguments: argparse.Namespace) -> Turn:
    book = ledger.require(session.project.root, fork)
    start, end = bisect.ends(session, session.mirror(book.url), book, patches[-1], arguments.start, arguments.end)
    return bisect.over_commits(session, fork, book, patches, start, end)


def _over_releases(session: Session, fork: str, patches: list[Patch], arguments: argparse.Namespace) -> Turn:
    sdist = session.lock.forks[fork].sdist
    if sdist is None:
        raise NotProvided(f"{fork} has no releases on the package index.")
    found = bases.between(session, sdist.name, arguments.start or sdist.version, arguments.end)
    return bisect.over_releases(session, fork, ledger.load(session.project.root, fork), patches, found)
