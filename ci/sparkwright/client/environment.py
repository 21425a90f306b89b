"""
One virtual environment for each release: made beside its place, checked, moved there, and then left
alone.

A new environment is whole once it has its marker, which is written last. Neither its Python nor its
RECORDs decide where something is written: what belongs into it is known from the wheels.
"""

import contextlib
import itertools
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sparkwright.client.folders import (
    locked_folder,
    own_folder,
    remove_unfinished,
    without_links,
)
from sparkwright.client.records import Channel, ReleaseName
from sparkwright.core import files
from sparkwright.core.console import console
from sparkwright.core.errors import FileError, PythonError
from sparkwright.core.process import CACHES
from sparkwright.core.store import UNFINISHED, write_file

MARKER, LISTING = "sparkwright.json", "sparkwright-files.json"
#: What a server of the release must answer.
CANARY = "sparkwright-canary.json"
#: The folder of warm packs below that of the caches.
PACKS = "packs"
#: The Python that runs this program is that of environments: its version, as wheels name it, too,
#: and the site-packages of an environment.
PYTHON = platform.python_version()
SHORT = ".".join(platform.python_version_tuple()[:2])
SITE = f"lib/python{SHORT}/site-packages"


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """
    The size of a file in bytes, its time in s, and its sha256 (of a link, of its target).

    Whole seconds, as layers of container images keep no fractions.
    """

    size: int
    time: int
    sha256: str


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is installed in an environment: its marker.

    Attributes:
        folder: Where it is; its ``caches.env`` names it.
        index: The address of the index that it came from.
        key: Of the lock and the edits that it was made of.
        channel: From which it was installed.
        packages: Project → version.
        wheels: Project → sha256 of its wheel.
        listing: The sha256 of the list of files.
        packs: Recipe → bytes of the warm pack that the release offered for it.
    """

    name: ReleaseName
    folder: str
    index: str
    python: str
    key: files.Sha256
    packages: dict[str, str]
    channel: Channel
    wheels: dict[str, files.Sha256]
    listing: str = ""
    packs: dict[str, int] = {}


def default_prefix() -> Path:
    """Return the folder of the installations: ``SPARKWRIGHT_PREFIX``, else the platform's."""
    if named := os.environ.get("SPARKWRIGHT_PREFIX"):
        return Path(named)
    import platformdirs

    return platformdirs.user_data_path("sparkwright")


def installed_at(folder: Path) -> Marker | None:
    """Return the record of the environment in *folder*; None if it has none."""
    return Prefix(folder.resolve().parent.parent).marker(folder.resolve().name)


class Prefix:
    """
    The folder of the installations.

    Attributes:
        root: The folder: ``releases/<name>/``, ``current``, ``trust/`` and ``history.json``.

    Raises:
        environment-unusable: The user in ``~NAME`` does not exist, or the path is not UTF-8.
        cache-unusable: It is behind a link of another user.
    """

    def __init__(self, root: Path) -> None:
        try:
            self.root = without_links(root.expanduser())
        except RuntimeError as error:
            raise PythonError(
                "environment-unusable", f"{root} cannot be resolved.", details=[str(error)]
            ) from error
        if not files.is_utf8(self.root):
            raise PythonError("environment-unusable", f"{self.root} is not UTF-8.")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Make the folder, and keep other runs that make or remove environments out of it."""
        return locked_folder(self.root)

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """
        Keep other runs from moving environments, the link to the current one, and the history, and
        remove what killed ones were writing.

        It is held for moments, while `locked` is held as long as an installation takes.

        Raises:
            environment-unusable: A folder is in the place of the link or of the history.
        """
        for name in ("current", ".current", "history.json"):
            if (path := self.root / name).is_dir() and not path.is_symlink():
                raise PythonError(
                    "environment-unusable", f"{path} is a folder.", todo="Move it away."
                )
        with locked_folder(self.root, ".switch.lock"):
            remove_unfinished(self.root)
            yield

    def environment_folder(self, name: str) -> Path:
        """Return the environment of the release *name*."""
        return self.root / "releases" / name

    def marker(self, name: str) -> Marker | None:
        """Return the marker of the release *name*; None without a whole one of that name."""
        with contextlib.suppress(FileError):
            marker = files.read_json(self.environment_folder(name) / MARKER, Marker)
            return marker if marker.name == name else None
        return None

    def listing(self, name: str) -> dict[str, FileState]:
        """Return the files of the release *name* as they were made; nothing if it is not whole."""
        path, marker = self.environment_folder(name) / LISTING, self.marker(name)
        with contextlib.suppress(FileError):
            if marker and files.sha256_bytes(files.read_bytes(path)) == marker.listing:
                return files.read_json(path, dict[str, FileState])
        return {}

    def installed(self) -> dict[str, Marker]:
        """Return every release that is installed wholly."""
        return {name: marker for name in self.environments() if (marker := self.marker(name))}

    def environments(self) -> list[str]:
        """Return the names of the environments that an installation made, also of damaged ones."""
        return [
            folder.name
            for folder in files.list_folder(self.root / "releases", "[!.]*")
            if os.path.lexists(folder / MARKER) or os.path.lexists(folder / LISTING)
        ]

    @property
    def current(self) -> str:
        """The name of the release that ``current`` leads to; empty if there is none."""
        try:
            target = (self.root / "current").readlink()
        except OSError:
            return ""
        return target.name if target.parent == Path("releases") else ""

    @property
    def history(self) -> list[str]:
        """
        The releases that were current, the latest last, which is the current one if any is; without
        a readable record, that one alone.
        """
        path, current = self.root / "history.json", self.current
        try:
            entries = files.read_json(path, list[str]) if os.path.lexists(path) else []
        except FileError as error:
            console.warn(f"{error.what} No earlier release is known.")
            entries = [current] if current else []
        # A `switch` that was killed leaves entries after the current one.
        while current in entries and entries[-1] != current:
            entries.pop()
        return entries

    def switch(self, name: str, *, back: Sequence[str] = ()) -> None:
        """
        Let ``current`` lead to the release *name*, and append it to the history.

        Args:
            back: The history up to *name*, which takes the place of the longer one.
        """
        path = self.root / "history.json"
        if not back and (history := self.history)[-1:] != [name]:
            write_file(path, msgspec.json.encode([*history, name]))
        link = self.root / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("releases") / name)
        os.replace(link, self.root / "current")
        if back:
            write_file(path, msgspec.json.encode(back))

    def work_folder(self) -> Path:
        """Return a new folder for an environment that is being made or removed."""
        return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=own_folder(self.root, "releases")))

    def remove(self, name: str) -> None:
        """Remove the environment *name*, or the link to it; ``current`` leads to it no more."""
        with self.switching():
            if self.current == name:
                (self.root / "current").unlink()
            self.environment_folder(name).rename(self.work_folder() / name)
        self.remove_work_folders()

    def remove_work_folders(self) -> None:
        """Remove what is left of runs; what cannot be removed is left to the next run."""
        for path in self.root.glob(f"releases/{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def describe(folder: Path, *, contents: bool = True) -> dict[str, FileState]:
    """
    Return the files and links below *folder*, without what programs compile at run time.

    Args:
        contents: Whether files are read; else their sha256 is left empty.
    """
    start, caches = len(str(folder)) + 1, folder / CACHES

    def states(entry: tuple[str, list[str], list[str]]) -> list[tuple[str, FileState]]:
        top, names, members = entry
        links = [name for name in names if Path(top, name).is_symlink()]
        paths = [f"{top}/{name}" for name in (*members, *links)]
        return [(path[start:], _state(path, contents=contents)) for path in paths]

    entries = (entry for entry in os.walk(folder) if not Path(entry[0]).is_relative_to(caches))
    with ThreadPoolExecutor(8) as pool:
        return dict(itertools.chain.from_iterable(pool.map(states, entries)))


def _state(path: str, *, contents: bool) -> FileState:
    entry, digest = os.lstat(path), ""
    if contents and stat.S_ISREG(entry.st_mode):
        digest = files.sha256_file(Path(path))
    elif contents and stat.S_ISLNK(entry.st_mode):
        digest = files.sha256_bytes(os.fsencode(Path(path).readlink()))
    return FileState(entry.st_size, entry.st_mtime_ns // 10**9, digest)
