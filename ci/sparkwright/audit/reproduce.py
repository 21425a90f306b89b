"""
Reproduce a wheel: build it again in another store from its own build record, and compare the two.

The other store fetches, patches and compiles everything anew. It shares with the first one only
what a hash verifies or the user gave: downloads, mirrors and installed tools. Two wheels are
compared by the hashes of their members and by their device code; diffoscope shows the contents of a
member that differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.audit import wheel_reader
from sparkwright.audit.device_code import images, library_digest, sections_digest, wheel_digest
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.wheel_reader import Binary
from sparkwright.builder import pipeline
from sparkwright.builder.environment import toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.builder.wheel.elf import ElfUnreadable
from sparkwright.builder.wheel.fatbin import FatbinUnreadable
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.store import Store
from sparkwright.forks.archive import zip_file, zip_members
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import MACHINES, Project

#: Folders that two stores share: bytes that the lock names by hash, and locks, since both stores
#: work on them.
SHARED = ("downloads", "environments", "mirrors", "locks")
#: Folders that a rebuild with ``--cached`` shares beyond that; compiled units are in them.
CACHES = ("cache", "ccache")
#: Cost records: no result of a build, and its memory is planned by them.
COSTS = "records/costs"

#: In names with internal linkage nvcc puts a hash of the real path of their source.
_INTERNAL = re.compile(rb"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(?=_\d+_)")
#: A build record names every patch with its reason; this is many times the largest.
_LARGEST_RECORD = 16 << 20

Verdict = Literal["identical", "same-device-code", "different"]


class Rebuild(msgspec.Struct, frozen=True):
    """
    The comparison of two wheels of the same inputs.

    Attributes:
        first, again: The sha256 of each.
        device_code: The device-code digest of each.
        compiler: The host compiler of each.
        cached: Units came from the compiler cache, so that the second build proves less.
        code: Libraries whose device code differs.
        members: Members that differ, or that only one wheel has.
        equal: Number of equal members.
        unexplained: Members that should be equal and are not.
    """

    wheel: str
    verdict: Verdict
    first: str
    again: str
    device_code: tuple[str, str]
    compiler: tuple[str, str]
    cached: bool
    code: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    equal: int = 0
    unexplained: tuple[str, ...] = ()


def read_record(path: Path) -> BuildRecord:
    """
    Return the build record in the wheel at *path*.

    Raises:
        wheel-invalid: It is not a wheel.
        not-provided: It has no valid build record.
    """
    name = f"{WheelName.of(path.name).info}/{BUILD_RECORD}"
    with zip_file(path) as archive:
        info = zip_members(archive, path.name).get(name)
        data = archive.read(name) if info and info.file_size <= _LARGEST_RECORD else b""
    try:
        return msgspec.json.decode(data, type=BuildRecord)
    except msgspec.DecodeError as error:
        raise SourceError(
            "not-provided",
            f"{path.name} has no build record that names its inputs.",
            details=[str(error)],
            todo="Only wheels that `sparkwright build` made can be built again.",
        ) from error


def rebuild_session(session: RunContext, path: Path, record: BuildRecord) -> RunContext:
    """
    Return *session* with the choices by which the wheel at *path* was built.

    Raises:
        not-provided: This checkout has no such stack or fork.
        inputs-differ: Its reviewed files are other ones.
    """
    root = session.project.root
    # The name in the wheel is compared with those that exist; no path is made of it.
    stacks = sorted(stack.parent.name for stack in root.glob("forks/*/stack.yaml"))
    if record.stack not in stacks:
        what = f"{path.name} is of stack {record.stack!r}, which is not here."
        raise SourceError("not-provided", what, details=[f"stacks: {', '.join(stacks)}"])
    fork, tag = record.source.fork, WheelName.of(path.name).tag
    project = Project(root, record.stack)
    project.fork(fork)
    changed = dataclasses.replace(
        session,
        project=project,
        forks=(fork,),
        source=record.source.source.kind,
        without=(),
        targets=record.targets,
        target=next((machine for machine in MACHINES if tag.endswith(machine)), ""),
    )
    inputs = pipeline.reviewed(pipeline.inputs(changed, fork))
    differing = [
        *(name for name in inputs if name in record.inputs and inputs[name] != record.inputs[name]),
        *sorted(f"{name}: only here" for name in inputs.keys() - record.inputs.keys()),
        *sorted(f"{name}: not here" for name in record.inputs.keys() - inputs.keys()),
    ]
    if differing:
        what = f"{path.name} was made from other inputs than this checkout holds."
        raise BuildError("inputs-differ", what, details=differing)
    return changed


@contextlib.contextmanager
def separate_store(
    session: RunContext, folder: Path | None, *, cached: bool
) -> Iterator[RunContext]:
    """
    Yield *session* with a store and an output folder of its own.

    Args:
        folder: New or empty, and kept; by default a folder in the store, which is removed at the
            end. cached: Take compiled units from the cache.

    Raises:
        usage: *folder* is not empty.
    """
    if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("usage", f"{folder} is not an empty folder.")
    with session.store.lock("rebuild"):
        root = folder.absolute() if folder else session.store.root / "work" / "rebuild"
        if not folder:
            shutil.rmtree(root, ignore_errors=True)
        (root / "store").mkdir(parents=True)
        for name in (*SHARED, *(CACHES if cached else ()), COSTS):
            link = root / "store" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(session.store.folder(*name.split("/")), target_is_directory=True)
        try:
            yield dataclasses.replace(
                session, store=Store(root / "store"), output=root / "dist", cached=cached
            )
        finally:
            if not folder:
                shutil.rmtree(root, ignore_errors=True)


def reproduce(session: RunContext, path: Path, record: BuildRecord, policy: AuditPolicy) -> Rebuild:
    """
    Build the wheel at *path* again in *session*, which has a separate store, and compare the two.
    """
    compilers = (record.compiler, toolchain.compiler(session) if record.compiler else "")
    if compilers[0] != compilers[1]:
        console.warn(
            f"the first wheel was compiled by {compilers[0]}, this one is by "
            f"{compilers[1] or 'nothing'}"
        )
    again = pipeline.wheel_path(session, pipeline.build(session, record.source.fork))
    return compare(
        path,
        again,
        policy,
        session.store.folder("work"),
        compiler=compilers,
        same_paths=record.isolation != "none",
        cached=session.cached,
    )


def compare(
    first: Path,
    again: Path,
    policy: AuditPolicy,
    scratch: Path,
    *,
    compiler: tuple[str, str],
    cached: bool,
    same_paths: bool = True,
) -> Rebuild:
    """
    Compare the wheels *first* and *again*, made of the same inputs.

    Host code must be equal if the host compiler is the same and both were compiled in folders of
    the same names.

    Args:
        scratch: Folder for libraries while they are read.
        same_paths: The compilers saw the same folder names in both builds.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `wheel_reader.walk`.
    """
    before, after = (read_device_code(path, policy, scratch) for path in (first, again))
    members = _member_hashes(first), _member_hashes(again)
    names = sorted(members[0].keys() | members[1].keys())
    differing = [name for name in names if members[0].get(name) != members[1].get(name)]
    code = [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name, ("", ""))[1] != after.get(name, ("", ""))[1]
    ]
    same_host = compiler[0] == compiler[1]
    explained = {name for name in differing if name.endswith(".dist-info/RECORD")}
    for name in differing:
        if name.endswith((f".dist-info/{BUILD_RECORD}", f".dist-info/{SBOM}")) and not same_host:
            explained.add(name)
        renamed = name in before and name in after and before[name] != after[name]
        if name.endswith(".so") and (renamed or not same_host or not same_paths):
            explained.add(name)
    explained -= {*code, *(members[0].keys() ^ members[1].keys())}
    unexplained = [name for name in differing if name not in explained]
    if first.name != again.name:
        unexplained.append(f"the file name: {again.name}")
    hashes = (digest.sha256_file(first), digest.sha256_file(again))
    verdict: Verdict = "identical" if hashes[0] == hashes[1] else "same-device-code"
    verdict = "different" if unexplained else verdict
    digests = [
        wheel_digest(library for library, _ in libraries.values()) for libraries in (before, after)
    ]
    return Rebuild(
        first.name,
        verdict,
        *hashes,
        (digests[0], digests[1]),
        compiler,
        cached,
        tuple(code),
        tuple(differing),
        len(names) - len(differing),
        tuple(unexplained),
    )


def read_device_code(wheel: Path, policy: AuditPolicy, scratch: Path) -> dict[str, tuple[str, str]]:
    """
    Return two digests of the device code of each library of *wheel*, without judging it.

    The first is the library's part of the audit's device-code digest, the second leaves out the
    hashes of source paths in names. They are equal for a library of the official wheel, and for one
    whose device code cannot be read.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `wheel_reader.walk`.
    """
    subject, libraries = wheel_reader.subject(wheel), dict[str, tuple[str, str]]()

    def visit(binary: Binary) -> None:
        wants = policy.library(subject.name, binary.name)
        with (
            contextlib.suppress(ElfUnreadable, FatbinUnreadable),
            elf.mapped(binary.path) as data,
        ):
            shared = elf.shared_object(data)
            if not shared.has_device_code:
                return
            libraries[binary.name] = (sections_digest(data, shared),) * 2
            if wants and wants.role == "target":
                hashes, renamed = list[str](), list[str]()
                # One at a time: all unpacked images together may be larger than the memory.
                for image, content in images(data, shared, policy.generation, whole_ptx=True):
                    hashes.append(image.sha256)
                    if image.sha256:
                        plain = _INTERNAL.sub(rb"\g<1>00000000", content)
                        renamed.append(digest.sha256_bytes(plain))
                libraries[binary.name] = library_digest(hashes), library_digest(renamed)

    wheel_reader.walk(wheel, subject, scratch, visit)
    return libraries


def _member_hashes(path: Path) -> dict[str, str]:
    with zip_file(path) as archive:
        hashes = {}
        for name in zip_members(archive, path.name):
            with archive.open(name) as stream:
                hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # readable
        return hashes


def show(rebuild: Rebuild) -> None:
    """Print the members that differ, and the verdict."""
    rows = [
        [
            name,
            "device code" if name in rebuild.code else "",
            "unexplained" if name in rebuild.unexplained else "explained",
        ]
        for name in rebuild.members
    ]
    if rows:
        title = f"{rebuild.wheel}: {rebuild.equal} members equal"
        console.table(title, ["member that differs", "", ""], rows, result=True)
    cached = ", units from the compiler cache: no real rebuild" if rebuild.cached else ""
    console.result(f"{rebuild.wheel}: {rebuild.verdict}{cached}")
    for name, values in (
        ("sha256", (rebuild.first, rebuild.again)),
        ("device code", rebuild.device_code),
        ("host compiler", rebuild.compiler),
    ):
        console.result(f"  {name}: {', then '.join(dict.fromkeys(values)) or 'none'}")


def raise_for_difference(rebuild: Rebuild) -> None:
    """
    Raise if the two wheels differ unexplained.

    Raises:
        rebuild-differs: They do.
    """
    if rebuild.verdict == "different":
        what = f"{rebuild.wheel}, built again from the same inputs, is another wheel."
        raise BuildError("rebuild-differs", what, details=rebuild.unexplained)
