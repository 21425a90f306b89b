"""
Append-only files of JSON lines, each on the disk before the next step begins.

A machine that dies loses at most the line that was being written: readers skip a cut last line,
and a writer that continues the file removes it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core.errors import FileError
from sparkwright.core.store import translate_disk_full


class JournalWriter(contextlib.AbstractContextManager["JournalWriter"]):
    """
    Append records to the file at *path*.

    Args:
        more: Continue an existing file; otherwise it is kept as ``NAME.before``.

    Raises:
        disk-full: There is no room; earlier lines stay whole. `add` raises it, too.
    """

    def __init__(self, path: Path, *, more: bool = False) -> None:
        self._path = path
        with translate_disk_full(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not more:
                os.replace(path, path.with_name(path.name + ".before"))
            self._stream = path.open("ab+", buffering=0)
            self._stream.seek(0)
            self._stream.truncate(self._stream.read().rfind(b"\n") + 1)

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, line: msgspec.Struct) -> None:
        """Write *line* and wait until it is on the disk."""
        with translate_disk_full(self._path.parent):
            data = memoryview(msgspec.json.encode(line) + b"\n")
            while data:
                data = data[self._stream.write(data) or 0 :]
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read(path: Path, kind: Any, *, largest: int, what: str) -> list[Any]:
    """
    Return the complete lines of the file at *path*, each of the type *kind*.

    Args:
        largest: The most bytes that are read.
        what: The name of such a file, for people.

    Raises:
        file-invalid: It cannot be read, is larger, or has other contents.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        if path.stat().st_size > largest:
            raise FileError("file-invalid", f"{path} is larger than {largest} bytes.")
        *lines, _ = path.read_bytes().split(b"\n")
        return [decoder.decode(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        what = f"{path} is not a valid {what}."
        raise FileError("file-invalid", what, details=[str(error)]) from error
