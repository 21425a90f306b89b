"""
Drift: the series on later revisions of its upstream; and the status of a stack, from the store
alone.

Neither writes anything that is reviewed.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import apply, ledger, patch, pull_requests, series
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base, Evidence, Upstream, evidence
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext

#: Share of its added lines that are in a base on which a patch conflicts, from which on the base
#: most likely has it.
LIKELY = 0.8

State = Literal["applies", "moves", "already-upstream", "likely-upstream", "empty", "conflict"]

#: Each state in words.
MEANING = {
    "applies": "applies",
    "moves": "applies at other lines",
    "already-upstream": "is upstream",
    "likely-upstream": "is upstream most likely",
    "empty": "is empty",
    "conflict": "conflicts",
}


class Trial(msgspec.Struct, frozen=True):
    """
    One patch on one base.

    Attributes:
        sha256: Of the patch.
        state: ``moves``: a patch of ours applies at other lines than it names; ``likely-upstream``:
            a conflict, but most of the added lines are there, so that upstream took it and changed
            it since, which no test proves.
        moved: Hunks that apply at other lines than they name.
        standing: Added lines that the base has, of how many.
        evidence: Results of the three tests; empty if the patch applies.
    """

    patch: str
    sha256: str
    base: str
    state: State
    moved: int
    standing: tuple[int, int]
    evidence: tuple[Evidence, ...]
    says: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether the patch applies and has an effect."""
        return self.state in ("applies", "moves")

    @property
    def proof(self) -> str:
        """The reason why upstream counts as having the patch."""
        proved = [f"{test.test}: {test.says}" for test in self.evidence if test.holds]
        return (
            "; ".join(proved)
            or f"{self.standing[0]} of its {self.standing[1]} added lines stand there"
        )


class Absorbed(msgspec.Struct, frozen=True):
    """
    The end of a patch, in the order of the bases.

    Attributes:
        last: The last base in a row, from the first, to which the patch applies; empty if there is
            none.
        first: The first base that has it; empty if there is none.
        state: On the newest base.
    """

    patch: str
    last: str
    first: str
    state: State
    proof: str = ""


class Drift(msgspec.Struct, frozen=True):
    """The trials of a fork's series, on a *day* (UTC)."""

    fork: str
    stack: str
    day: str
    bases: tuple[str, ...]
    trials: tuple[Trial, ...]

    def of(self, patch: str) -> list[Trial]:
        """Return the trials of the patch of that name, in the order of the bases."""
        return [trial for trial in self.trials if trial.patch == patch]

    @property
    def patches(self) -> list[str]:
        """The names of the patches."""
        return list(dict.fromkeys(trial.patch for trial in self.trials))

    def absorbed(self, patch: str) -> Absorbed:
        """Return the end of the patch of that name."""
        trials = self.of(patch)
        end = next(
            (number for number, trial in enumerate(trials) if not trial.applies), len(trials)
        )
        first = next(
            (trial for trial in trials if trial.state in ("already-upstream", "likely-upstream")),
            None,
        )
        last = trials[end - 1].base if end else ""
        state = trials[-1].state if trials else "conflict"
        return Absorbed(
            patch, last, first.base if first else "", state, first.proof if first else ""
        )


class DriftEntry(msgspec.Struct, frozen=True):
    """The drift of one fork, in a `Document`."""

    of: Drift


class Document(msgspec.Struct, frozen=True):
    """The output of ``drift --json``; *error* if it failed."""

    drift: tuple[DriftEntry, ...] = ()
    error: dict[str, object] = {}


def trials(upstream: Upstream, patches: Sequence[Patch], base: Base) -> list[Trial]:
    """
    Return the trials of *patches* on *base*; each is tried without the earlier ones that do not
    apply.
    """
    session, book = upstream.session, upstream.book
    merges = {record.name: record.merge for record in (book.records if book else ())}
    names = [(patch.name, patch.sha256, merges.get(patch.name, "")) for patch in patches]
    key = digest.key("trial", {"fork": upstream.fork, "base": base, "patches": names})
    if stored := session.store.get("trial", key, list[Trial]):
        return stored
    reverting = apply.taken_away(session.objects, base.tree, patches)
    outcomes = apply.evaluate(session.objects, base.tree, patches)
    tried = [
        _trial(upstream, base, patch, outcome, reverts=patch.name in reverting)
        for patch, outcome in zip(patches, outcomes, strict=True)
    ]
    tests = [test for trial in tried for test in trial.evidence if test.test == "patch-id"]
    # A test that could not be made today may succeed tomorrow.
    if not base.commit or all(test.holds is not None for test in tests):
        session.store.put("trial", key, tried)
    return tried


def _trial(
    upstream: Upstream, base: Base, tried: Patch, outcome: Outcome, *, reverts: bool
) -> Trial:
    standing = patch.standing(upstream.session.objects, base.tree, tried.sections())
    tests: tuple[Evidence, ...] = ()
    if outcome.status == "applied":
        state: State = "moves" if outcome.moved and not tried.pick else "applies"
    else:
        tests = evidence(upstream, base, tried, reverts=reverts)
        likely = standing[1] and standing[0] >= LIKELY * standing[1]
        state = "likely-upstream" if likely else "conflict"
        state = "empty" if outcome.status == "empty" else state
        if outcome.status == "already-upstream" or any(test.holds for test in tests):
            state = "already-upstream"
    says = outcome.says if tests else ()
    moved = outcome.moved
    return Trial(tried.name, tried.sha256, base.name, state, moved, standing, tests, says)


def measure(upstream: Upstream, patches: Sequence[Patch], bases: Iterable[Base]) -> Drift:
    """
    Return the drift of *patches* over *bases*, and keep it as the last one of its stack and fork.
    """
    session, names, tried = upstream.session, list[str](), list[Trial]()
    for base in bases:
        results = trials(upstream, patches, base)
        tried += results
        names.append(base.name)
        count = sum(trial.applies for trial in results)
        console.note(f"{base.name}: {count} of {len(results)} apply")
    day = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    drift = Drift(upstream.fork, session.project.stack, day, tuple(names), tuple(tried))
    if tried:
        session.store.put("drift", _key(session, upstream.fork), drift)
    return drift


def _key(session: RunContext, fork: str) -> str:
    return digest.key("drift", {"stack": session.project.stack, "fork": fork})


def last(session: RunContext, fork: str) -> Drift | None:
    """Return the last drift of *fork* in the store; None if there is none."""
    return session.store.get("drift", _key(session, fork), Drift)


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


def status(session: RunContext, fork: str, today: datetime.date) -> list[Line]:
    """Return a line per pick and patch of *fork*, in the order of application."""
    book, stack = ledger.load(session.project.root, fork), session.project.stack
    applied, drift, lines = _applied(session, fork), last(session, fork), list[Line]()

    def add(
        name: str, subject: str, date: str, data: bytes, sha256: str, why: tuple[str, ...]
    ) -> None:
        try:
            age = (today - email.utils.parsedate_to_datetime(date).date()).days
        except ValueError:
            age = (today - datetime.date.fromisoformat(date)).days if date[:1].isdigit() else -1
        here = "applied" if name in applied else "not tried"
        needed = _needed(drift, name, sha256)
        lines.append(Line(fork, name, subject, age, data.count(b"\n"), here, *needed, *why))

    for record in book.carried(stack) if book else ():
        data = pull_requests.stored_diff(session, record)
        sha256 = digest.sha256_bytes(patch.without(data, record.stacks[stack])) if data else ""
        page = book.page(record.number) if book else ""
        why = (record.reason, record.drop_when, page)
        add(record.name, record.title, record.date, data, sha256, why)
    for ours in series.load(session.project.series_folder(fork)):
        reasons = (ours.reason, ours.drop_when)
        add(ours.name, ours.subject, ours.date, ours.data, ours.sha256, reasons)
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


def _needed(drift: Drift | None, name: str, sha256: str) -> tuple[str, str]:
    """
    Return whether a patch is still needed, and what superseded it; a drift of another version of it
    does not count.
    """
    tried = [trial for trial in (drift.of(name) if drift else ()) if sha256 in ("", trial.sha256)]
    if not drift or not tried:
        return "not looked at", ""
    end = drift.absorbed(name)
    if end.first:
        return f"until {end.first}", f"{end.first}: {end.proof}"
    words = {"applies": "yes, fits {}", "moves": "yes, fits {} at other lines"}
    return words.get(tried[-1].state, "conflicts on {}").format(tried[-1].base), ""
