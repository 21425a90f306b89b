"""The folders of the client, which belong to this user alone."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

from sparkwright.core.errors import StoreError
from sparkwright.core.store import UNFINISHED, locked, writing

#: Links of one path, as Linux counts them.
_MOST_LINKS = 40


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


def without_links(path: Path) -> Path:
    """
    Return *path* without the links in it.

    Raises:
        cache-unusable: A link belongs to another user, who could lead this program anywhere; or
            there are too many of them.
    """
    parts, result, links = list(reversed(path.absolute().parts)), Path("/"), 0
    while parts:
        part = parts.pop()
        step = result.parent if part == ".." else result / part
        if not os.path.islink(step):  # noqa: PTH114  it raises nothing for any path
            result = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise StoreError("cache-unusable", f"{path} leads through too many links.")
        if step.lstat().st_uid not in (0, os.geteuid()):
            raise StoreError("cache-unusable", f"{step} is a link of another user.")
        parts += reversed(step.readlink().parts)
    return result


def locked_folder(folder: Path, name: str = ".lock") -> contextlib.AbstractContextManager[None]:
    """Hold the lock *name* of *folder*, which is made as by `own_folder`, as `locked`."""
    return locked(own_folder(folder) / name, str(folder))


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs were writing into *folder*, whose lock is held."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def check_room(folder: Path, size: int) -> None:
    """Raise `disk-full` unless *size* bytes fit where *folder* lies."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StoreError(
            "disk-full",
            f"{folder} has no room for {size / 1e6:,.1f} MB.",
            details=[f"free: {free / 1e6:,.1f} MB"],
        )
