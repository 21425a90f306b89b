"""Picks: a pull request becomes pins that hold for ever, or the run says in one word why it does not; and the ledger that holds them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited
from tests.unit.conftest import ROOT, Host

from sparkwright.cherry_picks import ledger, series
from sparkwright.cherry_picks.ledger import Ledger, PickRecord
from sparkwright.cli import main
from sparkwright.core import strict_yaml
from sparkwright.forks.stack import UNRESOLVED

WHY = ("--reason", "the test wants it", "--drop-when", "the test ends")


@pytest.fixture(name="upstream")
def _upstream(host: Host) -> Host:
    """Return the host with a first release, and a project that takes it."""
    host.work.commit({"a.txt": TEXT, "b.txt": b"one\n"}, "Begin")
    host.lock()
    return host


def run(host: Host, *words: str) -> PickRecord:
    """Run ``pick`` and return the record that it wrote last."""
    assert main.run(["patch", "pick", *host.words, "--fork", host.fork, *words]) == 0
    return host.ledger.records[-1]


# What is pinned.


def test_a_squash_is_pinned_as_what_came_to_the_branch(upstream: Host) -> None:
    """The pins of a merged pull request of several commits are its one commit on the branch and that commit's parent."""
    head = upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"a.txt": edited((3, "line 3.0\n")), "c.txt": b"new\n"})
    before = upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    merge = upstream.squash(7)
    made = run(upstream, "7", *WHY)

    assert (made.state, made.head, made.base, made.merge) == ("merged", head, before, merge)
    assert (made.title, made.author, made.date, made.files) == ("Improve it", "T", "2026-11-01", ("a.txt", "c.txt"))
    options = ("--binary", "--full-index", "--no-renames", "--no-indent-heuristic")
    assert made.sha256 == hashlib.sha256(upstream.work.output("diff-tree", "-r", "-p", *options, before, merge)).hexdigest()


def test_an_open_one_is_pinned_as_what_its_branch_has(upstream: Host) -> None:
    """Its title and author are those of its last commit, and later those of the record, which a person may have corrected."""
    start = upstream.work.git("rev-parse", "HEAD")
    upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"c.txt": b"new\n"})
    upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    upstream.push()
    made = run(upstream, "7", *WHY)
    assert (made.state, made.merge, made.base, made.files) == (UNRESOLVED, "", start, ("a.txt", "c.txt"))
    upstream.write(msgspec.structs.replace(made, title="Improve it"))
    assert (made.title, run(upstream, "7").title) == ("pr7 2", "Improve it")
    with refusal("pull-request-gone"):
        run(upstream, "8", *WHY)


# What moved, went, or is not true.


@pytest.mark.parametrize(("text", "diff"), [("line III\n", "another one"), ("line three\n", "the same as before")])
def test_a_force_pushed_head_is_an_error_that_shows_both(upstream: Host, text: str, diff: str) -> None:
    """The failure names both commits and whether the diff is still the same, and the ledger stays as it was."""
    old = upstream.pull(7, {"a.txt": edited((3, "line three\n"))}, {"c.txt": b"new\n"})
    before = upstream.carry(7, old)
    upstream.work.commit({"b.txt": b"two\n"}, "Meanwhile")
    upstream.push()
    new = upstream.pull(7, {"a.txt": edited((3, text))}, {"c.txt": b"new\n"})

    with refusal("pick-moved", match="head of #7 moved") as caught:
        run(upstream, "7")
    assert caught.value.details[2] == f"difference: https://github.com/acme/widget/compare/{old}..{new}"
    assert caught.value.details[3:] == (f"the diff is {diff}",)
    assert upstream.ledger.records == (before,)


@pytest.mark.parametrize("field", ["sha256", "patch_id", "base", "merge", "files"])
def test_a_record_that_was_edited_by_hand_is_a_mismatch(upstream: Host, field: str) -> None:
    """Every pin is checked against the others, whatever the store has already."""
    head = upstream.pull(7, {"a.txt": edited((20, "line twenty\n"))}, {"c.txt": b"new\n"})
    upstream.work.commit({"a.txt": b"above\n" + TEXT}, "Meanwhile")
    record = upstream.carry(7, head, upstream.squash(7))
    wrong = {"sha256": "0" * 64, "patch_id": "0" * 40, "base": record.head, "merge": record.base, "files": ("a.txt",)}
    upstream.write(msgspec.structs.replace(record, **{field: wrong[field]}))
    with refusal("pick-mismatch") as caught:
        series.load_series(upstream.context(), upstream.fork)

    assert any(line.startswith(("sha256: ", "patch-id: ", "files: ")) for line in caught.value.details)


# What a stack carries.


@pytest.mark.parametrize(
    ("has", "reference", "what"),
    [(False, "patch-conflict", r"#7 does not apply to widget: a\.txt"), (True, "patch-already-upstream", "#7 is in widget already, and changed since")],
)
def test_carrying_what_does_not_apply_writes_nothing(upstream: Host, has: bool, reference: str, what: str) -> None:
    """The locked source may lack a commit before it, or have the merge and later changes: then the way on is to do without it."""
    if not has:
        upstream.work.commit({"a.txt": edited((3, "line 3 of main\n"))}, "Meanwhile")
    upstream.pull(7, {"a.txt": edited((3, "line three\n"))})
    merge = upstream.squash(7)
    if has:
        upstream.work.commit({"a.txt": edited((3, "line III\n"))}, "Change it")
        upstream.lock()
    with refusal(reference, match=what) as caught:
        run(upstream, "7", "--carry", *WHY)
    text = "\n".join(caught.value.details)

    assert upstream.ledger.records == ()
    assert ("to go on: sparkwright patch pick 7 --stack test --fork widget --exclude PATH=REASON" in text) is not has
    assert (f"already upstream by ancestor: yes, {merge[:12]} is part of" in text) is has


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["7", *WHY, "--exclude", "a.txt"], "PATH=REASON"),
        (["7", *WHY, "--exclude", "=why"], "PATH=REASON"),
        (["7", *WHY, "--drop", "--exclude", "a.txt=why"], "--drop goes alone"),
        ([*WHY, "--", "widget#"], "names no pull request"),
        ([*WHY, "--", "widget#0"], "names no pull request"),
        ([*WHY, "--", "9" * 5000], "names no pull request"),
        ([*WHY, "--", "https://x/pull/7"], "names no pull request"),
        (["7"], "needs a reason and a condition for dropping it"),
        (["7", "--reason", "why"], "needs a reason and a condition for dropping it"),
        (["7", "--reason", "why", "--drop-when", "  "], "needs a reason and a condition for dropping it"),
    ],
)
def test_words_that_cannot_be_meant_are_wrong_usage(upstream: Host, words: list[str], what: str) -> None:
    """Exclusions without a reason, options that contradict each other, names of no pull request, a record without a reason or an end."""
    with refusal("usage", match=what):
        run(upstream, *words)


# The ledger.

HEAD, BASE, MERGE, SHA256 = "a" * 40, "b" * 40, "c" * 40, "d" * 64
OPEN: dict[str, Any] = {
    "number": 7, "title": "Improve it", "author": "octocat", "state": "open", "seen": "2026-11-01", "date": "2026-10-31", "head": HEAD,
    "base": BASE, "sha256": SHA256, "patch_id": MERGE, "reason": "why", "drop_when": "then", "files": ["a.txt"],
}  # fmt: skip
MERGED = {**OPEN, "state": "merged", "merge": MERGE}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([OPEN, {**OPEN, "number": 8}, MERGED, {**OPEN, "number": 8}], "listed twice: #7, #8"),
        ([{**OPEN, "head": UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "patch_id": UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "base": "a" * 39}], ".base`"),
        ([{**OPEN, "head": "main"}], ".head`"),
        ([OPEN, {**OPEN, "number": "8"}], "$.records[1].number"),
        ([{**OPEN, "seen": "2026-02-30"}], "day is out of range"),
        ([{**OPEN, "reason": "  \n"}], "reason"),
        ([{**OPEN, "stacks": {"test": {"a.txt": " "}}}], "stacks"),
        ([{**OPEN, "diff": "--- a"}], "diff"),
    ],
)
def test_a_ledger_that_cannot_be_meant_is_refused(records: list[dict[str, Any]], words: str) -> None:
    """The message names the record's place and the field."""
    with refusal("file-invalid") as caught:
        strict_yaml.parse(strict_yaml.dump({"url": Host.url, "records": records}), Ledger, "widget.yaml")
    assert words in " ".join(caught.value.details)


@pytest.mark.parametrize("fork", sorted(path.stem for path in (ROOT / "cherry_picks").glob("*.yaml") if path.stem not in ("effects", "ideas")))
def test_a_real_ledger_is_as_it_would_be_written(fork: str) -> None:
    """Byte for byte, so that the next pick changes its own record alone."""
    assert ledger.render(ledger.load_ledger(ROOT, fork)) == ledger.path_of(ROOT, fork).read_text("utf-8")
