"""``sparkwright lock``: intent into hashes, for the sources and for the tools."""

from __future__ import annotations

import argparse

from sparkwright.builder.environment import pylock
from sparkwright.core.console import console
from sparkwright.forks import lock, resolve
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.gates.load import benchy
from sparkwright.gates.tasks import harness


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Write ``lock.yaml``, ``pylock.toml`` and the locks of programs that gates run; what stays unresolved is reported."""
    if session.offline:
        raise SourceError("offline", "lock asks the index and the upstream hosts, which --offline forbids.")
    made = resolve.resolve(session)
    with console.step("lock the tools"):
        tools = pylock.lock(session)
    for what, program in (("the harness of the tasks", harness), ("the second load generator", benchy)):
        wanted = program.folder(session)
        # Checkouts that hold stacks alone (the demo's) have nothing to gate.
        if (wanted / "requirements.in").exists():
            with console.step(f"lock {what}"):
                made_of = program.lock(session)
            (wanted / "pylock.toml").write_text(made_of, "utf-8")
    session.project.lock_file.write_text(lock.render(made), "utf-8")
    (session.project.build_folder / "pylock.toml").write_text(tools, "utf-8")
    unresolved = resolve.unresolved(session, made)
    for line in unresolved:
        console.warn(f"unresolved: {line}")
    console.document({"lock": made, "unresolved": unresolved})
    return 0
