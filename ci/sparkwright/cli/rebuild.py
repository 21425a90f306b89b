"""``sparkwright rebuild``: builds a finished wheel again, elsewhere, and says whether the same inputs gave the same wheel."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkwright.audit import policy, reproduce_report
from sparkwright.audit.reproduce_report import Rebuild
from sparkwright.builder import pipeline as building
from sparkwright.builder import reproduce
from sparkwright.builder.pipeline import BuiltWheel
from sparkwright.core.console import console
from sparkwright.core.digest import key
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Build each named wheel again and compare; with ``--check``, fail where one is not the same."""
    names = arguments.wheels or session.forks
    wheels = [path for name in names if (path := _wheel(session, str(name), named=bool(arguments.wheels)))]
    if not wheels:
        raise SourceError("not-provided", "There is no wheel to build again.", todo="Run `sparkwright build`, or name a wheel.")
    if arguments.elsewhere and len(wheels) > 1:
        raise UsageError("usage", "--elsewhere holds one rebuild; name one wheel or fork.")
    # What cannot be built again is found out before an hour goes into what can.
    records = [(path, reproduce.record_of(path)) for path in wheels]
    sessions = [reproduce.session_for(session, path, record) for path, record in records]
    made = [_again(one, path, arguments) for one, path in zip(sessions, wheels, strict=True)]
    for one in made:
        reproduce_report.show(one)
    console.document({"rebuilds": made})
    for one in made if arguments.check else ():
        reproduce_report.raise_for_difference(one)
    return 0


def _wheel(session: Session, name: str, *, named: bool) -> Path | None:
    """Return the wheel that *name* means: a file, or the last build of a fork."""
    if name.endswith(".whl"):
        if not Path(name).is_file():
            raise SourceError("not-provided", f"There is no wheel {name}.")
        return Path(name)
    session.project.fork(name)
    built = session.store.get("wheel", key("wheel", building.inputs(session, name)), BuiltWheel)
    path = building.path_of(session, built) if built else None
    if path and path.exists():
        return path
    if named:
        todo = "Run `sparkwright build` first."
        raise SourceError("not-provided", f"The wheel of {name} that this checkout makes is not in {session.output}.", todo=todo)
    return None


def _again(session: Session, path: Path, arguments: argparse.Namespace) -> Rebuild:
    record = reproduce.record_of(path)
    rules = policy.load(session.project.audit_file, session.project.spec.arch)
    place = reproduce.elsewhere(session, arguments.elsewhere, cached=arguments.cached)
    with console.step(f"build {path.name} again, elsewhere"), place as other:
        made = reproduce.build(other, record)
        compilers = reproduce.compilers(other, record)
        return reproduce_report.compare(path, made, rules, other.store.folder("work"), compiler=compilers, cached=arguments.cached)
