"""Whether something else changed an installed set, package by package: in a moment by sizes and times, or byte by byte."""

from __future__ import annotations

import base64
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.core.files import sha256_file
from sparkwright.release import content
from sparkwright.release.client import caches, packages
from sparkwright.release.client.state import Installed, Pinned, Placed
from sparkwright.release.environment import Environment, access_guard

#: How many changed files are named.
SHOWN = 20

Hashes = Mapping[str, set[str]]


class Fault(msgspec.Struct, frozen=True):
    """What became of a package: *found* is the version that is there now, *by* who put it there, *files* what changed."""

    project: str
    version: str
    kind: Literal["removed", "replaced", "changed", "doubled"]
    says: str
    found: str = ""
    by: str = ""
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.project} {self.version}: {self.says}"


def look(place: Environment, known: Installed, *, deep: bool = False) -> tuple[Fault, ...]:
    """
    Return what is not as it was installed; a package that was put there again with the same bytes is.

    Args:
        deep: Read every byte; otherwise only of packages whose sizes, times or RECORD differ.

    Raises:
        environment-unusable: The environment cannot be read.
    """
    there = packages.found(place)
    with access_guard(place.site):
        return tuple(_faults(place, known, there, deep=deep))


def _faults(place: Environment, known: Installed, there: Mapping[str, list[str]], *, deep: bool) -> Iterator[Fault]:
    shared: Hashes | None = None
    for pinned in known.chosen.packages:
        if (was := known.placed.get(pinned.project)) is None:
            continue
        infos = there.get(pinned.project, [])
        if fault := _absent(place, pinned, was, infos):
            yield fault
        elif deep or not _untouched(place, was):
            shared = shared if shared is not None else _hashes(place, there)
            if fault := _changed(place, pinned, was, shared):
                yield fault
    yield from (Fault(name, "", "removed", "what keeps compiled kernels apart was removed or edited") for name in caches.lost(place, known))


def _absent(place: Environment, pinned: Pinned, was: Placed, infos: list[str]) -> Fault | None:
    def fault(kind: Literal["removed", "replaced", "doubled"], says: str, info: str = "") -> Fault:
        by = str(packages.origin(place.site / info)) if info else ""
        return Fault(pinned.project, pinned.version, kind, says, packages.of_info(info)[1] if info else "", by)

    if not infos:
        return fault("removed", "removed")
    if other := next((info for info in infos if info != was.info), None):
        says = f"{packages.of_info(other)[1]}, installed by {packages.origin(place.site / other)}"
        return (
            fault("doubled", f"there twice, also as {says}", other)
            if was.info in infos
            else fault("replaced", f"replaced by {says}", other)
        )
    return None


def _untouched(place: Environment, was: Placed) -> bool:
    try:
        return sha256_file(place.site / was.info / "RECORD") == was.record and packages.stat(place.site / was.info) == was.stat
    except OSError:
        return False


def _changed(place: Environment, pinned: Pinned, was: Placed, shared: Hashes) -> Fault | None:
    folder = place.site / was.info
    by = str(packages.origin(folder))
    if not (folder / "RECORD").is_file():
        return Fault(pinned.project, pinned.version, "removed", "half removed: its RECORD is gone", by=by)
    if was.content and content.of_installed(folder) != was.content:
        says = f"replaced by other bytes of the same version, installed by {by}"
        return Fault(pinned.project, pinned.version, "replaced", says, pinned.version, by)
    differ = [
        name
        for name, value, _ in packages.rows(folder)
        if not name.endswith(".pyc") and not _as_stated(folder.parent, name, _value(was.odd[name]) if name in was.odd else value, shared)
    ]
    if not differ:
        return None
    named = ", ".join(differ[:3]) + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")
    return Fault(pinned.project, pinned.version, "changed", f"{len(differ)} files changed or missing: {named}", files=tuple(differ[:SHOWN]))


def _as_stated(site: Path, name: str, value: str, shared: Hashes) -> bool:
    """Is the file what its RECORD says, or what that of another package says that has it, too?"""
    try:
        if not value:
            return (site / name).is_file()
        found = _value(sha256_file(site / name))
    except OSError:
        return False
    return found in {value.rstrip("="), *shared.get(name, ())}


def _value(sha256: str) -> str:
    """Return *sha256* as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


def _hashes(place: Environment, there: Mapping[str, list[str]]) -> Hashes:
    """Return what each file that several packages have may be."""
    made: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for info in itertools.chain.from_iterable(there.values()):
        for name, value, _ in packages.rows(place.site / info):
            made[name].add(value.rstrip("="))
            counts[name] += 1
    return {name: values for name, values in made.items() if counts[name] > 1}
