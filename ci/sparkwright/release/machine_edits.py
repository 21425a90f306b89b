"""
What a stack edits on the user's machine, as ``forks/<stack>/onsite.yaml`` has it.

The file names pinned wheels whose licence forbids to pass on a changed copy, the order in which
they lie over each other, and small edits of their files. A release carries the edits; the wheels
are in its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from packaging.utils import canonicalize_name

from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import FileEdit, Overlay, Sha256
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.strict_yaml import Prose
from sparkwright.forks.stack import Project
from sparkwright.release.errors import ReleaseError


class PinnedPackage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A package at one version.

    Attributes:
        wheels: File name → sha256, one for each Python and machine.
        over: Earlier package → how many of its files this one replaces.
    """

    name: str
    version: str
    wheels: dict[str, Sha256]
    over: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}


class MachineEdits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The file.

    Attributes:
        reason: Why these packages are not among our wheels.
        packages: In the order in which an installer would have to unpack them.
    """

    reason: Prose
    packages: Annotated[tuple[PinnedPackage, ...], msgspec.Meta(min_length=1)]
    edits: tuple[FileEdit, ...] = ()

    @property
    def overlays(self) -> tuple[Overlay, ...]:
        """Which package replaces files of which other."""
        return tuple(
            Overlay(package.name, lower, files)
            for package in self.packages
            for lower, files in package.over.items()
        )

    def require(self, wheels: Sequence[LockedWheel]) -> None:
        """
        Require that the lock has the pinned wheels.

        Raises:
            set-mixed: It has another wheel of a pinned package, or none.
        """
        faults = []
        for package in self.packages:
            project = canonicalize_name(package.name)
            own = [wheel for wheel in wheels if wheel.project == project]
            faults += [f"{package.name} is not in the set"] if not own else []
            faults += [
                f"{wheel.name} {wheel.sha256}"
                for wheel in own
                if package.wheels.get(wheel.name) != wheel.sha256
            ]
        if faults:
            raise ReleaseError(
                "set-mixed", "The set has other wheels than those to be edited.", details=faults
            )


def load(project: Project) -> MachineEdits | None:
    """
    Return the edits of the stack; None without any.

    Raises:
        file-invalid: The file cannot be read, or a name in it refers to nothing.
    """
    path = project.root / "forks" / project.stack / "onsite.yaml"
    if not path.exists():
        return None
    edits = strict_yaml.load(path, MachineEdits)
    if faults := sorted(_faults(edits)):
        raise FileError("file-invalid", f"{path} does not hold together.", details=faults)
    return edits


def _faults(edits: MachineEdits) -> Iterator[str]:
    names = [package.name for package in edits.packages]
    files = [edit.file for edit in edits.edits]
    yield from (f"package {name} is there twice" for name in set(names) if names.count(name) > 1)
    yield from (f"{file} is edited twice" for file in set(files) if files.count(file) > 1)
    for place, package in enumerate(edits.packages):
        for lower in package.over:
            if lower not in names[:place]:
                yield f"{package.name} lies over {lower}, which is not before it"
    for edit in edits.edits:
        if edit.package not in names:
            yield f"edit {edit.name}: there is no package {edit.package}"
