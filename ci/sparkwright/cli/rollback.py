"""
``sparkwright rollback``: an environment goes back to the set before the present one; with ``--at``,
an index to an earlier release.
"""

from __future__ import annotations

import argparse
from typing import Any

from sparkwright.cli import environments
from sparkwright.core.console import console
from sparkwright.release.client import back


def run(session: Any, arguments: argparse.Namespace) -> int:
    """
    Bring back the previous set of the environment ``--into``, or, for a publisher, of the index
    ``--at``.
    """
    if getattr(arguments, "at", None):
        from sparkwright.cli import publishing

        return int(publishing.rollback(session, arguments))
    done = back.rollback(session, environments.chosen(arguments.into))
    environments.show(done)
    console.document({"installed": done})
    return 0
