"""
A wheel built again, elsewhere, from what its own build record says that it was made of.

Elsewhere is another store: sources are fetched, patched and rewritten anew, and every unit is compiled. What it shares with the first
store is what is verified by hash or given by the user: downloads, mirrors and installed tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.builder import pipeline
from sparkwright.builder.environment import cross
from sparkwright.builder.errors import BuildError
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel.archive import WheelName, members
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.core.store import Store
from sparkwright.forks.archive import zip_file
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import MACHINES, Project

#: What another store borrows: bytes that the lock names by hash, and locks, since two stores then work on them.
SHARED = ("downloads", "environments", "mirrors", "locks")
#: What a rebuild with ``--cached`` borrows beyond that: compiled units among them.
CACHES = ("cache", "ccache")
#: How long and how large units are: no result, and memory is kept by it.
LEARNED = "records/costs"

#: A build record names every patch with its reason; this is many times the largest.
_LARGEST_RECORD = 16 << 20


def record_of(path: Path) -> BuildRecord:
    """
    Return the build record in the wheel at *path*.

    Raises:
        wheel-invalid: It is no wheel.
        not-provided: It has no build record, or one of another kind.
    """
    name = f"{WheelName.of(path.name).info}/sparkwright.json"
    with zip_file(path) as archive:
        info = members(archive, path.name).get(name)
        data = archive.read(name) if info and info.file_size <= _LARGEST_RECORD else b""
    try:
        return msgspec.json.decode(data, type=BuildRecord)
    except msgspec.DecodeError as error:
        todo = "Only wheels that `sparkwright build` made can be built again."
        raise SourceError(
            "not-provided", f"{path.name} has no build record that says what it was made of.", details=[str(error)], todo=todo
        ) from error


def session_for(session: Session, path: Path, record: BuildRecord) -> Session:
    """
    Return *session* as it has to be to build the wheel at *path* again.

    Raises:
        not-provided: This checkout has no such stack or fork.
        inputs-differ: It has, with other content.
    """
    root = session.project.root
    # The wheel's word is compared with what is there; no path is made of it.
    stacks = {found.parent.name for found in root.glob("forks/*/stack.yaml")}
    if record.stack not in stacks:
        raise SourceError(
            "not-provided",
            f"{path.name} is of stack {record.stack!r}, which is not here.",
            details=[f"stacks: {', '.join(sorted(stacks))}"],
        )
    project = Project(root, record.stack)
    project.fork(record.source.fork)
    platform = WheelName.of(path.name).tag
    made = dataclasses.replace(
        session, project=project, forks=(record.source.fork,), source=record.source.source.kind, without=(), targets=record.targets,
        target=next((machine for machine in MACHINES if platform.endswith(machine)), ""),
    )  # fmt: skip
    if differing := _differing(made, record):
        raise BuildError("inputs-differ", f"{path.name} was made from other inputs than this checkout holds.", details=differing)
    return made


def _differing(session: Session, record: BuildRecord) -> list[str]:
    here = pipeline.reviewed(pipeline.inputs(session, record.source.fork))
    changed = [name for name in here if name in record.inputs and here[name] != record.inputs[name]]
    other = [f"{name}: only here" for name in here.keys() - record.inputs.keys()]
    return [*changed, *sorted([*other, *(f"{name}: not here" for name in record.inputs.keys() - here.keys())])]


@contextlib.contextmanager
def elsewhere(session: Session, folder: Path | None, *, cached: bool) -> Iterator[Session]:
    """
    Yield a run like *session* in a store of its own.

    Args:
        folder: New or empty, and kept; by default one in the store, which is removed at the end.
        cached: Take compiled units from the cache.

    Raises:
        UsageError: *folder* holds something.
    """
    if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("usage", f"{folder} is not an empty folder.")
    with session.store.lock("rebuild"):
        place = folder.absolute() if folder else session.store.root / "work" / "rebuild"
        if not folder:
            shutil.rmtree(place, ignore_errors=True)
        (place / "store").mkdir(parents=True)
        for name in (*SHARED, *(CACHES if cached else ()), LEARNED):
            link = place / "store" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(session.store.folder(*name.split("/")), target_is_directory=True)
        try:
            yield dataclasses.replace(session, store=Store(place / "store"), output=place / "dist", cached=cached)
        finally:
            if not folder:
                shutil.rmtree(place, ignore_errors=True)


def build(session: Session, record: BuildRecord) -> Path:
    """Build the record's fork in *session*, which is elsewhere, and return the wheel; say where the compiler is not that of the first."""
    first, here = compilers(session, record)
    if here != first:
        console.warn(f"the first wheel was compiled by {first}, this one is by {here or 'nothing'}")
    fork = record.source.fork
    return pipeline.path_of(session, pipeline.build(session, fork))


def compilers(session: Session, record: BuildRecord) -> tuple[str, str]:
    """Return the host compiler of the first build and that of this machine; a wheel of headers or Python has none in either."""
    if not record.compiler:
        return "", ""
    return record.compiler, cross.compiler(session)
