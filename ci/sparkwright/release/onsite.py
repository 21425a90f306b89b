"""
What may not be shipped changed: pinned wheels whose licence forbids it, installed and edited on the user's machine.

Every edit is made in memory, on the verified wheel, and checked before the first byte is written. The environment is then brought to
what it should hold, file by file; a run that was killed is finished by the next one, and one with nothing to do writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.core.console import console
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.release import environment, layout
from sparkwright.release.errors import InstallError
from sparkwright.release.layout import Shared
from sparkwright.release.spec import Edit, OnsiteSpec

#: What became of an edit: made now, found there, or not wanted.
State = Literal["made", "there already", "taken back"]


class Edited(msgspec.Struct, frozen=True):
    """An edit, what became of it, and the sha256 that its file has now."""

    name: str
    file: str
    state: State
    sha256: str


class Installed(msgspec.Struct, frozen=True):
    """
    What an installation did.

    Attributes:
        python: As wheels name it: ``cp312``.
        wheels: File name → sha256, in the order in which they lie over each other.
        files: How many files the packages have together.
        written: How many of them had to be written.
    """

    python: str
    wheels: dict[str, str]
    shared: tuple[Shared, ...]
    edits: tuple[Edited, ...]
    files: int
    written: int


def install(
    store: Store, spec: OnsiteSpec, folder: Path, *, offline: bool = False, restore: bool = False, given: Mapping[str, Path] | None = None
) -> Installed:
    """
    Bring the environment in *folder* to what *spec* asks for.

    Args:
        offline: Take wheels from the store, never the network.
        restore: Bring back the files as the wheels hold them, over whatever is there.
        given: Where wheels of these names lie already, verified by hash.

    Raises:
        onsite-mismatch: An edit does not fit its file, or somebody else changed a file. Nothing was changed.
        environment-unusable, wheel-invalid, disk-full: See there.
        not-provided: No wheel is for its Python.
        source-unreachable, source-mismatch, offline: See `download.obtain`.
    """
    place = environment.probe(folder)
    names = [package.wheel(place.tags) for package in spec.packages]
    pairs = list(zip(spec.packages, names, strict=True))
    held = given or {}
    wheels = [
        (package, held.get(name) or package_index.obtain(store, package.name, name, package.wheels[name], offline=offline))
        for package, name in pairs
    ]
    wanted = layout.make(wheels, () if restore else spec.edits)
    written = _bring(place, wanted, restore=restore)
    return Installed(
        python=place.abi,
        wheels={name: package.wheels[name] for package, name in pairs},
        shared=wanted.shared,
        edits=tuple(_edited(edit, written=edit.file in written, restore=restore) for edit in spec.edits),
        files=len(wanted.files),
        written=len(written),
    )


def _bring(place: environment.Environment, wanted: layout.Layout, *, restore: bool) -> tuple[str, ...]:
    """Write what differs from *wanted*, and return its names."""
    with environment.held(place):
        found = environment.look(place, wanted)
        if found.unknown and not restore:
            raise InstallError(
                "onsite-mismatch",
                f"{len(found.unknown)} files in {place.site} are neither what the pinned wheels hold nor what the edits make of it.",
                details=found.unknown[:20],
            )
        with console.step(f"{len(found.differing)} of {len(wanted.files)} files to write"):
            environment.write(place, wanted, found.differing)
    return found.differing


def _edited(edit: Edit, *, written: bool, restore: bool) -> Edited:
    state: State = "taken back" if restore else "made" if written else "there already"
    return Edited(edit.name, edit.file, state, edit.before if restore else edit.after)
