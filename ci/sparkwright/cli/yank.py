"""``sparkwright yank``: stop offering a release, with the reason; its files stay."""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.forks.context import RunContext
from sparkwright.release.publish import changes


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Stop offering a release, with the reason; its files stay."""
    return publishing.show(
        changes.yank(publishing.publisher(session, arguments), arguments.release, arguments.reason)
    )
