"""``sparkwright drift``: the series against later releases and upstream's newest commit; with ``--issue``, told in one issue."""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections.abc import Iterable, Sequence

from sparkwright.cherry_picks import absorption, drift, ledger, series, upstream_revisions
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.drift import Drift, Trial
from sparkwright.core import github_summary
from sparkwright.core.console import console
from sparkwright.core.github import ADDRESS, GitHub
from sparkwright.core.github_repository import Repository
from sparkwright.forks.context import Session
from sparkwright.operate.upkeep import driftreport, issue
from sparkwright.operate.upkeep.issue import Kept

#: How a state is written in the table.
MARKS = {
    "applies": "applies",
    "moves": "applies at other lines",
    "already-upstream": "is upstream",
    "likely-upstream": "is upstream most likely",
    "empty": "is empty",
    "conflict": "conflicts",
}


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Show, for each fork, what becomes of every patch on every base; or which release took each idea of ``ideas.yaml``."""
    if arguments.ideas:
        return _ideas(session)
    if arguments.given:
        return _tell([one for path in arguments.given for one in driftreport.read(path)], session, arguments)
    made = [_drift(session, fork, arguments) for fork in session.forks]
    for one in made:
        show(one)
    if not arguments.releases and any(trial.state == "conflict" for one in made for trial in one.trials):
        console.note("a conflict may mean that upstream took the patch long ago and changed it since: --releases tells")
    kept = _keep(made, session, arguments) if arguments.issue else None
    told = [{"of": one, "absorbed": [drift.absorbed(one, name) for name in _names(one)]} for one in made]
    console.document({"drift": told, "issue": kept})
    return 0


def _tell(made: Sequence[Drift], session: Session, arguments: argparse.Namespace) -> int:
    """Tell of drifts that were looked at before."""
    for one in made:
        show(one)
    kept = _keep(made, session, arguments) if arguments.issue else None
    console.document({"drift": [{"of": one} for one in made], "issue": kept})
    return 0


def _keep(made: Sequence[Drift], session: Session, arguments: argparse.Namespace) -> Kept:
    """File, rewrite or close the one issue that tells of drift."""
    repository = Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.issue)
    asking = driftreport.asking(made)
    stacks = ", ".join(dict.fromkeys(one.stack for one, _ in asking))
    count = f"{len(asking)} patches of {stacks} ask" if len(asking) != 1 else f"a patch of {stacks} asks"
    title = f"Drift: {count} for a person" if asking else "Drift"
    text = driftreport.body(made, run=github_summary.run_url())
    kept = issue.keep(repository, "drift", title, text, author=arguments.author, wanted=bool(asking))
    console.result(f"issue {kept.done}{f': {kept.url}' if kept.url else ''}")
    return kept


def _ideas(session: Session) -> int:
    rows = absorption.derive(session)
    told = [[row.idea.idea, row.package, row.verdict, *(["\n".join(row.idea.evidence)] if console.verbose else [])] for row in rows]
    columns = ["idea", "package", "verdict", *(["because"] if console.verbose else [])]
    console.table("which release took which idea (-v shows the evidence)", columns, told, result=True)
    console.document({"ideas": rows})
    return 0


def _drift(session: Session, fork: str, arguments: argparse.Namespace) -> Drift:
    book = ledger.load(session.project.root, fork)
    patches = series.of(session, fork)
    mirror = session.mirror(book.url) if book else None
    found: list[Trial] = []
    names = []
    with console.step(f"drift of {fork}: {len(patches)} patches"):
        candidates: Iterable[Base] = ()
        if not patches:
            console.note("there is nothing to try")
        elif arguments.to:
            candidates = [upstream_revisions.named(session, fork, mirror, name, patches) for name in arguments.to]
        else:
            candidates = upstream_revisions.later(session, fork, mirror, book.branch if book else "", patches, every=arguments.releases)
        for base in candidates:
            tried = drift.trials(session, fork, book, patches, base)
            found += tried
            names.append(base.name)
            console.note(f"{base.name}: {sum(one.state in ('applies', 'moves') for one in tried)} of {len(tried)} apply")
    made = Drift(fork, session.project.stack, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", tuple(names), tuple(found))
    if found:
        drift.save(session, made)
    return made


def _names(one: Drift) -> list[str]:
    return list(dict.fromkeys(trial.patch for trial in one.trials))


def show(one: Drift) -> None:
    """Print the table of one fork: what became of each patch from base to base, and where upstream took it."""
    if not one.trials:
        console.result(f"{one.fork}: no patches, or nothing later than the locked source")
        return
    rows = []
    for name in _names(one):
        ended = drift.absorbed(one, name)
        rows.append([name, "\n".join(runs(one.of(name))), ended.first or "-", ended.proof])
    console.table(f"{one.fork} of {one.stack}, {one.day}", ["patch", "on later bases it", "upstream from", "because"], rows, result=True)


def runs(trials: list[Trial]) -> list[str]:
    """Return what became of a patch, a line for each run of bases that agree: ``applies: 0.20.2 to 0.21.0``."""
    lines, taken = [], False
    for state, group in itertools.groupby(trials, key=lambda trial: trial.state):
        names = [trial.base for trial in group]
        mark = "was upstream, changed since" if taken and state == "conflict" else MARKS[state]
        taken = taken or state in ("already-upstream", "likely-upstream")
        lines.append(f"{mark}: {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}")
    return lines
