"""
Does upstream have it already? Three tests, each of which finds what the others miss, and each names its evidence.

The merge commit is an ancestor of the base: certain, where there is a merge commit and a history. The diff as a whole has the patch-id
of an upstream commit: finds squashes and re-landed changes. The patch can be taken away from the base, newest patch first: needs no
history at all (the last is StGit's way, ``stg rebase --merged``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import diff, history
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.errors import GitError, SparkwrightError
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import Session
from sparkwright.forks.mirror import Mirror


class Evidence(msgspec.Struct, frozen=True):
    """
    What one test found.

    Attributes:
        holds: True when upstream has the change by this test, None when the test could not be made.
        says: The commit, release or reason, for people.
    """

    test: Literal["ancestor", "patch-id", "reverse"]
    holds: bool | None
    says: str


class Base(msgspec.Struct, frozen=True):
    """
    What patches are tried on.

    Attributes:
        name: What people call it: a release, a branch, a commit.
        commit: Empty where only the tree is known, as from an sdist.
    """

    name: str
    tree: str
    commit: str = ""


def evidence(
    session: Session, mirror: Mirror | None, base: Base, one: Patch, record: Record | None, taken: frozenset[str]
) -> tuple[Evidence, ...]:
    """Return what the three tests say of the patch *one* on *base*."""
    return (
        _ancestor(session, mirror, base, record),
        _patch_id(session, mirror, base, one, record),
        Evidence(
            "reverse",
            one.name in taken,
            f"{base.name} holds the whole change" if one.name in taken else f"{base.name} does not hold all of it",
        ),
    )


def _ancestor(session: Session, mirror: Mirror | None, base: Base, record: Record | None) -> Evidence:
    if record is None or not record.merge:
        return Evidence("ancestor", None, "there is no merge commit" if record else "the patch is ours")
    if not base.commit or mirror is None or not session.objects.has(f"{record.merge}^{{commit}}"):
        return Evidence("ancestor", None, f"the history of {base.name} is not known here")
    holds = history.is_ancestor(session.objects, record.merge, base.commit)
    if holds is None:
        return Evidence("ancestor", None, f"the history of {base.name} is not known here")
    return Evidence("ancestor", holds, f"{record.merge[:12]} is {'' if holds else 'not '}part of {base.name}")


def _patch_id(session: Session, mirror: Mirror | None, base: Base, one: Patch, record: Record | None) -> Evidence:
    """
    Compare with every commit that changed exactly the same files; blobs are brought for those alone.

    Of a pick the whole diff is compared, whatever a stack leaves out of it. A patch of ours has less context than any fixed number of
    lines, and context counts, so of ours and of what it is compared with it is left out.
    """
    if mirror is None or not base.commit:
        return Evidence("patch-id", None, f"the history of {base.name} is not known here")
    objects = session.objects
    paths, context = (record.files, 3) if record else (one.files, 0)
    wanted = record.patch_id if record else diff.patch_id(objects, diff.bare(one.data))
    if not wanted:
        return Evidence("patch-id", None, "the diff is empty")
    try:
        candidates = same_files(objects, paths, base.commit)
    except GitError:
        return Evidence("patch-id", None, f"the history of {base.name} is not known here")
    for commit in candidates:
        try:
            before = history.before(objects, commit)
            mirror.files(diff.blobs(objects, before, commit))
            found = diff.patch_id(objects, diff.render(objects, before, commit, context=context))
        except SparkwrightError as error:
            return Evidence("patch-id", None, f"{commit[:12]} changes the same files, but cannot be read: {error.what}")
        if found == wanted:
            return Evidence("patch-id", True, f"{history.commit(objects, commit).line()} has patch-id {wanted[:12]}")
    return Evidence("patch-id", False, f"no commit of {base.name} has patch-id {wanted[:12]}")


def same_files(objects: Objects, paths: Sequence[str], tip: str) -> list[str]:
    """Return the commits of the branch ending in *tip* that changed *paths* and nothing else, newest first."""
    # One path narrows the walk; asking for all would list every commit that touched any of them.
    words = [
        "log",
        "--first-parent",
        "--full-diff",
        "--name-only",
        "--no-renames",
        "-z",
        "--format=%x01%H",
        tip,
        "--",
        f":(literal){paths[0]}",
    ]
    out = objects.run(words)[1].decode("utf-8", "surrogateescape")
    entries = (entry.split("\0") for entry in out.split("\x01")[1:])
    return [entry[0].strip() for entry in entries if sorted(name.strip("\n") for name in entry[1:] if name.strip("\n")) == sorted(paths)]


def record_of(ledger: Ledger | None, one: Patch) -> Record | None:
    """Return the ledger's record of *one*; None for a patch of ours."""
    return ledger.record(one.pick) if ledger and one.pick else None
