"""
``sparkwright drift``: the series against later releases and upstream's newest commit; with
``--issue``, told in one issue.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence

from sparkwright.cherry_picks import ideas, series
from sparkwright.cherry_picks.drift import MEANING, Drift, Trial, measure
from sparkwright.cherry_picks.upstream import Base, Upstream
from sparkwright.core import github_summary
from sparkwright.core.console import console
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.forks.context import RunContext
from sparkwright.operate.upkeep import driftreport, issue
from sparkwright.operate.upkeep.issue import Kept


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Show, for each fork, what becomes of every patch on every base; or which release took each idea
    of ``ideas.yaml``.
    """
    if arguments.ideas:
        return _ideas(session)
    if arguments.given:
        return _tell(
            [one for path in arguments.given for one in driftreport.read(path)], session, arguments
        )
    made = [_drift(session, fork, arguments) for fork in session.forks]
    for one in made:
        show(one)
    if not arguments.releases and any(
        trial.state == "conflict" for one in made for trial in one.trials
    ):
        console.note(
            "a conflict may mean that upstream took the patch long ago and changed it since: "
            "--releases tells"
        )
    kept = _keep(made, session, arguments) if arguments.issue else None
    told = [{"of": one, "absorbed": [one.absorbed(name) for name in one.patches]} for one in made]
    console.document({"drift": told, "issue": kept})
    return 0


def _tell(made: Sequence[Drift], session: RunContext, arguments: argparse.Namespace) -> int:
    """Tell of drifts that were looked at before."""
    for one in made:
        show(one)
    kept = _keep(made, session, arguments) if arguments.issue else None
    console.document({"drift": [{"of": one} for one in made], "issue": kept})
    return 0


def _keep(made: Sequence[Drift], session: RunContext, arguments: argparse.Namespace) -> Kept:
    """File, rewrite or close the one issue that tells of drift."""
    repository = Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.issue)
    asking = driftreport.asking(made)
    stacks = ", ".join(dict.fromkeys(one.stack for one, _ in asking))
    count = (
        f"{len(asking)} patches of {stacks} ask"
        if len(asking) != 1
        else f"a patch of {stacks} asks"
    )
    title = f"Drift: {count} for a person" if asking else "Drift"
    text = driftreport.body(made, run=github_summary.run_url())
    kept = issue.keep(
        repository, "drift", title, text, author=arguments.author, wanted=bool(asking)
    )
    console.result(f"issue {kept.done}{f': {kept.url}' if kept.url else ''}")
    return kept


def _ideas(session: RunContext) -> int:
    found = ideas.derive(session)
    told = [
        [
            one.idea,
            one.package,
            one.verdict,
            *(["\n".join(one.evidence)] if console.verbose else []),
        ]
        for one in found
    ]
    columns = ["idea", "package", "verdict", *(["because"] if console.verbose else [])]
    console.table(
        "which release took which idea (-v shows the evidence)", columns, told, result=True
    )
    console.document({"ideas": found})
    return 0


def _drift(session: RunContext, fork: str, arguments: argparse.Namespace) -> Drift:
    upstream, patches = Upstream(session, fork), series.of(session, fork)
    with console.step(f"drift of {fork}: {len(patches)} patches"):
        bases: Iterable[Base] = ()
        if not patches:
            console.note("there is nothing to try")
        elif arguments.to:
            bases = [upstream.named(name, patches) for name in arguments.to]
        else:
            bases = upstream.later(patches, every=arguments.releases)
        return measure(upstream, patches, bases)


def show(drift: Drift) -> None:
    """
    Print the table of one fork: the states of each patch from base to base, and where upstream took
    it.
    """
    if not drift.trials:
        console.result(f"{drift.fork}: no patches, or nothing later than the locked source")
        return
    ends = [(name, drift.absorbed(name)) for name in drift.patches]
    rows = [
        [name, "\n".join(runs(drift.of(name))), end.first or "-", end.proof] for name, end in ends
    ]
    title = f"{drift.fork} of {drift.stack}, {drift.day}"
    console.table(
        title, ["patch", "on later bases it", "upstream from", "because"], rows, result=True
    )


def runs(trials: list[Trial]) -> list[str]:
    """
    Return what became of a patch, a line for each run of bases that agree: ``applies: 0.20.2 to
    0.21.0``.
    """
    lines, taken = [], False
    for state, group in itertools.groupby(trials, key=lambda trial: trial.state):
        names = [trial.base for trial in group]
        mark = "was upstream, changed since" if taken and state == "conflict" else MEANING[state]
        taken = taken or state in ("already-upstream", "likely-upstream")
        lines.append(f"{mark}: {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}")
    return lines
