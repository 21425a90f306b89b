"""Picks that are carried in part, and the patches that stand in for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks import series
from sparkwright.cherry_picks.apply import PatchedTree
from sparkwright.cherry_picks.ledger import Record
from sparkwright.forks import fetch

if TYPE_CHECKING:
    from tests.unit.conftest import Host

TEXT = "".join(f"line {number}\n" for number in range(1, 41)).encode()


def changed(*lines: int) -> bytes:
    text = TEXT
    for number in lines:
        text = text.replace(b"line %d\n" % number, b"LINE %d\n" % number)
    return text


def apply(host: Host) -> PatchedTree:
    context = host.context()
    return series.apply_series(context, fetch.fetch(context, host.fork))


def text_of(host: Host, path: str = "a.txt") -> bytes | None:
    return host.context().objects.blob(apply(host).tree, path)


@pytest.fixture(name="record")
def _record(host: Host) -> Record:
    """Return the record of a pull request with three hunks in one file and one in another; the first does not apply."""
    host.work.commit({"a.txt": TEXT.replace(b"line 2\n", b"line two\n"), "b.txt": b"1\n"}, "Begin")
    host.lock()
    host.work.commit({"a.txt": TEXT}, "Meanwhile")
    head = host.pull(7, {"a.txt": changed(3, 20, 38), "b.txt": b"2\n"})
    return host.carry(7, head, host.squash(7), excluded=["a.txt#1", "b.txt"])


def backport(host: Host, record: Record, *, sha256: str = "", number: int = 7, path: str = "a.txt") -> None:
    """Let a patch of ours stand in for the hunk that is left out."""
    host.ours("instead.patch", {path: TEXT.replace(b"line 3\n", b"LINE 3\n")}, text=f"As told.\n\nBackport-Of: #{number} {sha256 or record.sha256}")


def test_a_hunk_can_be_left_out(host: Host, record: Record) -> None:
    """The other hunks of the file apply, at their own places."""
    assert text_of(host) == changed(20, 38).replace(b"line 2\n", b"line two\n")
    assert text_of(host, "b.txt") == b"1\n"


@pytest.mark.parametrize("place", ["a.txt#0", "a.txt#4", "b.txt#2", "c.txt", "a.txt#x"])
def test_what_is_left_out_must_be_part_of_the_diff(host: Host, record: Record, place: str) -> None:
    host.write(msgspec.structs.replace(record, stacks={host.stack: {place: "why"}}))
    with refusal("pick-mismatch") as caught:
        apply(host)
    assert caught.value.details == (place,)


def test_a_backport_stands_in_for_what_is_left_out(host: Host, record: Record) -> None:
    host.work.git("checkout", "--quiet", "-b", "ours", "v1")
    host.work.commit({"a.txt": changed(20, 38).replace(b"line 2\n", b"line two\n")}, "The pick")
    host.work.git("checkout", "--quiet", "main")
    text = changed(3, 20, 38).replace(b"line 2\n", b"line two\n").replace(b"line 5\n", b"line 5.0\n")
    host.ours("instead.patch", {"a.txt": text}, text=f"As told.\n\nBackport-Of: #7 {record.sha256}")
    assert text_of(host) == text


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"sha256": "0" * 64}, "it was made from the diff 0000000000000000…, pinned is"),
        ({"number": 8}, "the stack does not carry #8"),
        ({"path": "other.txt"}, "#7 does not change other.txt"),
    ],
)
def test_a_backport_that_does_not_correspond_is_refused(host: Host, record: Record, header: dict[str, str], fault: str) -> None:
    backport(host, record, **header)  # type: ignore[arg-type]
    with refusal("backport-stale") as caught:
        apply(host)
    assert fault in caught.value.details[0]


def test_a_pick_that_is_left_out_whole_needs_a_backport(host: Host, record: Record) -> None:
    """With one, nothing of the pull request itself is applied."""
    everything = dict.fromkeys(("a.txt", "b.txt"), "why")
    host.write(msgspec.structs.replace(record, stacks={host.stack: everything}))
    with refusal("backport-stale") as caught:
        apply(host)
    assert caught.value.details == ("all of #7 is left out, without a backport",)
    host.ours("instead.patch", {"b.txt": b"2\n"}, text=f"As told.\n\nBackport-Of: #7 {record.sha256}")
    assert (text_of(host, "b.txt"), len(apply(host).steps)) == (b"2\n", 1)
