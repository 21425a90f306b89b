"""The ledger: what is written is read back, whatever people called their pull requests, and nothing half pinned is carried."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal

from sparkwright.cherry_picks import ledger
from sparkwright.cherry_picks.ledger import Ledger, Record, State
from sparkwright.core import strict_yaml
from sparkwright.forks.lock import UNRESOLVED

ROOT = Path(__file__).parents[2]
REAL = sorted(path.stem for path in (ROOT / "cherry_picks").glob("*.yaml") if path.stem != "ideas")
HEAD, BASE, MERGE, SHA256 = "a" * 40, "b" * 40, "c" * 40, "d" * 64
OPEN: dict[str, Any] = {
    "number": 7, "title": "Improve it", "author": "octocat", "state": "open", "seen": "2026-11-01", "date": "2026-10-31", "head": HEAD,
    "base": BASE, "sha256": SHA256, "patch_id": MERGE, "reason": "why", "drop_when": "then", "files": ["a.txt"],
}  # fmt: skip
MERGED = {**OPEN, "state": "merged", "merge": MERGE}
def parsed(*records: dict[str, Any], **fields: Any) -> Ledger:
    data = {"url": "https://github.com/acme/widget.git", "records": list(records), **fields}
    return strict_yaml.parse(strict_yaml.dump(data), Ledger, "widget.yaml")


def record(**changes: Any) -> Record:
    return msgspec.convert({**OPEN, **changes}, Record)


def refused(*records: dict[str, Any], **fields: Any) -> str:
    """Return why the ledger is refused."""
    with refusal("file-invalid") as caught:
        parsed(*records, **fields)
    return " ".join(caught.value.details)


# Round trip.

DAY = st.dates().map(str)
COMMIT = st.text("0123456789abcdef", min_size=40, max_size=40)
#: Whatever UTF-8 can hold; YAML reads some of it as something else unless it is quoted.
WORDS = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["null", "- a", "\n- number: 8", "a\n- b", "#7", "1e5", "~", "a: b"]
)
PROSE = WORDS.filter(lambda text: re.search(r"\S", text) is not None)


@st.composite
def records(draw: st.DrawFn, number: int) -> Record:
    """Return a record of any kind that is allowed."""
    states: list[State] = ["open", "merged", "closed", "unresolved"]
    state = draw(st.sampled_from(states))
    pinned = state == "merged" or draw(st.booleans())
    return Record(
        number=number, title=draw(WORDS), author=draw(WORDS), state=state, seen=draw(DAY | st.just("never")),
        date=draw(DAY | st.just(UNRESOLVED)), head=draw(COMMIT), base=draw(COMMIT) if pinned else UNRESOLVED,
        sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)), patch_id=draw(COMMIT | st.just("")), reason=draw(PROSE),
        drop_when=draw(PROSE), merge=draw(COMMIT) if state == "merged" else "", files=tuple(draw(st.lists(WORDS, max_size=3))),
        stacks=draw(st.dictionaries(WORDS, st.dictionaries(WORDS, PROSE, max_size=2), max_size=2)) if pinned else {},
    )  # fmt: skip


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    numbers = draw(st.lists(st.integers(1, 99999), unique=True, max_size=4))
    return Ledger(draw(WORDS), tuple(draw(records(number)) for number in numbers), draw(WORDS))


@given(ledgers())
def test_what_is_written_is_what_is_read(book: Ledger) -> None:
    """The text of a ledger gives that ledger again, and that ledger gives that text again."""
    text = ledger.render(book)
    again = strict_yaml.parse(text, Ledger, "widget.yaml")

    assert again == book
    assert ledger.render(again) == text
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cherry_picks").mkdir()
        ledger.write(Path(folder), "widget", book)
        assert ledger.load(Path(folder), "widget") == book


# Strictness.


def test_a_pull_request_has_one_record() -> None:
    """Two records of one number would be two truths; each is named once."""
    assert "listed twice: #7, #8" in refused(OPEN, {**OPEN, "number": 8}, MERGED, {**OPEN, "number": 8})


@pytest.mark.parametrize("field", ["head", "base", "sha256", "patch_id"])
def test_a_carried_record_is_pinned(field: str) -> None:
    """What a stack carries without a pin would be whatever the host has that day."""
    assert "#7 is carried by test, but its diff is not pinned" in refused({**OPEN, field: UNRESOLVED, "stacks": {"test": {}}})


@pytest.mark.parametrize("field", ["head", "base", "merge", "patch_id"])
@pytest.mark.parametrize("value", ["", "a" * 39, "A" * 40, "a" * 41, "g" * 40, "main", "a" * 40 + "\n", "٠" * 40])
def test_a_commit_is_forty_digits(field: str, value: str) -> None:
    """Abbreviations, names and other digits are refused, by field and record; only two fields may be empty."""
    if value or field in ("head", "base"):
        assert f".{field}`" in refused({**MERGED, field: value})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"number": 0}, "number"),
        ({"number": -7}, "number"),
        ({"number": "7"}, "number"),
        ({"number": True}, "number"),
        ({"state": "draft"}, "state"),
        ({"reason": ""}, "reason"),
        ({"reason": "  \n"}, "reason"),
        ({"drop_when": ""}, "drop_when"),
        ({"stacks": {"test": {"a.txt": " "}}}, "stacks"),
        ({"stacks": ["test"]}, "stacks"),
        ({"diff": "--- a"}, "diff"),
        ({"files": "a.txt"}, "files"),
    ],
)
def test_a_field_has_its_type(change: dict[str, Any], word: str) -> None:
    """The message names the record's place and the field."""
    said = refused(OPEN, {**OPEN, "number": 8, **change})

    assert "$.records[1]" in said
    assert word in said


# Questions.


def test_the_order_is_that_of_the_file() -> None:
    """A record that is written anew keeps its place, a new one comes last, and stacks see that order."""
    book = parsed({**OPEN, "number": 9, "stacks": {"test": {}}}, {**OPEN, "number": 3, "stacks": {"test": {}}}, {**OPEN, "number": 5})
    changed = book.with_record(record(number=9, reason="another", stacks={"test": {}})).with_record(record(number=1))

    assert [one.number for one in changed.records] == [9, 3, 5, 1]
    assert changed.record(9).reason == "another"
    assert [one.name for one in changed.carried("test")] == ["#9", "#3"]
    assert changed.carried("other") == ()


def test_a_fork_may_have_no_ledger(tmp_path: Path) -> None:
    """It has no picks then; a verb that needs one says where it should be."""
    assert ledger.load(tmp_path, "widget") is None
    with refusal("file-invalid", match="widget has no ledger") as caught:
        ledger.require(tmp_path, "widget")
    assert caught.value.details == (f"expected: {tmp_path / 'cherry_picks' / 'widget.yaml'}",)


# The real files.


@pytest.mark.parametrize("fork", REAL)
def test_a_real_ledger_is_as_it_would_be_written(fork: str) -> None:
    """Byte for byte, so that the next pick changes its own record alone."""
    book = ledger.require(ROOT, fork)

    assert ledger.render(book) == ledger.path_of(ROOT, fork).read_text("utf-8")
