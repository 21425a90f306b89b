"""
Records that are on the disk before the next thing begins: a line of JSON each, so that a machine that dies loses one at most.

A last line that was only half written is nobody's: readers leave it out, and a writer that goes on cuts it off first.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sparkwright.core.errors import FileError
from sparkwright.core.store import translate_disk_full

T = TypeVar("T")


class JournalWriter:
    """
    Appends to the file at *path*.

    Args:
        more: Go on behind what is there; otherwise what is there is kept beside it, with ``.before`` added to its name.

    Raises:
        disk-full: There is no room; what was written before stays whole. So raises `add`.
    """

    def __init__(self, path: Path, *, more: bool = False) -> None:
        self._path = path
        with translate_disk_full(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            if more and path.exists():
                _cut(path)
            elif path.exists():
                os.replace(path, path.with_name(path.name + ".before"))
            self._stream = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, line: msgspec.Struct) -> None:
        """Write *line* and wait until it is on the disk."""
        with translate_disk_full(self._path.parent):
            data = memoryview(msgspec.json.encode(line) + b"\n")
            while data:
                data = data[self._stream.write(data) or 0 :]
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def _cut(path: Path) -> None:
    """Take a last line without its end away."""
    with path.open("rb+") as stream:
        data = stream.read()
        stream.truncate(data.rfind(b"\n") + 1)


def read(path: Path, kind: Any, *, largest: int, what: str) -> list[Any]:
    """
    Return the whole lines of the file at *path*, each of the type *kind*.

    Args:
        largest: The most bytes that are read.
        what: What the file should be, for people.

    Raises:
        file-invalid: It cannot be read, is larger, or holds something else.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        if path.stat().st_size > largest:
            raise FileError("file-invalid", f"{path} is larger than {largest} bytes.")
        *whole, _ = path.read_bytes().split(b"\n")
        return [decoder.decode(line) for line in whole]
    except (OSError, ValueError, RecursionError) as error:
        raise FileError("file-invalid", f"{path} is no {what}.", details=[str(error)]) from error
