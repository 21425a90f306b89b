"""Which patches are still needed: said only where something proves it, asked of a real index and a real repository."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from sparkwright.cherry_picks import pick, series
from sparkwright.cherry_picks.ledger import PullState
from sparkwright.core.files import sha256_file
from sparkwright.core.github import PullRequest
from sparkwright.forks.lock import FileLock
from sparkwright.release.manifest.records import Fork, Need, Patch
from sparkwright.release.notes import needs

if TYPE_CHECKING:
    from tests.unit.conftest import Host, Index

TEXT = "".join(f"line {number}\n" for number in range(1, 41))
#: Nothing listens on the discard port.
NOWHERE = "http://127.0.0.1:9/"


def edited(*numbers: int) -> bytes:
    return "".join(f"line {number} as we want it\n" if number in numbers else f"line {number}\n" for number in range(1, 41)).encode()


@pytest.fixture(name="made")
def _made(host: Host, offered: Index) -> Host:
    """Return an upstream at release 1.0, with two patches of ours and an open pull request that the stack carries."""
    path = offered.release("1.0", {"a.txt": TEXT.encode(), "b.txt": b"one\n"})
    host.work.commit({"a.txt": TEXT.encode(), "b.txt": b"one\n"}, "Release 1.0")
    host.lock(sdist=FileLock("widget-kit", "1.0", path.name, sha256_file(path), path.stat().st_size))
    host.ours("first.patch", {"a.txt": edited(10)}, "Do the first")
    host.ours("second.patch", {"a.txt": edited(10, 30)}, "Do the second")
    head = host.pull(7, {"c.txt": b"picked\n"}, start="v1")
    carry(host, "open", head)
    return host


def carry(host: Host, state: PullState, head: str, merge: str = "") -> None:
    seen = PullRequest(7, "Improve it", "octocat", state, head, "main", merge)
    record = pick.record(host.context(), host.ledger, seen, 7, "the test wants it", "the test ends")
    host.write(msgspec.structs.replace(record, stacks={host.stack: {}}))


def fork(host: Host) -> Fork:
    """Return what a release says of the fork: the series as it stands."""
    carried = tuple(Patch(one.name, one.sha256, one.subject, one.reason, one.pick) for one in series.of(host.context(), host.fork))
    return Fork(host.fork, "1.0", "git", host.url, "1" * 40, "2" * 40, True, "backend", "3" * 40, patches=carried)


def gathered(host: Host, *words: str, ask: bool = True, of: Fork | None = None) -> dict[str, Need]:
    """Return the needs by patch; the order of the patches is kept."""
    about = of or fork(host)
    found = needs.gather(host.context(*words), (about, Fork("other", "1", "git", "", "", "", True, "backend", "")), ask=ask)
    assert [need.patch for need in found] == [one.name for one in about.patches]
    return {need.patch: need for need in found}


def states(found: dict[str, Need]) -> dict[str, str]:
    return {name: need.state for name, need in found.items()}


def test_what_nobody_asked_is_unknown_with_its_reason(made: Host) -> None:
    """Without a drift and without a network nothing counts as needed; what its authors say of its end is passed on."""
    found = gathered(made, "--offline", ask=False)
    assert set(states(found).values()) == {"unknown"}
    assert found["first.patch"].says == (
        "nobody tried it on anything later than its own source; Upstream-Status: Pending; it goes when: the test ends"
    )
    assert "the pull request was open when it was last looked at" in found["#7"].says


def test_a_later_release_decides(made: Host, offered: Index) -> None:
    """What it lacks is needed, what it holds is upstream's, and a conflict proves neither."""
    third = made.ours("third.patch", {"a.txt": edited(10, 20, 30)}, "Do the third")
    assert third
    offered.release("1.1", {"a.txt": edited(30).replace(b"line 20\n", b"line twenty\n"), "b.txt": b"one\n"})
    found = gathered(made, "--mirror", f"{made.url}={NOWHERE}")
    assert states(found) == {"#7": "needed", "first.patch": "needed", "second.patch": "upstream", "third.patch": "unknown"}
    assert found["second.patch"].says.startswith("1.1 has it: reverse: 1.1 holds the whole change; tried on ")
    assert found["first.patch"].says.startswith("1.1 lacks it and takes it; tried on ")
    assert found["third.patch"].says.startswith("on 1.1 it conflicts there, and no test finds the whole change")


def test_a_merge_that_the_ledger_names_counts_as_upstreams(made: Host) -> None:
    """Also where no later release was tried, which is said; a patch of ours beside it stays unknown."""
    merge = made.squash(7)
    carry(made, "merged", made.ledger.records[0].head, merge)
    found = gathered(made, "--offline", ask=False)
    assert found["#7"].state == "upstream"
    assert found["#7"].says.startswith(f"upstream merged it as {merge[:12]} (seen ")
    assert found["#7"].says.endswith("no later release was tried")
    assert found["first.patch"].state == "unknown"


def test_an_index_without_an_answer_leaves_the_patch_unknown(made: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is not "nothing newer"."""
    about = fork(made)
    monkeypatch.setenv("SPARKWRIGHT_INDEX_URL", os.environ["SPARKWRIGHT_INDEX_URL"].replace("simple", "gone"))
    found = gathered(made, "--mirror", f"{made.url}={NOWHERE}", of=about)
    assert set(states(found).values()) == {"unknown"}
    assert gathered(made, "--offline", of=about)["first.patch"].says.startswith("the network may not be used")
