"""
The series: the pull requests that a stack picks, then our patches in quilt's order, applied strictly.

Ours must apply at the very lines they name. A pick was made for another commit, so its hunks may stand elsewhere, but then each at the
one place where its lines occur. Every patch must change the tree, and must not be there already; each step has a tree id.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import already_upstream, apply_check, conflict, ledger, patch, together
from sparkwright.cherry_picks import pull_requests as pick
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.apply_check import Outcome
from sparkwright.cherry_picks.conflict import ConflictReport
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import Session
from sparkwright.forks.fetch import FetchedSource


class AppliedPatch(msgspec.Struct, frozen=True):
    """
    A patch that was applied, and the tree after it.

    Attributes:
        pick: Number of the pull request; 0 for a patch of ours.
        moved: How many of its hunks stand at other lines than they name.
    """

    name: str
    sha256: str
    subject: str
    reason: str
    tree: str
    pick: int = 0
    moved: int = 0


class PatchedTree(msgspec.Struct, frozen=True):
    """
    A source with the series on top.

    Attributes:
        base: Tree id of the source.
        tree: Tree id after the last patch; equals *base* when the series is empty.
    """

    fork: str
    base: str
    tree: str
    steps: tuple[AppliedPatch, ...]


class Entry(msgspec.Struct, frozen=True):
    """What determines an element of a series before anything of it is read: its pins, and what is left out of it."""

    name: str
    sha256: str
    left_out: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()


class Applied(msgspec.Struct, frozen=True):
    """The series that was applied last to some tree, each entry with its step."""

    series: tuple[Entry, ...]
    steps: tuple[AppliedPatch, ...]


def names(folder: Path) -> list[str]:
    """
    Return the file names that the file ``series`` in *folder* lists; a fork without one has none.

    Raises:
        patch-invalid: A listed patch is missing, is listed twice, or a patch in the folder is not listed.
    """
    listing = folder / "series"
    lines = listing.read_text("utf-8", errors="replace").splitlines() if listing.is_file() else []
    found = [name for name in (line.partition("#")[0].strip() for line in lines) if name]
    present = {path.name for path in folder.glob("*.patch")}
    wrong = [f"listed twice: {name}" for name in sorted({name for name in found if found.count(name) > 1})]
    wrong += [f"listed, but not there: {name}" for name in found if name not in present]
    wrong += [f"there, but not listed: {name}" for name in sorted(present - set(found))]
    if wrong:
        raise PatchError(
            "patch-invalid",
            f"{listing} and its folder disagree.",
            details=wrong,
            todo="List every patch once, in the order of application.",
        )
    return found


def load(folder: Path) -> tuple[Patch, ...]:
    """
    Return our patches in *folder*, in order.

    Raises:
        patch-invalid: As `names`; also when a patch cannot be read.
    """
    return tuple(patch.parse(name, (folder / name).read_bytes()) for name in names(folder))


def picks(session: Session, fork: str) -> tuple[Patch, ...]:
    """
    Return the pull requests that the stack carries, in the ledger's order.

    Raises:
        pick-mismatch, offline, source-unreachable: See `pick.patch_of`.
    """
    book = ledger.load(session.project.root, fork)
    return tuple(pick.patch_of(session, book, one, session.project.stack) for one in book.carried(session.project.stack)) if book else ()


def of(session: Session, fork: str) -> tuple[Patch, ...]:
    """Return the whole series of *fork*: the picks, then ours."""
    return picks(session, fork) + load(session.project.series_folder(fork))


def entries(session: Session, fork: str) -> tuple[Entry, ...]:
    """Return what determines the series of *fork*, reading no diff."""
    book, stack, folder = ledger.load(session.project.root, fork), session.project.stack, session.project.series_folder(fork)
    carried = book.carried(stack) if book else ()
    return (
        *(Entry(one.name, one.sha256, tuple(sorted(one.stacks[stack])), (one.base, one.tip, one.patch_id)) for one in carried),
        *(Entry(name, digest.sha256_file(folder / name)) for name in names(folder)),
    )


def apply(session: Session, source: FetchedSource) -> PatchedTree:
    """
    Apply the series of the source's fork.

    Raises:
        patch-conflict: A patch does not apply; the report is in the failure.
        patch-already-upstream: The base, or an earlier patch, has the change already.
        patch-no-effect: A patch leaves the tree as it was.
        patch-invalid, pick-mismatch, offline, source-unreachable: The series cannot be read.
    """
    wanted = entries(session, source.fork)
    found = known(session, source.fork, source.tree)
    if found and session.objects.whole(found.tree):
        return found
    last = digest.key("applied", {"fork": source.fork, "base": source.tree})
    applied = apply_to(
        session.objects,
        source.fork,
        source.tree,
        of(session, source.fork),
        explain=explainer(session, source, ledger.load(session.project.root, source.fork)),
        done=_still_good(session.objects, session.store.get("applied", last, Applied), wanted),
    )
    session.store.put("apply", key(source.tree, wanted), applied)
    session.store.put("applied", last, Applied(wanted, applied.steps))
    return applied


def known(session: Session, fork: str, base: str) -> PatchedTree | None:
    """Return what `apply` made of the series on the tree *base*; None when it did not, or the series changed since."""
    return session.store.get("apply", key(base, entries(session, fork)), PatchedTree)


def key(base: str, series: Sequence[Entry]) -> str:
    return digest.key("apply", {"base": base, "series": series})


def _still_good(objects: Objects, before: Applied | None, wanted: Sequence[Entry]) -> tuple[AppliedPatch, ...]:
    """Return the steps of the application *before* this one that need not be taken again: those ahead of the first entry that changed."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before.series, wanted, strict=False)) if before else ()
    steps = before.steps[: len(list(same))] if before else ()
    return steps if steps and objects.whole(steps[-1].tree) else ()


Explain = Callable[[str, Patch, Sequence[Patch]], ConflictReport]


def apply_to(
    objects: Objects, fork: str, base: str, patches: Sequence[Patch], *, explain: Explain | None = None, done: Sequence[AppliedPatch] = ()
) -> PatchedTree:
    """
    Apply *patches* to the tree *base*, in order; see `apply`.

    Args:
        done: The steps of the first patches, where they were taken before.
    """
    tree, steps = done[-1].tree if done else base, list(done)
    rest = patches[len(done) :]
    with console.step(f"apply {len(rest)} patches to {fork}"):
        if (known := together.trees(objects, tree, rest)) is not None:
            for one, after in zip(rest, known, strict=True):
                console.note(f"{after[:12]}  {one.subject}")
                steps.append(AppliedPatch(one.name, one.sha256, one.subject, one.reason, after, one.pick))
            return PatchedTree(fork, base, known[-1] if known else tree, tuple(steps))
    with objects.index(tree) as index:
        for one in rest:
            tried = apply_check.attempt(objects, index, tree, one)
            if tried.status != "applied":
                report = explain(tree, one, patches[: len(steps)]) if explain and tried.status == "conflict" else None
                _refuse(fork, tree, one, tried, report)
            tree = tried.tree
            steps.append(AppliedPatch(one.name, one.sha256, one.subject, one.reason, tree, one.pick, tried.moved))
            console.note(f"{tree[:12]}  {one.subject}")
    return PatchedTree(fork, base, tree, tuple(steps))


def evaluate(objects: Objects, base: str, patches: Sequence[Patch]) -> list[Outcome]:
    """Try every patch, each movable, leaving out those that do not apply; upkeep asks this, no build does."""
    tree, done = base, []
    with objects.index(base) as index:
        for one in patches:
            done.append(apply_check.attempt(objects, index, tree, one, movable=True))
            tree = done[-1].tree
    return done


def _refuse(fork: str, tree: str, one: Patch, done: Outcome, report: ConflictReport | None) -> None:
    where = [*done.says, f"tree before it: {tree}"]
    if done.status == "already-upstream":
        raise PatchError(
            "patch-already-upstream", f"{one.name} is in {fork} already.", details=[one.subject, f"drop it when: {one.drop_when}", *where]
        )
    if done.status == "empty":
        raise PatchError("patch-no-effect", f"{one.name} changes nothing in {fork}.", details=where)
    if report is None:
        raise PatchError("patch-conflict", f"{one.name} does not apply to {fork}.", details=where)
    error = conflict.error(report)
    raise PatchError("patch-conflict", error.what, details=[*where, *error.details], data=error.data)


def explainer(session: Session, source: FetchedSource, book: Ledger | None) -> Explain:
    """Return what makes a conflict report of the source's fork from what is in the store."""

    def explain(tree: str, one: Patch, earlier: Sequence[Patch]) -> ConflictReport:
        mirror = session.mirror(book.url) if book else None
        came = Base("the base", source.tree, source.pin if source.kind == "git" else "")
        taken = apply_check.taken_away(session.objects, source.tree, [one])
        verb = f"--stack {session.project.stack} --fork {source.fork}"
        aside = f"sparkwright pick {one.pick} {verb} --exclude PATH=REASON    (leave a file out, and carry it as a patch of ours)"
        return conflict.explain(
            session.objects, tree, one, fork=source.fork, base=source.origin, earlier=earlier, mirror=mirror,
            tip=(mirror.known(book.branch) or "") if mirror and book else "", page=book.page(one.pick) if book and one.pick else "",
            origin=source.tree,
            evidence=already_upstream.evidence(session, mirror, came, one, already_upstream.record_of(book, one), taken),
            commands=(aside, f"sparkwright rebase {verb}") if one.pick else (f"sparkwright rebase {verb}", f"sparkwright export {verb}"),
        )  # fmt: skip

    return explain
