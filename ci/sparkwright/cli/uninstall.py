"""
``sparkwright uninstall``: what `install` put into an environment leaves it again, and nothing else
does.
"""

from __future__ import annotations

import argparse

from sparkwright.cli import environments
from sparkwright.core.console import console
from sparkwright.forks.context import StandaloneContext
from sparkwright.release.client import back


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """Remove the set of the environment ``--into``, its caches and its records."""
    gone = back.uninstall(session, environments.chosen(arguments.into))
    rows = [
        [what, environments.few(names)]
        for what, names in (("removed", gone.removed), ("kept", gone.kept))
        if names
    ]
    console.table(f"{gone.name} is uninstalled", ["", "packages"], rows, result=True)
    console.document({"uninstalled": gone})
    return 0
