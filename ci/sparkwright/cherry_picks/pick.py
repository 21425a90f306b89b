"""
Pick: pin a pull request in the ledger, and watch those that are there.

GitHub's API describes a pull request; if that is out of reach, git alone does. Its diff comes from
git objects in either case.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import msgspec

from sparkwright.cherry_picks import ledger as ledgers
from sparkwright.cherry_picks import patch, series
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.ledger import Ledger, PullState, Record
from sparkwright.cherry_picks.patch import PatchError
from sparkwright.cherry_picks.upstream import Upstream
from sparkwright.core import github
from sparkwright.core.console import console
from sparkwright.core.errors import GitHubError, UsageError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.github import GitHub
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import UNRESOLVED
from sparkwright.forks.stack import SourceError


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
    data, previous = series.diff_between(context, ledger, base, tip), ledger.find(number)
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
        sha256=sha256_bytes(data),
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
            picks = [series.patch_of(context, book, pick, stack) for pick in book.carried(stack)]
            end = [pick.pick for pick in picks].index(number) + 1
            applied = [pick for pick in picks[:end] if pick.data]
            series.apply_patches(Upstream(context, fork, book), fetch.fetch(context, fork), applied)
        ledgers.write(context.project.root, fork, book)
    return book.record(number)


class WatchedPull(msgspec.Struct, frozen=True):
    """
    A pull request of the ledger, and what changed.

    Attributes:
        state, seen: As the ledger has them now.
        previous: The day on which it was last seen before.
        visible: Whether it could be looked at; git alone does not see one that is not merged, if
            the repository at hand lacks the refs of pull requests.
        changes: A line per change; empty if nothing did.
        stacks: The stacks that carry it.
    """

    fork: str
    name: str
    title: str
    state: str
    seen: str
    previous: str
    visible: bool
    changes: tuple[str, ...]
    stacks: tuple[str, ...]


def refresh(context: RunContext, fork: str) -> list[WatchedPull]:
    """
    Look at every pull request of the ledger of *fork*, by GitHub's API or else by git alone, and
    write what the pins do not depend on: the day, the state of one that is not merged, and a title
    and an author that were unresolved. New commits are taken by `pin`.

    Raises:
        offline, source-unreachable: Neither the API nor the repository answers.
    """
    with context.store.lock(f"ledger-{fork}"):
        book, watched, by_api = ledgers.require(context.project.root, fork), [], True
        today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        with console.progress("pull requests", len(book.records)) as progress:
            for count, old in enumerate(book.records, start=1):
                try:
                    pull = snapshot_by_api(context, book, old.number) if by_api else None
                    by_api = pull is not None
                    pull = pull or snapshot_by_git(context, book, old.number)
                except GitHubError as error:
                    if error.reference != "pull-request-gone":
                        raise
                    gone = ["it does not exist any more"] if by_api else []
                    pull, changes, fresh = None, gone, old
                if pull:
                    changes, fresh = _changes(old, pull), _refreshed(old, pull, today)
                    book = book.with_record(fresh)
                visible, stacks = bool(pull or changes), tuple(old.stacks)
                state = (fresh.title, fresh.state, fresh.seen, old.seen, visible)
                watched.append(WatchedPull(fork, old.name, *state, tuple(changes), stacks))
                progress.update(count, old.name)
        ledgers.write(context.project.root, fork, book)
    return watched


def _changes(old: Record, pull: PullRequestSnapshot) -> list[str]:
    changes = []
    if UNRESOLVED not in (old.state, pull.state) and old.state != pull.state:
        changes.append(f"{pull.state}, was {old.state}")
    commits = {"merged as": (old.merge, pull.merge), "head": (old.head, pull.head)}
    for name, (before, now) in commits.items():
        if now not in ("", UNRESOLVED, before) and before != UNRESOLVED:
            changes.append(f"{name} {now[:12]}" + (f", was {before[:12]}" if before else ""))
    return changes


def _refreshed(old: Record, pull: PullRequestSnapshot, today: str) -> Record:
    names = [name for name in ("title", "author") if getattr(old, name) == UNRESOLVED]
    fields = {name: getattr(pull, name) for name in names}
    if pull.state == old.state:
        fields["seen"] = today
    elif "merged" not in (old.state, pull.state) and pull.state != UNRESOLVED:
        fields |= {"state": pull.state, "seen": today}
    return msgspec.structs.replace(old, **fields)
