"""
Picks: an upstream pull request as a verified record of the ledger, and from the record back to its diff.

What a pull request is comes from GitHub's API, or from git alone where the API is out of reach; what its diff is comes from git objects
in either case, and must hash to the pins from then on.
"""

from __future__ import annotations

import datetime

import msgspec

from sparkwright.cherry_picks import diff, history
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger, Record, State
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest, github
from sparkwright.core.console import console
from sparkwright.core.errors import GitError, GitHubError, UsageError
from sparkwright.core.github import GitHub
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED
from sparkwright.forks.mirror import Mirror

API = github.ADDRESS

#: Lines of a range-diff that a failure shows.
SHOWN = 100


class Seen(msgspec.Struct, frozen=True):
    """
    What could be seen of a pull request today.

    Attributes:
        by: ``api`` or ``git``; git alone tells neither the title of what is not merged, nor open from closed.
    """

    by: str
    title: str
    author: str
    state: State
    head: str
    merge: str
    branch: str


class _Proved(msgspec.Struct, frozen=True):
    """That a record's pins agree with one another was seen in this store."""


def see(session: Session, ledger: Ledger, number: int) -> Seen:
    """
    Return what pull request *number* is today.

    Raises:
        pull-request-gone: It never was, or is deleted.
        offline, source-unreachable: Neither the API nor the repository answers.
    """
    owner = github.repository_of(ledger.url)
    if owner and not session.offline:
        try:
            found = GitHub.from_environment(session.mirrored(API)).pull(*owner, number)
            return Seen("api", found.title, found.author, found.state, found.head, found.merge, found.base_ref)
        except GitHubError as error:
            if error.reference not in {"github-limited", "github-refused", "github-unreachable"}:
                raise
            console.note(f"{error.reference}: {error.what} Asking git alone.")
    return _see_by_git(session, ledger, number)


def _see_by_git(session: Session, ledger: Ledger, number: int) -> Seen:
    mirror = session.mirror(ledger.url)
    tip = mirror.history(ledger.branch, newest=True)
    if tip is None:
        raise SourceError("source-unreachable", f"{ledger.url} has no branch {ledger.branch}.")
    head = mirror.ref(f"refs/pull/{number}/head")
    squash = history.merged_as(session.objects, number, tip)
    if squash:
        title = squash.subject[: squash.subject.rindex("(#")].strip()
        return Seen("git", title, squash.author, "merged", head or UNRESOLVED, squash.commit, ledger.branch)
    if head is None:
        raise GitHubError(
            "pull-request-gone", f"{ledger.url} has neither a pull request {number} nor a commit on {ledger.branch} that names it."
        )
    known = ledger.known(number)
    if known and known.merge:
        return Seen("git", UNRESOLVED, UNRESOLVED, "merged", head, known.merge, ledger.branch)
    _head(session, ledger, number, head)
    if merged := history.merged_with(session.objects, head, tip):
        return Seen("git", UNRESOLVED, history.commit(session.objects, head).author, "merged", head, merged.commit, ledger.branch)
    return Seen("git", UNRESOLVED, UNRESOLVED, UNRESOLVED, head, "", ledger.branch)


def _head(session: Session, ledger: Ledger, number: int, head: str) -> None:
    """Bring the history of a pull request's *head*."""
    found = session.mirror(ledger.url).history(f"refs/pull/{number}/head", newest=True)
    if found is None:
        raise SourceError(
            "source-unreachable", f"{ledger.url} does not offer the commits of #{number}, as a mirror without pull requests does."
        )
    if found != head:
        raise PatchError("pick-mismatch", f"#{number} moved while it was looked at.", todo="Run the same again.")


def record(session: Session, ledger: Ledger, seen: Seen, number: int, reason: str, drop_when: str) -> Record:
    """
    Return the record of pull request *number* with its pins made now.

    Raises:
        pick-mismatch: What the API calls its merge commit is not part of the branch, or nothing tells which commits were its.
        source-unreachable: The repository does not offer its commits.
    """
    base = _base(session, ledger, seen, number)
    tip = seen.merge or seen.head
    data = _rendered(session, session.mirror(ledger.url), base, tip)
    known = ledger.known(number)
    return Record(
        number=number,
        title=seen.title if seen.title != UNRESOLVED or not known else known.title,
        author=seen.author if seen.author != UNRESOLVED or not known else known.author,
        state=seen.state if seen.state != UNRESOLVED or not known else known.state,
        seen=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}" if seen.state != UNRESOLVED or not known else known.seen,
        date=history.commit(session.objects, tip).date,
        head=seen.head if seen.head != UNRESOLVED or not known else known.head,
        base=base,
        merge=seen.merge,
        sha256=digest.sha256_bytes(data),
        patch_id=diff.patch_id(session.objects, data),
        files=tuple(section.path for section in diff.sections(data)),
        reason=reason or (known.reason if known else ""),
        drop_when=drop_when or (known.drop_when if known else ""),
        stacks=known.stacks if known else {},
    )


def unseen(ledger: Ledger, number: int, reason: str, drop_when: str) -> Record:
    """
    Return a record of a pull request that nobody could look at from here; no stack can carry it.

    Raises:
        UsageError: The ledger knows it better already.
    """
    if (known := ledger.known(number)) and known.pinned:
        raise UsageError("usage", f"The ledger pins {known.name} already.")
    return Record(
        number=number, title=UNRESOLVED, author=UNRESOLVED, state="unresolved", seen="never", date=UNRESOLVED, head=UNRESOLVED,
        base=UNRESOLVED, sha256=UNRESOLVED, patch_id=UNRESOLVED, reason=reason, drop_when=drop_when,
    )  # fmt: skip


def _base(session: Session, ledger: Ledger, seen: Seen, number: int) -> str:
    """Return the commit that the diff is taken against, with the histories that this needs in the store."""
    mirror = session.mirror(ledger.url)
    tip = mirror.history(seen.branch, newest=True)
    if seen.merge:
        if tip is None or not history.is_ancestor(session.objects, seen.merge, tip):
            raise PatchError(
                "pick-mismatch",
                f"The merge commit of #{number} is not part of {seen.branch}.",
                details=[f"merge: {seen.merge}", f"{seen.branch}: {tip or 'no such branch'}"],
            )
        return _before_merge(session, ledger, seen, number)
    _head(session, ledger, number, seen.head)
    base = history.merge_base(session.objects, seen.head, tip) if tip else None
    if base is None:
        raise PatchError("pick-mismatch", f"#{number} has no common history with {seen.branch}.")
    if base == seen.head:
        raise _unclear(number, seen, "its commits are part of the branch, and no merge commit says from where on")
    return base


def _before_merge(session: Session, ledger: Ledger, seen: Seen, number: int) -> str:
    """
    Return the commit before the first that a merged pull request brought.

    A squash and a merge bring one commit to the branch. But a pull request that was rebased onto it is known by its last commit
    alone, and the one before that is its own, too.
    """
    objects = session.objects
    parents = history.parents(objects, seen.merge)
    if len(parents) > 1 or (parents and history.commit(objects, seen.merge).number == number):
        return parents[0]
    if seen.head == UNRESOLVED or not parents:
        raise _unclear(number, seen, "nobody offers its own commits to compare with")
    _head(session, ledger, number, seen.head)
    if history.is_ancestor(objects, seen.merge, seen.head):
        raise _unclear(number, seen, "its commits were pushed to the branch as they are")
    own = history.own(objects, parents[0], seen.head)
    if len(own) < 2 or not history.same_words(objects, own[-1], seen.merge):
        return parents[0]
    at = seen.merge
    for count, one in enumerate(reversed(own)):
        if not history.same_words(objects, one, at):
            raise _unclear(number, seen, f"it was rebased onto the branch, and only {count} of its {len(own)} commits are found there")
        at = history.parent(objects, at)
    return at


def _unclear(number: int, seen: Seen, why: str) -> PatchError:
    return PatchError(
        "pick-mismatch",
        f"It cannot be told what #{number} changed on {seen.branch}.",
        details=[why, f"head:  {seen.head}", f"merge: {seen.merge or '-'}"],
        todo="Carry the change as a patch of ours, made from the commits on the branch.",
    )


def check_head(session: Session, ledger: Ledger, old: Record, seen: Seen) -> None:
    """
    Compare what is there now with what was pinned.

    Raises:
        pick-moved: The head, or the merge commit, is another one; the details hold both and the difference of the two heads.
    """
    if old.merge and seen.merge and old.merge != seen.merge:
        raise PatchError(
            "pick-moved",
            f"The merge commit of #{old.number} is another one now.",
            details=[f"pinned: {old.merge}", f"now:    {seen.merge}"],
        )
    if UNRESOLVED in (old.head, seen.head) or old.head == seen.head:
        return
    raise PatchError(
        "pick-moved",
        f"The head of #{old.number} moved since it was pinned.",
        details=[f"pinned: {old.head}", f"now:    {seen.head}", *_difference(session, ledger, old, seen)],
    )


def _difference(session: Session, ledger: Ledger, old: Record, seen: Seen) -> list[str]:
    mirror, objects = session.mirror(ledger.url), session.objects
    try:
        tip = mirror.history(seen.branch, newest=True)
        mirror.history(f"refs/pull/{old.number}/head", newest=True)
        if not objects.has(f"{old.head}^{{commit}}"):
            mirror.commit(old.head)
        sides = []
        for head in (old.head, seen.head):
            base = history.merge_base(objects, head, tip) if tip else None
            if base is None:
                return ["the pinned state is gone from the host; there is nothing to compare with"]
            read = (diff.blobs(objects, history.before(objects, one), one) for one in history.own(objects, base, head))
            mirror.files(set().union(*read))
            sides.append((base, head))
        found = history.range_diff(objects, *sides)
    except (SourceError, GitError) as error:
        if isinstance(error, SourceError) and error.reference != "source-unreachable":
            raise
        return [f"the pinned state cannot be had any more: {error.what}"]
    rest = [f"({len(found) - SHOWN} more lines)"] if len(found) > SHOWN else []
    return ["range-diff of both states:", *(f"  {line}" for line in [*found[:SHOWN], *rest])]


def _rendered(session: Session, mirror: Mirror, base: str, tip: str) -> bytes:
    for commit in (base, tip):
        mirror.commit(commit)
    mirror.files(diff.blobs(session.objects, base, tip))
    return diff.render(session.objects, base, tip)


def diff_of(session: Session, ledger: Ledger, record: Record) -> bytes:
    """
    Return the diff that *record* pins, from the store, or rendered from the pinned commits.

    Raises:
        pick-mismatch: The record is not pinned, or the diff does not hash to its pins.
        offline, source-unreachable: The commits are not in the store, and the repository may not be asked or does not have them.
    """
    if not record.pinned:
        raise PatchError(
            "pick-mismatch", f"The ledger does not pin {record.name} of {ledger.url}.", todo=f"Run `sparkwright pick {record.number}`."
        )
    path = session.store.root / "diffs" / record.sha256
    # That the bytes are right does not make the other pins right.
    pins = digest.key("diff", [record.base, record.tip, record.sha256, record.patch_id, record.files])
    proved = session.store.get("diff", pins, _Proved) is not None
    if proved and path.exists() and digest.sha256_bytes(data := path.read_bytes()) == record.sha256:
        return data
    data = _rendered(session, session.mirror(ledger.url), record.base, record.tip)
    found = (digest.sha256_bytes(data), diff.patch_id(session.objects, data))
    if found != (record.sha256, record.patch_id):
        raise PatchError(
            "pick-mismatch",
            f"The diff of {record.name} is not the one that the ledger pins.",
            details=[f"ledger: sha256 {record.sha256}, patch-id {record.patch_id}", f"now:    sha256 {found[0]}, patch-id {found[1]}"],
        )
    touched = {section.path for section in diff.sections(data)}
    if touched != set(record.files):
        raise PatchError(
            "pick-mismatch",
            f"The ledger's files of {record.name} are not those that its diff touches.",
            details=sorted(touched ^ set(record.files)),
        )
    session.store.write(f"diffs/{record.sha256}", data)
    session.store.put("diff", pins, _Proved())
    return data


def patch_of(session: Session, ledger: Ledger, record: Record, stack: str) -> Patch:
    """
    Return what *stack* applies of *record*: its diff less the paths that the stack leaves out.

    Raises:
        pick-mismatch: As `diff_of`; also when a path to leave out is not part of the diff.
    """
    whole = diff_of(session, ledger, record)
    left_out = record.stacks.get(stack, {})
    if unknown := sorted(set(left_out) - set(record.files)):
        raise PatchError(
            "pick-mismatch",
            f"{record.name} does not touch what {stack} leaves out of it.",
            details=unknown,
            todo="Mend `stacks` in the ledger.",
        )
    data = diff.without(whole, left_out)
    return Patch(
        name=record.name, sha256=digest.sha256_bytes(data), subject=record.title, status="Backport", reason=record.reason,
        drop_when=record.drop_when, files=tuple(path for path in record.files if path not in left_out), data=data, pick=record.number,
        author=record.author,
    )  # fmt: skip


def left_out(words: list[str]) -> dict[str, str]:
    """
    Return what the ``--exclude PATH=REASON`` options say.

    Raises:
        UsageError: One has no reason.
    """
    pairs = [word.partition("=") for word in words]
    if bad := [path for path, _, reason in pairs if not path or not reason.strip()]:
        raise UsageError("usage", f"--exclude {bad[0]!r} is not of the form PATH=REASON.")
    return {path: reason.strip() for path, _, reason in pairs}
