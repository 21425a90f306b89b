"""
The series: the pull requests that a stack picks, then our patches in quilt's order, applied strictly.

Ours must apply at the very lines they name. A pick was made for another commit, so its hunks may stand elsewhere, but then each at the
one place where its lines occur. Every patch must change the tree, and must not be there already; each step has a tree id.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright import digest
from sparkwright.cherry_picks import conflict, diff, ledger, patch, pick, together, upstream
from sparkwright.cherry_picks.conflict import ConflictReport
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base
from sparkwright.console import console
from sparkwright.errors import PatchConflict, PatchInvalid, PatchNoEffect, PatchUpstream
from sparkwright.forks.session import Session
from sparkwright.forks.sources import FetchedSource
from sparkwright.objects import Index, Objects

#: git says so when it found a hunk's context elsewhere than the patch claims.
_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")

Status = Literal["applied", "already-upstream", "empty", "conflict"]


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


class Outcome(msgspec.Struct, frozen=True):
    """
    What came of trying one patch.

    Attributes:
        tree: The tree after it; the one before it, unless it was applied.
        moved: As in `AppliedPatch`.
        says: git's words, or why it counts as it does.
    """

    status: Status
    tree: str
    moved: int = 0
    says: tuple[str, ...] = ()


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
        PatchInvalid: A listed patch is missing, is listed twice, or a patch in the folder is not listed.
    """
    listing = folder / "series"
    lines = listing.read_text("utf-8", errors="replace").splitlines() if listing.is_file() else []
    found = [name for name in (line.partition("#")[0].strip() for line in lines) if name]
    present = {path.name for path in folder.glob("*.patch")}
    wrong = [f"listed twice: {name}" for name in sorted({name for name in found if found.count(name) > 1})]
    wrong += [f"listed, but not there: {name}" for name in found if name not in present]
    wrong += [f"there, but not listed: {name}" for name in sorted(present - set(found))]
    if wrong:
        raise PatchInvalid(f"{listing} and its folder disagree.", details=wrong, todo="List every patch once, in the order of application.")
    return found


def load(folder: Path) -> tuple[Patch, ...]:
    """
    Return our patches in *folder*, in order.

    Raises:
        PatchInvalid: As `names`; also when a patch cannot be read.
    """
    return tuple(patch.parse(name, (folder / name).read_bytes()) for name in names(folder))


def picks(session: Session, fork: str) -> tuple[Patch, ...]:
    """
    Return the pull requests that the stack carries, in the ledger's order.

    Raises:
        PickMismatch, Offline, SourceUnreachable: See `pick.patch_of`.
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
        PatchConflict: A patch does not apply; the report is in the failure.
        PatchUpstream: The base, or an earlier patch, has the change already.
        PatchNoEffect: A patch leaves the tree as it was.
        PatchInvalid, PickMismatch, Offline, SourceUnreachable: The series cannot be read.
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
            tried = attempt(objects, index, tree, one)
            if tried.status != "applied":
                _refuse(fork, tree, one, tried, lambda: explain(tree, one, patches[: len(steps)]) if explain else None)  # noqa: B023  called at once
            tree = tried.tree
            steps.append(AppliedPatch(one.name, one.sha256, one.subject, one.reason, tree, one.pick, tried.moved))
            console.note(f"{tree[:12]}  {one.subject}")
    return PatchedTree(fork, base, tree, tuple(steps))


def attempt(objects: Objects, index: Index, tree: str, one: Patch, *, movable: bool = False) -> Outcome:
    """
    Try *one* on *index*, which holds *tree* and holds the result afterwards when that is ``applied``.

    Args:
        movable: Let a patch of ours stand at other lines than it names, as a pick may; upkeep writes it anew there.
    """
    movable = movable or bool(one.pick)
    if not one.data.strip() or _idle(one):
        return Outcome("empty", tree, says=("it changes nothing" if one.data.strip() else "its diff is empty",))
    there, where = index.apply(one.data, reverse=True, check=True)
    there = there and not _glued(objects, tree, one, done=True)
    fits, said = index.apply(one.data, check=True)
    exact = fits and not _OFFSET.search(said)
    # What fits at its very lines is not there because its like stands elsewhere.
    if there and (not _OFFSET.search(where) or (movable and not exact)) and not (fits and _same(one)):
        return Outcome("already-upstream", tree, says=("the whole change can be taken away from this tree, so it is in there",))
    if not fits:
        return Outcome("conflict", tree, says=tuple(_reasons(said)))
    if glued := _glued(objects, tree, one):
        return Outcome("conflict", tree, says=("it ends a file where this tree goes on", *glued))
    moved = _OFFSET.findall(said)
    if moved and not movable:
        return Outcome("conflict", tree, says=("it applies only at other lines than it names", *moved))
    if moved and (double := _ambiguous(objects, tree, one)):
        return Outcome("conflict", tree, says=("hunks that stand at other lines than they name occur there more than once", *double))
    index.apply(one.data)
    after = index.tree()
    if after == tree:
        return Outcome("already-upstream" if there else "empty", tree, says=("the tree is the same with it as without",))
    return Outcome("applied", after, len(moved))


def evaluate(objects: Objects, base: str, patches: Sequence[Patch]) -> list[Outcome]:
    """Try every patch, each movable, leaving out those that do not apply; upkeep asks this, no build does."""
    tree, done = base, []
    with objects.index(base) as index:
        for one in patches:
            done.append(attempt(objects, index, tree, one, movable=True))
            tree = done[-1].tree
    return done


def _same(one: Patch) -> bool:
    """Does the patch replace lines by the same lines, or none at all?"""
    return all(hunk.before == hunk.after for section in one.sections() for hunk in section.hunks)


def _idle(one: Patch) -> bool:
    """Has the patch nothing but lines that it replaces by the same? git takes it for damaged where none is marked as replaced."""
    parts = one.sections()
    return _same(one) and all(part.hunks and part.old == part.new and b"\nnew mode " not in part.data for part in parts)


def _ambiguous(objects: Objects, tree: str, one: Patch) -> list[str]:
    """Return the hunks, in files where one stands elsewhere than it says, whose lines stand at more than one place, or that have none."""
    found = []
    for section in one.sections():
        text = (objects.blob(tree, section.old) if section.hunks and section.old else b"") or b""
        places = [(hunk, diff.places(text, hunk)) for hunk in section.hunks if section.old]
        if all(hunk.start in at for hunk, at in places):
            continue
        found += [f"{section.path}: {hunk.label} at lines {', '.join(map(str, at[:5]))}" for hunk, at in places if len(at) > 1]
        found += [f"{section.path}: {hunk.label} names no line that is there" for hunk, _ in places if not hunk.before]
    return found


def _glued(objects: Objects, tree: str, one: Patch, *, done: bool = False) -> list[str]:
    """
    Return the hunks that end with a line without a line end, where the file has one: git takes those for equal, and joins two lines.

    Args:
        done: Look at what it would write, instead.
    """
    found = []
    for section in one.sections():
        for hunk in section.hunks[-1:]:
            lines, path = (hunk.after, section.new) if done else (hunk.before, section.old)
            if path and lines and not lines[-1].endswith(b"\n") and not diff.places(objects.blob(tree, path) or b"", hunk, done=done):
                found.append(f"{path}: {hunk.label}")
    return found


def _refuse(fork: str, tree: str, one: Patch, done: Outcome, explain: Callable[[], ConflictReport | None]) -> None:
    where = [*done.says, f"tree before it: {tree}"]
    if done.status == "already-upstream":
        raise PatchUpstream(f"{one.name} is in {fork} already.", details=[one.subject, f"drop it when: {one.drop_when}", *where])
    if done.status == "empty":
        raise PatchNoEffect(f"{one.name} changes nothing in {fork}.", details=where)
    report = explain()
    if report is None:
        raise PatchConflict(f"{one.name} does not apply to {fork}.", details=where)
    error = conflict.error(report)
    raise PatchConflict(error.what, details=[*where, *error.details], data=error.data)


def explainer(session: Session, source: FetchedSource, book: Ledger | None) -> Explain:
    """Return what makes a conflict report of the source's fork from what is in the store."""

    def explain(tree: str, one: Patch, earlier: Sequence[Patch]) -> ConflictReport:
        mirror = session.mirror(book.url) if book else None
        came = Base("the base", source.tree, source.pin if source.kind == "git" else "")
        taken = upstream.taken_away(session.objects, source.tree, [one])
        verb = f"--stack {session.project.stack} --fork {source.fork}"
        aside = f"sparkwright pick {one.pick} {verb} --exclude PATH=REASON    (leave a file out, and carry it as a patch of ours)"
        return conflict.explain(
            session.objects, tree, one, fork=source.fork, base=source.origin, earlier=earlier, mirror=mirror,
            tip=(mirror.known(book.branch) or "") if mirror and book else "", page=book.page(one.pick) if book and one.pick else "",
            origin=source.tree, evidence=upstream.evidence(session, mirror, came, one, upstream.record_of(book, one), taken),
            commands=(aside if one.pick else f"sparkwright rebase {verb}", f"sparkwright export {verb}"),
        )  # fmt: skip

    return explain


def _reasons(said: str) -> list[str]:
    """Return git's complaints, without what it says of files that are fine."""
    # "while searching for" is followed by lines of the patch, which the report has.
    found = [line for line in said.splitlines() if line.startswith("error:") and "while searching for" not in line]
    return found or said.strip().splitlines()[-5:]
