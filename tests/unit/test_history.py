"""Questions to an upstream's history, asked of a real one with merges, squashes, reverts and other people's words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkwright.cherry_picks import history
from sparkwright.core.git_store import Objects

if TYPE_CHECKING:
    from tests.unit.conftest import Host, Repository


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


def test_an_ancestor_is_told_from_a_history_that_is_not_there(objects: Objects, repository: Repository, host: Host) -> None:
    """Yes, no, and unknown: a commit that was fetched without its history says nothing of what it holds."""
    first, last = at(repository), repository.commit({"a.txt": b"2\n"})
    host.work.commit({"a.txt": b"1\n"}, "Begin")
    old = host.work.commit({"a.txt": b"2\n"}, "Next")
    new = host.work.commit({"a.txt": b"3\n"}, "Last")
    host.lock()
    session = host.session()
    for commit in (old, new):
        session.mirror(host.url).commit(commit)

    assert history.is_ancestor(objects, first, last) is True
    assert history.is_ancestor(objects, last, first) is False
    assert history.is_ancestor(session.objects, old, new) is None


def test_the_first_landing_is_the_squash(objects: Objects, repository: Repository) -> None:
    """A cherry-pick with the same subject on the same branch comes later; what is on another branch does not count."""
    repository.git("checkout", "--quiet", "-b", "release")
    repository.commit({"b.txt": b"0\n"}, "Improve it (#7)")
    repository.git("checkout", "--quiet", "main")
    first = repository.commit({"b.txt": b"1\n"}, "Improve it (#7)")
    repository.commit({"b.txt": b"2\n"}, "Improve it (#7)")
    repository.git("merge", "--quiet", "-s", "ours", "-m", "Join", "release")
    found = history.merged_as(objects, 7, at(repository))

    assert found
    assert found.commit == first
    assert history.merged_as(objects, 70, at(repository)) is None


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
