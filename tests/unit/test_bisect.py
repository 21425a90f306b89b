"""Bisect: the very commit, or release, at which a patch turns, in as few tries as halving takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks.drift import State
from sparkwright.cli import main

if TYPE_CHECKING:
    from tests.unit.conftest import Host

TEXT = "".join(f"line {number}\n" for number in range(1, 61)).encode()
GOOD: tuple[State, ...] = ("applies", "moves")
BAD: tuple[State, ...] = ("already-upstream", "likely-upstream", "empty", "conflict")


def edited(*changes: tuple[int, str]) -> bytes:
    made = TEXT.decode()
    for number, line in changes:
        made = made.replace(f"line {number}\n", line)
    return made.encode()


# Over commits.


@pytest.fixture(name="made")
def _made(host: Host) -> Host:
    """Return the host with a release, two patches of ours, and a dozen commits after it."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT}, "Begin")
    host.lock()
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"a.txt": edited((10, "first\n"), (11, "second\n")), "b.txt": edited((30, "second\n"))}, "Do the second")
    return host


def go_on(host: Host, count: int, files: Mapping[str, bytes | None] | None = None, message: str = "Go on") -> list[str]:
    """Let upstream make *count* commits that do not matter, then one that changes *files*, if given; return them."""
    made = [host.work.commit({f"other/{number}.txt": host.work.git("rev-parse", "HEAD").encode()}, message) for number in range(count)]
    if files:
        made.append(host.work.commit(files, "Change what matters"))
    host.push()
    return made


def found(host: Host, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the turn that the verb tells of."""
    capsys.readouterr()
    assert main.main(["patch", "bisect", *host.words, "--json", *words]) == 0, capsys.readouterr().err
    return msgspec.json.decode(capsys.readouterr().out)["turn"]


def test_the_commit_that_took_a_pick_is_found(made: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """From the pick's own base on, without a word about where to begin; the evidence and the page are there."""
    go_on(made, 5)
    head = made.pull(7, {"c.txt": b"picked\n"})
    merge = made.squash(7)
    made.carry(7, head, merge)
    go_on(made, 6)
    turn = found(made, capsys, "7")

    assert turn["first"]["base"] == merge[:12]
    assert (turn["last"]["state"], turn["first"]["state"]) == ("applies", "already-upstream")
    assert turn["commit"] == f"{merge[:12]} 2026-11-01 Improve it (#7)"
    assert turn["page"] == "https://github.com/acme/widget/pull/7"
    assert turn["tried"][1] == 8
    assert {one["test"] for one in turn["first"]["evidence"] if one["holds"]} == {"ancestor", "patch-id", "reverse"}


@pytest.mark.parametrize("name", ["first", "first.patch"])
def test_the_commit_that_broke_a_patch_of_ours_is_found(made: Host, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A patch that only moves still fits; the commit that changed its lines is the turn."""
    go_on(made, 3, {"a.txt": b"new\n" + TEXT})
    *_, breaking = go_on(made, 4, {"a.txt": b"new\n" + edited((10, "theirs\n"))})
    go_on(made, 3)
    turn = found(made, capsys, name, "--from", "v1")

    assert turn["first"]["base"] == breaking[:12]
    assert (turn["last"]["state"], turn["first"]["state"]) == ("moves", "conflict")
    assert turn["commit"].endswith(" Change what matters")
    assert turn["page"] == ""
    assert turn["tried"] == [turn["tried"][0], 13]
    assert turn["tried"][0] <= 2 + math.ceil(math.log2(13))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["third", "--from", "v1"], "no patch 'third'"),
        (["8"], "no patch '8'"),
        (["first"], "needs a commit to start from"),
        (["first", "--from", "v9"], "no branch, tag or commit v9"),
        (["first", "--from", "v1", "--to", "v9"], "no branch, tag or commit v9"),
        (["first", "--from", "0" * 40], "no branch, tag or commit 0000"),
        (["first", "--from", "abcdef123"], "no branch, tag or commit abcdef123"),
        (["first", "--from", "main", "--to", "v1"], "does not follow"),
    ],
)
def test_names_that_mean_nothing_are_refused(made: Host, words: list[str], what: str) -> None:
    """A patch, a start or an end that nobody knows is an error that says which; so are ends the wrong way round."""
    go_on(made, 2)

    with refusal("not-provided", match=what):
        main.run(["patch", "bisect", *made.words, *words])


def test_ends_that_agree_are_said(made: Host) -> None:
    """A patch that still fits has no turn; the error names both ends and how to choose others."""
    go_on(made, 2)

    with refusal("bisect-undecided") as caught:
        main.run(["patch", "bisect", *made.words, "first", "--from", "v1"])
    assert [line.partition(": ")[2] for line in caught.value.details] == ["good", "good"]
    assert "--from" in caught.value.todo
