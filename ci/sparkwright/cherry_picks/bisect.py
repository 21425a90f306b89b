"""Bisect: the first upstream commit, or release, at which a patch stops applying or becomes already-upstream."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from sparkwright.cherry_picks import drift, history, upstream_revisions
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.drift import Trial
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.console import console
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.mirror import Mirror
from sparkwright.forks.package_index import shown


class Turn(msgspec.Struct, frozen=True):
    """
    Where a patch's answer changes.

    Attributes:
        last: The last base at which it is as it was at the start.
        first: The first at which it is something else.
        commit: What people call *first*: the commit's day and subject, or the release.
        page: Of the pull request that did it, where the subject names one.
        tried: How many bases were looked at, of how many.
    """

    patch: str
    last: Trial
    first: Trial
    commit: str
    page: str
    tried: tuple[int, int]


Try = Callable[[int], Trial]


def search(count: int, attempt: Try) -> tuple[Trial, int, Trial, int]:
    """
    Return the trial before the turn, the number of the base at the turn, its trial, and how many bases were tried.

    Args:
        count: How many bases there are, in order; the answer at the first and the last must differ.

    Raises:
        bisect-undecided: They do not.
    """
    low = attempt(0)
    high = attempt(count - 1) if count > 1 else low
    if good(low) == good(high):
        raise PatchError(
            "bisect-undecided",
            f"{low.patch} is the same at both ends.", details=[f"{one.base}: {one.state}" for one in (low, high)],
            todo="Choose other ends with --from and --to.",
        )  # fmt: skip
    first, last, tried = 0, count - 1, 2
    while last - first > 1:
        middle = (first + last) // 2
        found, tried = attempt(middle), tried + 1
        if good(found) == good(low):
            first, low = middle, found
        else:
            last, high = middle, found
    return low, last, high, tried


def good(one: Trial) -> bool:
    """Does the patch still have its work to do, and fit?"""
    return one.state in ("applies", "moves")


def over_commits(session: Session, fork: str, book: Ledger, patches: Sequence[Patch], start: str, end: str) -> Turn:
    """
    Return the commit of the upstream branch, after *start* up to *end*, at which the last of *patches* turns.

    Raises:
        bisect-undecided, source-unreachable, offline: See there.
        not-provided: *end* does not follow *start*.
    """
    mirror, objects = session.mirror(book.url), session.objects
    line = [start, *history.first_parents(objects, start, end)]
    if len(line) < 2:
        raise SourceError("not-provided", f"{end[:12]} does not follow {start[:12]}.")

    def attempt(number: int) -> Trial:
        base = upstream_revisions.of_commit(session, mirror, line[number][:12], line[number], patches)
        return _told(drift.trials(session, fork, book, patches, base)[-1], len(line))

    last, number, first, tried = search(len(line), attempt)
    turned = history.commit(objects, line[number])
    return Turn(patches[-1].name, last, first, turned.line(), book.page(turned.number) if turned.number else "", (tried, len(line)))


def over_releases(
    session: Session, fork: str, book: Ledger | None, patches: Sequence[Patch], found: Sequence[upstream_revisions.Release]
) -> Turn:
    """Return the release at which the last of *patches* turns; see `over_commits`."""

    def attempt(number: int) -> Trial:
        base: Base = upstream_revisions.of_release(session, found[number])
        return _told(drift.trials(session, fork, book, patches, base)[-1], len(found))

    last, number, first, tried = search(len(found), attempt)
    return Turn(patches[-1].name, last, first, f"{found[number].project} {found[number].version}", "", (tried, len(found)))


def _told(one: Trial, count: int) -> Trial:
    console.note(f"{one.base}: {one.state} (of {count})")
    return one


def ends(session: Session, mirror: Mirror, book: Ledger, patch: Patch | None, start: str, end: str) -> tuple[str, str]:
    """
    Return the commits to search between: what the command line names, else a pick's own base, and the tip of the branch.

    Raises:
        not-provided: There is no natural start for a patch of ours, or a name means nothing.
        offline, source-unreachable: The repository may not be asked, or does not answer.
    """
    tip = mirror.history(book.branch, newest=not session.offline)
    if not start and not (patch and patch.pick):
        what = patch.name if patch else "The search"
        raise SourceError(
            "not-provided", f"{what} needs a commit to start from.", todo="Name one with --from, or search releases with --releases."
        )
    begin = _commit(session, mirror, start) if start else book.record(patch.pick).base if patch else ""
    last = _commit(session, mirror, end) if end else tip
    for name, found in ((start, begin), (end or book.branch, last)):
        if not found:
            raise SourceError(
                "not-provided", f"{shown(book.url)} has no branch, tag or commit {name}.", todo="Choose ends with --from and --to."
            )
    return begin or "", last or ""


def _commit(session: Session, mirror: Mirror, name: str) -> str | None:
    """Return the commit that *name* means; its digits count where it is part of a history that is here."""
    if re.fullmatch(r"[0-9a-f]{7,40}", name):
        status, out, _ = session.objects.run(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"], check=False)
        if status == 0 or len(name) == 40:
            return out.decode().strip() or None
    return mirror.history(name, newest=not session.offline)
