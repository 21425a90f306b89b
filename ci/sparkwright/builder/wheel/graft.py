"""
A graft: the official wheel, with the libraries whose inputs we change compiled here, and the
changed Python files in place.

The base must be the same release as the source: every Python file that both have is compared before
anything is replaced.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from sparkwright.builder.configure import Library
from sparkwright.builder.environment.toolchain import ForkEnvironment
from sparkwright.builder.errors import BuildError
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import Papers
from sparkwright.builder.wheel.version import labelled
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import RunContext

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")
#: Parts of glibc, which the platform tag promises as a whole; which of them are named depends on
#: its version.
_LIBC = re.compile(r"(lib(c|m|dl|rt|pthread)|ld-linux-[a-z0-9-]+)\.so\.\d+$")
#: What a tag promises: its glibc, and the highest GLIBCXX and CXXABI (auditwheel 6.8.2,
#: manylinux-policy.json; lowest tag of each).
_PROMISED = (
    ((2, 17), (3, 4, 19), (1, 3, 7)),
    ((2, 24), (3, 4, 22), (1, 3, 10)),
    ((2, 27), (3, 4, 24), (1, 3, 11)),
    ((2, 31), (3, 4, 28), (1, 3, 12)),
    ((2, 34), (3, 4, 29), (1, 3, 13)),
    ((2, 35), (3, 4, 30), (1, 3, 13)),
    ((2, 39), (3, 4, 33), (1, 3, 15)),
)


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


def compare(session: RunContext, source: SourceTree, base: Path, settings: ForkEnvironment) -> None:
    """
    Check that *base* was built from the same source, before the series, and has the requirements
    that are to change.

    Raises:
        base-mismatch: A Python file that both have differs.
        requirement-mismatch: See `wheelfile.requiring`.
    """
    tree = session.objects.paths(source.source.tree, settings.package)
    with zip_file(base) as wheel:
        found = archive.members(wheel, base.name)
        names = [name for name in found if name.endswith(".py") and name in tree]
        differing = [
            name
            for name in names
            if name not in settings.version_files and _blob_id(wheel.read(name)) != tree[name][1]
        ]
        metadata = wheel.read(f"{WheelName.of(base.name).info}/METADATA")
    if differing or not names:
        raise BuildError(
            "base-mismatch",
            f"{base.name} was not built from {source.source.origin}.",
            details=[f"{len(differing)} of {len(names)} Python files differ", *differing[:10]],
        )
    # `write` does this again, after the compiling; an entry without effect should not cost an hour
    # first.
    archive.requiring(metadata, settings.requires)
    console.note(f"{base.name}: its {len(names)} Python files are those of the source")


def _blob_id(data: bytes) -> str:
    """
    Return the id that git gives to a file of these bytes; reading thousands of blobs one by one
    would take longer.
    """
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def members(base: Path, libraries: Iterable[Library], settings: ForkEnvironment) -> dict[str, str]:
    """
    Return the members of the wheel *base* that the compiled *libraries* replace, each with its path
    in the build folder.

    Raises:
        base-mismatch: The wheel has no member of a library's file name, or several.
    """
    with zip_file(base) as wheel:
        names = list(archive.members(wheel, base.name))
    replaced, faults = dict[str, str](), []
    for library in libraries:
        name = Path(library.path).name
        matching = [member for member in names if member.rpartition("/")[2] == name]
        if settings.named_targets and library.target not in settings.named_targets:
            continue
        if len(matching) == 1:
            replaced[matching[0]] = library.path
        elif settings.named_targets or library.installed or matching:
            faults.append(f"{library.target}: {name}: {', '.join(matching) or 'not in the wheel'}")
    if faults or not replaced:
        todo = "Compare the members of the wheel with the targets in stack.yaml or --targets."
        what = f"{base.name} has not exactly one library for each target that is compiled here."
        raise BuildError("base-mismatch", what, details=faults, todo=todo)
    return replaced


def transplant(
    session: RunContext,
    source: SourceTree,
    base: Path,
    build: Path,
    members: Mapping[str, str],
    settings: ForkEnvironment,
) -> tuple[dict[str, bytes], Transplant]:
    """
    Return the members that change, with their bytes, and the account of it.

    Args:
        members: The libraries to replace (`members`).

    Raises:
        compile-failed: The build folder lacks a library.
    """
    changes = [
        change
        for change in session.objects.changes(source.source.tree, source.tree)
        if change.path.startswith(settings.package + "/")
    ]
    replace = {
        change.path: session.objects.blob(source.tree, change.path) or b""
        for change in changes
        if change.status != "D"
    }
    libraries = {member: _library(build / path) for member, path in members.items()}
    with zip_file(base) as wheel:
        record = archive.records(wheel, WheelName.of(base.name).info, base.name)
    return {**replace, **libraries}, Transplant(
        libraries={member: hashlib.sha256(data).hexdigest() for member, data in libraries.items()},
        replaced=tuple(sorted(replace)),
        removed=tuple(sorted(change.path for change in changes if change.status == "D")),
        base={
            name: digest
            for name, (digest, _) in sorted(record.items())
            if name.endswith(".so") and name not in libraries
        },
        requires=settings.requires,
    )


def _library(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BuildError(
            "compile-failed", f"The build made no {path.name}.", details=[f"library: {path}"]
        ) from error


def write(
    base: Path,
    folder: Path,
    label: str,
    changes: Mapping[str, bytes],
    done: Transplant,
    settings: ForkEnvironment,
    papers: Papers,
) -> Path:
    """
    Write the grafted wheel to *folder*; its platform tag is raised where the libraries compiled
    here want a newer system.

    Raises:
        target-mismatch: See `check`.
    """
    check(base, changes, done)
    version = labelled(WheelName.of(base.name).version, label)
    return archive.remake(
        base,
        folder,
        version=version,
        platform=platform_tag(base.name, [changes[name] for name in done.libraries]),
        replace=changes,
        remove=frozenset(done.removed),
        version_files=settings.version_files,
        requires=done.requires,
        build_record=papers.record,
        sbom=papers.sbom(WheelName.of(base.name, version)),
    )


def check(base: Path, changes: Mapping[str, bytes], done: Transplant) -> None:
    """
    Check that the libraries compiled here can take the place of those of *base*.

    Raises:
        target-mismatch: One is for another machine than the wheel, brings libraries with it that
            the base's of the same name does not, or
            searches folders of its own.
    """
    tag = WheelName.of(base.name).tag
    faults = []
    with zip_file(base) as wheel:
        for name in done.libraries:
            mine, theirs = elf.shared_object(changes[name]), elf.shared_object(wheel.read(name))
            if not tag.endswith(mine.machine):
                faults.append(
                    f"{name} is for {mine.machine}, the wheel for {tag.rpartition('-')[2]}"
                )
            elif more := [
                needed
                for needed in mine.needed
                if needed not in theirs.needed and not _LIBC.match(needed)
            ]:
                faults.append(f"{name} needs {', '.join(more)}, which the official one does not")
            faults += [f"{name} searches {folder}" for folder in mine.rpath]
    if faults:
        raise BuildError(
            "target-mismatch",
            f"What was compiled here cannot take its place in {base.name}.",
            details=faults,
        )


def platform_tag(base: str, libraries: list[bytes]) -> str:
    """
    Return the platform tag of a wheel on which *libraries* run, at least that of *base*.

    A ``manylinux`` tag promises a glibc and a libstdc++; the lowest that promises what the
    libraries want is taken. Other tags stay.
    """
    tag = WheelName.of(base).tag.rpartition("-")[2]
    match = _MANYLINUX.fullmatch(tag)
    if not match:
        return tag
    needed: tuple[int, ...] = (int(match[1]), int(match[2]))
    for versions in (elf.shared_object(library).versions for library in libraries):
        runtime = versions.get("GLIBCXX", (0,)), versions.get("CXXABI", (0,))
        rows = [
            glibc
            for glibc, *promised in _PROMISED
            if runtime[0] <= promised[0] and runtime[1] <= promised[1]
        ]
        # What no tag promises yet is there at least on systems like the one that it was linked on.
        needed = max(
            needed, versions.get("GLIBC", (0, 0)), rows[0] if rows else _linked_glibc(match[3])
        )
    return f"manylinux_{needed[0]}_{needed[1]}_{match[3]}"


def _linked_glibc(machine: str) -> tuple[int, ...]:
    """Return the version of the glibc that libraries for *machine* are linked with here."""
    if machine == platform.machine():
        return tuple(int(part) for part in platform.libc_ver()[1].split("."))[:2]
    compiler = f"{machine}-linux-gnu-gcc"
    text = process.output([compiler, "-E", "-dM", "-include", "features.h", "-x", "c", "/dev/null"])
    defined = dict(re.findall(r"^#define (__GLIBC__|__GLIBC_MINOR__) (\d+)$", text, re.MULTILINE))
    return int(defined["__GLIBC__"]), int(defined["__GLIBC_MINOR__"])
