"""
Source archives, read without unpacking.

An archive is hostile: a member may climb out of its folder, be a link that leaves it, a device, or
promise less than it holds. Everything is checked here before a byte reaches the object store;
nothing is written to a path that a member names.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sparkwright.core.errors import FileError
from sparkwright.core.git import EXECUTABLE, LINK, REGULAR
from sparkwright.core.zips import (
    damage_guard,
    folders_above,
    odd_name,
    safe_path,
    zip_file,
    zip_members,
)

#: A whole CUTLASS or vLLM source is below 1 GB in 20,000 files; what exceeds these is not a source.
MOST_FILES = 200_000
MOST_BYTES = 4 * 1024**3


def _leaves(path: str, target: str) -> bool:
    """Return True if a link at *path* to *target* could lead out of the folder."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    # A name before ".." may be a link itself, so that the text alone does not say where the two
    # lead.
    climbs = ".." in [end.split("/")[0], *target.lstrip("./").split("/")]
    return not target or target.startswith("/") or odd_name(target) or climbs


def sdist_members(archive: Path) -> Iterator[tuple[str, str, bytes]]:
    """
    Yield the files of the source distribution *archive* (``.tar.gz``), its single top folder taken
    away: path, git mode, and bytes, which of a link are its target.

    Raises:
        archive-unsafe: A member is unsafe (module docstring), or the archive is damaged.
    """
    origin, top, total = archive.name, "", 0
    files, folders = set[str](), set[str]()
    with damage_guard(origin), tarfile.open(archive, "r|gz") as tar:
        for info in tar:
            name = safe_path(info.name.rstrip("/").removeprefix("./"), origin)
            head, _, path = name.partition("/")
            top, fault = top or head, ""
            if head == top and (info.isdir() or not path):
                continue
            above = folders_above(path)
            if head != top:
                fault = "has more than one top folder"
            elif not (info.issym() or info.isreg()):
                fault = "has a member that is no file, folder or symbolic link"
            elif info.issym() and _leaves(path, info.linkname):
                fault = f"has a link that leaves its folder, to {info.linkname!r}"
            elif path in files or path in folders or not files.isdisjoint(above):
                fault = "holds the same path twice"
            total += info.size if info.isreg() else 0  # that of a link may be negative
            files.add(path)
            folders |= above
            if len(files) + len(folders) > MOST_FILES or total > MOST_BYTES:
                fault = f"is larger than any source: over {MOST_FILES} files or {MOST_BYTES} bytes"
            if fault:
                raise FileError(
                    "archive-unsafe", f"{origin} {fault}.", details=[f"member: {name!r}"]
                )
            if info.issym():
                yield path, LINK, info.linkname.encode()
            elif content := tar.extractfile(info):
                yield path, EXECUTABLE if info.mode & 0o100 else REGULAR, content.read()


def wheel_members(archive: Path, folder: str) -> Iterator[tuple[str, str, bytes]]:
    """
    Yield the files below *folder* of the wheel *archive* as `sdist_members`; modes inside wheels
    carry no meaning for headers.

    Raises:
        archive-unsafe: A member is unsafe, the archive is damaged, or the folder is not in it.
    """
    failure = partial(FileError, "archive-unsafe")
    with zip_file(archive, failure) as zipped:
        members = zip_members(zipped, archive.name, failure)
        below = [name for name in members if name.startswith(f"{folder}/")]
        for name in below:
            yield name.removeprefix(f"{folder}/"), REGULAR, zipped.read(name)
    if not below:
        raise failure(f"{archive.name} has no folder {folder!r}.")
