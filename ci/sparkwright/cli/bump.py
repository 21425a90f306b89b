"""``sparkwright bump``: a fork to another upstream release, ending in a lock diff, a range-diff and the units to compile anew."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sparkwright.cherry_picks import bump, export, history, rebase, upstream_revisions
from sparkwright.cherry_picks.bump import Bump
from sparkwright.cherry_picks.drift import proof
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cli import drift
from sparkwright.cli.export import from_worktree
from sparkwright.cli.rebase import command, only_fork, show
from sparkwright.core.console import console
from sparkwright.core.github import ADDRESS, GitHub
from sparkwright.core.github_repository import Repository
from sparkwright.forks import fetch
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.operate.upkeep import bumped, foreseen, proposal
from sparkwright.operate.upkeep.foreseen import Foreseen
from sparkwright.operate.upkeep.proposal import Proposed


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Try the release, then write stack.yaml, lock.yaml, the ledger and the series; or leave a worktree where a person is needed."""
    fork = only_fork(session)
    if session.offline:
        raise SourceError(
            "not-provided", "bump asks the index and the upstream, which --offline forbids.", todo="Run it with a connection."
        )
    if arguments.pull:
        bumped.clean(session.project.root)
    version = arguments.to
    if version == "newest":
        version = _newest(session, fork)
        if not version:
            console.result(f"{fork} is at its newest release already.")
            console.document({"bump": None})
            return 0
    old = fetch.fetch(session, fork).tree
    made = bump.plan(session, fork, version)
    _tell(made)
    if stuck := [one for one in made.trials if one.patch.startswith("#") and one.state in ("conflict", "likely-upstream")]:
        raise PatchError(
            "patch-conflict",
            f"{', '.join(one.patch for one in stuck)} of {fork} cannot go along to {version}.",
            details=[f"{one.patch}: {drift.MARKS[one.state]}; {proof(one)}" for one in stuck],
            todo=f"Drop each, or leave files out of it: {command(session, fork, 'pick')} NUMBER --drop, or --exclude PATH=REASON.",
        )
    before = export.line(session, fork, upstream_revisions.of_source(session, fork))
    done = rebase.start(session, fork, made.base, files=made.files, gone=made.gone)
    if done.stopped:
        console.document({"bump": made, "rebase": done})
        show(session, fork, made.base, done)
    changed = from_worktree(session, fork, [])
    between = history.range_diff(session.objects, before, (done.base, done.tip))
    units = foreseen.foresee(session.objects, old, made.base.tree) if _compiles(session, fork) else None
    for line in (*changed, "", "range-diff of both series:", *between, "", *(foreseen.lines(units) if units else ())):
        console.result(line)
    proposed = _propose(session, arguments, made, between, units) if arguments.pull else None
    console.document({"bump": made, "changed": changed, "range_diff": between, "recompiles": units, "pull": proposed})
    return 0


def _newest(session: Session, fork: str) -> str:
    """Return the newest release of *fork*; empty where it is the locked one, or where it has none."""
    locked = session.lock.forks[fork].sdist
    later = upstream_revisions.releases_after(upstream_revisions.listed(session, locked.name), locked.version) if locked else []
    return later[-1].version if later else ""


def _compiles(session: Session, fork: str) -> bool:
    return session.project.fork(fork).build != "headers"


def _propose(session: Session, arguments: argparse.Namespace, made: Bump, between: Sequence[str], units: Foreseen | None) -> Proposed:
    """Open the pull request, or set it to this change."""
    root, stack = session.project.root, session.project.stack
    repository = Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.pull)
    text = bumped.body(stack, made, between, units)
    done = proposal.propose(
        repository, arguments.base, bumped.head(root), bumped.branch(stack, made), bumped.changed(root),
        title=bumped.title(stack, made), body=text,
    )  # fmt: skip
    console.result(f"pull request {done.done}: {done.url}")
    return done


def _tell(made: Bump) -> None:
    rows = [[one.patch, drift.MARKS[one.state], made.gone.get(one.patch, "")] for one in made.trials]
    console.table(f"{made.fork} to {made.base.name}", ["patch", "on the new base it", "so it is dropped"], rows, result=True)
    for line in made.difference:
        console.result(line)
