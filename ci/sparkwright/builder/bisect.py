"""
Bisect: the upstream commit or patch at which an answer changes, found by ``git bisect``.

The states become a line of commits in a scratch repository, and git chooses which to ask about. The
answer is that of a patch (does it apply?), or of a command: 0 is good, 125 no answer, all else bad
(as in ``git bisect run``). Answers of commands are kept, so that a killed search continues.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.builder import pipeline
from sparkwright.cherry_picks import apply, drift, patch, series, upstream
from sparkwright.cherry_picks.drift import Trial
from sparkwright.cherry_picks.patch import CONTEXT, Patch, PatchError
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core import digest, git, process
from sparkwright.core.console import console, duration
from sparkwright.core.errors import CommandError, SparkwrightError
from sparkwright.core.http import redact_credentials
from sparkwright.forks import fetch, lock
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import ForkLock
from sparkwright.forks.stack import Project

BisectAnswer = Literal["good", "bad", "skip"]
#: Makes the checkout of a state, and returns a run on it and the patched tree.
Make = Callable[[], tuple[RunContext, str]]

SKIP = 125
#: Failures of a state that has no answer; all others end the search.
NO_STATE = frozenset(
    {
        "arch-mismatch",
        "arch-trap",
        "base-mismatch",
        "build-failed",
        "build-downloads",
        "compile-failed",
        "early-check-failed",
        "extension-missing",
        "file-invalid",
        "patch-conflict",
        "patch-invalid",
        "requirement-mismatch",
        "rule-mismatch",
        "source-unlocked",
        "source-unresolved",
    }
)

#: The one patch of a series in the checkout of a state: the change that its patches make there.
PATCH = "series.patch"
_HEAD = b"""\
From: sparkwright <sparkwright@localhost>
Date: Thu, 1 Jan 1970 00:00:00 +0000
Subject: [PATCH] The change of the series

Upstream-Status: Inappropriate [made for one step of a search]
Reason: the step needs the change of the patches in its tree
Drop-When: the step ends
---
"""


class Turn(msgspec.Struct, frozen=True):
    """
    The base at which the state of a patch changes.

    Attributes:
        last, first: The trials before and after the change.
        commit: The commit's day and subject.
        page: The page of the pull request that the subject names.
        tried: The number of bases that were tried, of how many.
    """

    patch: str
    last: Trial
    first: Trial
    commit: str
    page: str
    tried: tuple[int, int]


class BisectCause(msgspec.Struct, frozen=True):
    """
    The change that changed the answer of a command.

    Attributes:
        last, first: The names of the states before and after the change, and their answers.
        what: The commit or the patch.
        page: The page of the pull request that the commit's subject names.
    """

    over: str
    last: str
    first: str
    answers: tuple[BisectAnswer, BisectAnswer]
    what: str
    page: str = ""


class BisectStep(msgspec.Struct, frozen=True):
    """
    A state that a command was asked about.

    Attributes:
        tree: Tree id of the fork's patched source.
        wheel: File name, if one was built.
        status: Exit status of the command; None if the state could not be made.
        why: Why it could not be made.
        log: The file with the command's output.
    """

    name: str
    answer: BisectAnswer
    tree: str = ""
    wheel: str = ""
    status: int | None = None
    why: str = ""
    seconds: float = 0
    log: str = ""


def search(names: Sequence[str], ask: Callable[[int], BisectAnswer]) -> tuple[int, int]:
    """
    Return the last state that answers as the first one does, and the first that answers as the last
    one does.

    Args:
        names: The states, in order. Between those that are returned there are only states without
            an answer.

    Raises:
        bisect-undecided: The ends give the same answer, or none.
    """
    end = len(names) - 1
    answers = {0: ask(0), end: ask(end)}
    if answers[0] == answers[end] or "skip" in answers.values():
        raise PatchError(
            "bisect-undecided",
            "The answer is not good at one end and bad at the other.",
            details=[f"{names[number]}: {answers[number]}" for number in answers],
        )
    with tempfile.TemporaryDirectory() as folder:
        run = partial(git.run, cwd=Path(folder))
        run(["init", "-q", "--bare", "."])
        form = (
            "commit refs/heads/main\nmark :{0}\ncommitter sparkwright <> {0} +0000\ndata {1}\n{0}\n"
        )
        stream = "".join(form.format(number, len(str(number))) for number in range(1, end + 2))
        run(["fast-import", "--quiet"], stdin=stream.encode())
        words = ["start", "--no-checkout", "main", f"main~{end}"]
        while not run(["bisect", *words], check=False)[0]:
            number = int(run(["log", "-1", "--format=%s", "BISECT_HEAD"])[1]) - 1
            if answers.get(number) not in (None, "skip"):
                break
            answers[number] = ask(number)
            side = "good" if answers[number] == answers[0] else "bad"
            words = ["skip" if answers[number] == "skip" else side]
    last = max(number for number, answer in answers.items() if answer == answers[0])
    return last, min(number for number, answer in answers.items() if answer == answers[end])


def line_of_commits(fork: Upstream, patch: Patch | None, start: str, end: str) -> list[str]:
    """
    Return the commits of the branch to search: from *start*, else from a pick's own base, to *end*,
    else to the tip.

    Raises:
        not-provided: There is no start for a patch of ours, a name means nothing, or *end* does not
            follow *start*.
        offline, source-unreachable: The repository may not be asked, or does not answer.
    """
    book, objects = fork.book, fork.session.objects
    assert book
    if not start and not (patch and patch.pick):
        raise SourceError(
            "not-provided",
            f"{patch.name if patch else 'The search'} needs a commit to start from.",
            todo="Name one with --from.",
        )
    tip = fork.commit(book.branch)
    begin = fork.commit(start) if start else book.record(patch.pick).base if patch else ""
    last = fork.commit(end) if end else tip
    for name, commit in ((start, begin), (end or book.branch, last)):
        if not commit or not objects.has(f"{commit}^{{commit}}"):
            raise SourceError(
                "not-provided",
                f"{redact_credentials(book.url)} has no branch, tag or commit {name}.",
                todo="Choose ends with --from and --to.",
            )
    line = [begin, *upstream.revisions(objects, "--first-parent", last, f"^{begin}")]
    if len(line) < 2:
        raise SourceError("not-provided", f"{last[:12]} does not follow {begin[:12]}.")
    return line


def patch_over_commits(fork: Upstream, patches: Sequence[Patch], line: Sequence[str]) -> Turn:
    """
    Return the commit of *line* at which the state of the last of *patches* changes.

    Raises:
        bisect-undecided: See `search`.
        source-unreachable, offline: See `Upstream.at_commit`.
    """
    tried: dict[int, Trial] = {}

    def ask(number: int) -> BisectAnswer:
        base = fork.at_commit(line[number][:12], line[number], patches)
        tried[number] = trial = drift.trials(fork, patches, base)[-1]
        console.note(f"{trial.base}: {trial.state} (of {len(line)})")
        return "good" if trial.applies else "bad"

    last, first = search([commit[:12] for commit in line], ask)
    counts = (len(tried), len(line))
    return Turn(patches[-1].name, tried[last], tried[first], *_named(fork, line[first]), counts)


def _named(fork: Upstream, name: str) -> tuple[str, str]:
    """Return a commit as text, and the page of its pull request."""
    commit = upstream.commit(fork.session.objects, name)
    return commit.line(), fork.book.page(commit.number) if fork.book and commit.number else ""


def checkout(
    session: RunContext,
    fork: str,
    folder: Path,
    base: str,
    patches: Sequence[Patch],
    locked: ForkLock | None = None,
) -> tuple[RunContext, str]:
    """
    Make *folder* a copy of the stack's checkout with the change of *patches* on the tree *base* as
    the series of *fork*, and return a run on it and the patched tree.

    Args:
        locked: The source of *fork*, in place of the checkout's.

    Raises:
        patch-conflict: A patch does not apply.
    """
    shutil.rmtree(folder, ignore_errors=True)
    root, stack = session.project.root, session.project.stack
    for name in (f"forks/{stack}", f"build/{stack}", "cherry_picks"):
        if (root / name).exists():
            shutil.copytree(root / name, folder / name)
    outcomes = apply.evaluate(session.objects, base, patches)
    pairs = zip(patches, outcomes, strict=True)
    if wrong := [tried.name for tried, outcome in pairs if outcome.status == "conflict"]:
        raise PatchError("patch-conflict", f"{', '.join(wrong)} cannot be applied here.")
    tree = outcomes[-1].tree if outcomes else base
    change = patch.render(session.objects, base, tree, context=CONTEXT)
    project = Project(folder, stack)
    shutil.rmtree(project.series_folder(fork), ignore_errors=True)
    project.series_folder(fork).mkdir()
    (folder / "cherry_picks" / f"{fork}.yaml").unlink(missing_ok=True)
    if change:
        (project.series_folder(fork) / PATCH).write_bytes(_HEAD + change)
        (project.series_folder(fork) / "series").write_text(f"{PATCH}\n", "utf-8")
    if locked:
        forks = {**session.lock.forks, fork: locked}
        text = lock.render(msgspec.structs.replace(session.lock, forks=forks))
        project.lock_file.write_text(text, "utf-8")
    return dataclasses.replace(session, project=project, output=folder.parent / "dist"), tree


class Predicate:
    """
    The command of a search; its `steps` are the states that it was asked about.

    Args:
        command: Run in the current folder and environment, with ``SPARKWRIGHT_…`` variables that
            describe the state.
        build: Build the wheel of each state, too.
    """

    def __init__(
        self, session: RunContext, fork: str, command: Sequence[str], *, build: bool = False
    ) -> None:
        self._session, self._fork, self._command = session, fork, tuple(command)
        self._build = build
        self.steps: list[BisectStep] = []
        self.folder = session.store.folder("work", session.project.stack, fork, "bisect")

    def ask(self, name: str, make: Make, *, again: bool = False) -> BisectAnswer:
        """
        Return the answer about a state.

        Args:
            again: Ask even if the answer is known, and compare.

        Raises:
            bisect-undecided: The answers do not agree.
            predicate-failed: The command was killed, or ended with a status of 128 or more.
        """
        began, store = time.monotonic(), self._session.store
        try:
            with console.step(name):
                session, tree = make()
                built = pipeline.build(session, self._fork) if self._build else None
        except SparkwrightError as error:
            if error.reference not in NO_STATE:
                raise
            why = f"{error.reference}: {error.what}"
            return self._record(BisectStep(name, "skip", why=why, seconds=time.monotonic() - began))
        # An edited script asks another question.
        files = [digest.sha256_file(Path(word)) for word in self._command if Path(word).is_file()]
        inputs = pipeline.reviewed(pipeline.inputs(session, self._fork))
        wheel = built.sha256 if built else ""
        key = digest.key("predicate", [self._command, files, tree, wheel, self._fork, inputs])
        previous, log = store.get("predicate", key, int), self._log(name)
        path = pipeline.wheel_path(session, built) if built else None
        ask = partial(self._run, name, session, tree, log, path)
        status = ask() if previous is None or again else previous
        store.put("predicate", key, status)
        if previous is not None and _answer(previous) != _answer(status):
            raise PatchError(
                "bisect-undecided",
                f"The command gives several answers about {name}.",
                details=[f"exit statuses: {previous}, {status}", f"last output: {log}"],
                todo="Make the command repeatable.",
            )
        filename = built.filename if built else ""
        step = BisectStep(name, _answer(status), tree, filename, status, log=str(log))
        return self._record(msgspec.structs.replace(step, seconds=time.monotonic() - began))

    def _record(self, step: BisectStep) -> BisectAnswer:
        self.steps.append(step)
        why = f", {step.why}" if step.why else ""
        console.note(f"{step.name}: {step.answer}{why}, {duration(step.seconds)}")
        return step.answer

    def _log(self, name: str) -> Path:
        plain = re.sub(r"[^\w.-]", "-", name)[:80]
        folder = self._session.store.folder("logs", "bisect")
        return folder / f"{self._session.project.stack}-{self._fork}-{plain}.log"

    def _run(self, name: str, session: RunContext, tree: str, log: Path, wheel: Path | None) -> int:
        """Return the exit status of the command on a fresh copy of *tree*."""
        folder = self.folder / "tree"
        shutil.rmtree(folder, ignore_errors=True)
        session.objects.archive(tree, folder)
        variables = {
            "SPARKWRIGHT_TREE": str(folder),
            "SPARKWRIGHT_PROJECT": str(session.project.root),
            "SPARKWRIGHT_NAME": name,
            "SPARKWRIGHT_FORK": self._fork,
            "SPARKWRIGHT_STACK": session.project.stack,
            "SPARKWRIGHT_WHEEL": str(wheel or ""),
        }
        try:
            process.run(self._command, log=log, env={**os.environ, **variables})
        except CommandError as error:
            if error.reference != "command-failed":
                raise
            status = int(str(error.data["status"]))
            if not 0 < status < 128:
                raise PatchError(
                    "predicate-failed",
                    f"The command was ended about {name}, with status {status}.",
                    details=error.details,
                ) from error
            return status
        return 0


def _answer(status: int) -> BisectAnswer:
    return "good" if status == 0 else "skip" if status == SKIP else "bad"


def over_commits(
    fork: Upstream, line: Sequence[str], predicate: Predicate, *, bare: bool = False
) -> BisectCause:
    """
    Return the upstream commit of *line* that changed the answer.

    Args:
        bare: Upstream as it is, without our patches.

    Raises:
        not-provided: The fork has no git source.
        bisect-undecided, predicate-failed: See `_cause` and `Predicate.ask`.
    """
    session, name, mirror = fork.session, fork.fork, fork.mirror
    locked, replace = session.lock.forks[name], msgspec.structs.replace
    source = locked.git
    if source is None or mirror is None:
        raise SourceError(
            "not-provided", f"Stack {session.project.stack} locks no git source of {name}."
        )
    patches = () if bare else series.of(session, name)

    def make(commit: str) -> tuple[RunContext, str]:
        mirror.commit(commit)
        tree = session.objects.resolve(f"{commit}^{{tree}}")
        there = [path for path in source.without if session.objects.has(f"{tree}:{path}")]
        pin = replace(source, ref=commit, commit=commit, tree=tree)
        other = replace(locked, git=pin, sdist=None, wheel=None)
        base = mirror.tree(tree, there)
        return checkout(session, name, predicate.folder / "project", base, patches, other)

    states = [(commit[:12], partial(make, commit)) for commit in line]
    number, cause = _cause(states, predicate, "commits")
    what, page = _named(fork, line[number])
    return replace(cause, what=what, page=page)


def over_patches(session: RunContext, fork: str, predicate: Predicate) -> BisectCause:
    """
    Return the patch that changed the answer, together with those before it.

    Raises:
        not-provided: The fork has no patches.
        bisect-undecided, predicate-failed: See `_cause` and `Predicate.ask`.
    """
    patches = series.of(session, fork)
    if not patches:
        raise SourceError(
            "not-provided", f"{fork} has no patches in stack {session.project.stack}."
        )
    base, folder = fetch.fetch(session, fork).tree, predicate.folder / "project"
    states: list[tuple[str, Make]] = [
        (
            f"up to {count} of {len(patches)}, {patches[count - 1].name}"
            if count
            else "without patches",
            partial(checkout, session, fork, folder, base, patches[:count]),
        )
        for count in range(len(patches) + 1)
    ]
    number, cause = _cause(states, predicate, "patches")
    return msgspec.structs.replace(cause, what=patches[number - 1].name)


def _cause(
    states: Sequence[tuple[str, Make]], predicate: Predicate, over: str
) -> tuple[int, BisectCause]:
    """
    Return the number of the state at which the answer changes, and the cause without its name.

    Both sides are asked twice, because a single answer would not show an unstable command.

    Raises:
        bisect-undecided: The ends agree, or states between the last and the first have no answer.
    """
    names = [name for name, _ in states]
    last, first = search(names, lambda number: predicate.ask(*states[number]))
    answers = tuple(predicate.ask(*states[number], again=True) for number in (last, first))
    if first - last > 1:
        raise PatchError(
            "bisect-undecided",
            f"The answer changes after {names[last]} and not later than {names[first]}.",
            details=[f"no answer: {name}" for name in names[last + 1 : first]],
            todo="Let the command judge these, or make them buildable; every other answer is kept.",
            data={"last": names[last], "first": names[first]},
        )
    return first, BisectCause(over, names[last], names[first], (answers[0], answers[1]), "")
