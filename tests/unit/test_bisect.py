"""Bisect: the upstream commit that changes the state of a patch, on a real repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.refusals import refusal
from tests.support.texts import TEXT, edited

from sparkwright.cli import main

if TYPE_CHECKING:
    from tests.unit.conftest import Host

@pytest.fixture(name="stack")
def _stack(host: Host) -> Host:
    """Return the host with a release and two patches of ours."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT}, "Begin")
    host.lock()
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"a.txt": edited((10, "first\n"), (11, "second\n")), "b.txt": edited((30, "second\n"))}, "Do the second")
    return host


def go_on(host: Host, count: int, files: dict[str, bytes | None] | None = None, subject: str = "Change what matters") -> str:
    """Let upstream make *count* commits that do not matter, then one that changes *files*, if given; return the last."""
    for number in range(count):
        host.work.commit({"n.txt": f"{number} {subject}".encode()}, "Go on")
    if files:
        host.work.commit(files, subject)
    host.push()
    return host.work.git("rev-parse", "HEAD")


def result(host: Host, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the document of a search that ends well."""
    capsys.readouterr()
    assert main.main(["patch", "bisect", *host.words, "--json", *words]) == 0, capsys.readouterr().err
    return msgspec.json.decode(capsys.readouterr().out)["bisect"]


def test_the_commit_that_took_a_pick_is_found(stack: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """The search starts from the pick's own base; the evidence and the page are in the result."""
    go_on(stack, 5)
    head = stack.pull(7, {"c.txt": b"picked\n"})
    merge = stack.squash(7)
    stack.carry(7, head, merge)
    go_on(stack, 6)
    change = result(stack, capsys, "7")

    assert (change["commit"], change["line"]) == (merge, f"{merge[:12]} 2026-11-01 Improve it (#7)")
    assert (change["before"], change["page"]) == ("applies", "https://github.com/acme/widget/pull/7")
    assert change["after"].startswith(f"is upstream (ancestor: {merge[:12]} is part of")


@pytest.mark.parametrize("name", ["first", "first.patch"])
def test_the_commit_that_broke_a_patch_is_found(stack: Host, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A patch that only moves still applies; the commit that changed its lines is the result, after few tries."""
    go_on(stack, 3, {"a.txt": b"new\n" + TEXT})
    breaking = go_on(stack, 4, {"a.txt": b"new\n" + edited((10, "theirs\n"))})
    go_on(stack, 3)
    change = result(stack, capsys, name, "--from", "v1")

    assert (change["commit"], change["page"]) == (breaking, "")
    assert (change["before"], change["after"]) == ("applies at other lines", "conflicts")


@pytest.mark.parametrize(
    ("words", "reference", "what"),
    [
        (["third", "--from", "v1"], "not-provided", "no patch 'third'"),
        (["first"], "not-provided", "needs a commit to start from"),
        (["first", "--from", "v9"], "not-provided", "v9 is neither a release nor a branch"),
        (["first", "--from", "0" * 40], "not-provided", "does not follow 0000"),
        (["first", "--from", "abcdef123"], "not-provided", "abcdef123 is neither"),
        (["first", "--from", "main", "--to", "v1"], "not-provided", "does not follow"),
        (["first", "--from", "v1"], "bisect-undecided", "No commit certainly changes"),
    ],
)
def test_a_search_without_a_result_is_refused(stack: Host, words: list[str], reference: str, what: str) -> None:
    """Unknown patches and ends, ends in the wrong order or of one answer."""
    go_on(stack, 2)

    with refusal(reference, match=what):
        main.run(["patch", "bisect", *stack.words, *words])
