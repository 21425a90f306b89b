"""
Rebase: the series as commits in a worktree, on the locked source or on another base.

Only here may git look for a place (3-way), and only in the worktree is anything half done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sparkwright.cherry_picks import apply_check, export, series, series_git, upstream_revisions, worktree
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.apply_check import Outcome
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.worktree import State
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import Session


class Rebased(msgspec.Struct, frozen=True):
    """
    How a rebase went.

    Attributes:
        outcomes: Of every patch, by name, up to the one that *stopped* it; the rest waits in the worktree.
        stopped: The patch that needs a person; empty when all is done.
        tip: The last commit so far.
    """

    folder: str
    outcomes: dict[str, Outcome]
    stopped: str
    base: str
    tip: str


def start(
    session: Session, fork: str, base: Base, *, files: Mapping[str, str] | None = None, gone: Mapping[str, str] | None = None
) -> Rebased:
    """
    Make the worktree: every patch of *fork* as a commit on *base*, up to the first that needs a person.

    Args:
        files: Reviewed files that the export writes, too; see `State`.
        gone: Patches to leave out, each with the evidence that the base has it.

    Raises:
        rebase-unfinished: There is a worktree already.
        patch-conflict: A pick does not apply; it is not ours to mend, so nothing is made.
    """
    folder = worktree.folder_of(session, fork)
    if folder.exists():
        raise PatchError("rebase-unfinished", f"There is a worktree of {fork} already.", details=[str(folder)])
    pins = export.pins(session, fork, files or {})
    patches = [one for one in series.of(session, fork) if one.name not in (gone or {})]
    done, (root, tip), stopped = _commits(session.objects, fork, base, patches)
    dropped = {**(gone or {}), **{name: "; ".join(one.says) for name, one in done.items() if one.status in ("already-upstream", "empty")}}
    picks = {one.pick: done[one.name].tree for one in patches if one.pick and one.name in done}
    rest = patches[[one.name for one in patches].index(stopped) :] if stopped else []
    said = {series_git.carried(session.objects, one): series_git.message(one) for one in rest}
    state = State(fork, session.project.stack, base, dropped, picks, dict(files or {}), pins, said)
    worktree.make(session.objects, folder, root, tip, state)
    if rest:
        _with_blobs(session, fork)
        stopped = worktree.am(folder, rest)
        tip = worktree.brought(session.objects, folder)[1]
        done |= _placed(session.objects, root, tip, rest, stopped)
    return Rebased(str(folder), done, stopped, root, tip)


def _commits(objects: Objects, fork: str, base: Base, patches: Sequence[Patch]) -> tuple[dict[str, Outcome], tuple[str, str], str]:
    """Return what came of the patches, the base and the last commit, and the patch of ours that conflicts first."""
    root = tip = series_git.root(objects, base.tree, f"{fork} {base.name}")
    done, tree = dict[str, Outcome](), base.tree
    with objects.index(base.tree) as index:
        for one in patches:
            outcome = apply_check.attempt(objects, index, tree, one, movable=True)
            if outcome.status == "conflict" and not one.pick:
                return done, (root, tip), one.name
            if outcome.status == "conflict":
                raise PatchError(
                    "patch-conflict",
                    f"{one.name} does not apply to {base.name}.", details=outcome.says,
                    todo=f"Leave the files out that conflict, or all of it: `sparkwright pick {fork}{one.name} --exclude …` or `--drop`.",
                )  # fmt: skip
            if outcome.status == "applied":
                tip = series_git.add(objects, tip, outcome.tree, one)
            tree, done[one.name] = outcome.tree, outcome
    return done, (root, tip), ""


def _with_blobs(session: Session, fork: str) -> None:
    """Bring what the patches were made for, as far as the series applies to the locked source: a merge of three states needs it."""
    try:
        series.apply_to(session.objects, fork, upstream_revisions.of_source(session, fork).tree, series.of(session, fork))
    except SparkwrightError as error:
        console.detail(f"git am may lack what a patch was made for: {error.what}")


def _placed(objects: Objects, base: str, tip: str, rest: Sequence[Patch], stopped: str) -> dict[str, Outcome]:
    """Return what git am made of *rest*, up to the patch at which it stopped."""
    commit = {one.name: one.commit for one in series_git.read(objects, base, tip)}
    found: dict[str, Outcome] = {}
    for one in rest:
        if one.name == stopped:
            break
        if one.name in commit:
            tree = objects.resolve(f"{commit[one.name]}^{{tree}}")
            found[one.name] = Outcome("applied", tree, says=("git am found a place for it: look at it before the export",))
        else:
            found[one.name] = Outcome("empty", "", says=("git am found nothing left to do; the export asks for --drop",))
    return found
