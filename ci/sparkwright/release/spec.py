"""
What is installed and edited on the user's machine, as people write it in ``forks/<stack>/onsite.yaml``.

The file names wheels by hash, in the order in which they lie over each other, and small edits of files in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError, WheelError
from sparkwright.core.strict_yaml import Prose
from sparkwright.core.zips import safe_path
from sparkwright.forks.stack import Project, SourceError

if TYPE_CHECKING:
    from packaging.tags import Tag

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that must occur exactly once, and what takes its place."""

    anchor: Prose
    replacement: str


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The edit of one file.

    Attributes:
        package: The package whose bytes are edited: the last one that holds the file.
        file: Path below the site-packages.
        before, after: sha256 of the file as the wheel holds it, and as it is after the changes.
        drop_when: What has to happen upstream for the edit to go.
    """

    name: Prose
    package: str
    file: str
    before: Sha256
    after: Sha256
    changes: Annotated[tuple[Change, ...], msgspec.Meta(min_length=1)]
    reason: Prose
    drop_when: Prose


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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

    def owns(self, filename: str) -> bool:
        """Is *filename* the name of a wheel of this package at this version?"""
        from packaging.utils import canonicalize_name

        try:
            name = WheelName.of(filename)
        except WheelError as error:
            if error.reference != "wheel-invalid":
                raise
            return False
        return (canonicalize_name(name.distribution), name.version) == (canonicalize_name(self.name), self.version)

    def wheel(self, tags: frozenset[Tag]) -> str:
        """Return the file name of the wheel that one of *tags* admits; raise `not-provided` where none does."""
        from packaging.utils import parse_wheel_filename

        for name in self.wheels:
            if not tags.isdisjoint(parse_wheel_filename(name)[3]):
                return name
        raise SourceError(
            "not-provided",
            f"No wheel of {self.name} {self.version} is for the Python of this environment on this machine.",
            details=sorted(self.wheels),
            todo="Make the environment with a Python that one of these wheels is for.",
        )


class OnsiteSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What ``onsite.yaml`` holds.

    Attributes:
        reason: Why these packages are not among our wheels.
        packages: In the order in which an installer would have to unpack them.
    """

    reason: Prose
    packages: Annotated[tuple[Package, ...], msgspec.Meta(min_length=1)]
    edits: tuple[Edit, ...] = ()


def load(project: Project) -> OnsiteSpec | None:
    """
    Return what the stack installs on site; None where it has no ``onsite.yaml``.

    Raises:
        file-invalid: As `yamlfile.load`; also where a name in it refers to nothing.
    """
    path = project.root / "forks" / project.stack / "onsite.yaml"
    if not path.exists():
        return None
    return checked(strict_yaml.load(path, OnsiteSpec), str(path))


def checked(spec: OnsiteSpec, what: str) -> OnsiteSpec:
    """Return *spec*; raise `file-invalid` where a name in it refers to nothing, or leaves the environment."""
    if wrong := sorted({*_wrong_packages(spec), *_wrong_edits(spec)}):
        raise FileError("file-invalid", f"{what} does not hold together.", details=wrong)
    return spec


def _wrong_packages(spec: OnsiteSpec) -> Iterator[str]:
    names = [package.name for package in spec.packages]
    for place, package in enumerate(spec.packages):
        yield from (
            f"{package.name} is to lie over {lower}, which is not before it" for lower in package.over if lower not in names[:place]
        )
        yield from (f"{name} is no wheel of {package.name} {package.version}" for name in package.wheels if not package.owns(name))
    yield from (f"package {name} is there twice" for name, count in Counter(names).items() if count > 1)


def _wrong_edits(spec: OnsiteSpec) -> Iterator[str]:
    names = {package.name for package in spec.packages}
    for edit in spec.edits:
        if edit.package not in names:
            yield f"edit {edit.name}: there is no package {edit.package}"
        try:
            safe_path(edit.file, "onsite.yaml")
        except FileError as error:
            if error.reference != "archive-unsafe":
                raise
            yield f"edit {edit.name}: {edit.file} leaves the environment"
    yield from (f"{file} is edited twice" for file, count in Counter(edit.file for edit in spec.edits).items() if count > 1)
