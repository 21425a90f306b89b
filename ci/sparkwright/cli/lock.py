"""``sparkwright lock``: intent into hashes, for the sources and for the tools."""

from __future__ import annotations

import argparse
import dataclasses

from sparkwright.builder import workspace
from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.errors import BuildError
from sparkwright.cherry_picks.patch import PatchError
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks import lock, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.gates.load import benchy
from sparkwright.gates.tasks import harness


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Write ``lock.yaml``, ``pylock.toml`` and the locks of programs that gates run; what stays
    unresolved is reported.
    """
    if session.offline:
        raise SourceError(
            "offline", "lock asks the index and the upstream hosts, which --offline forbids."
        )
    earlier = lock.read(session.project) if session.project.lock_file.exists() else None
    made = resolve.resolve(session, earlier)
    with console.step("lock the tools"):
        tools = pylock.resolve(session, session.project.build_folder / "requirements.in")
    for what, program in (
        ("the harness of the tasks", harness),
        ("the second load generator", benchy),
    ):
        wanted = program.folder(session)
        # Checkouts that hold stacks alone (the demo's) have nothing to gate.
        if (wanted / "requirements.in").exists():
            with console.step(f"lock {what}"):
                made_of = program.lock(session)
            (wanted / "pylock.toml").write_text(made_of, "utf-8")
    session.project.lock_file.write_text(lock.render(made), "utf-8")
    # What the run has read of an earlier lock file counts no longer.
    session = dataclasses.replace(session)
    (session.project.build_folder / "pylock.toml").write_text(tools, "utf-8")
    for fork, spec in session.project.spec.forks.items():
        if spec.build == "graft":
            _vendored(session, fork)
    made = lock.read(session.project)
    unresolved = resolve.unresolved(session, made)
    for line in unresolved:
        console.warn(f"unresolved: {line}")
    console.document({"lock": made, "unresolved": unresolved})
    return 0


def _vendored(session: RunContext, fork: str) -> None:
    """
    Write the sources that FetchContent would download to the lock, as far as CMake can be asked
    here.
    """
    count = len(session.lock.forks[fork].fetched)
    if not toolchain.installed(session):
        console.note(
            f"{fork}: {count} sources of FetchContent as before; to read them from CMake, fetch, "
            f"and lock again"
        )
        return
    try:
        workspace.lock_vendored(session, fork)
    except (BuildError, CommandError, FileError, PatchError, SourceError) as error:
        console.warn(
            f"{fork}: the sources that CMake asks for were not all read: {error.what} "
            f"({error.reference})"
        )
