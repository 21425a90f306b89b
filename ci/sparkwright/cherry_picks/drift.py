"""
Drift: the series on later revisions of its upstream. It writes nothing that is reviewed; the
results stay in the store.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import already_upstream, apply, patch
from sparkwright.cherry_picks.already_upstream import Evidence
from sparkwright.cherry_picks.apply import Outcome
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream_revisions import Base, Upstream
from sparkwright.core import digest
from sparkwright.core.console import console
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
    session = upstream.session
    merges = {
        record.name: record.merge for record in (upstream.book.records if upstream.book else ())
    }
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
    # A test that could not be made today may succeed tomorrow.
    if not base.commit or all(
        test.holds is not None for one in tried for test in one.evidence if test.test == "patch-id"
    ):
        session.store.put("trial", key, tried)
    return tried


def _trial(
    upstream: Upstream, base: Base, tried: Patch, outcome: Outcome, *, reverts: bool
) -> Trial:
    standing = patch.standing(upstream.session.objects, base.tree, tried.sections())
    if outcome.status == "applied":
        state: State = "moves" if outcome.moved and not tried.pick else "applies"
        return Trial(tried.name, tried.sha256, base.name, state, outcome.moved, standing, ())
    evidence = already_upstream.evidence(upstream, base, tried, reverts=reverts)
    if outcome.status == "already-upstream" or any(test.holds for test in evidence):
        state = "already-upstream"
    elif outcome.status == "empty":
        state = "empty"
    else:
        state = (
            "likely-upstream" if standing[1] and standing[0] >= LIKELY * standing[1] else "conflict"
        )
    return Trial(
        tried.name, tried.sha256, base.name, state, outcome.moved, standing, evidence, outcome.says
    )


def measure(upstream: Upstream, patches: Sequence[Patch], bases: Iterable[Base]) -> Drift:
    """
    Return the drift of *patches* over *bases*, and keep it as the last one of its stack and fork.
    """
    session, names, tried = upstream.session, list[str](), list[Trial]()
    for base in bases:
        results = trials(upstream, patches, base)
        tried += results
        names.append(base.name)
        console.note(
            f"{base.name}: {sum(trial.applies for trial in results)} of {len(results)} apply"
        )
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
