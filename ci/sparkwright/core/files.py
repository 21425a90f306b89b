"""
Read untrusted files, within bounds, and address content by its sha256.

Only regular files are read: a named pipe, a device or a folder is refused instead of waited for.
Size, encoding and the nesting of JSON are bounded, and a key that appears twice is refused instead
of losing one of its values.
"""

import fnmatch
import hashlib
import io
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from sparkwright.core.errors import Failure, FileError

T = TypeVar("T")

#: As `sha256_bytes` writes it.
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]

#: Bytes of the largest text file that is read whole.
LARGEST = 64 << 20

#: Part of every content key. Raise it when the meaning of a record changes and its fields do not,
#: so that old results are not reused.
KEY_FORMAT = 1

_invalid = partial(FileError, "file-invalid")


def is_utf8(path: Path) -> bool:
    """Return True if records, addresses and logs can hold *path*."""
    return str(path).encode(errors="replace") == os.fsencode(path)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file as `os.open`; a named pipe that has no writer is empty."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_bytes(path: Path, *, limit: int = LARGEST, failure: Failure = _invalid) -> bytes:
    """
    Return the regular file at *path*.

    Args:
        limit: The largest file, in bytes.
        failure: Makes the error, from what failed and its details.

    Raises:
        file-invalid: The file is missing, larger, or no regular file; or as *failure* says.
    """
    try:
        with io.FileIO(path, opener=_open_without_waiting) as stream:
            regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            data = io.BufferedReader(stream).read(limit + 1) if regular else b""
    # A ValueError is a NUL in the path.
    except (OSError, ValueError) as error:
        raise failure(f"{path} cannot be read.", details=[str(error)]) from error
    if not regular:
        raise failure(f"{path} is no regular file.")
    if len(data) > limit:
        raise failure(f"{path} is larger than {limit} bytes.")
    return data


def read_text(path: Path, *, limit: int = LARGEST) -> str:
    """Return the regular file at *path*, which must be UTF-8; raises as `read_bytes`."""
    try:
        return read_bytes(path, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"{path} is not UTF-8.", details=[str(error)]) from error


def read_json(path: Path, kind: type[T], *, limit: int = LARGEST) -> T:
    """
    Return the JSON file at *path* as a record of type *kind*.

    Raises:
        file-invalid: As `read_bytes`; or it is not JSON, repeats a key, is nested too deeply, holds
            a number of thousands of digits, or does not fit the record.
    """
    data = read_bytes(path, limit=limit)
    try:
        json.loads(data, object_pairs_hook=_unique)
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _invalid(f"{path} is not the expected JSON.", details=[str(error)[:300]]) from error


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice")


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """
    Return what lies in *folder* and has a name like *pattern* (`fnmatch`), sorted; nothing if there
    is no such folder.

    `Path.glob` gives nothing, too, for a folder that this user may not read.

    Raises:
        OSError: The folder cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in paths if fnmatch.fnmatch(path.name, pattern)]


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of *data* in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of the file at *path* in hex."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical(record: Any) -> bytes:
    """Return *record* as JSON with sorted keys: equal records give equal bytes."""
    return msgspec.json.encode(record, order="deterministic")


def content_key(kind: str, record: Any) -> str:
    """
    Return the address of what *record* determines.

    Args:
        kind: The stage, so that equal inputs of two stages do not share an address.
        record: Plain data or msgspec structs; it must hold no path, date or job count.
    """
    return sha256_bytes(canonical({"format": KEY_FORMAT, "kind": kind, "record": record}))
