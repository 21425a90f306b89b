"""``sparkwright build``: the main job. Says what it will do and how long that takes, does it, audits the result."""

from __future__ import annotations

import argparse
import os
import platform

from sparkwright.audit import report
from sparkwright.audit.report import AuditReport
from sparkwright.build import estimate as estimating
from sparkwright.build import wheel
from sparkwright.build.wheel import BuiltWheel
from sparkwright.cli import audit
from sparkwright.console import console, duration, size
from sparkwright.forks.session import Session

_HOW = {
    "headers": "pack its headers",
    "backend": "run its build backend",
    "graft": "compile two libraries, graft them onto the official wheel",
}


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Build and audit every fork; a wheel that fails its audit is shown, and fails the verb."""
    announce(session)
    pairs = []
    for fork in session.forks:
        built = wheel.build(session, fork)
        made = audit.audited(session, wheel.path_of(session, built))
        pairs.append((built, made))
        if not made.passed:
            report.show(made, result=True)
    _show(session, pairs)
    console.document({"wheels": [{"wheel": built, "path": str(wheel.path_of(session, built)), "audit": made} for built, made in pairs]})
    for _, made in pairs:
        report.raise_for_findings(made)
    return 0


def announce(session: Session) -> None:
    """Say what will be done for each fork, and how long it should take here."""
    console.note(f"stack {session.project.stack} for {session.project.spec.arch} on {session.machine}; cache: {session.store.root}")
    for fork in session.forks:
        if not wheel.is_built(session, fork):
            console.note(f"  {fork}: {_HOW[session.project.fork(fork).build]}, about {duration(estimate(session, fork))}")


def estimate(session: Session, fork: str) -> float:
    """
    Return the seconds that building *fork* should take here.

    This machine's last build counts; without one, the work that was measured elsewhere, shared among the cores.
    """
    last = session.store.get("duration", f"{session.project.stack}-{fork}", float)
    return last or estimating.seconds(session.project, fork, session.jobs or os.cpu_count() or 1)


def _show(session: Session, pairs: list[tuple[BuiltWheel, AuditReport]]) -> None:
    rows = []
    for built, made in pairs:
        units = ", ".join(f"{count} {verdict}" for verdict, count in built.counts.items() if count) or "–"
        rows.append(
            [built.filename, size(built.size), units, "pass" if made.passed else f"{len(made.findings)} findings", built.sha256[:16]]
        )
    console.table("wheels", ["wheel", ">size", "CUDA units", "audit", "sha256"], rows, result=True)
    names = " ".join(str(wheel.path_of(session, built)) for built, _ in pairs)
    console.note(f"install: python -m pip install {names}")
    if not any(tag in platform.machine() for tag in ("aarch64", "arm64")):
        console.note("no GB10 here: that the kernels run, and how fast, is not shown (gates: not-run)")
