"""Status: one table per stack of what it carries and what is known of it; it asks nobody."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sparkwright.cherry_picks import series
from sparkwright.cli import main
from sparkwright.core import github

if TYPE_CHECKING:
    from tests.unit.conftest import Host

TEXT = "".join(f"line {number}\n" for number in range(1, 61)).encode()
#: Nothing listens on the discard port.
NOWHERE = "http://127.0.0.1:9/"


def edited(*changes: tuple[int, str]) -> bytes:
    made = TEXT.decode()
    for number, line in changes:
        made = made.replace(f"line {number}\n", line)
    return made.encode()


@pytest.fixture(name="made")
def _made(host: Host) -> Host:
    """Return the host with a release, a pick, and two patches of ours."""
    host.work.commit({"a.txt": TEXT, "b.txt": TEXT, "docs/big.txt": TEXT}, "Begin")
    host.lock()
    host.carry(7, host.pull(7, {"c.txt": b"picked\n"}, start="v1"))
    host.ours("first.patch", {"a.txt": edited((10, "first\n"))}, "Do the first")
    host.ours("second.patch", {"b.txt": edited((30, "second\n"))}, "Do the second")
    return host


def lines(host: Host, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the lines of the host's own stack by name, shown where neither a repository nor the index can be reached."""
    alive = host.mirrors
    host.mirrors = {host.url: f"{NOWHERE}widget.git", github.ADDRESS: NOWHERE}
    words = host.words
    host.mirrors = alive
    capsys.readouterr()
    assert main.main(["patch", "status", *words, "--json"]) == 0
    return {line["name"]: line for line in msgspec.json.decode(capsys.readouterr().out)["stacks"][host.stack]}


def test_a_line_says_what_and_why(made: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Subject, reason and end come from the ledger or from the patch; the age is in days, the size in lines of diff."""
    series.of(made.session(), "widget")
    found = lines(made, capsys)
    age = (datetime.datetime.now(datetime.UTC).date() - datetime.date(2026, 11, 1)).days

    shared = {"fork": "widget", "age": age, "needed": "not looked at", "superseded": ""}
    shared |= {"reason": "the test wants it", "drop_when": "the test ends"}

    assert found["#7"] == {
        **shared, "name": "#7", "subject": "Improve number 7", "lines": 7, "page": "https://github.com/acme/widget/pull/7",
    }  # fmt: skip
    assert found["first.patch"] == {**shared, "name": "first.patch", "subject": "Do the first", "lines": 9, "page": ""}


def test_needed_and_superseded_are_what_the_last_drift_saw(made: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Fits, fits elsewhere, conflicts, is upstream since: each by the newest base that was looked at, with the proof."""
    made.ours("third.patch", {"a.txt": edited((10, "first\n"), (50, "third\n"))}, "Do the third")
    made.work.commit({"b.txt": edited((30, "second\n"), (2, "more\n"))}, "Take the second")
    made.work.git("tag", "v2")
    made.work.commit({"a.txt": b"new\n" + edited((50, "theirs\n"))}, "Break the third")
    made.push("main", "v2")
    main.run(["patch", "drift", *made.words, "--to", "v2", "--to", "main"])
    found = lines(made, capsys)

    assert {name: one["needed"] for name, one in found.items()} == {
        "#7": "applies on main",
        "first.patch": "applies at other lines on main",
        "second.patch": "until v2",
        "third.patch": "conflicts on main",
    }
    assert found["second.patch"]["superseded"] == "v2: reverse: v2 holds the whole change"
    assert {one["superseded"] for name, one in found.items() if name != "second.patch"} == {""}
