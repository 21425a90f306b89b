"""
What an environment knows of the set that is installed in it: ``<venv>/sparkwright/``.

``installed.json`` is written last, whole or not at all. ``installing.json`` is written before the first change and removed after
``installed.json`` is there: where it lies, a run was killed, and the next one finishes or undoes what it began.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from sparkwright.core import files
from sparkwright.core.store import flush
from sparkwright.release import environment
from sparkwright.release.environment import Environment, access_guard
from sparkwright.release.errors import InstallError
from sparkwright.release.manifest.records import Name, Sha256

T = TypeVar("T")

FORMAT = 1
#: How many earlier sets `rollback` can go through.
KEPT = 5
#: More is no record of ours: a set of 500 packages takes 300 kB.
MOST = 64 << 20


class Pinned(msgspec.Struct, frozen=True):
    """A package of a set: the wheel that it comes from, by hash; *url*: where it lies; *size*: 0 where the lock says none."""

    project: Name
    version: Name
    filename: Name
    sha256: Sha256
    url: str
    size: int = 0


class Chosen(msgspec.Struct, frozen=True):
    """
    A release as it is to be in an environment.

    Attributes:
        release, proof: Addresses. *index*: where it was taken from; *serial*: of the manifest that offered it.
        onsite: What is edited after the installation (canonical `release.spec.OnsiteSpec`), or empty.
    """

    release: Sha256
    name: Name
    stack: Name
    channel: str
    proof: Sha256
    index: str
    serial: int
    packages: tuple[Pinned, ...]
    onsite: str = ""


class Placed(msgspec.Struct, frozen=True):
    """
    A package as it lies in site-packages.

    Attributes:
        info: Name of its ``.dist-info``. *record*: sha256 of RECORD. *content*: see `release.content`.
        stat: Digest of the sizes and times of its files, which tells in a moment that nobody touched them.
        found: It was there before, with the same content: `uninstall` leaves it.
        odd: Files that came with other bytes than the wheel's own RECORD states (some were edited after it was written): name → sha256.
    """

    info: str
    record: str
    content: str
    stat: str
    found: bool = False
    odd: dict[str, str] = {}


class Installed(msgspec.Struct, frozen=True):
    """
    ``installed.json``.

    Attributes:
        placed: By project. *history*: earlier sets, the latest last.
        caches: Address of each of these releases → the folder of what was compiled with it.
    """

    chosen: Chosen
    placed: dict[str, Placed]
    history: tuple[Chosen, ...] = ()
    caches: dict[str, str] = {}
    format: int = FORMAT


class Installing(msgspec.Struct, frozen=True):
    """
    ``installing.json``.

    Attributes:
        chosen: What a run began to make; None: it was removing all. *before*: the set that was there, if one was.
        history: What the earlier sets will be. *found*: packages that were there before us, with the same bytes.
    """

    chosen: Chosen | None
    before: Installed | None
    history: tuple[Chosen, ...] = ()
    found: frozenset[str] = frozenset()
    format: int = FORMAT


def folder(place: Environment) -> Path:
    """Return where the records of *place* lie."""
    return place.prefix / "sparkwright"


def installed(place: Environment) -> Installed | None:
    """Return what is installed; None where nothing is. Raises `environment-broken` where the record is damaged."""
    return _read(folder(place) / "installed.json", Installed)


def installing(place: Environment) -> Installing | None:
    """Return what a killed run left; None where none did."""
    return _read(folder(place) / "installing.json", Installing)


def required(place: Environment) -> Installed:
    """Return what is installed; raise `nothing-installed` where nothing is."""
    if found := installed(place):
        return found
    raise InstallError("nothing-installed", f"{place.prefix} holds no set that sparkwright installed.")


def _read(path: Path, kind: type[T]) -> T | None:
    def broken(what: str, details: Sequence[str] = ()) -> InstallError:
        todo = f"Remove {path} if the environment is worth nothing; then run `install --replace`, which adopts the rest."
        return InstallError("environment-broken", f"{path} cannot be read.", details=[what, *details], todo=todo)

    try:
        return files.read_json(path, kind, limit=MOST, failure=broken)
    except InstallError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def begin(
    place: Environment,
    chosen: Chosen | None,
    before: Installed | None,
    history: tuple[Chosen, ...] = (),
    found: frozenset[str] = frozenset(),
) -> None:
    """Note what is about to be changed."""
    _write(folder(place) / "installing.json", Installing(chosen, before, history, found))


def end(place: Environment, done: Installed | None) -> None:
    """Note what is installed now (None: nothing), and that nothing is under way."""
    if done is None:
        (folder(place) / "installed.json").unlink(missing_ok=True)
    else:
        _write(folder(place) / "installed.json", done)
    (folder(place) / "installing.json").unlink(missing_ok=True)


def _write(path: Path, record: object) -> None:
    with access_guard(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as sink:
            sink.write(msgspec.json.format(msgspec.json.encode(record)))
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
        flush(path.parent)


@contextlib.contextmanager
def held(place: Environment) -> Iterator[None]:
    """
    Keep other runs of sparkwright away from the environment; uv has a lock of its own there, which it takes meanwhile.

    The lock's empty file stays for good: whoever removes it may let in a third run beside one that waits for it.
    """
    with environment.held(place, ".sparkwright.lock"):
        yield


def forget(place: Environment) -> None:
    """Remove the records, and all else that lies with them."""
    shutil.rmtree(folder(place), ignore_errors=True)
