"""
Which patches are still needed on the day of a release: asked of the last drift, of the ledger, and where wanted of upstream's newest.

A patch counts as needed only where somebody tried it on something later than its own source, or that source is the newest release. It
counts as upstream's only where a test proves that, or the ledger names the merge. All else is unknown, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import drift, ledger, series
from sparkwright.cherry_picks.drift import Drift, Trial
from sparkwright.cherry_picks.ledger import Record
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks.context import RunContext
from sparkwright.release.manifest.records import Fork, Need
from sparkwright.release.manifest.records import Patch as Carried
from sparkwright.release.notes.words import clean

#: The most that a record keeps of a reason.
LONGEST = 1000

#: What a trial that proves nothing says.
_UNPROVED = {
    "conflict": "it conflicts there, and no test finds the whole change: upstream changed the place, and a person has to look",
    "likely-upstream": "most of it stands there, which proves nothing",
    "empty": "it changes nothing there",
}

_NOTHING = "nothing later than the locked source could be had"


class _Known(msgspec.Struct, frozen=True):
    """
    What is known of a fork.

    Attributes:
        seen: The last drift; None where there was none.
        newest: The locked release, where the package index has nothing later; else empty.
        asked: Why nothing later could be tried, where it was asked for and that failed.
    """

    seen: Drift | None
    newest: str = ""
    asked: str = ""


def gather(context: RunContext, forks: Sequence[Fork], *, ask: bool) -> tuple[Need, ...]:
    """
    Return a need for every patch of *forks*, in their order.

    Args:
        ask: Try the series on upstream's newest, which needs the network; what the store knows is used where that fails.
    """
    made: list[Need] = []
    for fork in forks:
        if fork.patches:
            known = _known(context, fork.name, ask=ask)
            made += [_need(context, fork, one, known) for one in fork.patches]
    return tuple(made)


def _known(context: RunContext, fork: str, *, ask: bool) -> _Known:
    if not ask:
        return _Known(drift.last(context, fork))
    if context.offline:
        return _Known(drift.last(context, fork), asked="the network may not be used")
    try:
        with console.step(f"is {fork} still needed?"):
            return _asked(context, fork)
    except SparkwrightError as error:
        console.note(f"{fork}: {error.what}")
        return _Known(drift.last(context, fork), asked=error.what)


def _asked(context: RunContext, fork: str) -> _Known:
    """Return what becomes of the series on upstream's newest: releases of the package index, and the tip of its branch."""
    upstream, patches = Upstream(context, fork), series.of(context, fork)
    sdist = context.lock.forks[fork].sdist if fork in context.lock.forks else None
    newest = sdist.version if sdist and not upstream.later_releases() else ""
    made = drift.measure(upstream, patches, upstream.later(patches, every=False))
    if not made.trials:
        return _Known(drift.last(context, fork), newest, "upstream's branch was not tried" if newest else _NOTHING)
    return _Known(made, newest)


def _need(context: RunContext, fork: Fork, one: Carried, known: _Known) -> Need:
    record = _record(context, fork, one)
    tried = [trial for trial in known.seen.of(one.name) if trial.sha256 == one.sha256 and _later(trial.base, fork)] if known.seen else []
    merged = f"upstream merged it as {record.merge[:12]} (seen {record.seen})" if record and record.merge else ""
    day = f"tried on {known.seen.day}" if known.seen else ""
    if tried and tried[-1].state in ("applies", "moves"):
        where = ", at other lines" if tried[-1].state == "moves" else ""
        return _made(fork, one, "needed", f"{tried[-1].base} lacks it and takes it{where}", day, merged)
    if has := next((trial for trial in tried if trial.state == "already-upstream"), None):
        return _made(fork, one, "upstream", f"{has.base} has it: {has.proof}", day)
    if not tried and known.newest and known.newest == fork.version:
        return _made(fork, one, "needed", f"{known.newest} is the newest release, and the patch was applied to it", known.asked, merged)
    if merged:
        return _made(fork, one, "upstream", merged, "" if tried else "no later release was tried")
    told = _unproved(tried[-1]) if tried else known.asked or "nobody tried it on anything later than its own source"
    return _made(fork, one, "unknown", told, day if tried else "", *_said(context, fork, one, record))


def _made(fork: Fork, one: Carried, state: Literal["needed", "upstream", "unknown"], *says: str) -> Need:
    return Need(fork.name, one.name, state, clean("; ".join(part for part in says if part), LONGEST))


def _unproved(trial: Trial) -> str:
    present = f" ({trial.present[0]} of {trial.present[1]} added lines stand there)" if trial.present[1] else ""
    return f"on {trial.base} {_UNPROVED[trial.state]}{present}"


def _later(base: str, fork: Fork) -> bool:
    """Is *base* later than the fork's own source? A branch is; a release is by its version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(base) > Version(fork.version)
    except InvalidVersion:
        return True


def _record(context: RunContext, fork: Fork, one: Carried) -> Record | None:
    return ledger.load_ledger(context.project.root, fork.name).by_number.get(one.pick) if one.pick else None


def _said(context: RunContext, fork: Fork, one: Carried, record: Record | None) -> Iterator[str]:
    """Yield what those who wrote the patch down say of its end."""
    if record:
        yield f"the pull request was {record.state} when it was last looked at ({record.seen})"
        yield f"it goes when: {record.drop_when}"
    ours = series.load(context.project.series_folder(fork.name)) if not one.pick else ()
    for patch in ours:
        if (patch.name, patch.sha256) == (one.name, one.sha256):
            yield f"Upstream-Status: {patch.status}"
            yield f"it goes when: {patch.drop_when}"
