"""
Apply patches in git's object database: exact context, no fuzz, no 3-way merge, and a tree id after
every step.

Ours must apply at the lines that they name. A pick was made for another commit, so its hunks may
have moved, but each must then fit at one place only. git decides whether a patch fits. The checks
here are for what git lets pass: lines that occur at several places, a last line without its end
that is joined to the next (apply.c treats both as equal), a change that is there already, a patch
without effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.console import console
from sparkwright.core.git_store import Index, Objects

_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")


class AppliedPatch(msgspec.Struct, frozen=True):
    """
    An applied patch, and the tree after it.

    Attributes:
        pick: Number of the pull request; 0 for a patch of ours.
        moved: Number of hunks that were applied at other lines than they name.
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
    A source with its series applied.

    Attributes:
        base: Tree id of the source.
        tree: Tree id after the last patch; equal to *base* if the series is empty.
    """

    fork: str
    base: str
    tree: str
    steps: tuple[AppliedPatch, ...]


class Outcome(msgspec.Struct, frozen=True):
    """
    The result of trying one patch.

    Attributes:
        tree: The tree after it; the tree before it unless it was applied.
        moved: See `AppliedPatch`.
        says: git's messages, or the reason for the status.
    """

    status: Literal["applied", "already-upstream", "empty", "conflict"]
    tree: str
    moved: int = 0
    says: tuple[str, ...] = ()


#: Returns the failure for a patch that conflicts with a tree, from the patches before it and git's
#: messages.
Explain = Callable[[str, Patch, Sequence[Patch], Sequence[str]], PatchError]


def apply_patches(
    objects: Objects, fork: str, base: str, patches: Sequence[Patch], explain: Explain | None = None
) -> PatchedTree:
    """
    Apply *patches* to the tree *base*, in order.

    Raises:
        patch-conflict: A patch does not apply.
        patch-already-upstream: The base or an earlier patch has the change already.
        patch-no-effect: A patch leaves the tree as it was.
    """
    tree, steps = base, list[AppliedPatch]()
    with console.step(f"apply {len(patches)} patches to {fork}"), objects.index(base) as index:
        for patch in patches:
            outcome = attempt(objects, index, tree, patch)
            if outcome.status != "applied":
                error = refusal(fork, patch, outcome)
                raise (
                    explain(tree, patch, patches[: len(steps)], error.details)
                    if explain and outcome.status == "conflict"
                    else error
                )
            tree = outcome.tree
            steps.append(
                AppliedPatch(
                    patch.name,
                    patch.sha256,
                    patch.subject,
                    patch.reason,
                    tree,
                    patch.pick,
                    outcome.moved,
                )
            )
            console.note(f"{tree[:12]}  {patch.subject}")
    return PatchedTree(fork, base, tree, tuple(steps))


def refusal(fork: str, patch: Patch, outcome: Outcome) -> PatchError:
    """Return the failure for a patch that was not applied."""
    details = [*outcome.says, f"tree before it: {outcome.tree}"]
    if outcome.status == "already-upstream":
        details = [patch.subject, f"drop it when: {patch.drop_when}", *details]
        return PatchError(
            "patch-already-upstream", f"{patch.name} is in {fork} already.", details=details
        )
    if outcome.status == "empty":
        return PatchError(
            "patch-no-effect", f"{patch.name} changes nothing in {fork}.", details=details
        )
    return PatchError("patch-conflict", f"{patch.name} does not apply to {fork}.", details=details)


def evaluate(objects: Objects, base: str, patches: Sequence[Patch]) -> list[Outcome]:
    """
    Try every patch at any lines, without those that do not apply. Only upkeep uses this, no build.
    """
    tree, outcomes = base, list[Outcome]()
    with objects.index(base) as index:
        for patch in patches:
            outcomes.append(attempt(objects, index, tree, patch, movable=True))
            tree = outcomes[-1].tree
    return outcomes


def attempt(
    objects: Objects, index: Index, tree: str, patch: Patch, *, movable: bool = False
) -> Outcome:
    """
    Try *patch* on *index*, which holds *tree*, and holds the resulting tree afterwards.

    Args:
        movable: Let a patch of ours apply at other lines than it names, as a pick may.
    """
    movable = movable or bool(patch.pick)
    parts = patch.sections()
    same = _keeps_lines(patch)
    if not patch.data.strip():
        return Outcome("empty", tree, says=("its diff is empty",))
    if same and all(
        part.hunks and part.old == part.new and b"\nnew mode " not in part.data for part in parts
    ):
        return Outcome("empty", tree, says=("it changes nothing",))
    fits, output = index.apply(patch.data)
    moved = len(_OFFSET.findall(output))
    if not fits or moved or b"\n\\ " in patch.data or _repeatable(patch):
        if fits:
            index.reset(tree)
        reverse_fits, reverse_output = index.apply(patch.data, reverse=True, check=True)
        reverse_fits = reverse_fits and not list(_joined_lines(objects, tree, patch, done=True))
        # A patch that fits at its own lines is not there already because similar lines are
        # elsewhere.
        elsewhere = bool(_OFFSET.search(reverse_output)) and not (movable and (moved or not fits))
        if reverse_fits and not elsewhere and not (fits and same):
            return Outcome(
                "already-upstream", tree, says=("the whole change can be reverted in this tree",)
            )
        if reasons := _obstacles(objects, tree, patch, fits, output, movable=movable):
            return Outcome("conflict", tree, says=tuple(reasons))
        index.apply(patch.data)
    after = index.tree()
    if after == tree:
        return Outcome("already-upstream", tree, says=("the tree is the same with it as without",))
    return Outcome("applied", after, moved)


def _obstacles(
    objects: Objects, tree: str, patch: Patch, fits: bool, output: str, *, movable: bool
) -> list[str]:
    """Return why the patch is a conflict; nothing if it is none."""
    if not fits:
        # "while searching for" is followed by lines of the patch, which the report has.
        errors = [
            line
            for line in output.splitlines()
            if line.startswith("error:") and "while searching for" not in line
        ]
        return errors or output.strip().splitlines()[-5:]
    if joined := list(_joined_lines(objects, tree, patch)):
        return ["it ends a file where this tree goes on", *joined]
    moved = _OFFSET.findall(output)
    if moved and not movable:
        return ["it applies only at other lines than it names", *moved]
    if moved and (unclear := list(_ambiguous_hunks(objects, tree, patch))):
        return ["hunks that fit at other lines than they name fit there more than once", *unclear]
    return []


def taken_away(objects: Objects, tree: str, patches: Sequence[Patch]) -> frozenset[str]:
    """
    Return the names of the *patches* that can be reverted in *tree*, the newest first, so that
    *tree* has them.
    """
    present = set()
    with objects.index(tree) as index:
        for patch in reversed(patches):
            # git reverts a change of modes alone in any tree, with a warning; and a joined line is
            # another line.
            modes = _keeps_lines(patch) and all(
                part.old == part.new and not part.binary for part in patch.sections()
            )
            if (
                not patch.data.strip()
                or modes
                or list(_joined_lines(objects, index.tree(), patch, done=True))
            ):
                continue
            if index.apply(patch.data, reverse=True)[0]:
                present.add(patch.name)
    return frozenset(present)


def _keeps_lines(patch: Patch) -> bool:
    """Return whether every hunk, if any, replaces lines by the same lines."""
    return all(hunk.before == hunk.after for part in patch.sections() for hunk in part.hunks)


def _repeatable(patch: Patch) -> bool:
    """
    Return whether the patch may fit where it was applied already: no hunk shows which of both
    states a file has.
    """
    return all(
        old == new
        for part in patch.sections()
        for hunk in part.hunks
        for old, new in zip(hunk.before, hunk.after, strict=False)
    )


def _ambiguous_hunks(objects: Objects, tree: str, patch: Patch) -> Iterator[str]:
    """Yield the hunks of files with a moved hunk that fit at several places or name no line."""
    for part in patch.sections():
        text = (objects.blob(tree, part.old) if part.hunks and part.old else None) or b""
        hunks = [(hunk, hunk.places(text)) for hunk in part.hunks if part.old]
        for hunk, places in [] if all(hunk.start in places for hunk, places in hunks) else hunks:
            if len(places) > 1:
                yield f"{part.path}: {hunk.label} at lines {', '.join(map(str, places[:5]))}"
            if not hunk.before:
                yield f"{part.path}: {hunk.label} names no line that is there"


def _joined_lines(
    objects: Objects, tree: str, patch: Patch, *, done: bool = False
) -> Iterator[str]:
    """
    Yield the hunks that end with a line without a line end, where the file has one.

    Args:
        done: Look for the replacement instead of the replaced lines.
    """
    for part in patch.sections() if b"\n\\ " in patch.data else ():
        for hunk in part.hunks[-1:]:
            lines, path = (hunk.after, part.new) if done else (hunk.before, part.old)
            ends_open = path and lines and not lines[-1].endswith(b"\n")
            if ends_open and not hunk.places(objects.blob(tree, path) or b"", done=done):
                yield f"{path}: {hunk.label}"
