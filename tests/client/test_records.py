"""Records of an index, whose fields accept nothing that could leave a folder, a line or a shell word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support import tufindex

from sparkwright.client.records import Release, ReleaseState

#: Field → values that it refuses; the last part of each name is the field of the first element of a list.
HOSTILE: dict[str, list[object]] = {
    "name": ["", "2026", "2026.11.0", "2026.11.1\n", "../2026.11.1", "2026.11.1/x", "-rf.1"],
    "stack": ["", "2026.11\n", "../x", "-rf", "a b"],
    "made": ["2026-11-22T07:30:00Z\n", "now", "2026-11-22"],
    "wheels.name": ["", "../x.whl", "/etc/passwd", "x.whl\n", ".x.whl", "-x.whl", "a b.whl"],
    "wheels.sha256": ["0" * 63, "0" * 64 + "\n", "G" * 64, "0" * 63 + "A"],
    "wheels.size": [-1, "1", 1.5],
    "wheels.url": ["file:///etc/passwd", "ftp://a.example/x", "//a.example/x", "https://u:p@a.example/x", "https://a.example/x\n"],
    "wheels.machine": ["sparc", ""],
    "wheels.version": ["1.0\n", ""],
    "wheels.requires_python": ["\x1b[31m", "a\nb", "x" * 1001],
    "edits.file": ["../x", "/x", "a/../b", "a\n", "a//b", ""],
    "edits.package": ["a\n", "../a"],
    "edits.changes": [[], [{"anchor": " ", "replacement": "x"}]],
    "overlays.files": [-1],
    "overlays.reason": [1],
    "format": [2],
}  # fmt: skip


def _document() -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(tufindex.release("2026.11.1")[0])
    change = {"anchor": "a", "replacement": "b"}
    document["edits"] = [{"name": "x", "package": "demo", "file": "demo/a.py", "before": "0" * 64, "after": "1" * 64,
                          "changes": [change], "reason": "it refuses", "drop_when": "it admits"}]  # fmt: skip
    document["overlays"] = [{"upper": "a", "lower": "b", "files": 1, "reason": "it overlaps"}]
    return document


@pytest.mark.parametrize("field", HOSTILE)
def test_hostile_value_is_no_release(field: str) -> None:
    first, _, rest = field.partition(".")
    assert msgspec.convert(_document(), Release)
    for value in HOSTILE[field]:
        document = _document()
        if rest:
            document[first][0][rest] = value
        else:
            document[first] = value
        with pytest.raises(msgspec.ValidationError, match=rest or first):
            msgspec.convert(document, Release)


def test_hostile_value_is_no_state() -> None:
    state = msgspec.to_builtins(tufindex.state(tufindex.release("2026.11.1")[0]))
    assert msgspec.convert(state, ReleaseState)
    for field, value in (
        ("stack", "2026.11\n"),
        ("made", "2026-11-22T07:30:00Z\n"),
        ("channel", "stable"),
        ("pythons", ["3.12\n"]),
        ("yanked", "a\nb"),
        ("yanked", "\x1b[2J"),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**state, field: value}, ReleaseState)
