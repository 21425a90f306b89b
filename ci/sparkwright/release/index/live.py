"""
Which generation is live: what the symbolic link ``current`` points to.

The names at the root of the index are symbolic links into ``current/``, so replacing that one link, by a rename, changes everything that
a client sees at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from sparkwright.errors import IndexDamaged
from sparkwright.release.index.folder import sync
from sparkwright.release.manifest import places

GENERATIONS, CURRENT = "g", "current"

#: Names at the root that change with the manifest.
NAMES = (places.MANIFEST, "index.html", "candidate", "verified")

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
        IndexDamaged: ``current`` points to no generation.
    """
    try:
        target = str((root / CURRENT).readlink())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IndexDamaged(f"{CURRENT} is no symbolic link, so nothing says which generation is live.", details=[str(error)]) from error
    folder, _, name = target.partition("/")
    if folder != GENERATIONS or not name.isascii() or not name.isdecimal() or not (root / target).is_dir():
        raise IndexDamaged(f"{CURRENT} points to {target}, which is no generation of this index.")
    return int(name)


def current(root: Path) -> tuple[int, bytes] | None:
    """
    Return the serial of the live generation and its signed manifest; None where there is no index yet.

    Raises:
        IndexDamaged: What is live has no manifest, or one of a size that none has.
    """
    live = serial(root)
    if live is None:
        return None
    path = place(root, live) / places.MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise IndexDamaged(f"The manifest of generation {live} has more than {LARGEST >> 20} MiB.")
        return live, path.read_bytes()
    except OSError as error:
        raise IndexDamaged(f"The manifest of generation {live} cannot be read.", details=[str(error)]) from error


def flip(root: Path, serial: int) -> None:
    """
    Put the generation of *serial* live, by one rename, and remove generations that are old.

    Raises:
        IndexDamaged: There is no such generation, or it is not whole.
    """
    made = place(root, serial)
    if missing := [name for name in NAMES if not (made / name).exists()]:
        raise IndexDamaged(f"Generation {serial} cannot go live: it lacks {', '.join(missing)}.")
    _point(root / CURRENT, f"{GENERATIONS}/{serial}")
    for name in NAMES:
        point(root / name, f"{CURRENT}/{name}")
    sync(root)
    _clear(root, serial)


def point(path: Path, target: str) -> None:
    """Make the symbolic link *path*, unless it is there already."""
    with contextlib.suppress(OSError):
        if str(path.readlink()) == target:
            return
    _point(path, target)


def _point(path: Path, target: str) -> None:
    # A link cannot be made under a name that is taken, so it is made beside it and renamed over it.
    for left in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        (folder / path.name).symlink_to(target)
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear(root: Path, live: int) -> None:
    """Remove old generations, and pages of releases that no generation leads to any more."""
    found = sorted((int(path.name) for path in (root / GENERATIONS).iterdir() if path.name.isdecimal()), reverse=True)
    kept = [one for one in found if one <= live][:KEPT]
    gone = [one for one in found if one <= live and one not in kept]
    kept_pages = {path for one in found if one not in gone for path in _led(place(root, one))}
    idle = {path for one in gone for path in _led(place(root, one))} - kept_pages
    for path in [*(f"{place(root, one)}" for one in gone), *idle]:
        shutil.rmtree(path, ignore_errors=True)


def _led(generation: Path) -> list[str]:
    """Return the folders of releases' pages that *generation* leads to."""
    folder = f"{generation}/b"
    try:
        # A thousand links; pathlib would take as long as all the rest of a publication.
        return [os.path.normpath(f"{folder}/{os.readlink(one.path)}") for one in os.scandir(folder)]  # noqa: PTH115
    except FileNotFoundError:
        return []
