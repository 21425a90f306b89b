"""``sparkwright yank``: stop offering a release, with the reason; its files stay."""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.forks.context import Session
from sparkwright.release.publish import changes


def run(session: Session, arguments: argparse.Namespace) -> int:
    """Stop offering a release, with the reason; its files stay."""
    return publishing.show(
        changes.yank(publishing.publisher(session, arguments), arguments.release, arguments.reason)
    )
