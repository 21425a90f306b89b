"""
``sparkwright bisect``: the first upstream commit or release at which a patch stops applying, or is
already there.

With ``--run``: the commit or the patch that changed the answer of a command.
"""

from __future__ import annotations

import argparse
import dataclasses

from sparkwright.builder import bisect
from sparkwright.builder.bisect import Cause, Predicate, Turn
from sparkwright.cherry_picks import ledger, series
from sparkwright.cherry_picks import upstream as revisions
from sparkwright.cherry_picks.drift import MEANING
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.cli.rebase import only_fork
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Search between two ends, and show what changed and who changed it."""
    fork = only_fork(session)
    if bool(arguments.run) == bool(arguments.patch):
        raise UsageError("usage", "bisect wants a patch, or --run and a command.")
    if arguments.run:
        return _command(session, fork, arguments)
    turn = _turn(Upstream(session, fork), arguments)
    rows = [
        [label, trial.base, MEANING[trial.state]]
        for label, trial in (("last", turn.last), ("first", turn.first))
    ]
    console.table(
        f"{turn.patch}: {turn.tried[0]} of {turn.tried[1]} bases tried",
        ["", "base", "there it"],
        rows,
        result=True,
    )
    for line in (turn.commit, turn.page):
        console.result(line) if line else None
    for test in turn.first.evidence:
        if test.holds:
            console.result(f"already upstream by {test.test}: {test.says}")
    console.document({"turn": turn})
    return 0


def _turn(upstream: Upstream, arguments: argparse.Namespace) -> Turn:
    session, fork = upstream.session, upstream.fork
    patches = _upto(series.of(session, fork), arguments.patch, alone=arguments.alone)
    if not arguments.releases:
        ledger.require(session.project.root, fork)
        line = bisect.line_of_commits(upstream, patches[-1], arguments.start, arguments.end)
        return bisect.patch_over_commits(upstream, patches, line)
    sdist = session.lock.forks[fork].sdist
    if sdist is None:
        raise SourceError("not-provided", f"{fork} has no releases on the package index.")
    releases = revisions.between(
        session, sdist.name, arguments.start or sdist.version, arguments.end
    )
    return bisect.patch_over_releases(upstream, patches, releases)


def _upto(patches: tuple[Patch, ...], name: str, *, alone: bool) -> list[Patch]:
    """Return the patch that *name* means, after those before it."""
    names = [
        {patch.name, patch.name.removesuffix(".patch"), *([str(patch.pick)] if patch.pick else [])}
        for patch in patches
    ]
    at = next((number for number, words in enumerate(names) if name in words), None)
    if at is None:
        details = [patch.name for patch in patches]
        raise SourceError("not-provided", f"The series has no patch {name!r}.", details=details)
    return [patches[at]] if alone else list(patches[: at + 1])


def _command(session: RunContext, fork: str, arguments: argparse.Namespace) -> int:
    """
    Search for what changed the answer of a command, and show every state that was asked about,
    whatever the outcome.
    """
    session = dataclasses.replace(session, forks=(fork,))
    predicate = Predicate(
        session,
        fork,
        arguments.run,
        build=arguments.build,
    )
    cause = None
    with session.store.lock(f"bisect-{session.project.stack}-{fork}"):
        try:
            cause = _cause(Upstream(session, fork), predicate, arguments)
        finally:
            rows = [
                [
                    step.name,
                    step.answer,
                    step.why or str(step.status),
                    f"{step.seconds:.1f}",
                ]
                for step in predicate.steps
            ]
            console.table(
                f"bisect {fork} over {arguments.over}",
                ["state", "answer", "exit status", ">seconds"],
                rows,
                result=True,
            )
            console.document({"cause": cause, "steps": predicate.steps})
    for line in (
        f"{cause.answers[0]}: {cause.last}",
        f"{cause.answers[1]}: {cause.first}",
        cause.what,
        cause.page,
    ):
        console.result(line) if line else None
    return 0


def _cause(upstream: Upstream, predicate: Predicate, arguments: argparse.Namespace) -> Cause:
    session, fork, names = upstream.session, upstream.fork, (arguments.start, arguments.end)
    if arguments.over == "patches":
        return bisect.over_patches(session, fork, predicate)
    ledger.require(session.project.root, fork)
    line = bisect.line_of_commits(upstream, None, *names)
    return bisect.over_commits(upstream, line, predicate, bare=arguments.alone)
