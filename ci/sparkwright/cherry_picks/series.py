"""
The series of a stack: the pull requests that it picks, then our patches in quilt's order.

A pull request is a verified record of the ledger. GitHub's API describes it; if that is out of
reach, git alone does. The diff comes from git objects in either case, and must match the pins of
the record from then on.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sparkwright.cherry_picks import apply, backport, conflict, patch
from sparkwright.cherry_picks import ledger as ledgers
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.apply import PatchedTree
from sparkwright.cherry_picks.backport import Backport
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger, PullState, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core import digest, github
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError, UsageError
from sparkwright.core.github import GitHub
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.fetch import FetchedSource
from sparkwright.forks.lock import UNRESOLVED


class PullRequestSnapshot(msgspec.Struct, frozen=True):
    """
    The current state of a pull request; git alone shows neither the title of an unmerged one, nor
    whether it is closed.
    """

    title: str
    author: str
    state: PullState
    head: str
    merge: str
    branch: str


def snapshot(context: RunContext, ledger: Ledger, number: int) -> PullRequestSnapshot:
    """
    Return the current state of pull request *number*.

    Raises:
        pull-request-gone: It does not exist.
        offline, source-unreachable: Neither the API nor the repository answers.
    """
    return snapshot_by_api(context, ledger, number) or snapshot_by_git(context, ledger, number)


def snapshot_by_api(context: RunContext, ledger: Ledger, number: int) -> PullRequestSnapshot | None:
    """Return what `snapshot` does; None, with a note, if GitHub's API is out of reach."""
    owner = github.repository_of(ledger.url)
    if owner and not context.offline:
        try:
            pull = GitHub.from_environment(context.mirrored(github.ADDRESS)).pull(*owner, number)
            return PullRequestSnapshot(
                pull.title, pull.author, pull.state, pull.head, pull.merge, pull.base_ref
            )
        except GitHubError as error:
            if error.reference not in {"github-limited", "github-refused", "github-unreachable"}:
                raise
            console.note(f"{error.reference}: {error.what} Asking git alone.")
    return None


def snapshot_by_git(context: RunContext, ledger: Ledger, number: int) -> PullRequestSnapshot:
    """Return what `snapshot` does, by git alone."""
    mirror, previous = context.mirror(ledger.url), ledger.find(number)
    tip = mirror.history(ledger.branch, newest=True)
    if tip is None:
        raise SourceError("source-unreachable", f"{ledger.url} has no branch {ledger.branch}.")
    head = mirror.ref(f"refs/pull/{number}/head")
    # GitHub's subjects of a squash and of a merge.
    patterns = [f"--grep=\\(#{number}\\)[[:space:]]*$", f"--grep=^Merge pull request #{number} "]
    log = history.log(context.objects, "--first-parent", "--extended-regexp", *patterns, tip)
    merge = next((commit for commit in reversed(log) if commit.number == number), None)
    if merge is None and head is None:
        raise GitHubError(
            "pull-request-gone",
            f"{ledger.url} has neither a pull request {number} nor a commit that names it.",
        )
    squash = merge if merge and not merge.subject.startswith("Merge ") else None
    name = merge.commit if merge else previous.merge if previous else ""
    return PullRequestSnapshot(
        squash.subject[: squash.subject.rindex("(#")].strip() if squash else UNRESOLVED,
        squash.author if squash else UNRESOLVED,
        "merged" if name else UNRESOLVED,
        head or UNRESOLVED,
        name,
        ledger.branch,
    )


def record(
    context: RunContext,
    ledger: Ledger,
    pull: PullRequestSnapshot,
    number: int,
    reason: str,
    drop_when: str,
) -> Record:
    """
    Return the record of pull request *number*, pinned to its current state.

    Raises:
        pick-mismatch: Its merge commit is not part of the branch, or its own commits cannot be
            determined.
        source-unreachable: The repository does not offer its commits.
    """
    base, tip = _base(context, ledger, pull, number), pull.merge or pull.head
    data, previous = _rendered(context, ledger, base, tip), ledger.find(number)
    # git alone may not know what an earlier record does.
    old = {
        field: getattr(previous, field)
        for field in ("title", "author", "state", "head")
        if previous and getattr(pull, field) == UNRESOLVED
    }
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    fresh = Record(
        number=number,
        title=pull.title,
        author=pull.author,
        state=pull.state,
        head=pull.head,
        base=base,
        merge=pull.merge,
        seen=previous.seen if previous and "state" in old else today,
        date=history.commit(context.objects, tip).date,
        sha256=digest.sha256_bytes(data),
        patch_id=patch.patch_id(context.objects, data),
        files=tuple(part.path for part in patch.sections(data)),
        stacks=previous.stacks if previous else {},
        reason=reason,
        drop_when=drop_when,
    )
    return msgspec.structs.replace(fresh, **old)


def _base(context: RunContext, ledger: Ledger, pull: PullRequestSnapshot, number: int) -> str:
    """
    Return the commit that the diff is taken against, with the histories that this needs in the
    store.
    """
    objects, mirror = context.objects, context.mirror(ledger.url)
    tip = mirror.history(pull.branch, newest=True)
    if pull.merge:
        if tip is None or not history.is_ancestor(objects, pull.merge, tip):
            raise PatchError(
                "pick-mismatch",
                f"The merge commit of #{number} is not part of {pull.branch}.",
                details=[f"merge: {pull.merge}", f"{pull.branch}: {tip or 'no such branch'}"],
            )
        # A squash and a merge bring one commit to the branch.
        parents = history.parents(objects, pull.merge)
        if len(parents) > 1 or (parents and history.commit(objects, pull.merge).number == number):
            return parents[0]
        base = None
    else:
        head = mirror.history(f"refs/pull/{number}/head", newest=True)
        if head is None:
            what = f"{ledger.url} does not offer the commits of #{number}."
            raise SourceError("source-unreachable", what)
        if head != pull.head:
            what = f"#{number} moved while it was read."
            raise PatchError("pick-mismatch", what, todo="Run the same again.")
        base = history.merge_base(objects, head, tip) if tip else None
    if base in (None, pull.head):
        raise PatchError(
            "pick-mismatch",
            f"It is unclear what #{number} changed on {pull.branch}.",
            details=[
                "its commits were put onto the branch one by one, or have no history with it",
                f"head:  {pull.head}",
                f"merge: {pull.merge or '-'}",
            ],
            todo="Carry the change as a patch of ours, made from the commits on the branch.",
        )
    return base


def check_head(ledger: Ledger, old: Record, pull: PullRequestSnapshot) -> None:
    """
    Compare the current state of a pull request with its record.

    Raises:
        pick-moved: The head or the merge commit changed.
    """
    commits = {"merge commit": (old.merge, pull.merge), "head": (old.head, pull.head)}
    for name, (pinned, now) in commits.items():
        if pinned and now and pinned != now and UNRESOLVED not in (pinned, now):
            page = f"{ledger.url.removesuffix('.git')}/compare/{pinned}..{now}"
            raise PatchError(
                "pick-moved",
                f"The {name} of #{old.number} moved since it was pinned.",
                details=[f"pinned: {pinned}", f"now:    {now}", f"difference: {page}"],
            )


def _rendered(context: RunContext, ledger: Ledger, base: str, tip: str) -> bytes:
    mirror = context.mirror(ledger.url)
    for commit in (base, tip):
        mirror.commit(commit)
    mirror.files(patch.blobs(context.objects, base, tip))
    return patch.render(context.objects, base, tip)


def _path(context: RunContext, record: Record) -> Path:
    pins = [record.base, record.tip, record.sha256, record.patch_id, record.files]
    return context.store.root / "diffs" / digest.key("diff", pins)


def stored_diff(context: RunContext, record: Record) -> bytes:
    """
    Return the diff of *record* if it is in the store, where only diffs are that were verified with
    the same pins; else nothing.
    """
    path = _path(context, record)
    data = path.read_bytes() if path.exists() else b""
    return data if digest.sha256_bytes(data) == record.sha256 else b""


def diff_of(context: RunContext, ledger: Ledger, record: Record) -> bytes:
    """
    Return the diff that *record* pins, from the store, or rendered from the pinned commits.

    Raises:
        pick-mismatch: The record is not pinned, or the diff does not match its pins.
        offline, source-unreachable: The commits are not in the store, and the repository may not be
            asked or does not have them.
    """
    if not record.pinned:
        raise PatchError(
            "pick-mismatch",
            f"The ledger does not pin {record.name} of {ledger.url}.",
            todo=f"Run `sparkwright patch pick {record.number}`.",
        )
    if data := stored_diff(context, record):
        return data
    data = _rendered(context, ledger, record.base, record.tip)
    pinned = {"sha256": record.sha256, "patch-id": record.patch_id, "files": sorted(record.files)}
    actual = {
        "sha256": digest.sha256_bytes(data),
        "patch-id": patch.patch_id(context.objects, data),
        "files": sorted(part.path for part in patch.sections(data)),
    }
    if wrong := [name for name, pin in pinned.items() if actual[name] != pin]:
        raise PatchError(
            "pick-mismatch",
            f"The diff of {record.name} is not the one that the ledger pins.",
            details=[f"{name}: {pinned[name]} in the ledger, {actual[name]} now" for name in wrong],
        )
    path = _path(context, record)
    context.store.write(f"diffs/{path.name}", data)
    return data


def patch_of(context: RunContext, ledger: Ledger, record: Record, stack: str) -> Patch:
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


def as_patch(record: Record, data: bytes) -> Patch:
    """Return the patch of *record* whose diff is *data*; without one it has no hash."""
    return Patch(
        name=record.name,
        sha256=digest.sha256_bytes(data) if data else "",
        subject=record.title,
        status="Backport",
        reason=record.reason,
        drop_when=record.drop_when,
        files=tuple(part.path for part in patch.sections(data)),
        data=data,
        pick=record.number,
        author=record.author,
    )


def pin(
    context: RunContext,
    fork: str,
    number: int,
    *,
    reason: str = "",
    drop_when: str = "",
    carry: bool = False,
    drop: bool = False,
    accept: bool = False,
    excluded: Mapping[str, str] = {},
) -> Record:
    """
    Pin pull request *number* of *fork* to its current state, and write the ledger.

    Args:
        reason, drop_when: Of the record; empty to leave them as they are.
        carry, drop: Let the stack carry it, or not any more.
        accept: Take another head than the one that is pinned.
        excluded: Files and hunks (``PATH#NUMBER``) that the stack leaves out, each with the reason.

    Raises:
        UsageError: The record has no reason, or no condition for dropping it.
        patch-conflict, patch-already-upstream, patch-no-effect: It does not apply to the stack
            after the picks before it.
        pick-moved, pick-mismatch, pull-request-gone: See `snapshot`, `record` and `check_head`.
    """
    # Without the lock, two runs could overwrite each other's record.
    with console.step(f"pick {fork}#{number}"), context.store.lock(f"ledger-{fork}"):
        book, stack = ledgers.require(context.project.root, fork), context.project.stack
        earlier = book.find(number)
        reason = reason or (earlier.reason if earlier else "")
        drop_when = drop_when or (earlier.drop_when if earlier else "")
        if not reason.strip() or not drop_when.strip():
            raise UsageError(
                "usage",
                f"{fork}#{number} needs a reason and a condition for dropping it.",
                todo="Give both: --reason TEXT --drop-when TEXT.",
            )
        seen = snapshot(context, book, number)
        if earlier and not accept:
            check_head(book, earlier, seen)
        fresh = record(context, book, seen, number, reason, drop_when)
        stacks = {name: paths for name, paths in fresh.stacks.items() if name != stack or not drop}
        if carry or excluded:
            stacks[stack] = {**stacks.get(stack, {}), **excluded}
        book = book.with_record(msgspec.structs.replace(fresh, stacks=stacks))
        if stack in stacks:
            picks = [patch_of(context, book, pick, stack) for pick in book.carried(stack)]
            end = [pick.pick for pick in picks].index(number) + 1
            applied = [pick for pick in picks[:end] if pick.data]
            _apply(Upstream(context, fork, book), fetch.fetch(context, fork), applied)
        ledgers.write(context.project.root, fork, book)
    return book.record(number)


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


def of(context: RunContext, fork: str) -> tuple[Patch, ...]:
    """
    Return the whole series of *fork*: the picks in the ledger's order, then our patches. A pick of
    which everything is left out is not part of it.

    Raises:
        patch-invalid: See `load`.
        pick-mismatch, offline, source-unreachable: See `patch_of`.
    """
    book, stack = ledgers.load(context.project.root, fork), context.project.stack
    picks = (
        [patch_of(context, book, record, stack) for record in book.carried(stack)] if book else []
    )
    ours = load(context.project.series_folder(fork))
    return (*(pick for pick in picks if pick.data), *ours)


def backports(context: RunContext, fork: str) -> list[Backport]:
    """Return the picks that the stack carries in part, as far as their diffs are in the store."""
    book, stack = ledgers.load(context.project.root, fork), context.project.stack
    ours = load(context.project.series_folder(fork))
    return [
        backport.compare(record, stack, diff, patch_of(context, book, record, stack), ours)
        for record in (book.carried(stack) if book else ())
        if book and record.stacks[stack] and (diff := stored_diff(context, record))
    ]


def pins(context: RunContext, fork: str) -> list[tuple[object, ...]]:
    """
    Return what determines each element of the series of *fork*, without reading a diff: its name,
    its pins, and what is left out of it.
    """
    book, stack = ledgers.load(context.project.root, fork), context.project.stack
    folder = context.project.series_folder(fork)
    picks = [
        (record.name, record.sha256, record.base, record.tip, record.patch_id, record.stacks[stack])
        for record in (book.carried(stack) if book else ())
    ]
    return [*picks, *((name, digest.sha256_file(folder / name)) for name in names(folder))]


def apply_series(context: RunContext, source: FetchedSource) -> PatchedTree:
    """
    Apply the series of the fork of *source*; the result is kept in the store.

    Raises:
        patch-conflict, patch-already-upstream, patch-no-effect: See `apply.apply_patches`.
        patch-invalid, pick-mismatch, offline, source-unreachable: The series cannot be read.
        backport-stale: See `backport.check`.
    """
    pinned = {"base": source.tree, "series": pins(context, source.fork)}
    key = digest.key("apply", pinned)
    stored = context.store.get("apply", key, PatchedTree)
    if stored and context.objects.whole(stored.tree):
        return stored
    patches, book = of(context, source.fork), ledgers.load(context.project.root, source.fork)
    backport.check(book, context.project.stack, patches)
    patched = _apply(Upstream(context, source.fork), source, patches)
    context.store.put("apply", key, patched)
    return patched


def _apply(upstream: Upstream, source: FetchedSource, patches: Sequence[Patch]) -> PatchedTree:
    failure = partial(conflict.error_with_report, upstream, source)
    return apply.apply_patches(upstream.context.objects, source.fork, source.tree, patches, failure)
