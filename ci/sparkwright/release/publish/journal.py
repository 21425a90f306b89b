"""
What a publication is about to add, on the disk before the first byte of it is sent.

A journal is a folder ``.publishing/<key>``: the small files, by their sha256, and ``journal.json``, written last. Its key follows from what
was asked and from the manifest that it was asked of, so that the same command after a kill goes on with exactly these bytes, and any other
removes what no manifest refers to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.core.store import flush
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Entry, Manifest, Sha256
from sparkwright.release.publish import ground
from sparkwright.release.publish.folder import Folder
from sparkwright.release.publish.hosts import Host

NAME = "journal.json"
LARGEST = 16 << 20


class Planned(msgspec.Struct, frozen=True):
    """A file that will be added: its place below the root, the sha256 and the number of its bytes."""

    place: str
    sha256: Sha256
    size: int


class Journal(msgspec.Struct, frozen=True):
    """
    A publication, promotion or removal that is under way.

    Attributes:
        host: `Host.name`, which says where *files* go.
        files: Wheels and their METADATA, in the order in which they are sent. *small*: evidence first, then records and locks.
        names: File name of each wheel of the release → its sha256.
        releases: Addresses of what is added or removed. *going*: places of what is removed.
    """

    key: str
    host: str
    releases: tuple[Sha256, ...]
    files: tuple[Planned, ...] = ()
    small: tuple[Planned, ...] = ()
    names: dict[str, Sha256] = {}
    going: tuple[str, ...] = ()
    entry: Entry | None = None

    @property
    def offers(self) -> Entry:
        """What the manifest will say of what is added."""
        assert self.entry is not None
        return self.entry


class Draft:
    """A journal in the making, in its folder below *root*; what is not finished there is nobody's."""

    def __init__(self, root: Path, key: str) -> None:
        self.folder, self._root, self._key = place(root, key), root, key
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._small: list[Planned] = []

    def add(self, where: str, data: bytes) -> str:
        """Keep *data*, which will lie at *where*; return its sha256."""
        planned = self.keep(where, data)
        if planned not in self._small:
            self._small.append(planned)
        return planned.sha256

    def keep(self, where: str, data: bytes) -> Planned:
        """Keep *data* as a file that a host will get."""
        sha256 = sha256_bytes(data)
        path = self.folder / sha256
        path.write_bytes(data)
        return Planned(where, sha256, len(data))

    def finish(self, entry: Entry, host: str, files: tuple[Planned, ...], names: Mapping[str, str]) -> Journal:
        """Write the journal; the files that it names are hashed again before they are used, so nothing has to flush them."""
        return self.write(Journal(self._key, host, (entry.release,), files, tuple(self._small), dict(names), entry=entry))

    def write(self, made: Journal) -> Journal:
        """Write *made*, from which moment on it counts."""
        unfinished = self.folder / f"{NAME}.new"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        flush(unfinished)
        os.replace(unfinished, self.folder / NAME)
        flush(self.folder)
        return made


def retiring(root: Path, serial: int, gone: Iterable[Entry], going: tuple[str, ...]) -> None:
    """Write that *going*, which the releases *gone* led to, is removed once the manifest after *serial* does not lead there any more."""
    key = f"retain-{serial}"
    Draft(root, key).write(Journal(key, Folder.name, tuple(one.release for one in gone), going=going))


def place(root: Path, key: str) -> Path:
    """Return the folder of the journal *key*."""
    return root / ground.WORK / key


def read(root: Path, key: str) -> Journal | None:
    """Return the journal *key*, if there is a whole one."""
    try:
        with (place(root, key) / NAME).open("rb") as stream:
            found = msgspec.json.decode(stream.read(LARGEST), type=Journal)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if found.key == key else None


def whole(root: Path, key: str) -> Journal | None:
    """Return the journal *key*, if there is one and a disk that failed did not change what it keeps."""
    found, folder = read(root, key), place(root, key)
    if found is None:
        return None
    kept = {one.sha256 for one in (*found.files, *found.small) if (folder / one.sha256).exists()}
    sound = kept.issuperset(one.sha256 for one in found.small) and all(sha256_file(folder / one) == one for one in kept)
    return found if sound else None


def clear(root: Path, key: str) -> None:
    """Forget the journal *key*: first that it is one, then its files."""
    (place(root, key) / NAME).unlink(missing_ok=True)
    shutil.rmtree(place(root, key), ignore_errors=True)


def clean(root: Path, manifest: Manifest | None, host_of: Callable[[str], Host], keep: str = "") -> list[str]:
    """
    Remove what killed runs added and *manifest* does not refer to, and return it.

    Args:
        host_of: Returns the host of that name. *keep*: the journal that goes on.
    """
    referred = _referred(root, manifest) if manifest else set()
    removed: list[str] = []
    for key in _keys(root):
        if key == keep:
            continue
        found = read(root, key)
        if found is not None:
            removed += _undone(root, found, referred, host_of)
        clear(root, key)
    return removed


def _undone(root: Path, journal: Journal, referred: set[str], host_of: Callable[[str], Host]) -> list[str]:
    small = tuple(one for one in (*(planned.place for planned in journal.small), *journal.going) if one not in referred)
    files = tuple(one.place for one in journal.files if one.place not in referred)
    for record in map(places.release, journal.releases):
        if record not in referred:
            # Pages of it were made there, too.
            shutil.rmtree((root / record).parent, ignore_errors=True)
    host_of(Folder.name).remove(small)
    try:
        if files:
            host_of(journal.host).remove(files)
    except SparkwrightError as error:
        # Another verb must not fail for want of a token; people can remove a release of GitHub by hand.
        console.warn(f"{journal.host} could not be cleaned of what a killed run left: {error.what}")
    return [*files, *small]


def _referred(root: Path, manifest: Manifest) -> set[str]:
    """Return the places of all files that *manifest* leads to."""
    return {one for entry in manifest.entries for one in referred(root, entry)}


def referred(root: Path, entry: Entry) -> Iterator[str]:
    """Yield the places of the files that *entry* leads to, on whichever host; raises as `ground.release`."""
    release, proof = ground.release(root, entry.release), ground.proof(root, entry)
    yield places.release(entry.release)
    yield places.proof(entry.release, entry.proof)
    yield places.onsite(entry.release)
    for lock in release.locks:
        yield places.lock(entry.release, lock.machine)
        yield places.requirements(entry.release, lock.machine)
    for wheel in release.wheels:
        where = places.wheel(wheel.sha256, wheel.filename)
        yield where
        yield f"{where}.metadata"
    yield from (places.evidence(one.sha256) for proved in proof.wheels for one in proved.evidence)


def none(root: Path) -> bool:
    """Return whether no run was killed in the middle of something."""
    return not _keys(root)


def _keys(root: Path) -> list[str]:
    folder = root / ground.WORK
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
