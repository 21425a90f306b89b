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
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.wheel import audit, members
from sparkwright.builder import BuildError, pipeline
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName, member_text
from sparkwright.core.console import console
from sparkwright.core.store import Store
from sparkwright.core.zips import info_folder, zip_file, zip_members
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import MACHINES, Project, SourceError

#: Folders that two stores share: bytes that the lock names by hash, and locks, since both stores
#: work on them.
SHARED = ("downloads", "environments", "mirrors", "locks")

#: Ends of the names of members that another host compiler changes.
HOST = (".so", *(f".dist-info/{name}" for name in (BUILD_RECORD, SBOM, "RECORD")))

Verdict = Literal["identical", "same-device-code", "different"]


class Rebuild(msgspec.Struct, frozen=True):
    """
    The comparison of two wheels of the same inputs.

    Attributes:
        verdict: ``same-device-code`` if only host code, and the records of it, differ.
        first, again: The sha256 of each.
        device_code: The device-code digest of each.
        members: Members that differ, or that only one wheel has.
        unexplained: Members among them that another host compiler does not change, and device code.
    """

    wheel: str
    verdict: Verdict
    first: str
    again: str
    device_code: tuple[str, str]
    members: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()


def read_record(path: Path) -> pipeline.BuildRecord:
    """
    Return the build record in the wheel at *path*.

    Raises:
        wheel-invalid: It is not a wheel.
        not-provided: It has no valid build record.
    """
    with zip_file(path) as archive:
        listed = zip_members(archive, path.name)
        name = f"{info_folder(listed, path.name)}/{BUILD_RECORD}"
        data = member_text(archive, listed, name, path.name) if name in listed else b""
    try:
        return msgspec.json.decode(data, type=pipeline.BuildRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(
            "not-provided",
            f"{path.name} has no build record that names its inputs.",
            details=[str(error)],
            todo="Only wheels that `sparkwright build` made can be built again.",
        ) from error


def rebuild_context(context: RunContext, path: Path, record: pipeline.BuildRecord) -> RunContext:
    """
    Return *context* with the choices by which the wheel at *path* was built.

    Raises:
        not-provided: This checkout has no such stack, architecture or fork.
        inputs-differ: Its reviewed files are other ones.
    """
    fork, tag = record.source.fork, WheelName.of(path.name).tag
    project = Project(context.project.root, record.stack, record.arch)
    project.fork(fork)
    changed = dataclasses.replace(
        context,
        project=project,
        forks=(fork,),
        source=record.source.source.kind,
        git_errors={
            source.fork: source.git_error
            for source in (record.source.source, *record.needs)
            if source.git_error
        },
        keep=record.keep,
        absent={name: why for name, why in record.unlocked.items() if name in record.absent},
        target=next((machine for machine in MACHINES if tag.endswith(machine)), ""),
    )
    # The targets of the stack may be more than those that CMake made libraries of.
    for targets in ((), record.targets):
        changed = dataclasses.replace(changed, targets=targets)
        inputs = pipeline.reviewed(pipeline.inputs(changed, fork))
        differing = sorted({name for name, _ in inputs.items() ^ record.inputs.items()})
        if not differing:
            return changed
    raise BuildError(
        "inputs-differ",
        f"{path.name} was made from other inputs than this checkout holds.",
        details=differing,
    )


@contextlib.contextmanager
def separate_store(context: RunContext) -> Iterator[RunContext]:
    """Yield *context* with a store and an output folder of its own, which are removed then."""
    root = context.store.root / "work" / "rebuild"
    with context.store.lock("rebuild"):
        shutil.rmtree(root, ignore_errors=True)
        for name in SHARED:
            link = root / "store" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(context.store.folder(*name.split("/")), target_is_directory=True)
        try:
            yield dataclasses.replace(
                context, store=Store(root / "store"), output=root / "dist", cached=False
            )
        finally:
            shutil.rmtree(root, ignore_errors=True)


def reproduce(
    context: RunContext, path: Path, record: pipeline.BuildRecord, policy: AuditPolicy
) -> Rebuild:
    """
    Build the wheel at *path* again in *context*, which has a separate store, and compare the two.
    """
    return compare(
        path,
        pipeline.wheel_path(context, pipeline.build(context, record.source.fork)),
        policy,
        context.store.folder("work"),
    )


def compare(first: Path, again: Path, policy: AuditPolicy, scratch: Path) -> Rebuild:
    """
    Compare the wheels *first* and *again*, made of the same inputs.

    Args:
        scratch: Folder for libraries while they are read.

    Raises:
        wheel-invalid, archive-unsafe, disk-full: As `audit`.
    """
    # Nothing is disassembled, so no folder of nvdisasm is needed.
    old, new = (audit(path, policy, Path, scratch=scratch, judged="any") for path in (first, again))
    files, new_files = (
        {member.name: member.sha256 for member in members(path, scratch)} for path in (first, again)
    )
    differing = sorted({name for name, _ in files.items() ^ new_files.items()})
    codes, new_codes = (
        {library.name: library.device_code for library in report.libraries} for report in (old, new)
    )
    unexplained = [
        name
        for name in differing
        if codes.get(name) != new_codes.get(name)
        or not name.endswith(HOST)
        or (name in files) != (name in new_files)
    ]
    same: Verdict = "identical" if old.subject.sha256 == new.subject.sha256 else "same-device-code"
    return Rebuild(
        first.name,
        "different" if unexplained else same,
        old.subject.sha256,
        new.subject.sha256,
        (old.device_code, new.device_code),
        tuple(differing),
        tuple(unexplained),
    )


def raise_for_difference(rebuild: Rebuild) -> None:
    """
    Print the comparison; raise if the two wheels differ unexplained.

    Raises:
        rebuild-differs: They do.
    """
    console.result(f"{rebuild.wheel}: {rebuild.verdict}")
    for name in rebuild.members:
        console.result(f"  differs: {name}")
    if rebuild.verdict == "different":
        raise BuildError(
            "rebuild-differs",
            f"{rebuild.wheel}, built again from the same inputs, differs.",
            details=rebuild.unexplained,
        )
