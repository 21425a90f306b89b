"""The ledger: what is written is read back, whatever people called their pull requests, and nothing half pinned is carried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal

from sparkwright.cherry_picks import ledger
from sparkwright.cherry_picks.ledger import Ledger
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


# Round trip.

@pytest.mark.parametrize("text", ["null", "- a", "a\x85b", "\n- number: 8", "a\n- b", "#7", "1e5", "~", "a: b", "Größe 🚀", " x ", "'", '"', "\u2028x"])
def test_what_is_written_is_what_is_read(text: str) -> None:
    """The text of a ledger gives that ledger again, and that ledger gives that text again; YAML reads some titles as something else."""
    words = {**OPEN, "title": text, "author": text, "files": [text], "reason": text, "drop_when": text, "head": UNRESOLVED, "patch_id": UNRESOLVED}
    book = msgspec.convert({"url": text, "records": [words, {**MERGED, "number": 8, "stacks": {text: {text: text}}}]}, Ledger)
    written = ledger.render(book)
    again = strict_yaml.parse(written, Ledger, "widget.yaml")

    assert (again, ledger.render(again)) == (book, written)


# Strictness.


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([OPEN, {**OPEN, "number": 8}, MERGED, {**OPEN, "number": 8}], "listed twice: #7, #8"),
        ([{**OPEN, "head": UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "patch_id": UNRESOLVED, "stacks": {"test": {}}}], "#7 is carried by test, but its diff is not pinned"),
        ([{**OPEN, "merge": MERGE}], "#7 is open with a merge commit"),
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
        parsed(*records)
    assert words in " ".join(caught.value.details)


def test_a_fork_may_have_no_ledger(tmp_path: Path) -> None:
    """It has no picks then; a verb that needs one says where it should be."""
    assert ledger.load_ledger(tmp_path, "widget").records == ()
    with refusal("file-invalid", match="widget has no ledger"):
        ledger.require(tmp_path, "widget")


# The real files.


@pytest.mark.parametrize("fork", REAL)
def test_a_real_ledger_is_as_it_would_be_written(fork: str) -> None:
    """Byte for byte, so that the next pick changes its own record alone."""
    book = ledger.require(ROOT, fork)

    assert ledger.render(book) == ledger.path_of(ROOT, fork).read_text("utf-8")


def test_the_reviewed_ideas_can_be_read() -> None:
    """Each has a text and the releases that need it."""
    assert ledger.load_ideas(ROOT)["vllm"]["#35693"].needed == "still in 0.33.0"
