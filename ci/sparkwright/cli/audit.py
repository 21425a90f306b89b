"""
``sparkwright audit``: what a wheel really holds, also one that was not built here, and several side
by side.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from sparkwright.audit import policy, report, wheel, wheel_reader
from sparkwright.audit.report import AuditReport
from sparkwright.builder import pipeline as building
from sparkwright.builder.environment import toolchain
from sparkwright.builder.wheel import flashinfer_aot
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: Raised whenever an audit finds out or says more than before, so that no older one is taken for
#: it.
FORM = 6


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Audit the named wheels, or those that the last build of the stack made; fail when one has a
    finding.
    """
    wheels = arguments.wheels or [path for fork in session.forks for path in _last(session, fork)]
    if not wheels:
        raise SourceError(
            "not-provided",
            "There is no wheel to audit.",
            todo="Run `sparkwright build`, or name a wheel.",
        )
    reports = [audited(session, path, judged_as(path, arguments.judge)) for path in wheels]
    report.show(*reports, result=True)
    console.document({"reports": reports})
    for audit_report in reports:
        report.raise_for_findings(audit_report)
    return 0


def judged_as(path: Path, asked: Literal["auto", "stack", "any"]) -> Literal["stack", "any"]:
    """
    Return by what the wheel at *path* is judged; where nobody says, the stack's policy is for
    wheels with our record in them.
    """
    if asked != "auto":
        return asked
    return "stack" if wheel_reader.contents(path, wheel_reader.subject(path)).ours else "any"


def audited(
    session: RunContext, path: Path, judged: Literal["stack", "any"] = "stack"
) -> AuditReport:
    """
    Return the audit of the wheel at *path*; a wheel and a policy that were seen together before are
    not read again.
    """
    rules = policy.load(session.project.audit_file, session.project.spec.arch)
    key = digest.key(
        "audit",
        {
            "wheel": digest.sha256_file(path),
            "name": path.name,
            "policy": rules,
            "judged": judged,
            "form": FORM,
        },
    )
    known = session.store.get("audit", key, AuditReport)
    if known:
        return known
    programs, scratch = toolchain.obtain(session).cuda / "bin", session.store.folder("work")
    with console.step(f"audit {path.name}"):
        made = wheel.audit(path, rules, programs, scratch=scratch, judged=judged)
    # A tool that is missing today may be there tomorrow.
    if all(checker.state != "not-run" for checker in made.checkers):
        session.store.put("audit", key, made)
    return made


def _last(session: RunContext, fork: str) -> list[Path]:
    spec = flashinfer_aot.load(session.project, fork)
    made = (building.current(session, fork), flashinfer_aot.stored(session, spec) if spec else None)
    return [
        path for built in made if built and (path := building.wheel_path(session, built)).exists()
    ]
