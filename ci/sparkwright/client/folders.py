"""The folders of the client, which belong to this user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sparkwright.core.errors import StoreError
from sparkwright.core.store import translate_disk_full

#: The lock of a folder.
LOCK = ".lock"


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
        raise StoreError(
            "cache-unusable", f"{path} cannot be used.", details=[str(error)]
        ) from error
    return path


def _check_own(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError("it is a link")
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_IWOTH:
        raise PermissionError("another user may change it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError("it cannot be written")
