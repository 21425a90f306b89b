"""Watch: look at every pull request of the ledger again, and report what changed."""

from __future__ import annotations

import datetime

import msgspec

from sparkwright.cherry_picks import ledger, series
from sparkwright.cherry_picks.ledger import Record
from sparkwright.cherry_picks.series import PullRequestSnapshot
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import UNRESOLVED


class WatchedPull(msgspec.Struct, frozen=True):
    """
    A pull request of the ledger, and what changed.

    Attributes:
        state, seen: As the ledger has them now.
        previous: The day on which it was last seen before.
        visible: Whether it could be looked at; git alone does not see one that is not merged, if
            the repository at hand lacks the refs of pull requests.
        changes: A line per change; empty if nothing did.
        stacks: The stacks that carry it.
    """

    fork: str
    name: str
    title: str
    state: str
    seen: str
    previous: str
    visible: bool
    changes: tuple[str, ...]
    stacks: tuple[str, ...]


def refresh(context: RunContext, fork: str) -> list[WatchedPull]:
    """
    Look at every pull request of the ledger of *fork*, by GitHub's API or else by git alone, and
    write what the pins do not depend on: the day, the state of one that is not merged, and a title
    and an author that were unresolved. New commits are taken by `series.pin`.

    Raises:
        offline, source-unreachable: Neither the API nor the repository answers.
    """
    with context.store.lock(f"ledger-{fork}"):
        book, watched, by_api = ledger.require(context.project.root, fork), [], True
        today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        with console.progress("pull requests", len(book.records)) as progress:
            for count, old in enumerate(book.records, start=1):
                try:
                    pull = series.snapshot_by_api(context, book, old.number) if by_api else None
                    by_api = pull is not None
                    pull = pull or series.snapshot_by_git(context, book, old.number)
                except GitHubError as error:
                    if error.reference != "pull-request-gone":
                        raise
                    gone = ["it does not exist any more"] if by_api else []
                    pull, changes, fresh = None, gone, old
                if pull:
                    changes, fresh = _changes(old, pull), _refreshed(old, pull, today)
                    book = book.with_record(fresh)
                visible, stacks = bool(pull or changes), tuple(old.stacks)
                state = (fresh.title, fresh.state, fresh.seen, old.seen, visible)
                watched.append(WatchedPull(fork, old.name, *state, tuple(changes), stacks))
                progress.update(count, old.name)
        ledger.write(context.project.root, fork, book)
    return watched


def _changes(old: Record, pull: PullRequestSnapshot) -> list[str]:
    changes = []
    if UNRESOLVED not in (old.state, pull.state) and old.state != pull.state:
        changes.append(f"{pull.state}, was {old.state}")
    commits = {"merged as": (old.merge, pull.merge), "head": (old.head, pull.head)}
    for name, (before, now) in commits.items():
        if now not in ("", UNRESOLVED, before) and before != UNRESOLVED:
            changes.append(f"{name} {now[:12]}" + (f", was {before[:12]}" if before else ""))
    return changes


def _refreshed(old: Record, pull: PullRequestSnapshot, today: str) -> Record:
    names = [name for name in ("title", "author") if getattr(old, name) == UNRESOLVED]
    fields = {name: getattr(pull, name) for name in names}
    if pull.state == old.state:
        fields["seen"] = today
    elif "merged" not in (old.state, pull.state) and pull.state != UNRESOLVED:
        fields |= {"state": pull.state, "seen": today}
    return msgspec.structs.replace(old, **fields)
