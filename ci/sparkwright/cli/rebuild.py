"""``sparkwright rebuild``: build a finished wheel again in another store and compare the two."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkwright.audit import policy, reproduce
from sparkwright.builder import pipeline
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Build each named wheel again and compare; with ``--check``, fail if one differs."""
    if arguments.wheels:
        wheels = [_named_wheel(session, str(name)) for name in arguments.wheels]
    else:
        wheels = [path for fork in session.forks if (path := _last_wheel(session, fork))]
    if not wheels:
        todo = "Run `sparkwright build`, or name a wheel."
        raise SourceError("not-provided", "There is no wheel to build again.", todo=todo)
    if arguments.elsewhere and len(wheels) > 1:
        raise UsageError("usage", "--elsewhere holds one rebuild; name one wheel or fork.")
    # Refuse what cannot be built again before an hour goes into the rest.
    records = [reproduce.read_record(path) for path in wheels]
    sessions = [
        reproduce.rebuild_session(session, path, record)
        for path, record in zip(wheels, records, strict=True)
    ]
    rebuilds = []
    for own, path, record in zip(sessions, wheels, records, strict=True):
        rules = policy.load(own.project.audit_file, own.project.spec.arch)
        separate = reproduce.separate_store(own, arguments.elsewhere, cached=arguments.cached)
        with console.step(f"build {path.name} again, elsewhere"), separate as other:
            rebuilds.append(reproduce.reproduce(other, path, record, rules))
    for rebuild in rebuilds:
        reproduce.show(rebuild)
    console.document({"rebuilds": rebuilds})
    if arguments.check:
        for rebuild in rebuilds:
            reproduce.raise_for_difference(rebuild)
    return 0


def _named_wheel(session: RunContext, name: str) -> Path:
    """Return the wheel file *name*, or the last build of the fork *name*."""
    if name.endswith(".whl"):
        if not Path(name).is_file():
            raise SourceError("not-provided", f"There is no wheel {name}.")
        return Path(name)
    session.project.fork(name)
    if path := _last_wheel(session, name):
        return path
    what = f"The wheel of {name} that this checkout makes is not in {session.output}."
    raise SourceError("not-provided", what, todo="Run `sparkwright build` first.")


def _last_wheel(session: RunContext, fork: str) -> Path | None:
    built = pipeline.current(session, fork)
    path = pipeline.wheel_path(session, built) if built else None
    return path if path and path.exists() else None
