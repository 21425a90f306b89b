"""
``sparkwright promote``: move a candidate to verified, where new verdicts show all that is asked
for.
"""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.forks.context import RunContext
from sparkwright.release.publish import changes


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Move a candidate to verified, where new verdicts show all that is asked for."""
    who = publishing.publisher(session, arguments)
    return publishing.show(
        changes.promote(who, arguments.release, arguments.verdicts, arguments.reason)
    )
