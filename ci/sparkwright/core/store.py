"""
The cache directory: results by key, downloads, and folders that are continued.

Nothing else creates files there. A result is written to a temporary name on the same file system
and renamed, so that a killed run leaves either the whole result or none; single files are flushed
to the disk first, folders are not.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sparkwright.core.console import NO_ROOM, console
from sparkwright.core.errors import Failure, FileError, StoreError
from sparkwright.core.files import is_utf8

T = TypeVar("T")

#: What a killed run leaves beside the file that it was writing begins so.
UNFINISHED = ".unfinished-"
#: Bytes that a disk with room still takes.
ROOM = 16 << 20
#: Bytes read of a file of JSON lines.
LARGEST_LINES = 1024**3


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def has_room(folder: Path) -> bool:
    """Return False if the operating system finds no room for `ROOM` bytes in *folder*."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM)
    except OSError as error:
        return error.errno not in NO_ROOM
    return True


@contextlib.contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """
    Raise `disk-full`, with *folder*, for "no space left on device", "disk quota exceeded" and "file
    too large" within the block.
    """
    try:
        yield
    except OSError as error:
        # The error of `shutil.copytree` has a text and no errno.
        full = isinstance(error, shutil.Error) and not has_room(folder)
        if error.errno not in (*NO_ROOM, errno.EFBIG) and not full:
            raise
        raise StoreError(
            "disk-full", f"There is no room left under {folder}.", details=[str(error)]
        ) from error


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """
    Raise `disk-full` or `cache-unusable` for what the operating system refuses to write below
    *folder* within the block.
    """
    try:
        with translate_disk_full(folder):
            yield
    except OSError as error:
        raise StoreError(
            "cache-unusable", f"{folder} cannot be used.", details=[str(error)]
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """
    Write *data* to *path*, whole or not at all; a link in its place is replaced, not followed.

    Raises:
        disk-full: There is no room.
    """
    with translate_disk_full(path.parent), replacing(path) as temporary:
        temporary.write_bytes(data)
        flush(temporary)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Yield a temporary file path beside *path* that takes its place when the block ends without an
    error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(
    path: Path,
    what: str,
    *,
    wait: bool = True,
    failure: Failure = partial(StoreError, "cache-unusable"),
) -> Iterator[None]:
    """
    Hold the lock in the file *path* for the block; it ends with the process, too.

    Args:
        what: What is locked, for messages.
        wait: Wait for another holder to end, after saying so.
        failure: Makes the error for a path that cannot be opened: a folder, a link.

    Raises:
        store-busy: Another process holds it, and *wait* is not set.
        cache-unusable: Or as *failure*.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise
            console.note(f"another sparkwright works on {what}; waiting for it to end")
            held = lock.acquire()
    except Timeout as error:
        raise StoreError(
            "store-busy", f"{what} is in use by another process.", details=[f"lock: {path}"]
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise failure(f"{path} cannot be locked.", details=[str(error)]) from error
    with held:
        yield


@contextlib.contextmanager
def locked_in_place(folder: Path, what: str) -> Iterator[None]:
    """
    Hold the lock of *folder* for the block, without a file in it; it ends with the process, too.

    Args:
        what: What is locked, for messages.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.note(f"another sparkwright works on {what}; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def append_line(path: Path, record: msgspec.Struct) -> None:
    """
    Append *record* as a line of JSON to the file at *path*, and wait until it is on the disk.

    A machine that dies loses at most the line that is being written: the next call removes a cut
    last line, and `read_lines` skips it.

    Raises:
        disk-full: There is no room; earlier lines stay whole.
    """
    with translate_disk_full(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            stream.seek(max(0, stream.tell() - 1))
            if stream.read() not in (b"", b"\n"):
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.write(msgspec.json.encode(record) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def read_lines(path: Path, kind: Any, what: str) -> list[Any]:
    """
    Return the whole lines of the file of JSON lines at *path*, each of the type *kind*.

    Args:
        what: The name of such a file, for people.

    Raises:
        file-invalid: It cannot be read, is larger than `LARGEST_LINES`, or has other contents.
    """
    try:
        if path.stat().st_size > LARGEST_LINES:
            raise ValueError(f"it is larger than {LARGEST_LINES} bytes")
        *lines, _ = path.read_bytes().split(b"\n")
        return list(map(msgspec.json.Decoder(kind).decode, lines))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            "file-invalid", f"{path} is not a valid {what}.", details=[str(error)]
        ) from error


class Store:
    """
    A cache directory.

    Args:
        root: Where it lies; made when missing.

    Raises:
        cache-unusable: It cannot be made or written, or its path would be taken for two.
    """

    def __init__(self, root: Path) -> None:
        # By its real path: what compilers write into their results must not depend on a link.
        self.root = Path(os.path.realpath(root))
        if not {":", "\n"}.isdisjoint(str(self.root)) or not is_utf8(self.root):
            raise StoreError(
                "cache-unusable",
                f"{self.root} cannot be used: it is not UTF-8, or has a colon or a line end, at "
                "which PATH and git end a path.",
            )
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            # The signature that backup programs look for (bford.info/cachedir).
            if not (self.root / "CACHEDIR.TAG").exists():
                self.write("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55\n")

    def folder(self, *parts: str) -> Path:
        """Return the folder of that name, made when missing."""
        path = self.root.joinpath(*parts)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str | Path, data: bytes) -> Path:
        """Write *data* to the file *name* (absolute, or below the root), whole or not at all."""
        path = self.root / name
        with writing(path.parent):
            write_file(path, data)
        return path

    @contextlib.contextmanager
    def building(self, path: Path) -> Iterator[Path]:
        """
        Yield an empty temporary folder beside *path* that takes its place when the block ends
        without an error.

        Callers hold the lock of that place, so what lies half-made beside it is a killed run's, and
        is removed.
        """
        with translate_disk_full(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f".{path.name}.*"):
                shutil.rmtree(left, ignore_errors=True)
            # Not by tempfile, which makes private folders: results have the modes of the umask.
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            temporary.mkdir()
            try:
                yield temporary
                if path.exists():
                    shutil.rmtree(path)
                os.rename(temporary, path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def put(self, kind: str, key: str, record: Any) -> None:
        """Store the *record* of a finished stage under *key*."""
        self.write(f"records/{kind}/{key}.json", msgspec.json.format(msgspec.json.encode(record)))

    def get(self, kind: str, key: str, record: type[T]) -> T | None:
        """
        Return the record of a finished stage, or None when there is none that still has the
        expected fields.
        """
        path = self.root / "records" / kind / f"{key}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=record)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def lock(self, name: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """
        Hold the lock *name* for the block; the operating system frees it when the process dies.

        Args:
            wait: Wait for another holder to end, after saying so.

        Raises:
            store-busy: Another process holds it, and *wait* is not set.
        """
        return locked(self.folder("locks") / f"{name}.lock", name, wait=wait)
