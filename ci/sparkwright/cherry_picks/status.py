"""Status: what a stack carries, how old it is, why, and whether it is still needed, from what the store knows; no host is asked."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils

import msgspec

from sparkwright.cherry_picks import diff, drift, ledger, series
from sparkwright.cherry_picks.drift import Drift
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import fetch
from sparkwright.forks.context import Session
from sparkwright.forks.lock import ForkLock


class Line(msgspec.Struct, frozen=True):
    """
    A patch or pick of a stack.

    Attributes:
        age: Days since its author's date; for a pick, since the commit that has it; −1 where that is not known.
        lines: Lines of its diff; 0 where the diff is not in the store.
        here: What it is on the locked source: ``applied``, or ``not tried`` where the store does not know.
        needed: Whether it is still needed, as far as the last drift tells.
        superseded: What took its place, with the evidence; empty when nothing did.
        page: Where people read about it.
    """

    fork: str
    name: str
    subject: str
    age: int
    lines: int
    here: str
    needed: str
    superseded: str
    reason: str
    drop_when: str
    page: str = ""


def of(session: Session, fork: str, today: datetime.date) -> list[Line]:
    """Return a line per pick and patch of *fork*, in the order of application."""
    book = ledger.load(session.project.root, fork)
    ours = series.load(session.project.series_folder(fork))
    here = _applied(session, fork)
    seen = drift.last(session, fork)
    carried = book.carried(session.project.stack) if book else ()
    return [_pick(session, fork, book, one, here, seen, today) for one in carried if book] + [
        _ours(fork, one, here, seen, today) for one in ours
    ]


def _applied(session: Session, fork: str) -> frozenset[str]:
    """Return the names of what is known to apply to one of the locked sources, with its pins as they are now."""
    locked = session.lock.forks[fork]
    trees = [_git_tree(session, fork, locked), *(file.tree for file in (locked.sdist, locked.wheel) if file)]
    known = (series.known(session, fork, tree) for tree in trees if tree)
    return frozenset(step.name for one in known if one for step in one.steps)


def _git_tree(session: Session, fork: str, locked: ForkLock) -> str:
    """Return the tree that patches are applied to, made of what is in the store; empty when something is not."""
    if not locked.git or not locked.git.resolved:
        return ""
    submodules = any(one.kind == "submodule" for one in locked.vendored.values())
    if not submodules and not locked.git.without:
        return locked.git.tree
    try:
        tree = session.objects.without_paths(locked.git.tree, locked.git.without)
        return fetch.with_submodules(dataclasses.replace(session, offline=True), fork, tree, locked.vendored)
    except SparkwrightError:
        return ""


def _pick(session: Session, fork: str, book: Ledger, one: Record, here: frozenset[str], seen: Drift | None, today: datetime.date) -> Line:
    day = datetime.date.fromisoformat(one.date) if one.date[:1].isdigit() else None
    path = session.store.root / "diffs" / one.sha256
    data = path.read_bytes() if path.exists() else b""
    pin = digest.sha256_bytes(diff.without(data, one.stacks[session.project.stack])) if data else ""
    needed, superseded = _needed(seen, one.name, pin)
    return Line(
        fork, one.name, one.title, (today - day).days if day else -1, data.count(b"\n"),
        "applied" if one.name in here else "not tried", needed, superseded, one.reason, one.drop_when, book.page(one.number),
    )  # fmt: skip


def _ours(fork: str, one: Patch, here: frozenset[str], seen: Drift | None, today: datetime.date) -> Line:
    try:
        age = (today - email.utils.parsedate_to_datetime(one.date).date()).days
    except ValueError:
        age = -1
    needed, superseded = _needed(seen, one.name, one.sha256)
    return Line(
        fork, one.name, one.subject, age, one.data.count(b"\n"), "applied" if one.name in here else "not tried", needed, superseded,
        one.reason, one.drop_when,
    )  # fmt: skip


def _needed(seen: Drift | None, name: str, sha256: str = "") -> tuple[str, str]:
    """Return whether a patch is still needed, and what superseded it, by the last drift; a changed patch was not looked at."""
    tried = [one for one in seen.of(name) if not sha256 or one.sha256 == sha256] if seen else []
    if not seen or not tried:
        return "not looked at", ""
    ended = drift.absorbed(seen, name)
    if ended.first:
        return f"until {ended.first}", f"{ended.first}: {ended.proof}"
    newest = tried[-1]
    return {"applies": f"yes, fits {newest.base}", "moves": f"yes, fits {newest.base} at other lines"}.get(
        newest.state, f"conflicts on {newest.base}"
    ), ""
