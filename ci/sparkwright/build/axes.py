"""
What may have changed an answer: upstream's commits, our patches, or what two stacks are made of; and the search along each.

Both ends are asked twice before anything else, and both sides of the result once more at the end: a command that wavers is found out,
and then nothing is named.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sparkwright import git
from sparkwright.build import recipe, search
from sparkwright.build.predicate import Predicate
from sparkwright.build.recipe import Recipe
from sparkwright.build.search import Answer
from sparkwright.cherry_picks import history
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.console import console
from sparkwright.errors import BisectUndecided, NotProvided
from sparkwright.forks import archive
from sparkwright.forks.session import Session
from sparkwright.forks.spec import Project

#: Twice: once would not show a command that wavers.
SURE = 2

Place = tuple[str, Callable[[], Recipe]]


class Cause(msgspec.Struct, frozen=True):
    """
    What changed the answer.

    Attributes:
        last, first: The states on both sides of the change, by name, and their answers.
        what: The commit; the patches; the pieces, the smallest set of them that suffices.
        page: Of the pull request that did it, where the commit's subject names one.
    """

    over: str
    last: str
    first: str
    answers: tuple[Answer, Answer]
    what: tuple[str, ...]
    page: str = ""


def over_commits(session: Session, fork: str, book: Ledger, ends: tuple[str, str], predicate: Predicate, *, bare: bool = False) -> Cause:
    """
    Return the upstream commit, after the first of *ends* up to the second, that changed the answer.

    Args:
        bare: Upstream as it is, without our patches.

    Raises:
        NotProvided: The second end does not follow the first, or the fork has no git source.
        BisectUndecided, PredicateFailed: See `Predicate.ask`, and `_turn`.
    """
    line = [ends[0], *history.first_parents(session.objects, *ends)]
    if len(line) < 2:
        raise NotProvided(f"{ends[1][:12]} does not follow {ends[0][:12]}.")
    locked = session.lock.forks[fork].git
    if locked is None:
        raise NotProvided(f"Stack {session.project.stack} locks no git source of {fork}.")
    made, mirror = recipe.of(session, fork), session.mirror(book.url)
    if bare:
        made = dataclasses.replace(made, patches={**made.patches, fork: ()})

    def at(commit: str) -> Recipe:
        mirror.commit(commit)
        tree = session.objects.resolve(f"{commit}^{{tree}}")
        present = [path for path in locked.without if session.objects.has(f"{tree}:{path}")]
        return recipe.at_commit(made, fork, commit, tree, mirror.tree(tree, present))

    def place(commit: str) -> Place:
        return commit[:12], lambda: at(commit)

    number, cause = _turn([place(commit) for commit in line], predicate, "commits")
    turned = history.commit(session.objects, line[number])
    return msgspec.structs.replace(cause, what=(turned.line(),), page=book.page(turned.number) if turned.number else "")


def over_patches(session: Session, fork: str, predicate: Predicate) -> Cause:
    """
    Return the patches that changed the answer: the first one, in the series' order, after which it is another, and with it those
    before it without which it would not be.

    Raises:
        NotProvided: The fork has no patches.
        BisectUndecided, PredicateFailed: See `Predicate.ask`, and `_turn`.
    """
    made = recipe.of(session, fork)
    series = made.patches[fork]
    if not series:
        raise NotProvided(f"{fork} has no patches in stack {session.project.stack}.")

    def place(chosen: Sequence[Patch], name: str) -> Place:
        return name, lambda: dataclasses.replace(made, patches={**made.patches, fork: tuple(chosen)})

    names = ["without patches", *(f"up to {number} of {len(series)}, {one.name}" for number, one in enumerate(series, start=1))]
    number, cause = _turn([place(series[:count], name) for count, name in enumerate(names)], predicate, "patches")

    def ask(chosen: tuple[Patch, ...], times: int = 1) -> Answer:
        return predicate.ask(*place(chosen, f"with {', '.join(one.name for one in chosen)} alone"), times=times)

    return _smallest(series[:number], ask, cause, [one.name for one in series])


def over_locks(one: Recipe, other: Recipe, names: tuple[str, str], predicate: Predicate) -> Cause:
    """
    Return the pieces in which *other* differs from *one* that changed the answer, the smallest set of them that suffices.

    Raises:
        NotProvided: They do not differ.
        BisectUndecided, PredicateFailed: See `Predicate.ask`, and `_turn`.
    """
    before, after = one.pieces(), other.pieces()
    differing = [piece for piece in dict.fromkeys([*before, *after]) if before.get(piece) != after.get(piece)]
    if not differing:
        raise NotProvided(f"{names[0]} and {names[1]} do not differ in what the fork is made of.")
    console.note(f"{len(differing)} pieces differ: {', '.join(differing)}")

    def ask(chosen: tuple[str, ...], times: int = 1) -> Answer:
        name = f"{names[0]} with {', '.join(chosen)} of {names[1]}" if len(chosen) < len(differing) else names[1]
        return predicate.ask(name if chosen else names[0], lambda: recipe.mixed(one, other, chosen), times=times)

    answers = (ask((), SURE), ask(tuple(differing), SURE))
    _require_difference(names, answers)
    return _smallest(differing, ask, Cause("locks", names[0], names[1], answers, ()), differing)


def _turn(places: Sequence[Place], predicate: Predicate, over: str) -> tuple[int, Cause]:
    """
    Return the number of the place at which the answer changes, and the cause as far as it is known.

    Raises:
        BisectUndecided: The ends agree or give no answer, or there is none between the last and the first.
    """
    known: dict[int, Answer] = {}

    def ask(number: int, times: int = 1) -> Answer:
        if number not in known or times > 1:
            known[number] = predicate.ask(*places[number], times=times)
        return known[number]

    ends = (places[0][0], places[-1][0])
    _require_difference(ends, (ask(0, SURE), ask(len(places) - 1, SURE)))
    found = search.turn(len(places), ask)
    answers = (ask(found.last, SURE), ask(found.first, SURE))
    if found.between:
        raise BisectUndecided(
            f"The answer changes after {places[found.last][0]} and not later than {places[found.first][0]}.",
            details=[f"no answer: {places[number][0]}" for number in found.between],
            todo="Let the command judge these, or make them buildable; every other answer is kept.",
            data={"last": places[found.last][0], "first": places[found.first][0]},
        )
    return found.first, Cause(over, places[found.last][0], places[found.first][0], answers, ())


def _require_difference(names: tuple[str, str], answers: tuple[Answer, Answer]) -> None:
    if answers[0] == answers[1] or "skip" in answers:
        details = [f"{name}: {answer}" for name, answer in zip(names, answers, strict=True)]
        todo = "Choose other ends with --from and --to, or another command."
        raise BisectUndecided("The answer is not good at one end and bad at the other.", details=details, todo=todo)


def _smallest(items: Sequence[search.T], ask: Callable[..., Answer], cause: Cause, order: Sequence[str]) -> Cause:
    """Return *cause* with the smallest part of *items* that suffices, which is asked once more."""
    least = search.minimal(items, ask, cause.answers[1])
    if len(least) < len(items) and ask(least, SURE) != cause.answers[1]:
        raise BisectUndecided("The smallest set that was found does not suffice when asked again.", details=[str(one) for one in least])
    names = {one.name if isinstance(one, Patch) else str(one) for one in least}
    return msgspec.structs.replace(cause, what=tuple(name for name in order if name in names))


def side(session: Session, fork: str, name: str) -> Recipe:
    """
    Return what *fork* is made of in *name*: another stack, or a revision of this checkout.

    Raises:
        NotProvided: It is neither.
    """
    root, stack = session.project.root, session.project.stack
    if name in {found.parent.name for found in root.glob("forks/*/stack.yaml")}:
        return recipe.of(dataclasses.replace(session, project=Project(root, name), forks=(fork,)), fork)
    folder = session.store.folder("work", stack, fork, "bisect") / "side"
    shutil.rmtree(folder, ignore_errors=True)
    _unpack(root, name, ("forks", "build", "cherry_picks"), folder)
    return recipe.of(dataclasses.replace(session, project=Project(folder, stack), forks=(fork,)), fork)


def _unpack(root: Path, revision: str, names: tuple[str, ...], folder: Path) -> None:
    """Write the folders *names* of the checkout in *root*, as they were in *revision*, to *folder*."""
    plain = re.fullmatch(r"[\w./~^@{}-]+", revision) and not revision.startswith("-")
    ask = ["rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    status, out, _ = git.run(ask, cwd=root, check=False) if plain else (1, b"", "")
    commit = out.decode().strip()
    there = git.run(["ls-tree", "--name-only", commit], cwd=root)[1].decode().splitlines() if status == 0 else []
    wanted = [name for name in names if name in there]
    if "forks" not in wanted:
        raise NotProvided(f"{revision} is neither a stack nor a revision of {root} that has any.")
    data = git.run(["archive", "--format=tar", "--prefix=checkout/", commit, "--", *wanted], cwd=root)[1]
    for member in archive.tar_members(io.BytesIO(data), f"{revision} of {root}"):
        path = folder / member.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.mode == git.LINK:
            path.symlink_to(os.fsdecode(member.data))
        else:
            path.write_bytes(member.data)
            path.chmod(0o755 if member.mode == git.EXECUTABLE else 0o644)
