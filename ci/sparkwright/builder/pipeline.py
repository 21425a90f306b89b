"""
From the reviewed data to a wheel, once: the same inputs give the wheel that is in the store.

The key of a build is made of reviewed files and of what this machine is, so that "nothing changed"
is known without git, a network or a compiler; when something changed, the build says what.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.builder import configure, preflight, source_tree, vendored
from sparkwright.builder.arch import plan
from sparkwright.builder.compile import ninja, unit_manifest
from sparkwright.builder.compile.costs import Costs
from sparkwright.builder.compile.ninja import BuildFolder
from sparkwright.builder.compile.unit_manifest import CompiledUnit
from sparkwright.builder.environment import toolchain
from sparkwright.builder.environment.toolchain import Toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel import cutlass, graft, pep517, sbom, version
from sparkwright.builder.wheel.graft import GraftManifest
from sparkwright.builder.wheel.sbom import DistInfoFiles
from sparkwright.builder.workspace import Workspace
from sparkwright.core import digest
from sparkwright.core.console import console, size
from sparkwright.core.store import room_guard
from sparkwright.forks import download
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import FileLock

#: Raise it when equal inputs give another wheel. 2: wheels hold their bill of materials. 3: and
#: their unit manifest. 4: the bill of materials in another order.
LAYOUT = 4


class BuiltWheel(msgspec.Struct, frozen=True):
    """
    A finished wheel.

    Attributes:
        key: What it was built from.
        counts: Where something was compiled, CUDA units by verdict of the plan.
        transplant: For a graft, what was changed in the base.
    """

    fork: str
    key: str
    filename: str
    sha256: str
    size: int
    tree: str
    counts: dict[str, int] = {}
    transplant: GraftManifest | None = None


class BuildRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    What travels in the wheel as ``sparkwright.json``: what it was made of, and where every library
    came from. No path, date or job count.

    The key of the build is not in it: that is made of how the build was asked for, too, and
    ``--source auto`` and ``git`` may be one wheel.

    Attributes:
        inputs: The reviewed files and choices that it was made from, as `inputs` digests them;
            nothing of the machine is among them. targets: The CMake targets that were compiled.
            plan, base, tools, compiler, counts, units, transplant: Only where something was
            compiled;
            *units* is the unit manifest.
        isolation: The same; what kept the build from the network (`Sandbox.kind`), ``none`` where
            nothing did.
    """

    sparkwright: str
    stack: str
    arch: str
    source: SourceTree
    inputs: dict[str, str]
    targets: tuple[str, ...] = ()
    plan: str = ""
    base: str = ""
    tools: str = ""
    compiler: str = ""
    isolation: str = ""
    counts: dict[str, int] = {}
    units: tuple[CompiledUnit, ...] = ()
    transplant: GraftManifest | None = None


def inputs(session: RunContext, fork: str) -> dict[str, str]:
    """Return what a build of *fork* is determined by: name that people know → digest."""
    project, stack = session.project, session.project.stack
    concerned, rules = (fork, *project.fork(fork).needs), source_tree.rules_of(session)
    locks = {f"forks/{stack}/lock.yaml ({name})": session.lock.forks[name] for name in concerned}
    series = {
        f"forks/{stack}/{name}/series": _folder(project.series_folder(name)) for name in concerned
    }
    settings = toolchain.settings(session, fork).deciding()
    # How the targets were asked for, by default or by name, makes no other wheel.
    spec = msgspec.structs.replace(project.fork(fork), targets=())
    tools = (project.build_folder / "pylock.toml").read_bytes()
    parts: dict[str, object] = {
        **locks,
        **series,
        f"forks/{stack}/stack.yaml": (
            project.spec.arch,
            project.spec.label,
            version.LABELS,
            spec,
        ),
        f"build/{stack}/archs.yaml": [rules.of(name) for name in concerned],
        f"build/{stack}/environment.yaml": msgspec.structs.replace(settings, targets=()),
        f"build/{stack}/pylock.toml": digest.sha256_bytes(tools),
        "--source": session.source,
        "this machine": (
            platform.machine(),
            platform.python_version(),
            toolchain.compiler(session),
        ),
        "--target": session.machine,
        "--targets": settings.targets,
        "sparkwright": (__version__, LAYOUT, toolchain.ADDITIONS),
    }
    return {name: digest.key("input", part) for name, part in parts.items()}


def reviewed(parts: dict[str, str]) -> dict[str, str]:
    """
    Return those of the inputs *parts* that are the same on every machine; a wheel for all machines
    is to be the same from each.
    """
    return {
        name: part
        for name, part in parts.items()
        if "/" in name or name in ("sparkwright", "--targets")
    }


def dist_info(
    session: RunContext, source: SourceTree, base: FileLock | None = None, **compiled: Any
) -> DistInfoFiles:
    """
    Return the build record of the wheel made of *source*, and the parts for its bill of materials.

    Args:
        base: The official wheel under a graft.
        compiled: Fields of the record that describe the compiling.
    """
    project = session.project
    record = BuildRecord(
        __version__,
        project.stack,
        project.spec.arch,
        source,
        reviewed(inputs(session, source.fork)),
        base=base.sha256 if base else "",
        **compiled,
    )
    manifest = record.transplant
    parts = sbom.gather(
        session,
        source,
        base=base,
        compiled=manifest.libraries if manifest else None,
        inherited=manifest.base if manifest else None,
        toolchain=record.tools,
        compiler=record.compiler,
        isolation=record.isolation,
    )
    return DistInfoFiles(msgspec.json.format(msgspec.json.encode(record)), parts)


def _folder(folder: Path) -> dict[str, str]:
    return {
        path.name: digest.sha256_file(path) for path in sorted(folder.glob("*")) if path.is_file()
    }


def build(session: RunContext, fork: str) -> BuiltWheel:
    """
    Return the wheel of *fork*, built when the store has none of the same inputs, and placed in the
    output folder.

    Raises:
        arch-mismatch, compile-failed, base-mismatch, and what the earlier stages raise.
    """
    with session.store.lock(Workspace.name(session, fork)):
        return reused(session, fork, inputs(session, fork), lambda key: _build(session, fork, key))


def reused(
    session: RunContext, fork: str, parts: dict[str, str], make: Callable[[str], BuiltWheel]
) -> BuiltWheel:
    """
    Return the wheel that the store has for *parts*, else the one that *make* gives for their key;
    callers hold the fork's lock.
    """
    key = digest.key("wheel", parts)
    built = kept(session, key)
    if built:
        console.note(f"{fork}: {built.filename}, reused: nothing changed")
    else:
        console.note(f"{fork}: {_why(session, fork, parts)}")
        began = time.monotonic()
        built = make(key)
        session.store.put("duration", called(session, fork), time.monotonic() - began)
        console.note(f"{fork}: {built.filename}, {size(built.size)}")
        session.store.put("wheel", key, built)
        session.store.put("inputs", called(session, fork), parts)
    _place(session, built)
    return built


def called(session: RunContext, fork: str) -> str:
    """Return the name of what is recorded of the last build of this kind."""
    return session.named(f"{session.project.stack}-{fork}")


def known(session: RunContext, fork: str) -> BuiltWheel | None:
    """
    Return the wheel that a build of *fork* would take from the store now; None where it has to be
    made.
    """
    return kept(session, digest.key("wheel", inputs(session, fork)))


def kept(session: RunContext, key: str) -> BuiltWheel | None:
    """Return the wheel of that *key*, if the store still holds it."""
    built = session.store.get("wheel", key, BuiltWheel)
    return built if built and _kept(session, built).exists() else None


def is_built(session: RunContext, fork: str) -> bool:
    """Does the store hold the wheel that a build of *fork* would make now?"""
    return known(session, fork) is not None


def path_of(session: RunContext, built: BuiltWheel) -> Path:
    """Return where the wheel lies for people."""
    return session.output / built.filename


def _why(session: RunContext, fork: str, parts: dict[str, str]) -> str:
    before = session.store.get("inputs", called(session, fork), dict[str, str])
    changed = [name for name in parts if (before or {}).get(name) != parts[name]]
    return (
        "not built yet"
        if before is None
        else f"rebuilding: "
        f"{', '.join(changed) or 'its wheel is gone from the store'}{' changed' if changed else ''}"
    )


def _kept(session: RunContext, built: BuiltWheel) -> Path:
    return session.store.root / "wheels" / built.sha256 / built.filename


def _place(session: RunContext, built: BuiltWheel) -> None:
    """
    Make the store's wheel appear in the output folder; a hard link where that is possible, so that
    it costs no room.
    """
    kept, shown = _kept(session, built), path_of(session, built)
    session.output.mkdir(parents=True, exist_ok=True)
    # The caller holds the fork's lock, so a temporary name there is a killed run's.
    for left in session.output.glob(f".{built.filename}.*"):
        left.unlink(missing_ok=True)
    # `pip install dist/*.whl` must not meet two builds of one release. What goes is in the store
    # still; what is not, stays.
    for name in version.superseded(
        built.filename, [path.name for path in session.output.glob("*.whl")]
    ):
        if (
            session.store.root / "wheels" / digest.sha256_file(session.output / name) / name
        ).exists():
            (session.output / name).unlink()
    if shown.exists() and (
        shown.samefile(kept)
        or (shown.stat().st_size == built.size and digest.sha256_file(shown) == built.sha256)
    ):
        return
    with room_guard(session.output), session.store.replacing(shown) as temporary:
        temporary.unlink()
        try:
            os.link(kept, temporary)
        except OSError:
            shutil.copyfile(kept, temporary)


def _build(session: RunContext, fork: str, key: str) -> BuiltWheel:
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(
            session.store.building(
                session.store.root / "work" / session.project.stack / fork / "out"
            )
        )
        source = source_tree.make(session, fork)
        label = version.label(session, source)
        settings = toolchain.settings(session, fork)
        kind = session.project.fork(fork).build
        _fetch_inputs(session, fork)
        preflight.check(session, source)
        counts: dict[str, int] = {}
        done: GraftManifest | None = None
        if kind == "headers":
            path = cutlass.build(
                session,
                source.tree,
                settings.distribution,
                label,
                dist_info(session, source),
                scratch,
            )
        elif kind == "backend":
            path = pep517.build(
                session,
                toolchain.obtain(session),
                settings,
                fork,
                source.tree,
                label,
                dist_info(session, source),
                scratch,
            )
        else:
            path, counts, done = _graft(session, toolchain.obtain(session), source, label, scratch)
        built = BuiltWheel(
            fork,
            key,
            path.name,
            digest.sha256_file(path),
            path.stat().st_size,
            source.tree,
            counts,
            done,
        )
        shelve(session, built, path)
    return built


def _fetch_inputs(session: RunContext, fork: str) -> None:
    """Fetch the vendored sources and the base wheel that a graft of *fork* reads."""
    if session.project.fork(fork).build != "graft":
        return
    if toolchain.settings(session, fork).needs_vendored:
        vendored.fetch(session, fork)
    if base := session.lock.forks[fork].bases.get(session.machine):
        download.obtain(
            session.store, base.name, base.filename, base.sha256, offline=session.offline
        )


def shelve(session: RunContext, built: BuiltWheel, path: Path) -> None:
    """Move the wheel at *path* to its place in the store."""
    with session.store.building(_kept(session, built).parent) as shelf:
        os.rename(path, shelf / path.name)
        # The output folder holds a hard link to this file: nobody should change it by accident.
        (shelf / path.name).chmod(0o444)


def _graft(
    session: RunContext, tools: Toolchain, source: SourceTree, label: str, folder: Path
) -> tuple[Path, dict[str, int], GraftManifest]:
    fork = source.fork
    settings = toolchain.settings(session, fork)
    locked = session.lock.forks[fork].bases.get(session.machine)
    if locked is None:
        raise SourceError(
            "not-provided",
            f"Stack {session.project.stack} locks no base wheel of {fork} for {session.machine}.",
        )
    base = download.obtain(
        session.store, locked.name, locked.filename, locked.sha256, offline=session.offline
    )
    with console.step(f"graft {fork} onto {locked.filename}"):
        made = plan.obtain(session, tools, source, configured=True)
        plan.show(made.after, made.before)
        plan.check(made.after, made.before)
        workspace = Workspace(session, tools, settings, fork)
        libraries = configure.libraries(workspace.build)
        members = graft.replaced_members(base, libraries, settings)
        member_of = {path: member for member, path in members.items()}
        by_target = {
            library.target: member_of[library.path]
            for library in libraries
            if library.path in member_of
        }
        build_folder = BuildFolder.of(
            session, tools, fork, workspace.folder, workspace.sandbox, workspace.environment()
        )
        build_folder.compile(settings.targets, Costs.of(session, fork), ninja.limits(session))
        changes, done = graft.changes(session, source, base, workspace.build, members, settings)
        files = dist_info(
            session,
            source,
            locked,
            targets=settings.targets,
            plan=made.key,
            tools=tools.key,
            compiler=toolchain.compiler(session),
            counts=made.after.counts,
            transplant=done,
            isolation=workspace.sandbox.kind,
            units=unit_manifest.record(workspace.build, made.after.units, by_target),
        )
        path = graft.write(base, folder, label, changes, done, settings, files)
    console.note(
        f"{len(done.libraries)} libraries compiled here, {len(done.base)} from the base, "
        f"{len(done.replaced)} files replaced"
    )
    if done.requires:
        console.note(
            f"requirements changed: "
            f"{', '.join(text or f'no {project}' for project, text in done.requires.items())}"
        )
    return path, made.after.counts, done
