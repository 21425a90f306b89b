"""Does upstream have it? Each of the three tests finds what the others miss, each names its evidence, and none says more than it knows."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.texts import TEXT, edited
from tests.unit.conftest import Host

from sparkwright.cherry_picks import apply, series
from sparkwright.cherry_picks import upstream as history
from sparkwright.cherry_picks.ledger import Record
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base, Evidence, Upstream
from sparkwright.forks.context import RunContext


@pytest.fixture(name="begun")
def _begun(host: Host) -> Host:
    """Return the host with a first release, and a project that takes it."""
    host.work.commit({"a.txt": TEXT, "b.txt": b"one\n"}, "Begin")
    host.lock()
    return host


def pinned(host: Host, number: int, merge: str = "") -> tuple[Record, Patch]:
    """Let the stack carry a pull request, and return its record and its patch."""
    record = host.carry(number, host.work.git("rev-parse", f"pr{number}"), merge)
    return record, series.patch_of(host.context(), host.ledger, record, host.stack)


def base(host: Host, context: RunContext) -> Base:
    """Return the newest commit of the host, with its history and its files."""
    host.push()
    tip = context.mirror(host.url).history("main", newest=True)
    assert tip
    return Base("main", context.mirror(host.url).tree(context.objects.resolve(f"{tip}^{{tree}}")), tip)


def verdict(host: Host, patch: Patch, record: Record, on: Base | None = None) -> dict[str, Evidence]:
    context = host.context()
    on = on or base(host, context)
    host.write(record)
    reverts = patch.name in apply.revertible_patches(context.objects, on.tree, [patch])
    return {test.test: test for test in history.evidence(Upstream(context, "widget"), on, patch, reverts=reverts)}


def holds(found: dict[str, Evidence]) -> tuple[bool | None, ...]:
    return tuple(found[test].holds for test in ("ancestor", "patch-id", "reverse"))


def test_what_was_merged_and_altered_since_is_known_by_its_ancestor_alone(begun: Host) -> None:
    """The squash had been resolved by hand, and its lines were changed later: only the merge commit tells."""
    begun.pull(7, {"a.txt": edited((3, "line three\n"))})
    begun.squash(7)
    record, one = pinned(begun, 7, begun.work.git("rev-parse", "HEAD"))
    begun.work.commit({"a.txt": edited((3, "line 3.0\n"))}, "Later")
    # Pins of another state than the one that was merged.
    other = msgspec.structs.replace(record, patch_id="0" * 40)
    found = verdict(begun, one, other)

    assert holds(found) == (True, False, False)


def test_what_landed_again_under_another_commit_is_known_by_its_patch_id_alone(begun: Host) -> None:
    """The pull request was never merged, but its diff was, and was changed later."""
    begun.pull(7, {"a.txt": edited((3, "line three\n"))}, {"a.txt": edited((3, "line three\n"), (30, "line thirty\n"))})
    record, one = pinned(begun, 7)
    begun.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    begun.work.git("merge", "--quiet", "--squash", "pr7")
    begun.work.git("commit", "--quiet", "-m", "By a maintainer")
    landed = begun.work.git("rev-parse", "HEAD")
    begun.work.commit({"a.txt": edited((3, "line 3.0\n"), (30, "line thirty\n"))}, "Later")
    found = verdict(begun, one, record)

    assert holds(found) == (None, True, False)
    assert found["patch-id"].says == f"{landed[:12]} 2026-11-01 By a maintainer has patch-id {record.patch_id[:12]}"


def test_what_is_in_a_release_archive_is_known_by_taking_it_away_alone(begun: Host) -> None:
    """A tree without a commit has no history; that the whole change can be taken away from it is evidence enough."""
    begun.pull(7, {"a.txt": edited((20, "line twenty\n"))})
    record, one = pinned(begun, 7)
    objects = begun.context().objects
    tree = objects.store_files([("a.txt", "100644", b"above\n" + edited((20, "line twenty\n"))), ("PKG-INFO", "100644", b"x\n")])
    found = verdict(begun, one, record, Base("1.1", tree))

    assert holds(found) == (None, None, True)
    assert found["reverse"].says == "1.1 holds the whole change"
