"""Does upstream have it? Each of the three tests finds what the others miss, each names its evidence, and none says more than it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from sparkwright.cherry_picks import already_upstream, apply_check, patch, pull_requests
from sparkwright.cherry_picks.already_upstream import Base, Evidence
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.pull_requests import Seen
from sparkwright.forks.context import Session

if TYPE_CHECKING:
    from tests.unit.conftest import Host

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
    seen = Seen("git", "Improve it", "octocat", "merged" if merge else "open", head, merge, "main")
    made = pull_requests.record(session, ledger, seen, number, "why", "then")
    return made, pull_requests.patch_of(session, ledger, msgspec.structs.replace(made, stacks={host.stack: {}}), host.stack)


def base(host: Host, session: Session, revision: str = "main") -> Base:
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
    found = already_upstream.evidence(
        session, session.mirror(host.url), on, one, record, apply_check.taken_away(session.objects, on.tree, [one])
    )
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


def test_a_half_merged_pull_request_is_not_upstream(begun: Host) -> None:
    """One of two files landed: no test holds."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three")), "c.txt": b"new\n"})
    record, one = pinned(begun, 7)
    begun.work.commit({"c.txt": b"new\n"}, "Half of it")
    found = verdict(begun, one, record)

    assert holds(found) == (None, False, False)
    assert found["reverse"].says == "main does not hold all of it"
    assert found["patch-id"].says == f"no commit of main has patch-id {record.patch_id[:12]}"


def test_what_is_merged_later_than_the_base_is_not_in_it(begun: Host) -> None:
    """The base is a commit before the merge."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    begun.squash(7)
    record, one = pinned(begun, 7, begun.work.git("rev-parse", "HEAD"))

    assert holds(verdict(begun, one, record, base(begun, begun.session(), "v1"))) == (False, False, False)


def test_a_revert_takes_the_change_out_again(begun: Host) -> None:
    """The merge commit is still an ancestor, which is why all three are shown."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    begun.squash(7)
    record, one = pinned(begun, 7, begun.work.git("rev-parse", "HEAD"))
    begun.work.git("revert", "--no-edit", "HEAD")

    assert holds(verdict(begun, one, record)) == (True, True, False)


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
    assert found["ancestor"].says == found["patch-id"].says == "the history of main is not known here"


def test_a_commit_that_cannot_be_read_is_no_evidence(begun: Host) -> None:
    """Offline, a commit that changed the same files and whose files are not in the store leaves the question open."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    record, one = pinned(begun, 7)
    begun.work.commit({"a.txt": edited(("line 3", "line 3.0"))}, "Another change of it")
    begun.work.commit({"a.txt": edited(("line 3", "line III"))}, "And another")
    session = begun.session()
    on = base(begun, session)
    offline = begun.session("--offline")
    found = already_upstream.evidence(offline, offline.mirror(begun.url), on, one, record, frozenset())

    assert found[1].holds is None
    assert "changes the same files, but cannot be read" in found[1].says


# A stack of patches.


def test_patches_are_taken_away_newest_first(begun: Host) -> None:
    """The second patch changed the first one's context, so the first can be taken away only after it."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))})
    begun.squash(7)
    begun.pull(8, {"a.txt": edited(("line 3", "line three"), ("line 4", "line four"))})
    begun.squash(8)
    begun.push()
    patches = [pinned(begun, number, begun.work.git("rev-parse", f"main~{8 - number}"))[1] for number in (7, 8)]
    session = begun.session()
    tree = base(begun, session).tree

    assert apply_check.taken_away(session.objects, tree, patches) == {"#7", "#8"}
    assert apply_check.taken_away(session.objects, tree, patches[:1]) == frozenset()


def test_a_patch_that_is_not_there_does_not_hide_the_others(begun: Host) -> None:
    """Of three patches upstream took the first and the last."""
    for number, line in ((7, 3), (8, 20), (9, 35)):
        begun.pull(number, {"a.txt": edited((f"line {line}", f"line {line}.5"))})
    begun.work.commit({"a.txt": edited(("line 3", "line 3.5"), ("line 35", "line 35.5"))}, "Two of them")
    patches = [pinned(begun, number)[1] for number in (7, 8, 9)]
    session = begun.session()

    assert apply_check.taken_away(session.objects, base(begun, session).tree, patches) == {"#7", "#9"}


# What is compared.


def test_the_whole_pull_request_is_compared_whatever_a_stack_leaves_out(begun: Host) -> None:
    """The patch-id is that of the ledger, and so are the files; upstream leaves nothing out."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))}, {"c.txt": b"new\n"})
    record, _ = pinned(begun, 7)
    session, ledger = begun.session(), Ledger(begun.url)
    one = pull_requests.patch_of(session, ledger, msgspec.structs.replace(record, stacks={"test": {"c.txt": "not needed"}}), "test")
    begun.work.git("merge", "--quiet", "--squash", "pr7")
    begun.work.git("commit", "--quiet", "-m", "By a maintainer")

    assert one.files == ("a.txt",)
    assert verdict(begun, one, record)["patch-id"].holds is True


def test_a_patch_of_ours_is_compared_without_context(begun: Host) -> None:
    """Ours have the smallest context that git accepts, so that the patch-id with context would never be upstream's."""
    mail = begun.work.change(
        {"a.txt": edited(("line 3", "line three"), ("line 5", "line 5\n-- five"), ("line 40", "line forty")), "c.txt": b"no end"}
    )
    begun.work.git("reset", "--quiet", "--hard", "main~1")
    one = patch.parse("ours.patch", mail)
    begun.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    text = begun.work.path / "a.txt"
    text.write_bytes(edited(("line 3", "line three"), ("line 5", "line 5\n-- five"), ("line 40", "line forty")))
    landed = begun.work.commit({"c.txt": b"no end"}, "Take a patch of somebody's")
    begun.work.commit({"c.txt": b"another end"}, "Later")
    found = verdict(begun, one, None)

    assert holds(found) == (None, True, False)
    assert found["patch-id"].says.startswith(landed[:12])
    assert found["ancestor"].says == "the patch is ours"


def test_a_merge_on_the_branch_is_compared_as_a_whole(begun: Host) -> None:
    """What a true merge brought is its diff against the branch before it."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three"))}, {"c.txt": b"new\n"})
    record, one = pinned(begun, 7)
    begun.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    begun.work.git("merge", "--quiet", "--no-ff", "-m", "Join", "pr7")

    assert verdict(begun, one, record)["patch-id"].holds is True


def test_an_empty_diff_has_no_patch_id(begun: Host) -> None:
    """That it is a commit's is all that can be said of it."""
    begun.pull(7, {"c.txt": b"new\n"})
    begun.work.commit({"c.txt": b"new\n"}, "The same")
    record, one = pinned(begun, 7, begun.squash(7))
    found = verdict(begun, one, record)

    assert holds(found) == (True, None, False)
    assert found["patch-id"].says == "the diff is empty"


@pytest.mark.parametrize("name", ["a b.txt", "ä.txt", 'q"uote.txt', "dir/[x]*.txt"])
def test_names_of_files_are_compared_as_they_are(begun: Host, name: str) -> None:
    """Blanks, quotes, brackets and other alphabets."""
    begun.pull(7, {name: b"new\n"})
    record, one = pinned(begun, 7)
    begun.work.commit({name: b"new\n"}, "The same")

    assert verdict(begun, one, record)["patch-id"].holds is True


def test_only_commits_of_exactly_these_files_are_read(begun: Host) -> None:
    """A commit that changes more, or less, cannot have the patch-id."""
    wanted = begun.work.commit({"a.txt": b"1\n", "b.txt": b"1\n"}, "Both")
    begun.work.commit({"a.txt": b"2\n"}, "One")
    begun.work.commit({"a.txt": b"3\n", "b.txt": b"3\n", "c.txt": b"3\n"}, "Three")
    begun.push()
    session = begun.session()
    on = base(begun, session)

    assert already_upstream.same_files(session.objects, ["b.txt", "a.txt"], on.commit) == [wanted, begun.work.git("rev-parse", "v1")]


def test_a_patch_of_ours_has_no_record(begun: Host) -> None:
    """A pick is looked up by its number."""
    begun.pull(7, {"c.txt": b"new\n"})
    record, one = pinned(begun, 7)
    ledger = begun.write(record)

    assert already_upstream.record_of(ledger, one) == record
    assert already_upstream.record_of(ledger, msgspec.structs.replace(one, pick=0)) is None
    assert already_upstream.record_of(None, one) is None


def test_the_first_commit_of_a_history_is_one_to_compare_with(begun: Host) -> None:
    """It has no parent; it is a change of nothing, and whatever begins with the same files is read on."""
    begun.pull(7, {"a.txt": edited(("line 3", "line three")), "b.txt": b"two\n"})
    record, one = pinned(begun, 7)

    assert record.files == ("a.txt", "b.txt")
    assert verdict(begun, one, record)["patch-id"].holds is False
