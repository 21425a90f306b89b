"""The packages in an environment's site-packages: what is there, who put it there, and how one leaves."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from sparkwright.core.files import sha256_file
from sparkwright.release import content
from sparkwright.release.client.state import Placed
from sparkwright.release.environment import Environment, access_guard

#: What a RECORD can have at most; torch's has 2 MB.
MOST = 64 << 20


def canonical(name: str) -> str:
    """Return *name* as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def of_info(info: str) -> tuple[str, str]:
    """Return project and version of the ``.dist-info`` folder named *info*."""
    name, _, version = info.removesuffix(".dist-info").rpartition("-")
    return canonical(name), version


def found(place: Environment) -> dict[str, list[str]]:
    """Return the names of ``.dist-info`` folders by project; two of one project are a fault that installers leave when they are killed."""
    made: dict[str, list[str]] = {}
    with access_guard(place.site):
        for info in sorted(place.site.glob("*.dist-info")):
            if info.is_dir():
                made.setdefault(of_info(info.name)[0], []).append(info.name)
    return made


def rows(info: Path) -> list[tuple[str, str, str]]:
    """Return the rows of RECORD: name, digest, size; none where it cannot be read."""
    try:
        if (info / "RECORD").stat().st_size > MOST:
            return []
        text = (info / "RECORD").read_text("utf-8")
        return [(row[0], row[1], row[2]) for row in csv.reader(io.StringIO(text)) if len(row) == 3]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def stat(info: Path) -> str:
    """Return a digest of the sizes and times of a package's files; it changes when anybody writes one."""
    # Plain text and one call for each file: with tens of thousands of them, path objects alone would take the second that there is.
    site, lines = f"{info.parent}/", []
    for name, _, _ in rows(info):
        if name.endswith(".pyc"):
            continue  # Python writes those when it runs
        try:
            state = os.lstat(site + name)
            lines.append(f"{name},{state.st_size},{state.st_mtime_ns}\n")
        except OSError:
            lines.append(f"{name},-\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def placed(place: Environment, info: str, *, found: bool = False, before: Placed | None = None) -> Placed:
    """
    Return how the package with that ``.dist-info`` lies there now.

    Args:
        before: How it lay there when it was laid down, where that was earlier: which of its files are `odd` was known then, for good.
    """
    folder = place.site / info
    with contextlib.suppress(FileNotFoundError):
        known = before.odd if before else odd(folder)
        return Placed(info, sha256_file(folder / "RECORD"), content.of_installed(folder), stat(folder), found, known)
    return Placed(info, "", "", "", found)


def odd(info: Path) -> dict[str, str]:
    """
    Return the files of a package whose size is not the one that RECORD states: name → sha256 of what is there.

    Asked once, when the package has just been laid down from a wheel that is known by hash. A file of the stated size and another hash
    is not among them, and `health.look` finds fault with it.
    """
    site, found = info.parent, {}
    for name, _, size in rows(info):
        with contextlib.suppress(OSError):
            if size.isdecimal() and not name.endswith(".pyc") and os.lstat(site / name).st_size != int(size):
                found[name] = sha256_file(site / name)
    return found


class Origin(msgspec.Struct, frozen=True):
    """Who installed a package, as INSTALLER and direct_url.json say; *url* is empty for one from an index."""

    installer: str
    url: str = ""

    def __str__(self) -> str:
        return (self.installer or "something that leaves no name") + (f" from {self.url}" if self.url else "")


class _DirectUrl(msgspec.Struct):
    url: str = ""


def origin(info: Path) -> Origin:
    """Return who installed the package."""
    who, url = "", ""
    with contextlib.suppress(OSError):
        with (info / "INSTALLER").open("rb") as stream:
            who = stream.read(100).decode("ascii", "replace").strip()
        with (info / "direct_url.json").open("rb") as stream, contextlib.suppress(msgspec.DecodeError):
            url = msgspec.json.decode(stream.read(1 << 16), type=_DirectUrl).url
    return Origin(_plain(who), _plain(url))


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def remove(place: Environment, infos: Sequence[str]) -> None:
    """
    Remove the packages with these ``.dist-info`` folders; a file that another package's RECORD names, too, stays.

    RECORD goes last, so that whoever kills this leaves a package that can be removed again.
    """
    with access_guard(place.site):
        stay = [info for known in found(place).values() for info in known if info not in infos]
        others = {name for info in stay for name, _, _ in rows(place.site / info)}
        for info in infos:
            _remove(place, info, others)


def _remove(place: Environment, info: str, others: Collection[str]) -> None:
    folder = place.site / info
    names = [name for name, _, _ in rows(folder) if not name.startswith(f"{info}/") and name not in others]
    erase(place, names)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif path.name != "RECORD" or path.parent != folder:
            path.unlink()
    (folder / "RECORD").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def erase(place: Environment, names: Collection[str]) -> None:
    """Remove files by their names below site-packages, what Python compiled of them, and the folders that are empty then."""
    folders: set[Path] = set()
    for path in _inside(place, names):
        path.unlink(missing_ok=True)
        folders.add(path.parent)
        if path.suffix == ".py":
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink(missing_ok=True)
    for one in sorted(folders, key=lambda one: -len(one.parts)):
        _tidy(place, one)


def _inside(place: Environment, names: Collection[str]) -> Iterator[Path]:
    """Yield the paths of *names*, less those that lead out of the environment: RECORD is text that anybody may have written."""
    prefix, resolved = place.prefix.resolve(), dict[Path, bool]()
    for name in names:
        path = place.site / name
        inside = resolved.get(path.parent)
        if inside is None:
            inside = resolved[path.parent] = path.parent.resolve().is_relative_to(prefix)
        if inside and (path.is_symlink() or not path.is_dir()):
            yield path


def _tidy(place: Environment, folder: Path) -> None:
    top = place.site
    while folder != top and folder.is_relative_to(top):
        with contextlib.suppress(OSError):
            (folder / "__pycache__").rmdir()
        try:
            folder.rmdir()
        except OSError:
            return  # something else lies in it
        folder = folder.parent
