"""
``sparkwright bump``: a fork to another upstream release, ending in a lock diff, a range-diff and
the units to compile anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sparkwright.cherry_picks import bump, rebase
from sparkwright.cherry_picks.bump import Bump
from sparkwright.cherry_picks.drift import MEANING
from sparkwright.cherry_picks.patch import PatchError
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.cli.export import from_worktree
from sparkwright.cli.rebase import command, only_fork, show
from sparkwright.core.console import console
from sparkwright.core.github import ADDRESS, GitHub, Repository
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.operate.upkeep import bumped, foreseen, proposal
from sparkwright.operate.upkeep.foreseen import Foreseen
from sparkwright.operate.upkeep.proposal import Proposed


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Try the release, then write stack.yaml, lock.yaml, the ledger and the series; or leave a
    worktree for a person.
    """
    upstream = Upstream(session, only_fork(session))
    fork, version = upstream.fork, arguments.to
    if session.offline:
        todo = "Run it with a connection."
        raise SourceError(
            "not-provided",
            "bump asks the index and the upstream, which --offline forbids.",
            todo=todo,
        )
    if arguments.pull:
        bumped.clean(session.project.root)
    if version == "newest":
        later = upstream.later_releases()
        if not later:
            console.result(f"{fork} is at its newest release already.")
            console.document({"bump": None})
            return 0
        version = later[-1].version
    old = upstream.locked()
    plan = bump.plan(upstream, version, arguments.drop)
    rows = [
        [trial.patch, MEANING[trial.state], plan.gone.get(trial.patch, "")] for trial in plan.trials
    ]
    rows += [[name, "is not tried", plan.gone[name]] for name in arguments.drop]
    console.table(
        f"{fork} to {plan.base.name}",
        ["patch", "on the new base it", "so it is dropped"],
        rows,
        result=True,
    )
    for line in plan.difference:
        console.result(line)
    if plan.stuck:
        drop = " ".join(f"--drop '{trial.patch}'" for trial in plan.stuck)
        exclude = f"{command(session, fork, 'pick')} NUMBER --exclude PATH=REASON"
        raise PatchError(
            "patch-conflict",
            f"{', '.join(trial.patch for trial in plan.stuck)} of {fork} cannot go along to "
            f"{version}.",
            details=[
                f"{trial.patch}: {MEANING[trial.state]}; {trial.proof}" for trial in plan.stuck
            ],
            todo=f"Drop them: {command(session, fork, 'bump')} --to {version} {drop}; or leave "
            f"files out: {exclude}.",
        )
    done = rebase.start(upstream, plan.base, files=plan.files, gone=plan.gone)
    if done.stopped:
        console.document({"bump": plan, "rebase": done})
        show(upstream, plan.base, done)
    between = rebase.compare(upstream, done)
    changed = from_worktree(session, fork, [])
    units = (
        foreseen.foresee(session.objects, old.tree, plan.base.tree)
        if _compiles(session, fork)
        else None
    )
    for line in (
        *changed,
        "",
        "range-diff of both series:",
        *between,
        "",
        *(foreseen.lines(units) if units else ()),
    ):
        console.result(line)
    proposed = _propose(session, arguments, plan, between, units) if arguments.pull else None
    console.document(
        {
            "bump": plan,
            "changed": changed,
            "range_diff": between,
            "recompiles": units,
            "pull": proposed,
        }
    )
    return 0


def _compiles(session: RunContext, fork: str) -> bool:
    return session.project.fork(fork).build != "headers"


def _propose(
    session: RunContext,
    arguments: argparse.Namespace,
    made: Bump,
    between: Sequence[str],
    units: Foreseen | None,
) -> Proposed:
    """Open the pull request, or set it to this change."""
    root, stack = session.project.root, session.project.stack
    repository = Repository(GitHub.from_environment(session.mirrored(ADDRESS)), arguments.pull)
    text = bumped.body(stack, made, between, units)
    done = proposal.propose(
        repository,
        arguments.base,
        bumped.head(root),
        bumped.branch(stack, made),
        bumped.changed(root),
        title=bumped.title(stack, made),
        body=text,
    )
    console.result(f"pull request {done.done}: {done.url}")
    return done
