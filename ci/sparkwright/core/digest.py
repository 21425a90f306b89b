"""Content addresses: sha256 of files, and keys of frozen records."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

#: Part of every key. Raise it when a record's meaning changes without its fields changing, so that
#: old results are not reused.
KEY_FORMAT = 1


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of *data* in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of the file at *path* in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical(record: Any) -> bytes:
    """Return *record* as JSON with sorted keys: equal records give equal bytes."""
    return msgspec.json.encode(record, order="deterministic")


def key(kind: str, record: Any) -> str:
    """
    Return the address of what *record* determines.

    Args:
        kind: The stage, so that equal inputs of two stages do not share an address.
        record: Plain data or msgspec structs; it must hold no path, date or job count.
    """
    return sha256_bytes(canonical({"format": KEY_FORMAT, "kind": kind, "record": record}))
