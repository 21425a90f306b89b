"""The folders of the client, which belong to this user alone."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import AbstractContextManager
from pathlib import Path

from sparkwright.core.errors import StoreError
from sparkwright.core.store import locked, writing


def own_folder(base: Path, *parts: str) -> Path:
    """
    Return the folder *parts* below *base*, made if it is missing.

    Raises:
        cache-unusable: It cannot be made or written; or it, or a folder between it and *base*, is
            a link, or may be changed by somebody else.
    """
    path = base
    with writing(base.joinpath(*parts)):
        base.mkdir(parents=True, exist_ok=True)
        _check_own(base)
        for part in parts:
            path /= part
            path.mkdir(exist_ok=True)
            _check_own(path)
    return path


def _check_own(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError(f"{folder} is a link")
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_IWOTH:
        raise PermissionError(f"another user may change {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


def locked_folder(folder: Path) -> AbstractContextManager[None]:
    """Keep other runs out of *folder*, which is made as by `own_folder`, for the block."""
    return locked(own_folder(folder) / ".lock", str(folder))


def check_room(folder: Path, size: int) -> None:
    """Raise `disk-full` unless *size* bytes fit where *folder* lies."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StoreError(
            "disk-full",
            f"{folder} has no room for {size / 1e6:,.1f} MB.",
            details=[f"free: {free / 1e6:,.1f} MB"],
        )
