"""
Whether upstream has a patch already: three tests, each of which finds what the others miss, with
their evidence.

The merge commit is an ancestor of the base. The diff as a whole has the patch-id of an upstream
commit, which finds squashes and re-landed changes. The patch can be reverted in the base, which
needs no history (as ``stg rebase --merged`` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sparkwright.cherry_picks import history, patch
from sparkwright.cherry_picks.ledger import Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream_revisions import Base, Upstream
from sparkwright.core.errors import GitError, SparkwrightError
from sparkwright.core.git_store import Objects

#: Context of the patches that we write: the smallest that git accepts.
CONTEXT = 1


class Evidence(msgspec.Struct, frozen=True):
    """
    The result of one test.

    Attributes:
        holds: True if upstream has the change by this test, None if the test could not be made.
        says: The commit, release or reason, for people.
    """

    test: Literal["ancestor", "patch-id", "reverse"]
    holds: bool | None
    says: str


def evidence(
    upstream: Upstream, base: Base, patch: Patch, *, reverts: bool
) -> tuple[Evidence, ...]:
    """
    Return the results of the three tests for *patch* on *base*.

    Args:
        reverts: Whether the patch can be reverted in *base*; see `apply.taken_away`.
    """
    record = upstream.book.record(patch.pick) if upstream.book and patch.pick else None
    return (
        Evidence("ancestor", *_ancestor(upstream, base, record)),
        Evidence("patch-id", *_patch_id(upstream, base, patch, record)),
        Evidence(
            "reverse",
            reverts,
            f"{base.name} {'holds the whole change' if reverts else 'does not hold all of it'}",
        ),
    )


def _ancestor(upstream: Upstream, base: Base, record: Record | None) -> tuple[bool | None, str]:
    if record is None or not record.merge:
        return None, "there is no merge commit" if record else "the patch is ours"
    objects = upstream.session.objects
    known = base.commit and objects.has(f"{record.merge}^{{commit}}")
    holds = history.is_ancestor(objects, record.merge, base.commit) if known else None
    if holds is None:
        return None, f"the history of {base.name} is not known here"
    return holds, f"{record.merge[:12]} is {'' if holds else 'not '}part of {base.name}"


def _patch_id(
    upstream: Upstream, base: Base, ours: Patch, record: Record | None
) -> tuple[bool | None, str]:
    """
    Compare with every commit that changed exactly the same files; of a pick, the whole diff counts.
    """
    objects = upstream.session.objects
    wanted = record.patch_id if record else patch.patch_id(objects, ours.data)
    if not wanted:
        return None, "the diff is empty"
    try:
        candidates = (
            same_files(objects, record.files if record else ours.files, base.commit)
            if base.commit
            else None
        )
    except GitError:
        candidates = None
    if candidates is None or not upstream.mirror:
        return None, f"the history of {base.name} is not known here"
    for commit in candidates:
        try:
            before = history.before(objects, commit)
            upstream.mirror.files(patch.blobs(objects, before, commit))
            diff = patch.render(objects, before, commit, context=3 if record else CONTEXT)
        except SparkwrightError as error:
            return None, f"{commit[:12]} changes the same files, but cannot be read: {error.what}"
        if patch.patch_id(objects, diff) == wanted:
            return True, f"{history.commit(objects, commit).line()} has patch-id {wanted[:12]}"
    return False, f"no commit of {base.name} has patch-id {wanted[:12]}"


def same_files(objects: Objects, paths: Sequence[str], tip: str) -> list[str]:
    """
    Return the commits of the branch ending in *tip* that changed *paths* and nothing else, newest
    first.
    """
    words = [
        "log",
        "--first-parent",
        "--full-diff",
        "--name-only",
        "--no-renames",
        "-z",
        "--format=%x01%H",
        tip,
    ]
    # One path narrows the walk; all of them would list every commit that touched any of them.
    out = objects.run([*words, "--", f":(literal){paths[0]}"])[1].decode("utf-8", "surrogateescape")
    entries = [[word.strip("\n") for word in entry.split("\0")] for entry in out.split("\x01")[1:]]
    return [
        commit for commit, *changed in entries if sorted(filter(None, changed)) == sorted(paths)
    ]
