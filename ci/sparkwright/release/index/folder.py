"""A folder that is made whole or not at all, and is on the disk before anything points at it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparkwright.core import store

#: With more files than this, flushing all that the machine has not written yet is quicker than flushing them one by one.
MANY = 1000

#: Flushes at a time: file systems write what is asked for together in one go, which takes a quarter of the time.
TOGETHER = 16


class Draft:
    """
    A folder in the making, beside *place*, whose name it takes at the end.

    Args:
        place: Nothing lies there yet. Whoever makes a folder there is alone in doing so; what a killed run left is removed.
    """

    def __init__(self, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(f".{place.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
        self.place, self.path = place, Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
        self._folders, self._written = {""}, list[str]()

    def write(self, name: str, data: bytes) -> None:
        """Write *data* to the file *name*."""
        self._above(name)
        with open(f"{self.path}/{name}", "xb", buffering=0) as stream:  # noqa: PTH123  thousands of small files
            stream.write(data)
        self._written.append(name)

    def link(self, name: str, other: Path) -> None:
        """Give the file *other* the further name *name*; where the file system has no hard links, copy it."""
        self._above(name)
        try:
            os.link(other, self.path / name)
        except OSError:
            self.write(name, other.read_bytes())

    def _above(self, name: str) -> None:
        folder = name.rpartition("/")[0]
        if folder not in self._folders:
            (self.path / folder).mkdir(parents=True)
            # Made with its parents, which nobody may make again.
            self._folders.update(_ancestors(folder))

    def finish(self, *, on_disk: bool = True) -> Path:
        """Give the folder its name, with *on_disk* once all of it is there, and return its place."""
        self.path.chmod(0o755)
        if on_disk:
            flush([self])
        os.rename(self.path, self.place)
        if on_disk:
            sync(self.place.parent)
        return self.place

    @property
    def written(self) -> list[Path]:
        """The files and folders that may not be on the disk yet; what is only linked is."""
        return [self.path / name for name in [*self._written, *self._folders]]

    def drop(self) -> None:
        """Remove what was not finished."""
        shutil.rmtree(self.path, ignore_errors=True)


def flush(drafts: Sequence[Draft]) -> None:
    """Bring what was written to *drafts* to the disk."""
    sync(*(path for draft in drafts for path in draft.written))


def _ancestors(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def sync(*paths: Path) -> None:
    """Flush files, and folders' names, to the disk."""
    if len(paths) > MANY:
        os.sync()
    elif len(paths) == 1:
        store.flush(paths[0])
    else:
        with ThreadPoolExecutor(TOGETHER) as pool:
            # Asking for the results raises what went wrong.
            list(pool.map(store.flush, paths))
