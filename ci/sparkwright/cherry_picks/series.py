"""
The series: our patches in quilt's order, applied strictly.

Every patch must apply exactly, at the very lines it names, and must change the tree; each step has a tree id.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from sparkwright import digest
from sparkwright.cherry_picks import patch
from sparkwright.cherry_picks.patch import Patch
from sparkwright.console import console
from sparkwright.errors import PatchConflict, PatchInvalid, PatchNoEffect
from sparkwright.forks.session import Session
from sparkwright.forks.sources import FetchedSource
from sparkwright.git import Objects

#: git says so when it found a hunk's context elsewhere than the patch claims.
_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset -?\d+ lines?\)")


class AppliedPatch(msgspec.Struct, frozen=True):
    """A patch that was applied, and the tree after it."""

    name: str
    sha256: str
    subject: str
    reason: str
    tree: str


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


def load(folder: Path) -> tuple[Patch, ...]:
    """
    Return the patches that the file ``series`` in *folder* lists; a fork without one has none.

    Raises:
        PatchInvalid: A listed patch is missing or unreadable, is listed twice, or a patch in the folder is not listed.
    """
    listing = folder / "series"
    lines = listing.read_text("utf-8", errors="replace").splitlines() if listing.is_file() else []
    names = [name for name in (line.partition("#")[0].strip() for line in lines) if name]
    present = {path.name for path in folder.glob("*.patch")}
    wrong = [f"listed twice: {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    wrong += [f"listed, but not there: {name}" for name in names if name not in present]
    wrong += [f"there, but not listed: {name}" for name in sorted(present - set(names))]
    if wrong:
        raise PatchInvalid(f"{listing} and its folder disagree.", details=wrong, todo="List every patch once, in the order of application.")
    return tuple(patch.parse(name, (folder / name).read_bytes()) for name in names)


def apply(session: Session, source: FetchedSource) -> PatchedTree:
    """
    Apply the series of the source's fork.

    Raises:
        PatchConflict: A patch does not apply at the lines it names.
        PatchNoEffect: A patch leaves the tree as it was.
    """
    patches = load(session.project.series_folder(source.fork))
    key = digest.key("apply", {"base": source.tree, "patches": [(one.name, one.sha256) for one in patches]})
    known = session.store.get("apply", key, PatchedTree)
    if known and session.objects.has(f"{known.tree}^{{tree}}"):
        return known
    applied = apply_to(session.objects, source.fork, source.tree, patches)
    session.store.put("apply", key, applied)
    return applied


def apply_to(objects: Objects, fork: str, base: str, patches: tuple[Patch, ...]) -> PatchedTree:
    """Apply *patches* to the tree *base*, in order; see `apply`."""
    tree, steps = base, []
    with console.step(f"apply {len(patches)} patches to {fork}"):
        for one in patches:
            after, said = objects.apply(tree, one.data)
            # A binary hunk that is cut off gets an error from git, but no status: the rest is applied.
            if after is None or any(line.startswith("error:") for line in said.splitlines()):
                raise PatchConflict(f"{one.name} does not apply to {fork}.", details=[*_reasons(said), f"tree before it: {tree}"])
            if offsets := _OFFSET.findall(said):
                raise PatchConflict(
                    f"{one.name} applies to {fork} only at other lines than it names.", details=[*offsets, f"tree before it: {tree}"]
                )
            if after == tree:
                raise PatchNoEffect(f"{one.name} changes nothing in {fork}.", details=[f"tree: {tree}"])
            tree = after
            steps.append(AppliedPatch(one.name, one.sha256, one.subject, one.reason, tree))
            console.note(f"{tree[:12]}  {one.subject}")
    return PatchedTree(fork, base, tree, tuple(steps))


def _reasons(said: str) -> list[str]:
    """Return git's complaints, without what it says of files that are fine."""
    return [line for line in said.splitlines() if line.startswith("error:")] or said.strip().splitlines()[-5:]
