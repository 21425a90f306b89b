"""
From the reviewed data to a wheel, once: the same inputs give the wheel that is in the store.

The key of a build is made of reviewed files and of what this machine is, so that "nothing changed" is known without git, a
network or a compiler; when something changed, the build says what.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from pathlib import Path

import msgspec

from sparkwright import __version__, digest
from sparkwright.build import backend, graft, headers, plan, planning, sourcetree, toolchain
from sparkwright.build import compile as compiling
from sparkwright.build.graft import Transplant
from sparkwright.build.sourcetree import SourceTree
from sparkwright.build.toolchain import Toolchain
from sparkwright.build.workspace import Workspace
from sparkwright.console import console, size
from sparkwright.errors import NotProvided
from sparkwright.forks import download
from sparkwright.forks.session import Session
from sparkwright.store import room_guard


class BuiltWheel(msgspec.Struct, frozen=True):
    """
    A finished wheel.

    Attributes:
        key: What it was built from.
        counts: For a graft, CUDA units by verdict of the plan.
        transplant: For a graft, what was changed in the base.
    """

    fork: str
    key: str
    filename: str
    sha256: str
    size: int
    tree: str
    counts: dict[str, int] = {}
    transplant: Transplant | None = None


class BuildRecord(msgspec.Struct, frozen=True):
    """What travels in the wheel as ``sparkwright.json``: where every library came from. No path, date or job count."""

    sparkwright: str
    stack: str
    arch: str
    key: str
    plan: str
    base: str
    tools: str
    compiler: str
    source: SourceTree
    counts: dict[str, int]
    transplant: Transplant


def inputs(session: Session, fork: str) -> dict[str, str]:
    """Return what a build of *fork* is determined by: name that people know → digest."""
    project, stack = session.project, session.project.stack
    concerned, rules = (fork, *project.fork(fork).needs), sourcetree.rules_of(session)
    locks = {f"forks/{stack}/lock.yaml ({name})": session.lock.forks[name] for name in concerned}
    series = {f"forks/{stack}/{name}/series": _folder(project.series_folder(name)) for name in concerned}
    settings = msgspec.structs.replace(toolchain.spec(project).forks[fork], seconds=0, longest=0, memory={})
    tools = (project.build_folder / "pylock.toml").read_bytes()
    parts: dict[str, object] = {
        **locks,
        **series,
        f"forks/{stack}/stack.yaml": (project.spec.arch, project.spec.label, project.fork(fork)),
        f"build/{stack}/archs.yaml": [rules.of(name) for name in concerned],
        f"build/{stack}/environment.yaml": settings,
        f"build/{stack}/pylock.toml": digest.sha256_bytes(tools),
        "--source": session.source,
        "this machine": (session.machine, platform.python_version(), toolchain.host_compiler()),
        "sparkwright": __version__,
    }
    return {name: digest.key("input", part) for name, part in parts.items()}


def _folder(folder: Path) -> dict[str, str]:
    return {path.name: digest.sha256_file(path) for path in sorted(folder.glob("*")) if path.is_file()}


def build(session: Session, fork: str) -> BuiltWheel:
    """
    Return the wheel of *fork*, built when the store has none of the same inputs, and placed in the output folder.

    Raises:
        ArchMismatch, CompileFailed, BaseMismatch, and what the earlier stages raise.
    """
    parts = inputs(session, fork)
    key = digest.key("wheel", parts)
    with session.store.lock(Workspace.name(session, fork)):
        known = session.store.get("wheel", key, BuiltWheel)
        if known and _kept(session, known).exists():
            console.note(f"{fork}: {known.filename}, reused: nothing changed")
        else:
            console.note(f"{fork}: {_why(session, fork, parts)}")
            known = _build(session, fork, key)
            session.store.put("wheel", key, known)
            session.store.put("inputs", f"{session.project.stack}-{fork}", parts)
        _place(session, known)
    return known


def is_built(session: Session, fork: str) -> bool:
    """Does the store hold the wheel that a build of *fork* would make now?"""
    known = session.store.get("wheel", digest.key("wheel", inputs(session, fork)), BuiltWheel)
    return known is not None and _kept(session, known).exists()


def path_of(session: Session, built: BuiltWheel) -> Path:
    """Return where the wheel lies for people."""
    return session.output / built.filename


def _why(session: Session, fork: str, parts: dict[str, str]) -> str:
    before = session.store.get("inputs", f"{session.project.stack}-{fork}", dict[str, str])
    changed = [name for name in parts if (before or {}).get(name) != parts[name]]
    return (
        "not built yet"
        if before is None
        else f"rebuilding: {', '.join(changed) or 'its wheel is gone from the store'}{' changed' if changed else ''}"
    )


def _kept(session: Session, built: BuiltWheel) -> Path:
    return session.store.root / "wheels" / built.sha256 / built.filename


def _place(session: Session, built: BuiltWheel) -> None:
    """Make the store's wheel appear in the output folder; a hard link where that is possible, so that it costs no room."""
    kept, shown = _kept(session, built), path_of(session, built)
    session.output.mkdir(parents=True, exist_ok=True)
    # The caller holds the fork's lock, so a temporary name there is a killed run's.
    for left in session.output.glob(f".{built.filename}.*"):
        left.unlink(missing_ok=True)
    if shown.exists() and (shown.samefile(kept) or (shown.stat().st_size == built.size and digest.sha256_file(shown) == built.sha256)):
        return
    with room_guard(session.output), session.store.replacing(shown) as temporary:
        temporary.unlink()
        try:
            os.link(kept, temporary)
        except OSError:
            shutil.copyfile(kept, temporary)


def _build(session: Session, fork: str, key: str) -> BuiltWheel:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(session.store.building(session.store.root / "work" / session.project.stack / fork / "out"))
        source = sourcetree.make(session, fork)
        settings = toolchain.spec(session.project).forks[fork]
        kind = session.project.fork(fork).build
        counts: dict[str, int] = {}
        done: Transplant | None = None
        if kind == "headers":
            path = headers.build(session, source.tree, settings.distribution, scratch)
        elif kind == "backend":
            path = backend.build(session, toolchain.obtain(session), settings, fork, source.tree, scratch)
        else:
            path, counts, done = _graft(session, toolchain.obtain(session), source, key, scratch)
        sha256 = digest.sha256_file(path)
        built = BuiltWheel(fork, key, path.name, sha256, path.stat().st_size, source.tree, counts, done)
        with session.store.building(session.store.root / "wheels" / sha256) as shelf:
            os.rename(path, shelf / path.name)
            # The output folder holds a hard link to this file: nobody should change it by accident.
            (shelf / path.name).chmod(0o444)
    session.store.put("duration", f"{session.project.stack}-{fork}", time.monotonic() - began)
    console.note(f"{fork}: {built.filename}, {size(built.size)}")
    return built


def _graft(session: Session, tools: Toolchain, source: SourceTree, key: str, folder: Path) -> tuple[Path, dict[str, int], Transplant]:
    fork = source.fork
    settings = toolchain.spec(session.project).forks[fork]
    locked = session.lock.forks[fork].bases.get(session.machine)
    if locked is None:
        raise NotProvided(f"Stack {session.project.stack} locks no base wheel of {fork} for {session.machine}.")
    base = download.obtain(session.store, locked.name, locked.filename, locked.sha256, offline=session.offline)
    with console.step(f"graft {fork} onto {locked.filename}"):
        graft.compare(session, source, base, settings)
        made = planning.planned(session, tools, source, configured=True)
        plan.show(made.after, made.before)
        plan.check(made.after, made.before)
        workspace = Workspace(session, tools, settings, fork)
        compiling.compile_targets(session, tools, settings, fork, workspace.folder, workspace.environment())
        changes, done = graft.transplant(session, source, base, workspace.build, settings)
        record = BuildRecord(
            sparkwright=__version__,
            stack=session.project.stack,
            arch=session.project.spec.arch,
            key=key,
            plan=made.key,
            base=locked.sha256,
            tools=tools.key,
            compiler=toolchain.host_compiler(),
            source=source,
            counts=made.after.counts,
            transplant=done,
        )
        path = graft.write(
            base, folder, session.project.spec.label, changes, done, settings, msgspec.json.format(msgspec.json.encode(record))
        )
    console.note(f"{len(done.libraries)} libraries compiled here, {len(done.base)} from the base, {len(done.replaced)} files replaced")
    if done.requires:
        console.note(f"requirements changed: {', '.join(text or f'no {project}' for project, text in done.requires.items())}")
    return path, made.after.counts, done
