"""The folder of the site: what did not change stays, what is no longer made goes, and nothing else in it is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core.errors import UsageError
from sparkwright.core.store import Store, translate_disk_full

#: In the folder: what the last run made, so that another one knows what is ours.
LISTING = "site.json"
LARGEST = 16 << 20


class _Listing(msgspec.Struct, frozen=True):
    files: tuple[str, ...]


class Written(msgspec.Struct, frozen=True):
    """How many files there are, were written, and were removed; *size* in bytes of all, *largest* of one page with its style."""

    files: int
    written: int
    removed: int
    size: int
    largest: int


def write(store: Store, folder: Path, files: Mapping[str, bytes], style: str) -> Written:
    """
    Bring *folder* to hold *files*, each replaced whole. Pages that nothing links to any more are removed last.

    Args:
        style: The one of them that every page loads.

    Raises:
        UsageError: The folder holds what this did not make. disk-full: There is no room.
    """
    before = _before(folder)
    changed = 0
    # The first page comes last: it links to all others.
    for name in sorted(files, key=lambda name: (name == "index.html", name != style, name)):
        changed += _put(store, folder / name, files[name])
    listing = msgspec.json.format(msgspec.json.encode(_Listing(tuple(sorted(files))))) + b"\n"
    # Before the removals: what a killed run leaves is then at worst still there, and another run's to remove.
    gone = sorted(before - files.keys())
    _put(store, folder / LISTING, msgspec.json.format(msgspec.json.encode(_Listing(tuple(sorted({*files, *gone}))))) + b"\n")
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    _put(store, folder / LISTING, listing)
    pages = [len(data) for name, data in files.items() if name.endswith(".html")]
    size = sum(map(len, files.values()))
    return Written(len(files), changed, len(gone), size, max(pages, default=0) + len(files[style]))


def _before(folder: Path) -> set[str]:
    """Return the names of what is ours in *folder*."""
    try:
        data = (folder / LISTING).read_bytes()
        found = msgspec.json.decode(data, type=_Listing) if len(data) <= LARGEST else _Listing(())
    except FileNotFoundError:
        found = _Listing(())
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError("usage", f"{folder} holds files that are none of a site; name an empty folder with --output.") from None
        if folder.exists() and not folder.is_dir():
            raise UsageError("usage", f"{folder} is no folder.") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        found = _Listing(())
    # A listing that somebody changed must not lead out of the folder.
    return {name for name in found.files if not name.startswith("/") and ".." not in name.split("/")}


def _put(store: Store, path: Path, data: bytes) -> bool:
    """Write *data* to *path* unless it holds just that; say whether it was written."""
    try:
        if path.stat().st_size == len(data) and path.read_bytes() == data:
            return False
    except OSError:
        pass
    with translate_disk_full(path.parent), store.replacing(path) as unfinished:
        unfinished.write_bytes(data)
    return True
