"""
The series of a stack: the pull requests that it picks, then our patches in quilt's order.

A pull request is a verified record of the ledger. The diff comes from git objects, and must match
the pins of the record.

A stack may carry a pick in part: the ledger names what it leaves out, files (``PATH``) or hunks
(``PATH#NUMBER``), each with the reason. A backport is a patch of ours that replaces it; its header
has a line ``Backport-Of: #NUMBER SHA256`` with the hash of the pinned diff, so that a backport
never outlives the state that it was made from.
"""

import re
from collections.abc import Sequence

from sparkwright.cherry_picks import apply, conflict, patch
from sparkwright.cherry_picks.ledger import Ledger, PickRecord, load_ledger
from sparkwright.cherry_picks.patch import Patch, PatchError
from sparkwright.cherry_picks.upstream import Upstream, base_of
from sparkwright.core.console import console
from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.forks.context import RunContext
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.stack import SourceUnreachable

_TRAILER = re.compile(r"^Backport-Of: #([1-9][0-9]{0,8}) ([0-9a-f]{64})$", re.MULTILINE)


def check_backports(ledger: Ledger, stack: str, patches: Sequence[Patch]) -> None:
    """
    Check that the backports among *patches*, the series of *stack*, belong to picks as the ledger
    pins them.

    Raises:
        backport-stale: A backport is of a pull request that is not carried, or of another state of
            it; or a pick leaves everything out and has none.
    """
    carried, faults = {record.number: record for record in ledger.carried(stack)}, list[str]()
    missing = carried.keys() - {patch.pick for patch in patches}
    for entry in patches:
        for number, sha256 in _TRAILER.findall(entry.text):
            record = carried.get(int(number))
            missing -= {int(number)}
            if record is None:
                faults.append(f"{entry.name}: the stack does not carry #{number}")
            elif record.sha256 != sha256:
                faults.append(
                    f"{entry.name}: it was made from the diff {sha256[:16]}…, pinned is "
                    f"{record.sha256[:16]}…"
                )
    faults += map("all of #{} is left out, without a backport".format, sorted(missing))
    if faults:
        raise PatchError(
            "backport-stale",
            f"Backports of {stack} do not correspond to its picks.",
            details=faults,
        )


def diff_between(context: RunContext, ledger: Ledger, base: str, tip: str) -> bytes:
    """Return the diff from commit *base* to commit *tip*, fetched where it is not in the store."""
    mirror = context.mirror(ledger.url)
    for commit in (base, tip):
        mirror.commit(commit)
    mirror.files(patch.blobs(context.objects, base, tip))
    return patch.render(context.objects, base, tip)


def diff_of(context: RunContext, ledger: Ledger, record: PickRecord) -> bytes:
    """
    Return the diff that *record* pins, rendered from the pinned commits.

    Raises:
        pick-mismatch: The diff does not match its pins.
        offline, source-unreachable: The commits are not in the store, and the repository may not be
            asked or does not have them.
    """
    try:
        data = diff_between(context, ledger, record.base, record.tip)
    except SourceUnreachable as error:
        raise SourceUnreachable(
            error.reference,
            f"The diff of {record.name} cannot be had: {error.what}",
            details=error.details,
            todo=f"Give a mirror of {ledger.url} (--mirror), or run `sparkwright fetch` once with "
            "a connection.",
        ) from error
    pins = {
        "sha256": (record.sha256, sha256_bytes(data)),
        "patch-id": (record.patch_id, patch.patch_id(context.objects, data)),
        "files": (sorted(record.files), sorted(patch.paths(data))),
    }
    details = list[str]()
    for name, (pin, actual) in pins.items():
        if pin != actual:
            details.append(f"{name}: {pin} in the ledger, {actual} now")
    if details:
        raise PatchError(
            "pick-mismatch",
            f"The diff of {record.name} is not the one that the ledger pins.",
            details=details,
        )
    return data


def patch_of(context: RunContext, ledger: Ledger, record: PickRecord, stack: str) -> Patch:
    """
    Return the patch that *stack* applies for *record*: its diff without the files and hunks that
    the stack leaves out.

    Raises:
        pick-mismatch: See `diff_of`; or a file or hunk to leave out is not part of the diff.
    """
    left_out, whole = record.stacks.get(stack, {}), diff_of(context, ledger, record)
    hunks = {
        f"{part.path}#{number}"
        for part in patch.sections(whole)
        for number in range(1, len(part.hunks) + 1)
    }
    if unknown := sorted(set(left_out) - set(record.files) - hunks):
        raise PatchError(
            "pick-mismatch",
            f"{record.name} does not change what {stack} leaves out of it.",
            details=unknown,
            todo="Correct `stacks` in the ledger.",
        )
    return as_patch(record, patch.without(whole, left_out))


def as_patch(record: PickRecord, data: bytes) -> Patch:
    """Return the patch of *record* whose diff is *data*; without one, it has no hash."""
    return Patch(
        name=record.name,
        sha256=sha256_bytes(data) if data else "",
        subject=record.title,
        reason=record.reason,
        drop_when=record.drop_when,
        files=patch.paths(data),
        data=data,
        pick=record.number,
        author=record.author,
        date=f"{record.date}T00:00:00Z" if record.date[:1].isdigit() else "",
    )


def picks(context: RunContext, ledger: Ledger) -> list[Patch]:
    """
    Return the picks of the stack in the ledger's order, less those of which everything is left out.

    Raises:
        pick-mismatch, offline, source-unreachable: See `patch_of`.
    """
    patches, stack = list[Patch](), context.project.stack
    for record in ledger.carried(stack):
        pick = patch_of(context, ledger, record, stack)
        if pick.data:
            patches.append(pick)
    return patches


def load_series(context: RunContext, fork: str) -> tuple[Patch, ...]:
    """
    Return the whole series of *fork*: its `picks`, then our patches.

    Raises:
        patch-invalid: See `patch.load_folder`.
        pick-mismatch, offline, source-unreachable: See `patch_of`.
    """
    carried = picks(context, load_ledger(context.project.root, fork))
    return (*carried, *patch.load_folder(context.project.series_folder(fork)))


def pick_pins(context: RunContext, fork: str) -> list[tuple[object, ...]]:
    """Return what the ledger says of each pick of *fork* that enters the tree or the wheel."""
    stack = context.project.stack
    return [
        (record.name, record.sha256, record.base, record.tip, record.patch_id,
         record.title, record.reason, record.stacks[stack])
        for record in load_ledger(context.project.root, fork).carried(stack)
    ]  # fmt: skip


def pins(context: RunContext, fork: str) -> list[tuple[object, ...]]:
    """Return what determines each element of the series of *fork*, without reading a diff."""
    folder = context.project.series_folder(fork)
    patches = ((name, sha256_file(folder / name)) for name in patch.series_names(folder))
    return [*pick_pins(context, fork), *patches]


def apply_series(context: RunContext, source: FetchedSource) -> apply.PatchedTree:
    """
    Apply the series of the fork of *source*; the result is kept in the store.

    Raises:
        patch-conflict, patch-already-upstream, patch-no-effect: See `apply.patched_tree`.
        patch-invalid, pick-mismatch, offline, source-unreachable: The series cannot be read.
        backport-stale: See `check_backports`.
    """
    key = content_key("apply", {"base": source.tree, "series": pins(context, source.fork)})
    stored = context.store.get("apply", key, apply.PatchedTree)
    if stored and context.objects.is_complete(stored.tree):
        return stored
    patches = load_series(context, source.fork)
    check_backports(load_ledger(context.project.root, source.fork), context.project.stack, patches)
    patched = apply_with_report(Upstream(context, source.fork), source, patches)
    context.store.put("apply", key, patched)
    return patched


def apply_with_report(
    upstream: Upstream, source: FetchedSource, patches: Sequence[Patch]
) -> apply.PatchedTree:
    """Apply *patches* to *source*; see `apply.patched_tree`. A conflict has the report."""
    objects, fork, base = upstream.context.objects, source.fork, source.tree
    with console.step(f"apply {len(patches)} patches to {fork}"):
        outcomes = apply.evaluate(objects, base, patches, strict=True)
        if outcomes and outcomes[-1].status == "conflict":
            *earlier, failed = patches[: len(outcomes)]
            raise conflict.explain(upstream, base_of(source), outcomes[-1], failed, earlier)
        return apply.patched_tree(objects, fork, base, patches, outcomes)
