"""
How one patch meets one tree: it applies, moves, is there already, changes nothing, or conflicts.

git decides; here stands what has to be asked besides, because git lets it pass: lines that stand at several places, a last line without
its end that is joined to the next, a change that can be made twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import diff
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.git_store import Index, Objects

#: git says so when it found a hunk's context elsewhere than the patch claims.
_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")

Status = Literal["applied", "already-upstream", "empty", "conflict"]


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


def taken_away(objects: Objects, tree: str, patches: Sequence[Patch]) -> frozenset[str]:
    """Return the names of those *patches* that *tree* has already: each is reverse-applied, the newest first."""
    found = set()
    with objects.index(tree) as index:
        for one in reversed(patches):
            # git takes a change of modes alone away from any tree, with a warning; and a joined line is not the one that was written.
            modes = _same(one) and all(part.old == part.new and not part.binary for part in one.sections())
            if not one.data.strip() or modes or _glued(objects, index.tree(), one, done=True):
                continue
            if index.apply(one.data, reverse=True)[0]:
                found.add(one.name)
    return frozenset(found)


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


def _reasons(said: str) -> list[str]:
    """Return git's complaints, without what it says of files that are fine."""
    # "while searching for" is followed by lines of the patch, which the report has.
    found = [line for line in said.splitlines() if line.startswith("error:") and "while searching for" not in line]
    return found or said.strip().splitlines()[-5:]
