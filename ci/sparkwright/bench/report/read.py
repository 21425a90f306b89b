"""Results as files: bounded, typed, and of a format that this program knows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparkwright.bench.results import FORMAT, Result
from sparkwright.core.errors import FileError
from sparkwright.core.files import reading

#: Bytes of a file; twelve cells of 144 legs of 64 requests each are 17 MB.
LARGEST = 256 * 1024 * 1024

#: More cells or legs than that are no gate of ours, and no page that anybody could use.
MOST_CELLS = 1000
MOST_LEGS = 50_000


class _Head(msgspec.Struct):
    """What every format has."""

    format: int = 0


def read(path: Path) -> Result:
    """
    Return the Result in the file *path*.

    Raises:
        file-invalid: It cannot be read, is too large, is no Result, or is of another format.
    """
    todo = "Give a file that `sparkwright gate` or `bench` wrote; one of another version is read by that version."
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise FileError(
                "file-invalid",
                f"{path} has {size:,} bytes; a result has at most {LARGEST:,}.",
                todo=todo,
            )
        with reading(path) as stream:
            # The file may have grown since it was asked for its size.
            data = stream.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise FileError(
            "file-invalid",
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            todo=todo,
        ) from None
    return decode(data, str(path), todo)


def decode(data: bytes, name: str, todo: str = "") -> Result:
    """Return the Result that *data* holds; *name* is said where there is none."""
    try:
        found = msgspec.json.decode(data, type=_Head).format
        if found != FORMAT:
            raise FileError(
                "file-invalid",
                f"{name} is of format {found:.15g}; this program reads format {FORMAT}.",
                todo=todo,
            )
        result = msgspec.json.decode(data, type=Result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise FileError(
            "file-invalid", f"{name} is no result of a measurement: {error}.", todo=todo
        ) from None
    if len(result.cells) > MOST_CELLS or len(result.legs) > MOST_LEGS:
        raise FileError(
            "file-invalid",
            f"{name} has {len(result.cells):,} cells and {len(result.legs):,} legs.",
            todo=todo,
        )
    return result
