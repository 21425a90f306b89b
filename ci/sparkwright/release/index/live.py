"""
Which generation is live: what the symbolic link ``current`` points to.

The names at the root of the index are symbolic links into ``current/``, so replacing that one link, by a rename, changes everything that
a client sees there at once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from sparkwright.release.errors import ReleaseError
from sparkwright.release.index.folder import sync
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Sha256

GENERATIONS, CURRENT = "g", "current"

#: Names at the root that change with the manifest.
NAMES = (places.MANIFEST, "index.html", "candidate", "verified")

#: Names in the folder of a release that change with how it stands; they lead to ``pages/``, and that to the folder that shows it.
RELEASE_NAMES = ("index.html", "notes.md", "simple")

#: In a generation: which folder that is, for each release.
PAGES = "pages.json"

#: Generations that stay, the live one among them: a client that began to read an older page may still follow its links.
KEPT = 3

#: Bytes of the signed manifest.
LARGEST = 64 << 20


def place(root: Path, serial: int) -> Path:
    """Return where the generation of *serial* lies."""
    return root / GENERATIONS / str(serial)


def serial(root: Path) -> int | None:
    """
    Return the serial of the live generation; None where there is no index yet.

    Raises:
        index-damaged: ``current`` points to no generation.
    """
    try:
        target = str((root / CURRENT).readlink())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReleaseError(
            "index-damaged", f"{CURRENT} is no symbolic link, so nothing says which generation is live.", details=[str(error)]
        ) from error
    folder, _, name = target.partition("/")
    if folder != GENERATIONS or not name.isascii() or not name.isdecimal() or not (root / target).is_dir():
        raise ReleaseError("index-damaged", f"{CURRENT} points to {target}, which is no generation of this index.")
    return int(name)


def current(root: Path) -> tuple[int, bytes] | None:
    """
    Return the serial of the live generation and its signed manifest; None where there is no index yet.

    Raises:
        index-damaged: What is live has no manifest, or one of a size that none has.
    """
    live = serial(root)
    if live is None:
        return None
    path = place(root, live) / places.MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise ReleaseError("index-damaged", f"The manifest of generation {live} has more than {LARGEST >> 20} MiB.")
        return live, path.read_bytes()
    except OSError as error:
        raise ReleaseError("index-damaged", f"The manifest of generation {live} cannot be read.", details=[str(error)]) from error


def flip(root: Path, serial: int) -> None:
    """
    Put the generation of *serial* live, by one rename; then lead to the pages of releases as it has them, and remove old generations.

    A run that ends after the rename leaves pages of a release that stands as it stood before; the next flip leads to the new ones.

    Raises:
        index-damaged: There is no such generation, or it is not whole.
    """
    made = place(root, serial)
    if missing := [name for name in (*NAMES, PAGES) if not (made / name).exists()]:
        raise ReleaseError("index-damaged", f"Generation {serial} cannot go live: it lacks {', '.join(missing)}.")
    # The names first: of a new index they lead nowhere until the rename, and then all of them do at once.
    for name in NAMES:
        point(root / name, f"{CURRENT}/{name}")
    point(root / CURRENT, f"{GENERATIONS}/{serial}")
    sync(root)
    led = pages_of(made)
    for release in _releases(root) - led.keys():
        # No longer named by the manifest; its folder is for `publish` to remove.
        for name in ("pages", *RELEASE_NAMES):
            (root / "b" / release / name).unlink(missing_ok=True)
    for release, pages in led.items():
        # A thousand links, of which one or two differ.
        if _target(f"{root}/b/{release}/pages") != pages:
            lead(root / "b" / release, pages)
    _clear(root, serial)


def pages_of(generation: Path) -> dict[str, str]:
    """Return the folder of pages of each release, as *generation* has them; raises `index-damaged` where it does not say."""
    try:
        return msgspec.json.decode((generation / PAGES).read_bytes(), type=dict[Sha256, str])
    except (OSError, msgspec.DecodeError) as error:
        raise ReleaseError(
            "index-damaged", f"Generation {generation.name} does not say which pages its releases have.", details=[str(error)]
        ) from error


def lead(release: Path, pages: str) -> None:
    """Make the names in the folder *release* lead to *pages* there, by one rename; what they led to before stays for one more change."""
    link = release / "pages"
    before = _target(f"{link}")
    for name in RELEASE_NAMES:
        point(release / name, f"pages/{name}")
    point(link, pages)
    for path in release.glob("pages-*"):
        if path.name not in (before, pages):
            shutil.rmtree(path, ignore_errors=True)


def point(path: Path, target: str) -> None:
    """Make the symbolic link *path*, unless it is there already. Whoever does so is alone."""
    if _target(f"{path}") == target:
        return
    # A link cannot be made under a name that is taken, so it is made beside it and renamed over it.
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)


def _releases(root: Path) -> set[str]:
    try:
        return set(os.listdir(root / "b"))  # noqa: PTH208  names alone
    except FileNotFoundError:
        return set()


def _target(path: str) -> str:
    """Return what the symbolic link *path* says; nothing where there is none."""
    try:
        return os.readlink(path)  # noqa: PTH115  see `flip`
    except OSError:
        return ""


def _clear(root: Path, live: int) -> None:
    found = sorted((int(path.name) for path in (root / GENERATIONS).iterdir() if path.name.isdecimal()), reverse=True)
    for one in [one for one in found if one <= live][KEPT:]:
        shutil.rmtree(place(root, one), ignore_errors=True)
