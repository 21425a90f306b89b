"""``sparkwright retain``: remove old candidates, with the files that nothing else refers to."""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.release.publish import changes


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Remove all candidates of each stack but the newest; the names of their files stay taken for
    good.
    """
    if arguments.keep < 0:
        raise UsageError("usage", "--keep is a number of releases.")
    who = publishing.publisher(session, arguments)
    return publishing.show(
        changes.retain(
            who,
            arguments.keep or who.policy.retain,
            verified=arguments.verified,
            reason=arguments.reason,
        )
    )
