"""``sparkwright install``: what may not be shipped as a wheel of ours, installed and edited in the user's environment."""

from __future__ import annotations

import argparse

from sparkwright.console import console
from sparkwright.forks.session import Session
from sparkwright.release import onsite, spec

#: The rest of an installation is a matter of uv or pip.
SCOPE = "this covers only what may not be shipped as a wheel; install the wheels themselves from dist/ with uv or pip"


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Bring the environment ``--into`` to what the stack's ``onsite.yaml`` asks for, or with ``--restore`` to the unedited wheels."""
    wanted = spec.load(session.project)
    console.note(SCOPE)
    if wanted is None:
        console.result(f"Stack {session.project.stack} has nothing to do on site.")
        console.document({"installed": None})
        return 0
    console.note(f"why on site: {wanted.reason}")
    done = onsite.install(session, wanted, arguments.into, restore=arguments.restore)
    rows = [["wheel", name, sha256[:12], ""] for name, sha256 in done.wheels.items()]
    rows += [["shared", f"{one.upper} over {one.lower}", "", f"{one.files} files, {one.differ} differ"] for one in done.shared]
    rows += [["edit", f"{one.name}: {one.file}", one.sha256[:12], one.state] for one in done.edits]
    console.table(f"{done.written} of {done.files} files written", ["", "what", "sha256", ""], rows, result=True)
    console.document({"installed": done})
    return 0
