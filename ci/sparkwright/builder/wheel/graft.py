"""
A graft: the official wheel with the changed libraries compiled here, and the changed Python files.

`pipeline.check_base` has compared the Python files of both: the base is the same release as the
source.
"""

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path

import msgspec

from sparkwright.builder import BuildError
from sparkwright.builder.configure import CMakeLibrary
from sparkwright.builder.plan import PlannedUnit
from sparkwright.builder.toolchain import ForkEnvironment
from sparkwright.builder.wheel import archive, elf, gpu_target
from sparkwright.builder.workspace import SourceTree
from sparkwright.core.files import sha256_bytes
from sparkwright.core.zips import records, zip_file, zip_members
from sparkwright.forks.context import RunContext


class Omissions(msgspec.Struct, frozen=True):
    """
    The parts of an official wheel that a graft leaves out.

    Attributes:
        reasons: A library, or a glob of environment.yaml → why it is of no use.
        files: The members that these are.
        trimmed: Libraries without the code for other GPUs, with their bytes.
    """

    reasons: dict[str, str] = {}
    files: frozenset[str] = frozenset()
    trimmed: dict[str, bytes] = {}


def omissions(
    base: Path, arch: str, replaced: Collection[str], settings: ForkEnvironment
) -> Omissions:
    """
    Return what a GPU of *arch* (``12.1f``) cannot use in the official wheel *base*.

    Args:
        replaced: Libraries that are compiled here.

    Raises:
        omission-idle: An entry of environment.yaml matches nothing.
    """
    gpu = gpu_target.parsed(f"sm_{arch.replace('.', '')}")[:2]
    reasons, files, trimmed, idle = dict[str, str](), set[str](), dict[str, bytes](), list[str]()
    with zip_file(base) as wheel:
        members = zip_members(wheel, base.name).keys() - {*replaced}
        for entry in settings.unused:
            matching = fnmatch.filter(members, entry.glob)
            if not matching:
                idle.append(entry.glob)
            else:
                reasons[entry.glob] = entry.reason
                files.update(matching)
        for name in sorted(members - files):
            if not name.endswith(".so"):
                continue
            data = wheel.read(name)
            try:
                entries = elf.fatbin_entries(data, elf.shared_object(data).fatbins)
                units = [list(unit) for _, unit in groupby(entries, lambda e: e.container)]
            except elf.ElfUnreadable:
                # The audit says so.
                continue
            usable = [gpu_target.taken(unit, gpu) for unit in units]
            if usable == units:
                continue
            if any(usable):
                trimmed[name] = gpu_target.trimmed(data, gpu)
            else:
                files.add(name)
                targets = ", ".join(sorted({entry.target for unit in units for entry in unit}))
                reasons[name] = (
                    f"SM {gpu[0]}.{gpu[1]} loads none of its {len(units)} units ({targets})"
                )
    if idle:
        raise BuildError(
            "omission-idle",
            f"{len(idle)} entries of `unused` match nothing in {base.name}.",
            details=idle,
        )
    return Omissions(reasons, frozenset(files), trimmed)


class GraftManifest(msgspec.Struct, frozen=True):
    """
    The changes of a graft to its base.

    Attributes:
        libraries: Compiled here: member → sha256.
        replaced, removed: Python and data files.
        base: Libraries that stay: member → sha256 as the base's RECORD states it.
        requires: Requirements that were changed: project → the new requirement, or empty.
        trimmed: Libraries without the code for other GPUs: member → sha256.
        left_out: A library, or a glob → why the GPU has no use of it (`omissions`).
    """

    libraries: dict[str, str]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    base: dict[str, str]
    requires: dict[str, str] = {}
    trimmed: dict[str, str] = {}
    left_out: dict[str, str] = {}


def replaced_members(
    base: Path, libraries: Iterable[CMakeLibrary], settings: ForkEnvironment
) -> dict[str, str]:
    """
    Return the members of the wheel *base* that the compiled *libraries* replace, each with its path
    in the build folder.

    Raises:
        base-mismatch: The wheel has no member of a library's file name, or several.
    """
    with zip_file(base) as wheel:
        members = zip_members(wheel, base.name)
    named = settings.named_targets
    replaced, faults = dict[str, str](), []
    for library in libraries:
        if named and library.target not in named:
            continue
        name = Path(library.path).name
        matching = [member for member in members if member.rpartition("/")[2] == name]
        if len(matching) == 1:
            replaced[matching[0]] = library.path
        elif named or library.installed or matching:
            faults.append(f"{library.target}: {name}: {', '.join(matching) or 'not in the wheel'}")
    if faults or not replaced:
        raise BuildError(
            "base-mismatch",
            f"{base.name} has not exactly one library for each target that is compiled here.",
            details=faults,
            todo="Compare the members of the wheel with the targets in stack.yaml or --targets.",
        )
    return replaced


def changes(
    context: RunContext,
    source: SourceTree,
    base: Path,
    build: Path,
    members: Mapping[str, str],
    omitted: Omissions,
    settings: ForkEnvironment,
) -> tuple[dict[str, bytes], GraftManifest]:
    """
    Return the members that change, with their bytes, and the manifest of the graft.

    Args:
        members: The libraries to replace (`replaced_members`).

    Raises:
        compile-failed: The build made no library of a target.
    """
    replaced, removed = dict[str, bytes](), list[str]()
    for path, status in context.objects.changes(source.source.tree, source.tree).items():
        if path.startswith(f"{settings.package}/"):
            if status == "D":
                removed.append(path)
            else:
                replaced[path] = context.objects.blob(source.tree, path) or b""
    libraries, hashes = dict[str, bytes](), dict[str, str]()
    try:
        for member, path in members.items():
            libraries[member] = (build / path).read_bytes()
            hashes[member] = sha256_bytes(libraries[member])
    except FileNotFoundError as error:
        raise BuildError(
            "compile-failed", "The build made no library.", details=[f"missing: {error.filename}"]
        ) from error
    with zip_file(base) as wheel:
        rows = records(wheel, zip_members(wheel, base.name))
    elsewhere = {*libraries, *omitted.files, *omitted.trimmed}
    return {**replaced, **omitted.trimmed, **libraries}, GraftManifest(
        libraries=hashes,
        replaced=tuple(sorted(replaced)),
        removed=tuple(sorted(removed)),
        base={
            name: row.digest
            for name, row in sorted(rows.items())
            if name.endswith(".so") and name not in elsewhere
        },
        requires=settings.requires,
        trimmed={member: sha256_bytes(data) for member, data in omitted.trimmed.items()},
        left_out=omitted.reasons,
    )


def unit_manifest(
    build: Path,
    units: Iterable[PlannedUnit],
    libraries: Iterable[CMakeLibrary],
    members: Mapping[str, str],
) -> tuple[archive.CompiledUnit, ...]:
    """
    Return the manifest of the planned *units*, which have been compiled in the folder *build*.

    The linker copies the fatbins of the objects into the library as they are, so that a cubin in a
    wheel leads back to its source by its sha256. The manifest is part of the wheel's build record.

    Args:
        members: The replaced libraries (`replaced_members`).

    Raises:
        compile-failed: An object is missing, or is not what a compiler writes.
    """
    paths = {library.target: library.path for library in libraries}
    member_of = {path: member for member, path in members.items()}
    return tuple(
        archive.CompiledUnit(
            unit.source,
            unit.target,
            unit.object,
            member_of.get(paths.get(unit.target, ""), ""),
            unit.gencode,
            _device_code(build / unit.object),
        )
        for unit in sorted(units)
    )


def _device_code(path: Path) -> tuple[tuple[str, str], ...]:
    try:
        with elf.mapped(path) as data:
            if any(section.name == elf.RELOCATABLE_FATBIN for section in elf.sections(data)):
                return ()
            entries = elf.fatbin_entries(data, elf.shared_object(data).fatbins)
            return tuple(
                sorted((entry.target, sha256_bytes(elf.unpack(data, entry))) for entry in entries)
            )
    except (OSError, elf.ElfUnreadable) as error:
        raise BuildError(
            "compile-failed",
            f"{path.name} is not an object file with device code.",
            details=[str(error)],
        ) from error


def platform_tag(tag: str, libraries: Iterable[bytes]) -> str:
    """
    Return the platform tag of a wheel with *libraries*, raised from *tag* if they need a newer
    system; tags other than ``manylinux`` stay.

    Raises:
        target-mismatch: A library needs a newer libstdc++ than any tag promises.
    """
    glibc = elf.promised_glibc(tag.split("."))
    for library in map(elf.shared_object, libraries if glibc else ()):
        if not (required := elf.required_glibc(library)):
            raise BuildError(
                "target-mismatch",
                "A compiled library needs a newer C++ runtime than any platform tag promises.",
                details=[str(library.versions)],
            )
        if required > glibc:
            glibc = required
            machine = next(filter(tag.endswith, elf.MACHINES.values()))
            tag = f"manylinux_{elf.version_text(glibc).replace('.', '_')}_{machine}"
    return tag
