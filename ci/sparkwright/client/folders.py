"""
The folders of the client: they belong to this user, are no links, and hold only whole files.

What is written goes to a new file beside its place, which is renamed: a planted link or a hard link
is replaced, never written through.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from sparkwright.core.console import console
from sparkwright.core.errors import StoreError
from sparkwright.core.store import flush, translate_disk_full


def own_folder(base: Path, *parts: str) -> Path:
    """
    Return the folder *parts* below *base*, made if it is missing.

    Raises:
        cache-unusable: It cannot be made or written; or it, or a folder between it and *base*, is
            a link, or may be changed by somebody else.
    """
    path = base
    try:
        with translate_disk_full(path):
            base.mkdir(parents=True, exist_ok=True)
            _check_own(base)
            for part in parts:
                path /= part
                path.mkdir(exist_ok=True)
                _check_own(path)
    except OSError as error:
        what = f"{path} cannot be used."
        raise StoreError("cache-unusable", what, details=[str(error)]) from error
    return path


def _check_own(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError("it is a link")
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_IWOTH:
        raise PermissionError("another user may change it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError("it cannot be written")


def write_file(path: Path, data: bytes) -> Path:
    """
    Write *data* to *path*, whole or not at all, and return it.

    Raises:
        disk-full: There is no room.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with translate_disk_full(path.parent):
            with temporary.open("xb") as sink:
                sink.write(data)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs of the client out of *folder*; the lock ends with the process."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.note(f"another sparkwright works in {folder}; waiting for it to end")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
