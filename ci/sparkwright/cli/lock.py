"""``sparkwright lock``: resolve the stack to hashes of its sources and tools."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec

from sparkwright.builder import source_tree, vendored
from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.workspace import Workspace
from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError
from sparkwright.forks import lock as locks
from sparkwright.forks import resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED, ForkLock, VendoredLock
from sparkwright.gates.load import benchy
from sparkwright.gates.tasks import harness


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``lock``."""
    parsers["lock"].set_defaults(run=lock)


def lock(arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Write ``lock.yaml``, ``pylock.toml`` and the locks of the gates' programs; report unresolved
    sources.
    """
    context = options.checkout(arguments)
    if context.offline:
        raise SourceError(
            "offline", "lock needs the index and the upstream hosts, which --offline forbids."
        )
    project = context.project
    earlier = locks.read(project) if project.lock_file.exists() else None
    resolved = resolve.resolve(context, earlier)
    with console.step("lock the tools"):
        tools = pylock.resolve(context.store, project.build_folder / "requirements.in")
    for program in (harness, benchy):
        folder = program.folder(context)
        # A checkout with stacks alone has no gates.
        if (folder / "requirements.in").exists():
            with console.step(f"lock {folder.name}"):
                context.store.write(folder / "pylock.toml", program.lock(context).encode())
    context.store.write(project.lock_file, locks.render(resolved).encode())
    context.store.write(project.build_folder / "pylock.toml", tools.encode())
    # The context caches the lock that it has read.
    context = dataclasses.replace(context)
    for fork, spec in project.spec.forks.items():
        if spec.build == "graft" and not toolchain.installed(context):
            todo = "to read them from CMake, run fetch and lock again"
            console.note(f"{fork}: the sources of FetchContent are unchanged; {todo}")
        elif spec.build == "graft":
            try:
                lock_vendored(context, fork)
            except SparkwrightError as error:
                what = f"{error.what} ({error.reference})"
                console.warn(f"{fork}: not all sources of FetchContent were read: {what}")
    written = locks.read(project)
    unresolved = resolve.unresolved(context.project, written)
    for line in unresolved:
        console.warn(f"unresolved: {line}")
    return {"lock": written, "unresolved": unresolved}


def lock_vendored(context: RunContext, fork: str) -> None:
    """
    Write the sources that CMake downloads for *fork* to the lock file.

    CMake is configured for all targets with the sources that the lock pins, repeated
    until it needs no others: a source may download further sources.

    Raises:
        source-unlocked: CMake needs a download that cannot be pinned.
        source-unresolved: A host does not answer; the lock marks the source as unresolved.
        And the errors of applying and configuring.
    """
    tools, name = toolchain.obtain(context), Workspace.name(context, fork)
    while True:
        # A copy reads the lock file again.
        context = dataclasses.replace(context, targets=("all",))
        with context.store.lock(name):
            workspace = Workspace(context, tools, fork, "lock")
            workspace.fill(source_tree.make(context, fork).tree)
            try:
                workspace.configure()
                return
            except SourceError as error:
                if error.reference != "source-unlocked":
                    raise
                with context.store.lock("objects"):
                    locked = _pinned(context, fork, workspace.declarations())
                if locked == context.lock.forks[fork]:
                    raise
        forks = {**context.lock.forks, fork: locked}
        text = locks.render(msgspec.structs.replace(context.lock, forks=forks))
        context.store.write(context.project.lock_file, text.encode())


def _pinned(context: RunContext, fork: str, declared: Iterable[vendored.Declaration]) -> ForkLock:
    """
    Return the lock of *fork* with exactly the sources *declared* in place of those that
    FetchContent would download.
    """
    spec, locked = context.project.fork(fork), context.lock.forks[fork]

    def below(sources: Container[str]) -> dict[str, VendoredLock]:
        """Return the entries of *sources*, and of their submodules (``name/path``)."""
        return {n: entry for n, entry in locked.vendored.items() if n.split("/")[0] in sources}

    fetched = below(locked.fetched)
    entries = {name: entry for name, entry in locked.vendored.items() if name not in fetched}
    for declaration in declared:
        name = declaration.name
        if name in spec.ignored or not declaration.pinnable:
            continue
        if vendored.mismatch(declaration, locked.fetched.get(name)):
            source = VendoredLock(
                declaration.url, declaration.ref, UNRESOLVED, UNRESOLVED, kind="fetchcontent"
            )
            entries |= resolve.pin(context, spec, name, source, declaration.modules)
        else:
            entries |= below([name])
    return msgspec.structs.replace(locked, vendored=dict(sorted(entries.items())))
