"""
The status of a stack: what it carries, how old that is, why, and whether it is still needed, from
the store alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils

import msgspec

from sparkwright.cherry_picks import drift, ledger, patch, pull_requests, series
from sparkwright.cherry_picks.drift import Drift
from sparkwright.core import digest
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext


class Line(msgspec.Struct, frozen=True):
    """
    A patch or pick of a stack.

    Attributes:
        age: Days since its author's date; for a pick, since the commit that has it; −1 if unknown.
        lines: Lines of its diff; 0 if the diff is not in the store.
        here: On the locked source: ``applied``, or ``not tried`` if the store has no result.
        needed: Whether it is still needed, by the last drift.
        superseded: What took its place, with the evidence; empty if nothing did.
        page: The page of a pull request.
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


def of(session: RunContext, fork: str, today: datetime.date) -> list[Line]:
    """Return a line per pick and patch of *fork*, in the order of application."""
    book, stack = ledger.load(session.project.root, fork), session.project.stack
    applied, last = _applied(session, fork), drift.last(session, fork)
    lines = []
    for record in book.carried(stack) if book else ():
        data = pull_requests.stored_diff(session, record)
        sha256 = digest.sha256_bytes(patch.without(data, record.stacks[stack])) if data else ""
        day = datetime.date.fromisoformat(record.date) if record.date[:1].isdigit() else None
        here = "applied" if record.name in applied else "not tried"
        needed = _needed(last, record.name, sha256)
        lines.append(
            Line(
                fork,
                record.name,
                record.title,
                (today - day).days if day else -1,
                data.count(b"\n"),
                here,
                *needed,
                record.reason,
                record.drop_when,
                book.page(record.number) if book else "",
            )
        )
    for ours in series.load(session.project.series_folder(fork)):
        try:
            age = (today - email.utils.parsedate_to_datetime(ours.date).date()).days
        except ValueError:
            age = -1
        here = "applied" if ours.name in applied else "not tried"
        needed = _needed(last, ours.name, ours.sha256)
        lines.append(
            Line(
                fork,
                ours.name,
                ours.subject,
                age,
                ours.data.count(b"\n"),
                here,
                *needed,
                ours.reason,
                ours.drop_when,
            )
        )
    return lines


def _applied(session: RunContext, fork: str) -> frozenset[str]:
    """
    Return the names of the patches that applied to the locked source, if that is in the store.
    """
    try:
        source = fetch.fetch(dataclasses.replace(session, offline=True), fork)
    except SparkwrightError:
        return frozenset()
    stored = series.stored_tree(session, fork, source.tree)
    return frozenset(step.name for step in stored.steps) if stored else frozenset()


def _needed(last: Drift | None, name: str, sha256: str) -> tuple[str, str]:
    """
    Return whether a patch is still needed, and what superseded it; a drift of another version of it
    does not count.
    """
    tried = (
        [trial for trial in last.of(name) if not sha256 or trial.sha256 == sha256] if last else []
    )
    if not last or not tried:
        return "not looked at", ""
    end = last.absorbed(name)
    if end.first:
        return f"until {end.first}", f"{end.first}: {end.proof}"
    fits = {"applies": "yes, fits {}", "moves": "yes, fits {} at other lines"}.get(
        tried[-1].state, "conflicts on {}"
    )
    return fits.format(tried[-1].base), ""
