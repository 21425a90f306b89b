"""Drift: what becomes of a series on later states of its upstream. Nothing reviewed is written; the answers stay in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import already_upstream, apply_check, diff, series
from sparkwright.cherry_picks.already_upstream import Base, Evidence
from sparkwright.cherry_picks.apply_check import Outcome
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest
from sparkwright.forks.context import Session
from sparkwright.forks.mirror import Mirror

#: Share of a patch's added lines that stand in a base on which it conflicts, from which on the base most likely has it.
LIKELY = 0.8

State = Literal["applies", "moves", "already-upstream", "likely-upstream", "empty", "conflict"]


class Trial(msgspec.Struct, frozen=True):
    """
    One patch on one base.

    Attributes:
        sha256: Of what was tried.
        state: ``moves`` is a patch of ours that applies at other lines than it names; ``likely-upstream`` is a conflict with most of
            the added lines in place: taken, and changed since. No test proves it.
        moved: Hunks that stand at other lines than they name.
        standing: Added lines that stand in the base, of how many.
        evidence: What the three tests found; empty where the patch applies.
    """

    patch: str
    sha256: str
    base: str
    state: State
    moved: int
    standing: tuple[int, int]
    evidence: tuple[Evidence, ...]
    says: tuple[str, ...] = ()


class Absorbed(msgspec.Struct, frozen=True):
    """
    Where a patch ended, in the order of the bases.

    Attributes:
        last: The last base in a row, from the first, that takes the patch; empty when none does.
        first: The first base that has it; empty when none has.
        state: What it is on the newest base.
    """

    patch: str
    last: str
    first: str
    state: State
    proof: str = ""


class Drift(msgspec.Struct, frozen=True):
    """The trials of one fork's series, as of a *day* (UTC)."""

    fork: str
    stack: str
    day: str
    bases: tuple[str, ...]
    trials: tuple[Trial, ...]

    def of(self, patch: str) -> list[Trial]:
        """Return the trials of the patch of that name, in the order of the bases."""
        return [one for one in self.trials if one.patch == patch]


class Told(msgspec.Struct, frozen=True):
    """The drift of one fork, in a `Document`."""

    of: Drift


class Document(msgspec.Struct, frozen=True):
    """What ``sparkwright drift --json`` prints, as others read it; *error* where it failed."""

    drift: tuple[Told, ...] = ()
    error: dict[str, object] = {}


def trials(session: Session, fork: str, book: Ledger | None, patches: Sequence[Patch], base: Base) -> list[Trial]:
    """Return what becomes of every patch on *base*; those that do not apply are left out for the ones after them."""
    records = [already_upstream.record_of(book, one) for one in patches]
    pins = [(one.name, one.sha256, record.merge if record else "") for one, record in zip(patches, records, strict=True)]
    key = digest.key("trial", {"fork": fork, "base": base, "patches": pins})
    known = session.store.get("trial", key, _Trials)
    if known:
        return list(known.trials)
    mirror = session.mirror(book.url) if book else None
    taken = apply_check.taken_away(session.objects, base.tree, patches)
    outcomes = series.evaluate(session.objects, base.tree, patches)
    made = [_trial(session, mirror, base, *one, taken) for one in zip(patches, records, outcomes, strict=True)]
    # What could not be read today may be readable tomorrow.
    if not base.commit or all(test.holds is not None for one in made for test in one.evidence if test.test == "patch-id"):
        session.store.put("trial", key, _Trials(tuple(made)))
    return made


class _Trials(msgspec.Struct, frozen=True):
    trials: tuple[Trial, ...]


def _trial(
    session: Session, mirror: Mirror | None, base: Base, one: Patch, record: Record | None, outcome: Outcome, taken: frozenset[str]
) -> Trial:
    standing = diff.standing(session.objects, base.tree, one.sections())
    if outcome.status == "applied":
        state: State = "moves" if outcome.moved and not one.pick else "applies"
        return Trial(one.name, one.sha256, base.name, state, outcome.moved, standing, ())
    found = already_upstream.evidence(session, mirror, base, one, record, taken)
    if outcome.status == "already-upstream" or any(test.holds for test in found):
        state = "already-upstream"
    elif outcome.status == "empty":
        state = "empty"
    else:
        state = "likely-upstream" if standing[1] and standing[0] >= LIKELY * standing[1] else "conflict"
    return Trial(one.name, one.sha256, base.name, state, outcome.moved, standing, found, outcome.says)


def absorbed(drift: Drift, patch: str) -> Absorbed:
    """Return where the patch of that name ended; see `Absorbed`."""
    found = drift.of(patch)
    last = ""
    for one in found:
        if one.state not in ("applies", "moves"):
            break
        last = one.base
    first = next((one for one in found if one.state in ("already-upstream", "likely-upstream")), None)
    return Absorbed(patch, last, first.base if first else "", found[-1].state if found else "conflict", proof(first) if first else "")


def proof(one: Trial) -> str:
    """Return why upstream counts as having the patch of the trial *one*."""
    proved = [test for test in one.evidence if test.holds]
    if proved:
        return "; ".join(f"{test.test}: {test.says}" for test in proved)
    return f"{one.standing[0]} of its {one.standing[1]} added lines stand there"


def _key(session: Session, fork: str) -> str:
    return digest.key("drift", {"stack": session.project.stack, "fork": fork})


def save(session: Session, drift: Drift) -> None:
    """Keep *drift* as the last one of its stack and fork."""
    session.store.put("drift", _key(session, drift.fork), drift)


def last(session: Session, fork: str) -> Drift | None:
    """Return the last drift of *fork* that was looked at from this store; None when there was none."""
    return session.store.get("drift", _key(session, fork), Drift)
