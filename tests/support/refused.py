"""
What a refusal leaves: folders compared with what they were, and rows for the table that `tests/client/refusal_table.py` prints.

    before = refused.tree(folder)
    ...
    refused.record(record_property, outcome.reference, before, refused.tree(folder))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sparkwright.core.files import sha256_file

#: The names of the properties of a test that are rows of the table: of a refusal, and the number of kills.
PROPERTY, KILLS = "refusal", "kills"
#: Folders and files that hold no part of an index or an installation.
LOCKS = frozenset((".lock",))


def tree(folder: Path, besides: frozenset[str] = LOCKS) -> dict[str, str]:
    """Return what lies below *folder*, by path; names in *besides* are left out."""
    state = {}
    for path in sorted(folder.rglob("*")):
        if not besides.isdisjoint(path.relative_to(folder).parts):
            continue
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            state[name] = f"link to {path.readlink()}"
        elif path.is_file():
            state[name] = sha256_file(path)
        else:
            state[name] = "folder" if path.is_dir() else "pipe"
    return state


def touched(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the paths that differ, or ``nothing``."""
    names = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    return ", ".join(names) or "nothing"


def record(
    record_property: Callable[[str, object], None],
    reference: str,
    before: Mapping[str, str],
    after: Mapping[str, str],
) -> tuple[str, str]:
    """Note a row of the table, and return the reference and the paths that differ."""
    row = reference, touched(before, after)
    record_property(PROPERTY, list(row))
    return row
