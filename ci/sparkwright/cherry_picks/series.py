"""The series of a stack: the pull requests that it picks, then our patches in quilt's order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sparkwright.cherry_picks import apply, conflict, ledger, patch, pull_requests
from sparkwright.cherry_picks.apply import PatchedTree
from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core import digest
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource


def names(folder: Path) -> list[str]:
    """
    Return the file names that the file ``series`` in *folder* lists; none if there is no such file.

    Raises:
        patch-invalid: A listed patch is missing, is listed twice, or a patch in the folder is not
            listed.
    """
    listing = folder / "series"
    lines = listing.read_text("utf-8", errors="replace").splitlines() if listing.is_file() else []
    listed = [name for name in (line.partition("#")[0].strip() for line in lines) if name]
    present = {path.name for path in folder.glob("*.patch")}
    twice = sorted({name for name in listed if listed.count(name) > 1})
    wrong = [f"listed twice: {name}" for name in twice]
    wrong += [f"listed, but not there: {name}" for name in listed if name not in present]
    wrong += [f"there, but not listed: {name}" for name in sorted(present - set(listed))]
    if wrong:
        raise PatchError(
            "patch-invalid",
            f"{listing} and its folder disagree.",
            details=wrong,
            todo="List every patch once, in the order of application.",
        )
    return listed


def load(folder: Path) -> tuple[Patch, ...]:
    """
    Return our patches in *folder*, in order.

    Raises:
        patch-invalid: See `names`; or a patch cannot be read.
    """
    return tuple(patch.parse(name, (folder / name).read_bytes()) for name in names(folder))


def of(session: RunContext, fork: str) -> tuple[Patch, ...]:
    """
    Return the whole series of *fork*: the picks in the ledger's order, then our patches.

    Raises:
        patch-invalid: See `load`.
        pick-mismatch, offline, source-unreachable: See `pull_requests.patch_of`.
    """
    book, stack = ledger.load(session.project.root, fork), session.project.stack
    picks = [
        pull_requests.patch_of(session, book, record, stack)
        for record in (book.carried(stack) if book else ())
        if book
    ]
    return (*picks, *load(session.project.series_folder(fork)))


def pins(session: RunContext, fork: str) -> list[tuple[object, ...]]:
    """
    Return what determines each element of the series of *fork*, without reading a diff: its name,
    its pins, and the paths that are left out.
    """
    book, stack = ledger.load(session.project.root, fork), session.project.stack
    folder = session.project.series_folder(fork)
    picks = [
        (record.name, record.sha256, record.base, record.tip, record.patch_id, record.stacks[stack])
        for record in (book.carried(stack) if book else ())
    ]
    return [*picks, *((name, digest.sha256_file(folder / name)) for name in names(folder))]


def apply_series(session: RunContext, source: FetchedSource) -> PatchedTree:
    """
    Apply the series of the fork of *source*; the result is kept in the store.

    Raises:
        patch-conflict, patch-already-upstream, patch-no-effect: See `apply.apply_patches`.
        patch-invalid, pick-mismatch, offline, source-unreachable: The series cannot be read.
    """
    stored = stored_tree(session, source.fork, source.tree)
    if stored and session.objects.whole(stored.tree):
        return stored
    patches = of(session, source.fork)
    failure = partial(conflict.refusal, Upstream(session, source.fork), source)
    patched = apply.apply_patches(session.objects, source.fork, source.tree, patches, failure)
    session.store.put("apply", _key(session, source.fork, source.tree), patched)
    return patched


def stored_tree(session: RunContext, fork: str, base: str) -> PatchedTree | None:
    """
    Return the stored result of `apply_series` on the tree *base*; None if there is none, or the
    series changed since.
    """
    return session.store.get("apply", _key(session, fork, base), PatchedTree)


def _key(session: RunContext, fork: str, base: str) -> str:
    return digest.key("apply", {"base": base, "series": pins(session, fork)})
