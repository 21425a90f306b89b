"""
Bisect: the upstream commit at which a patch stops applying or becomes upstream, or at which the
answer of a command changes.

A command answers as for ``git bisect run``: 0 is good, 125 is no answer, any other status below 128
is bad.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from sparkwright.cherry_picks import apply, drift, ledger, series
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.forks.errors import SourceError

#: Whether a commit is good, None if that cannot be told; and the answer in words.
Answer = tuple[bool | None, str]

SKIP = 125


class BisectResult(msgspec.Struct, frozen=True):
    """
    The upstream commit that changes an answer.

    Attributes:
        before, after: The answers for its parent and for itself.
        line: Its id, day and subject.
        page: The page of the pull request that its subject names.
    """

    commit: str
    before: str
    after: str
    line: str
    page: str


def up_to(patches: Sequence[Patch], name: str) -> list[Patch]:
    """
    Return the patch *name* (a file, with or without its suffix, or a number) after those before it.

    Raises:
        not-provided: There is none of that name.
    """
    for number, patch in enumerate(patches, 1):
        if name in (patch.name, patch.name.removesuffix(".patch"), str(patch.pick or "")):
            return list(patches[:number])
    raise SourceError(
        "not-provided",
        f"The series has no patch {name!r}.",
        details=[patch.name for patch in patches],
    )


def commit_range(fork: Upstream, start: str, end: str, number: int = 0) -> list[str]:
    """
    Return the commits of the branch from *start*, else from the base of pull request *number*, to
    *end*, else to the tip; oldest first.

    Raises:
        file-invalid: The fork has no ledger, which names the repository.
        not-provided: A name means nothing, or *end* does not follow *start*.
        offline, source-unreachable: The repository may not be asked, or does not answer.
    """
    book, objects = ledger.require(fork.context.project.root, fork.fork), fork.context.objects
    start = start or (book.record(number).base if number else "")
    if not start:
        raise SourceError(
            "not-provided",
            "The search needs a commit to start from.",
            todo="Name one with --from.",
        )
    fork.commit(book.branch)
    first, last = fork.commit(start), fork.commit(end or book.branch)
    names = ["--first-parent", last, f"^{first}"]
    ends = [f"{commit}^{{commit}}" for commit in (first, last)]
    following = history.log(objects, *names) if all(map(objects.has, ends)) else []
    if not following:
        raise SourceError(
            "not-provided",
            f"{last[:12]} does not follow {first[:12]} on {book.branch}.",
            todo="Choose ends with --from and --to.",
        )
    return [first, *(entry.commit for entry in reversed(following))]


def search(count: int, ask: Callable[[int], bool | None]) -> tuple[int, int]:
    """
    Return the last of *count* states that answers as the first one does, and the first that answers
    as the last one does; between them there are only states without an answer.

    Returns:
        Both ends, if they do not give two answers.
    """
    low, high = 0, count - 1
    answers = {low: ask(low), high: ask(high)}
    while {answers[low], answers[high]} == {True, False}:
        untried = [number for number in range(low + 1, high) if number not in answers]
        if not untried:
            break
        number = untried[len(untried) // 2]
        answers[number] = ask(number)
        if answers[number] is not None:
            low, high = (number, high) if answers[number] == answers[low] else (low, number)
    return low, high


def first_change(
    fork: Upstream, commits: Sequence[str], ask: Callable[[str], Answer]
) -> BisectResult:
    """
    Return the first of *commits* at which the answer of *ask* differs from the first one's.

    Raises:
        bisect-undecided: The ends give the same answer, or none; or the commits at the change give
            none.
    """
    answers = dict[int, Answer]()

    def answer(number: int) -> bool | None:
        answers[number] = ask(commits[number])
        console.note(f"{commits[number][:12]}: {answers[number][1]}")
        return answers[number][0]

    last, first = search(len(commits), answer)
    if first - last > 1 or {answers[last][0], answers[first][0]} != {True, False}:
        raise PatchError(
            "bisect-undecided",
            f"The answer changes nowhere for certain from {commits[last][:12]} to "
            f"{commits[first][:12]}.",
            details=[f"{commits[number][:12]}: {answers[number][1]}" for number in sorted(answers)],
        )
    commit = history.commit(fork.context.objects, commits[first])
    page = fork.book.page(commit.number) if fork.book and commit.number else ""
    replies = (answers[last][1], answers[first][1])
    return BisectResult(commit.commit, *replies, commit.line(), page)


def patch_answer(fork: Upstream, patches: Sequence[Patch], commit: str) -> Answer:
    """Return whether the last of *patches* applies to *commit*, after those before it."""
    trial = drift.trials(fork, patches, fork.at_commit(commit[:12], commit, patches))[-1]
    proof = f" ({trial.proof})" if trial.state == "already-upstream" else ""
    return trial.applies, f"{drift.MEANING[trial.state]}{proof}"


def command_answer(fork: Upstream, command: Sequence[str], commit: str) -> Answer:
    """
    Return the answer of *command*, run in a folder with the series on *commit*; there is none if a
    patch conflicts there.

    Raises:
        command-failed: It was killed, or ended with a status of 128 or more.
    """
    context, patches = fork.context, series.of(fork.context, fork.fork)
    work = context.store.folder("work", context.project.stack, fork.fork, "bisect")
    locked, tree = context.lock.forks[fork.fork].git, fork.at_commit("", commit, patches).tree
    if fork.mirror:
        tree = fork.mirror.tree(tree, locked.without if locked else ())
    outcomes = apply.evaluate(context.objects, tree, patches)
    if any(outcome.status == "conflict" for outcome in outcomes):
        return None, "a patch conflicts"
    context.objects.checkout(outcomes[-1].tree if outcomes else tree, work / "tree", work / "index")
    status = 0
    try:
        process.run(command, log=work / "log", cwd=work / "tree", env=dict(os.environ))
    except CommandError as error:
        status = int(str(error.data.get("status", 128)))
        if not 0 < status < 128:
            raise
    return None if status == SKIP else status == 0, f"exit status {status}"
