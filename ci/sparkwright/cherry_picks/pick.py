"""
Pick: pin a pull request in the ledger.

git alone describes it: its commits, those of the target branch that name it, and their authors.
"""

import datetime
from collections.abc import Mapping

import msgspec

from sparkwright.cherry_picks import patch, series
from sparkwright.cherry_picks.ledger import (
    Ledger,
    PickRecord,
    path_of,
    render,
    write_reviewed,
)
from sparkwright.cherry_picks.patch import PatchError
from sparkwright.cherry_picks.upstream import Upstream, is_ancestor, log
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.files import sha256_bytes
from sparkwright.forks import fetch
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import UNRESOLVED, SourceUnreachable


class PullRequest(msgspec.Struct, frozen=True):
    """
    A pull request as git shows it, which does not show whether an unmerged one is closed.

    Attributes:
        head: The commit at the tip of its branch; ``unresolved`` if that is gone.
        merge: The commit that it became on the target branch; empty unless merged.
        title: Of a squash; else empty.
    """

    head: str
    merge: str = ""
    title: str = ""


def snapshot(context: RunContext, ledger: Ledger, number: int) -> PullRequest:
    """
    Return the current state of pull request *number*.

    Raises:
        pull-request-gone: Neither the pull request nor a commit that names it exists.
        offline, source-unreachable: The repository may not be asked, or does not answer.
    """
    mirror, previous = context.mirror(ledger.url), ledger.by_number.get(number)
    tip = mirror.history(ledger.branch, newest=True)
    if tip is None:
        raise SourceUnreachable(
            "source-unreachable", f"{ledger.url} has no branch {ledger.branch}."
        )
    head = mirror.ref(f"refs/pull/{number}/head")
    # GitHub's subjects of a squash and of a merge.
    patterns = [f"--grep=\\(#{number}\\)[[:space:]]*$", f"--grep=^Merge pull request #{number} "]
    commits = log(context.objects, "--first-parent", "--extended-regexp", *patterns, tip)
    merge = next((commit for commit in reversed(commits) if commit.number == number), None)
    if merge is None and head is None:
        raise PatchError(
            "pull-request-gone",
            f"{ledger.url} has neither a pull request {number} nor a commit that names it.",
        )
    if merge is None:
        return PullRequest(head or UNRESOLVED, previous.merge if previous else "")
    squash = not merge.subject.startswith("Merge ")
    title = merge.subject[: merge.subject.rindex("(#")].strip() if squash else ""
    return PullRequest(head or UNRESOLVED, merge.commit, title)


def record(
    context: RunContext,
    ledger: Ledger,
    pull: PullRequest,
    number: int,
    reason: str,
    drop_when: str,
) -> PickRecord:
    """
    Return the record of pull request *number*, pinned to its current state.

    Raises:
        pick-mismatch: Its merge commit is not part of the branch, or its own commits cannot be
            determined.
        source-unreachable: The repository does not offer its commits.
    """
    base, tip = _base(context, ledger, pull, number), pull.merge or pull.head
    data, previous = series.diff_between(context, ledger, base, tip), ledger.by_number.get(number)
    [commit] = log(context.objects, "-1", tip)
    head, stacks = pull.head, previous.stacks if previous else {}
    if previous and head == UNRESOLVED:
        head = previous.head
    return PickRecord(
        number=number,
        title=pull.title or (previous.title if previous else commit.subject),
        author=previous.author if previous else commit.author,
        state="merged" if pull.merge else UNRESOLVED,
        head=head,
        base=base,
        merge=pull.merge,
        seen=datetime.datetime.now(datetime.UTC).date().isoformat(),
        date=commit.date,
        sha256=sha256_bytes(data),
        patch_id=patch.patch_id(context.objects, data),
        files=patch.paths(data),
        stacks=stacks,
        reason=reason,
        drop_when=drop_when,
    )


def _base(context: RunContext, ledger: Ledger, pull: PullRequest, number: int) -> str:
    """
    Return the commit that the diff is taken against, with the histories that this needs in the
    store.
    """
    objects, mirror, base = context.objects, context.mirror(ledger.url), ""
    tip = mirror.history(ledger.branch, newest=True) or ""
    if pull.merge:
        if not is_ancestor(objects, pull.merge, tip):
            raise PatchError(
                "pick-mismatch",
                f"The merge commit of #{number} is not part of {ledger.branch}.",
                details=[f"merge: {pull.merge}", f"{ledger.branch}: {tip or 'no such branch'}"],
            )
        before = objects.text("rev-parse", f"{pull.merge}^@").split()
        # A squash and a merge bring one commit to the branch.
        if len(before) > 1 or log(objects, "-1", pull.merge)[0].number == number:
            base = "".join(before[:1])
    else:
        if mirror.history(f"refs/pull/{number}/head", newest=True) is None:
            raise SourceUnreachable(
                "source-unreachable", f"{ledger.url} does not offer the commits of #{number}."
            )
        base = objects.text("merge-base", pull.head, tip, check=False).strip()
    if base in ("", pull.head):
        raise PatchError(
            "pick-mismatch",
            f"It is unclear what #{number} changed on {ledger.branch}.",
            details=[
                "its commits were put onto the branch one by one, or have no history with it",
                f"head:  {pull.head}",
                f"merge: {pull.merge or '-'}",
            ],
            todo="Carry the change as a patch of ours, made from the commits on the branch.",
        )
    return base


def _refuse_moved(ledger: Ledger, old: PickRecord, pull: PullRequest) -> None:
    """
    Check that *pull* is still the commits of *old*.

    Raises:
        pick-moved: The head or the merge commit is another one.
    """
    commits = {"merge commit": (old.merge, pull.merge), "head": (old.head, pull.head)}
    for name, (pinned, now) in commits.items():
        if pinned == now or {pinned, now} & {"", UNRESOLVED}:
            continue
        raise PatchError(
            "pick-moved",
            f"The {name} of #{old.number} moved since it was pinned.",
            details=[
                f"pinned: {pinned}",
                f"now:    {now}",
                f"difference: {ledger.url.removesuffix('.git')}/compare/{pinned}..{now}",
            ],
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
) -> PickRecord:
    """
    Pin pull request *number* of *fork* to its current state, and write the ledger.

    Args:
        reason, drop_when: Of the record; empty to leave them as they are.
        carry, drop: Let the stack carry it, or not any more.
        accept: Take another head than the one that is pinned.
        excluded: Files and hunks (``PATH#NUMBER``) that the stack leaves out, each with the reason.

    Raises:
        UsageError: The record has no reason, or no condition for dropping it.
        patch-conflict, patch-already-upstream, patch-no-effect: The picks of the stack do not
            apply with it.
        pick-moved: The head or the merge commit changed since it was pinned.
        pick-mismatch, pull-request-gone: See `record` and `snapshot`.
    """
    with console.step(f"pick {fork}#{number}"):
        path, stack = path_of(context.project.root, fork), context.project.stack
        ledger = strict_yaml.load(path, Ledger)
        earlier = ledger.by_number.get(number)
        reason = reason or (earlier.reason if earlier else "")
        drop_when = drop_when or (earlier.drop_when if earlier else "")
        if not reason.strip() or not drop_when.strip():
            raise UsageError(
                "usage",
                f"{fork}#{number} needs a reason and a condition for dropping it.",
                todo="Give both: --reason TEXT --drop-when TEXT.",
            )
        seen = snapshot(context, ledger, number)
        if earlier and not accept:
            _refuse_moved(ledger, earlier, seen)
        fresh = record(context, ledger, seen, number, reason, drop_when)
        if drop:
            fresh = fresh.dropped_by(stack)
        elif carry or excluded:
            left_out = {**fresh.stacks.get(stack, {}), **excluded}
            fresh = msgspec.structs.replace(fresh, stacks={**fresh.stacks, stack: left_out})
        ledger = ledger.with_record(fresh)
        if stack in fresh.stacks:
            series.apply_with_report(
                Upstream(context, fork, ledger),
                fetch.fetch(context, fork),
                series.picks(context, ledger),
            )
        write_reviewed(path, render(ledger).encode())
    return fresh
