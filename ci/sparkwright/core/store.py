"""
The cache directory: results by key, downloads, and folders that are continued.

Nothing else creates files there. A result is written to a temporary name on the same file system,
flushed, and renamed, so that a killed run leaves either the whole result or none (DESIGN §7.7).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from sparkwright.core.errors import StoreError

T = TypeVar("T")

README = """\
Made by sparkwright. Everything here can be fetched or built again; delete it when you like while no sparkwright runs.

downloads/  files of the package index, by sha256     records/  results of finished stages, by key
objects.git source trees, by git tree id              costs     what each unit cost (records/costs)
wheels/     finished wheels, by sha256                work/     source and build folders that are continued
environments/ tool environments, by key               logs/     full output of every program that was run
ccache/     compiled units, by what they were made of
"""


def reading(path: Path) -> BinaryIO:
    """
    Open the file at *path* for reading, without waiting: a named pipe that has no writer is empty.

    Raises:
        OSError: As `open`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # A pipe that somebody writes to is waited for, as a shell makes one of <(COMMAND).
    os.set_blocking(handle, True)
    try:
        return os.fdopen(handle, "rb")
    except OSError:  # a folder
        os.close(handle)
        raise


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """
    Raise `disk-full`, with *folder* and its free space, for "no space left on device" and "disk
    quota exceeded" within the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        raise StoreError(
            "disk-full",
            f"There is no room left under {folder}.",
            details=[f"free: {free / 1e6:,.0f} MB"],
        ) from error


class Store:
    """
    A cache directory.

    Args:
        root: Where it lies; made when missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            with translate_disk_full(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                if not (self.root / "CACHEDIR.TAG").exists():
                    # The signature that backup programs look for (bford.info/cachedir).
                    self.write("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55\n")
                    self.write("README", README.encode())
        except OSError as error:
            raise self._unusable(str(error)) from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise self._unusable("it cannot be written")

    def _unusable(self, reason: str) -> StoreError:
        return StoreError(
            "cache-unusable",
            f"{self.root} cannot be used as the cache directory.",
            details=[reason],
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """
        Raise `disk-full` or `cache-unusable` for what the operating system refuses to write within
        the block.
        """
        try:
            with translate_disk_full(self.root):
                yield
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
                raise
            raise self._unusable(str(error)) from error

    def folder(self, *parts: str) -> Path:
        """Return the folder of that name, made when missing."""
        path = self.root.joinpath(*parts)
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, data: bytes) -> Path:
        """Write *data* to the file *name* (relative to the root), whole or not at all."""
        path = self.root / name
        with self._writing(), self.replacing(path) as temporary, temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        return path

    @contextlib.contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """
        Yield a temporary file path beside *path* that takes its place when the block ends without
        an error.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

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
            temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
            try:
                yield temporary
                temporary.chmod(0o755)
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

    @contextlib.contextmanager
    def lock(self, name: str, *, wait: float = -1) -> Iterator[None]:
        """
        Hold the lock *name* for the block; the operating system frees it when the process dies.

        Args:
            wait: Seconds to wait for another holder; −1 waits without end, after saying so.

        Raises:
            store-busy: The lock was not free in time.
        """
        from filelock import FileLock, Timeout

        from sparkwright.core.console import console

        path = self.folder("locks") / f"{name}.lock"
        lock = FileLock(path)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if wait == 0:
                    raise
                console.note(f"another sparkwright works on {name}; waiting for it to end")
                lock.acquire(timeout=wait)
        except Timeout as error:
            raise StoreError(
                "store-busy", f"{name} is in use by another process.", details=[f"lock: {path}"]
            ) from error
        try:
            yield
        finally:
            lock.release()
