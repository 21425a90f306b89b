"""
A graft: the official wheel, with the libraries whose inputs we change compiled here, and the changed Python files in place.

The base must be the same release as the source: every Python file that both have is compared before anything is replaced.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.build import wheelfile
from sparkwright.build.sourcetree import SourceTree
from sparkwright.build.toolchain import ForkEnvironment
from sparkwright.build.version import labelled
from sparkwright.build.wheelfile import WheelName
from sparkwright.console import console
from sparkwright.errors import BaseMismatch, CompileFailed
from sparkwright.forks.session import Session

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


class Transplant(msgspec.Struct, frozen=True):
    """
    What a graft changes in the base.

    Attributes:
        libraries: Compiled here: member → sha256.
        replaced, removed: Python and data files.
        base: Libraries that stay as they came: member → sha256 as the base's RECORD states it.
        requires: Requirements that were changed: project → the new requirement, or nothing.
    """

    libraries: dict[str, str]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    base: dict[str, str]
    requires: dict[str, str] = {}


def compare(session: Session, source: SourceTree, base: Path, settings: ForkEnvironment) -> None:
    """
    Check that *base* was built from the same source, before the series, and has the requirements that are to change.

    Raises:
        BaseMismatch: A Python file that both have differs.
        RequirementMismatch: See `wheelfile.requiring`.
    """
    tree = session.objects.paths(source.source.tree, settings.package)
    with zipfile.ZipFile(base) as wheel:
        names = [name for name in wheelfile.members(wheel, base.name) if name.endswith(".py") and name in tree]
        differing = [name for name in names if name not in settings.version_files and _blob_id(wheel.read(name)) != tree[name][1]]
        metadata = wheel.read(f"{WheelName.of(base.name).info}/METADATA")
    if differing or not names:
        raise BaseMismatch(
            f"{base.name} was not built from {source.source.origin}.",
            details=[f"{len(differing)} of {len(names)} Python files differ", *differing[:10]],
        )
    # `write` does this again, after the compiling; an entry without effect should not cost an hour first.
    wheelfile.requiring(metadata, settings.requires)
    console.note(f"{base.name}: its {len(names)} Python files are those of the source")


def _blob_id(data: bytes) -> str:
    """Return the id that git gives to a file of these bytes; reading thousands of blobs one by one would take longer."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def transplant(
    session: Session, source: SourceTree, base: Path, build: Path, settings: ForkEnvironment
) -> tuple[dict[str, bytes], Transplant]:
    """
    Return the members that change, with their bytes, and the account of it.

    Raises:
        CompileFailed: The build folder lacks a library.
    """
    changes = [
        change for change in session.objects.changes(source.source.tree, source.tree) if change.path.startswith(settings.package + "/")
    ]
    replace = {change.path: session.objects.blob(source.tree, change.path) or b"" for change in changes if change.status != "D"}
    libraries = {member: _library(build, target, member) for target, member in settings.targets.items()}
    with zipfile.ZipFile(base) as wheel:
        record = wheelfile.records(wheel, WheelName.of(base.name).info, base.name)
    return {**replace, **libraries}, Transplant(
        libraries={member: hashlib.sha256(data).hexdigest() for member, data in libraries.items()},
        replaced=tuple(sorted(replace)),
        removed=tuple(sorted(change.path for change in changes if change.status == "D")),
        base={name: digest for name, (digest, _) in sorted(record.items()) if name.endswith(".so") and name not in libraries},
        requires=settings.requires,
    )


def _library(build: Path, target: str, member: str) -> bytes:
    try:
        return (build / Path(member).name).read_bytes()
    except FileNotFoundError as error:
        raise CompileFailed(f"Target {target} made no {Path(member).name}.", details=[f"build folder: {build}"]) from error


def write(
    base: Path, folder: Path, label: str, changes: Mapping[str, bytes], done: Transplant, settings: ForkEnvironment, record: bytes
) -> Path:
    """Write the grafted wheel to *folder*; its platform tag is raised where the libraries compiled here want a newer system."""
    version = labelled(WheelName.of(base.name).version, label)
    return wheelfile.remake(
        base, folder, version=version, platform=platform_tag(base.name, [changes[name] for name in done.libraries]),
        replace=changes, remove=frozenset(done.removed), version_files=settings.version_files, requires=done.requires,
        build_record=record,
    )  # fmt: skip


def platform_tag(base: str, libraries: list[bytes]) -> str:
    """
    Return the platform tag of a wheel on which *libraries* run, at least that of *base*.

    A ``manylinux`` tag promises a glibc and a libstdc++; where a library wants a newer one than the base's tag promises, this
    machine's glibc is what is known to do. Other tags stay.
    """
    import platform

    from sparkwright.build.elf import wanted_versions

    tag = WheelName.of(base).tag.rpartition("-")[2]
    match = _MANYLINUX.fullmatch(tag)
    if not match:
        return tag
    promised = (int(match[1]), int(match[2]))
    wanted = [wanted_versions(io.BytesIO(library)) for library in libraries]
    glibc = max((versions.get("GLIBC", (0, 0)) for versions in wanted), default=(0, 0))
    needed = max(promised, glibc)
    # GCC's symbol versions that manylinux_2_28 promises (auditwheel's policy): GCC 8 made GLIBCXX_3.4.25 and CXXABI_1.3.11.
    if any(versions.get("GLIBCXX", (0,)) > (3, 4, 25) or versions.get("CXXABI", (0,)) > (1, 3, 11) for versions in wanted):
        here = tuple(int(part) for part in platform.libc_ver()[1].split("."))
        needed = max(needed, here[:2])
    return f"manylinux_{needed[0]}_{needed[1]}_{match[3]}"
