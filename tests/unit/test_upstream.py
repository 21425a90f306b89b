"""Does upstream have it? Each of the three tests finds what the others miss, each names its evidence, and none says more than it knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from sparkwright.cherry_picks import apply, series
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.series import PullRequestSnapshot as Seen
from sparkwright.cherry_picks.upstream import Base, Evidence, Upstream
from sparkwright.core.git_store import Objects
from sparkwright.forks.context import RunContext

if TYPE_CHECKING:
    from tests.unit.conftest import Host, Repository

TEXT = "".join(f"line {number}\n" for number in range(1, 41))


def edited(*changes: tuple[str, str], text: str = TEXT) -> bytes:
    for old, new in changes:
        assert f"{old}\n" in text
        text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text.encode()


@pytest.fixture(name="begun")
def _begun(host: Host) -> Host:
    """Return the host with a first release, and a project that takes it."""
    host.work.commit({"a.txt": TEXT.encode(), "b.txt": b"one\n"}, "Begin")
    host.lock()
    return host


def pinned(host: Host, number: int, merge: str = "") -> tuple[Record, Patch]:
    """Pin a pull request without asking anybody but the repository, and return what the stack applies of it."""
    session, ledger = host.session(), Ledger(host.url)
    head = host.work.git("rev-parse", f"pr{number}")
    seen = Seen("Improve it", "octocat", "merged" if merge else "open", head, merge, "main")
    made = series.record(session, ledger, seen, number, "why", "then")
    return made, series.patch_of(session, ledger, msgspec.structs.replace(made, stacks={host.stack: {}}), host.stack)


def base(host: Host, session: RunContext, revision: str = "main") -> Base:
    """Return a revision as it is at the host, with its history and its files."""
    host.push()
    mirror = session.mirror(host.url)
    mirror.history("main", newest=True)
    commit = host.work.git("rev-parse", revision)
    mirror.commit(commit)
    return Base(revision, mirror.tree(session.objects.resolve(f"{commit}^{{tree}}")), commit)


def verdict(host: Host, one: Patch, record: Record | None, on: Base | None = None) -> dict[str, Evidence]:
    session = host.session()
    on = on or base(host, session)
    host.write(*([record] if record else []))
    reverts = one.name in apply.taken_away(session.objects, on.tree, [one])
    found = history.evidence(Upstream(session, "widget"), on, one, reverts=reverts)
    return {test.test: test for test in found}


def holds(found: dict[str, Evidence]) -> tuple[bool | None, ...]:
    return tuple(found[test].holds for test in ("ancestor", "patch-id", "reverse"))


# Each test alone.


def test_what_was_merged_and_altered_since_is_known_by_its_ancestor_alone(begun: Host) -> None:
    """The squash had been resolved by hand, and its lines were changed later: only the merge commit tells."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    begun.squash(7)
    record, one = pinned(begun, 7, begun.work.git("rev-parse", "HEAD"))
    begun.work.commit({"a.txt": edited(("line 3", "line 3.0"))}, "Later")
    # Pins of another state than the one that was merged.
    other = msgspec.structs.replace(record, patch_id="0" * 40)
    found = verdict(begun, one, other)

    assert holds(found) == (True, False, False)
    assert found["ancestor"].says == f"{record.merge[:12]} is part of main"


def test_what_landed_again_under_another_commit_is_known_by_its_patch_id_alone(begun: Host) -> None:
    """The pull request was never merged, but its diff was, and was changed later."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))}, {"a.txt": edited(("line 3", "line three"), ("line 30", "line thirty"))})
    record, one = pinned(begun, 7)
    begun.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    begun.work.git("merge", "--quiet", "--squash", "pr7")
    begun.work.git("commit", "--quiet", "-m", "By a maintainer")
    landed = begun.work.git("rev-parse", "HEAD")
    missed = begun.work.git("cherry", "main", "pr7").splitlines()
    begun.work.commit({"a.txt": edited(("line 3", "line 3.0"), ("line 30", "line thirty"))}, "Later")
    found = verdict(begun, one, record)

    assert holds(found) == (None, True, False)
    assert found["patch-id"].says == f"{landed[:12]} 2026-11-01 By a maintainer has patch-id {record.patch_id[:12]}"
    # git's own comparison goes by commits, and finds no squash.
    assert [line[0] for line in missed] == ["+", "+"]


def test_what_is_in_a_release_archive_is_known_by_taking_it_away_alone(begun: Host) -> None:
    """A tree without a commit has no history; that the whole change can be taken away from it is evidence enough."""
    begun.pull(7, {"a.txt": edited(("line 20", "line twenty"))})
    record, one = pinned(begun, 7)
    objects = begun.session().objects
    tree = objects.store_files([("a.txt", "100644", b"above\n" + edited(("line 20", "line twenty"))), ("PKG-INFO", "100644", b"x\n")])
    found = verdict(begun, one, record, Base("1.1", tree))

    assert holds(found) == (None, None, True)
    assert found["reverse"].says == "1.1 holds the whole change"
    assert found["ancestor"].says == "there is no merge commit"
    assert found["patch-id"].says == "the history of 1.1 is not known here"


# What they do not find.


def test_a_history_that_is_not_there_is_no_evidence(begun: Host) -> None:
    """A base that was fetched alone says of no commit that it lacks it."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    merge = begun.squash(7)
    record, one = pinned(begun, 7, merge)
    begun.work.commit({"a.txt": edited(("line 3", "line 3.0"))}, "Later")
    begun.push()
    begun.cache = begun.cache.with_name("fresh")
    session = begun.session()
    tip = begun.work.git("rev-parse", "main")
    for commit in (merge, tip):
        session.mirror(begun.url).commit(commit)
    on = Base("main", session.mirror(begun.url).tree(session.objects.resolve(f"{tip}^{{tree}}")), tip)
    found = verdict(begun, one, record, on)

    assert holds(found) == (None, None, False)
    assert all(found[test].says.startswith("the history of main is not known here") for test in ("ancestor", "patch-id"))



# History.


@pytest.fixture(name="objects")
def _objects(repository: Repository, tmp_path: Path) -> Objects:
    """Return an object database that borrows from the repository, as the store's does from mirrors."""
    repository.commit({"a.txt": b"1\n"}, "Begin")
    objects = Objects(tmp_path / "objects.git")
    objects.borrow(repository.path)
    return objects


def at(repository: Repository, name: str = "HEAD") -> str:
    return repository.git("rev-parse", name)


def merged(repository: Repository, name: str, files: dict[str, bytes | None], message: str) -> tuple[str, str]:
    """Merge a branch of one commit into main; return its head and the merge."""
    repository.git("checkout", "--quiet", "-b", name)
    head = repository.commit(files, name)
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "-m", message, name)
    return head, at(repository)


def test_the_states_of_a_file_are_those_of_the_branch(objects: Objects, repository: Repository) -> None:
    """Newest first, each with the commit of the branch that made it: of what a merge brought, the merge; zeros where it was removed."""
    ids = [at(repository, "HEAD:a.txt")]
    commits = [at(repository)]
    commits.append(merged(repository, "side", {"a.txt": b"2\n"}, "Join")[1])
    ids.append(at(repository, "HEAD:a.txt"))
    repository.commit({"b.txt": b"b\n"})
    commits.append(repository.commit({"a.txt": None}))
    ids.append("0" * 40)
    commits.append(repository.commit({"a.txt": b"1\n"}))
    ids.append(ids[0])

    assert history.states(objects, "a.txt", at(repository)) == list(reversed(list(zip(commits, ids, strict=True))))
    assert history.states(objects, "none.txt", at(repository)) == []


@pytest.mark.parametrize(
    ("before", "after", "touched"),
    [
        (b"a\nb\nc\n", b"a\nB\nc\n", True),
        (b"a\nx\nc\n", b"a\nb\nx\nc\n", True),
        (b"a\nb\nc\n", b"A\nb\nc\n", False),
        (b"b\n", b"b", True),
        (b"a\n\n", b"a\n", False),
        (b"\x00b\n", b"\x00c\n", True),
    ],
    ids=["removed", "added", "beside it", "line end", "blank line", "binary"],
)
def test_a_change_touches_the_lines_that_it_removes_or_adds(
    objects: Objects, repository: Repository, before: bytes, after: bytes, touched: bool
) -> None:
    """Context does not count, and neither do blank lines; what cannot be told counts."""
    ids = []
    for text in (before, after):
        repository.commit({"a.txt": text})
        ids.append(at(repository, "HEAD:a.txt"))

    assert history.touches(objects, ids[0], ids[1], [b"b\n", b"\n"]) == touched
