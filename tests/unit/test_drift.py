"""Drift: the state of each patch on later revisions, with the evidence; the status of a stack; and the commit that changed the state."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited

from sparkwright.cherry_picks import series
from sparkwright.cli import main
from sparkwright.client.records import ForkSource, ReleasePatch
from sparkwright.core.files import sha256_file
from sparkwright.forks.lock import FileLock
from sparkwright.release import release_notes

if TYPE_CHECKING:
    from tests.unit.conftest import Host, Index

BLOCK = [f"    block {number}\n" for number in range(1, 6)]
#: What our patches do, in their order.
OURS = {
    "taken": (5, "line five\n"),
    "kept": (20, "line twenty\n"),
    "lost": (35, "line thirty-five\n"),
    "altered": (28, "".join(["line 28\n", *BLOCK])),
}
#: What upstream did, by release.
RELEASED = {
    "1.1": [OURS["taken"]],
    "1.2": [OURS["taken"], (1, "above\nline 1\n"), (35, "line XXXV\n"), (28, "".join(["line 28\n", *BLOCK[:4], "    another\n"]))],
}


@pytest.fixture(name="stack")
def _stack(host: Host, offered: Index) -> Host:
    """
    Return a project on release 1.0 with four patches of ours and two picks, whose diffs came to the branch after its release 1.2 and were
    changed later: 7 was merged, and 8 is open.
    """
    path = offered.release("1.0", {"a.txt": TEXT, "b.txt": b"one\n"})
    offered.release("2.0rc1", {"a.txt": TEXT})
    host.work.commit({"a.txt": TEXT, "b.txt": b"one\n"}, "Release 1.0")
    host.lock(sdist=FileLock(offered.project, "1.0", path.name, sha256_file(path), path.stat().st_size))
    for count, name in enumerate(OURS, 1):
        host.ours(f"{name}.patch", {"a.txt": edited(*list(OURS.values())[:count])}, name)
    heads = [host.pull(7, {"b.txt": b"two\n"}), host.pull(8, {"c.txt": TEXT})]
    for version, changes in RELEASED.items():
        host.work.commit({"a.txt": edited(*changes)}, f"Release {version}")
        offered.release(version, {"a.txt": edited(*changes), "b.txt": b"one\n"})
    host.carry(7, heads[0], host.squash(7))
    host.carry(8, heads[1])
    host.squash(8)
    host.work.commit({"b.txt": b"three\n", "c.txt": b"\n"}, "Change both")
    host.push()
    return host


def document(host: Host, capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> Any:
    """Return the document that a command prints."""
    capsys.readouterr()
    assert main.main(["patch", verb, *host.words, "--json", *words]) == 0
    return msgspec.json.decode(capsys.readouterr().out)


def states(report: Any) -> dict[str, list[str]]:
    """Return the states of each patch in the order of the bases."""
    found: dict[str, list[str]] = {}
    for trial in report["of"]["trials"]:
        found.setdefault(trial["patch"].removesuffix(".patch"), []).append(trial["state"])
    return found


def test_every_patch_is_tried_on_every_base(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Upstream took one as it was and one with a change, moved one, broke one, and has both picks; each test finds what the others miss."""
    [report] = document(stack, capsys, "drift", "--releases")["drift"]
    ends = {end["patch"].removesuffix(".patch"): (end["last"], end["first"], end["state"], end["proof"]) for end in report["absorbed"]}
    merge, landed = stack.ledger.by_number[7].merge[:12], stack.work.git("rev-parse", "main~1")[:12]

    assert report["of"]["bases"] == ["1.1", "1.2", "main 2026-11-01"]
    assert states(report) == {
        "#7": ["applies", "applies", "already-upstream"],
        "#8": ["applies", "applies", "already-upstream"],
        "taken": ["already-upstream", "already-upstream", "already-upstream"],
        "kept": ["applies", "moves", "moves"],
        "lost": ["applies", "conflict", "conflict"],
        "altered": ["applies", "likely-upstream", "likely-upstream"],
    }
    assert ends.pop("#7")[3].startswith(f"ancestor: {merge} is part of main 2026-11-01; patch-id: {merge} ")
    assert ends.pop("#8")[3].startswith(f"patch-id: {landed} 2026-11-01 Improve it (#8) has patch-id ")
    assert ends == {
        "taken": ("", "1.1", "already-upstream", "reverse: 1.1 holds the whole change"),
        "kept": ("main 2026-11-01", "", "moves", ""),
        "lost": ("1.1", "", "conflict", ""),
        "altered": ("1.1", "1.2", "likely-upstream", "4 of its 5 added lines are there"),
    }


def test_a_base_may_be_named(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """A release, a branch, a tag, and a commit; in the order in which they are named."""
    names = ["1.1", "main", "v1", stack.work.git("rev-parse", "main~1")]
    [report] = document(stack, capsys, "drift", *(word for name in names for word in ("--to", name)))["drift"]

    assert report["of"]["bases"] == names
    assert states(report)["#7"] == ["applies", "already-upstream", "applies", "already-upstream"]


def known(host: Host) -> dict[str, tuple[str, str]]:
    """Return the entry in a release's notes of each patch: whether upstream has it, and why."""
    patches = tuple(ReleasePatch(one.name, one.sha256, one.subject, one.reason, one.pick) for one in series.of(host.context(), host.fork))
    source = ForkSource(
        name=host.fork, version="1.0", kind="git", origin=host.url, pin="1" * 40, tree="2" * 40, resolved=True, built="backend",
        source_tree="3" * 40, patches=patches,
    )  # fmt: skip
    noted = release_notes.with_upstream(host.context(), source).patches
    return {patch.name: (patch.upstream, patch.upstream_says) for patch in noted}


def test_status_and_release_notes_have_the_result_of_the_last_drift(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """No host is asked. Before the drift only the ledger's merge is known; a conflict proves neither."""
    before, merge = known(stack), stack.ledger.by_number[7].merge[:12]
    document(stack, capsys, "drift", "--releases")
    stack.path.rename(stack.path.with_suffix(".gone"))
    lines = {line["name"]: line for line in document(stack, capsys, "status")["stacks"]["test"]}
    age = (datetime.datetime.now(datetime.UTC).date() - datetime.date(2026, 11, 1)).days

    assert {name: line["needed"] for name, line in lines.items()} == {
        "#7": "until main 2026-11-01", "#8": "until main 2026-11-01", "taken.patch": "until 1.1",
        "kept.patch": "applies at other lines on main 2026-11-01", "lost.patch": "conflicts on main 2026-11-01", "altered.patch": "until 1.2",
    }  # fmt: skip
    assert lines["kept.patch"] == {
        "fork": "widget", "name": "kept.patch", "subject": "kept", "age": age, "lines": 9, "superseded": "", "page": "",
        "needed": lines["kept.patch"]["needed"], "reason": "the test wants it", "drop_when": "the test ends",
    }  # fmt: skip
    assert (lines["#7"]["subject"], lines["#7"]["page"]) == ("Improve number 7", "https://github.com/acme/widget/pull/7")
    assert before.pop("#7") == ("upstream", f"merged as {merge}")
    assert set(before.values()) == {("", "not tried on anything later")}
    assert known(stack) == {
        "#7": ("upstream", "main 2026-11-01 has it"),
        "#8": ("upstream", "main 2026-11-01 has it"),
        "taken.patch": ("upstream", "1.1 has it"),
        "kept.patch": ("needed", "main 2026-11-01 lacks it"),
        "lost.patch": ("", "on main 2026-11-01: conflict"),
        "altered.patch": ("", "on main 2026-11-01: likely-upstream"),
    }


@pytest.mark.parametrize(
    ("words", "commit", "states", "page"),
    [
        (["7"], "main~2", ("applies", "is upstream (ancestor: "), "https://github.com/acme/widget/pull/7"),
        (["lost", "--from", "v1"], "main~3", ("applies", "conflicts"), ""),
    ],
)
def test_bisect_finds_the_commit_that_took_or_broke_a_patch(
    stack: Host, capsys: pytest.CaptureFixture[str], words: list[str], commit: str, states: tuple[str, str], page: str
) -> None:
    """The search for a pick starts from the pick's own base."""
    change = document(stack, capsys, "bisect", *words)["bisect"]

    assert (change["commit"], change["before"], change["page"]) == (stack.work.git("rev-parse", commit), states[0], page)
    assert change["after"].startswith(states[1])


def test_a_bisection_without_a_result_is_refused(stack: Host) -> None:
    """Unknown patches and ends, ends in the wrong order or of one answer."""
    for words, reference, what in (
        (["third", "--from", "v1"], "not-provided", "no patch 'third'"),
        (["kept"], "not-provided", "needs a commit to start from"),
        (["kept", "--from", "v9"], "not-provided", "v9 is neither a release nor a branch"),
        (["kept", "--from", "0" * 40], "not-provided", "does not follow 0000"),
        (["kept", "--from", "main", "--to", "v1"], "not-provided", "does not follow"),
        (["kept", "--from", "v1"], "bisect-undecided", "No commit certainly changes"),
    ):
        with refusal(reference, match=what):
            main.run(["patch", "bisect", *stack.words, *words])
