"""
``sparkwright refresh``: sign the manifest again, so that clients go on to believe it, and remove
what killed runs left.
"""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.forks.context import RunContext
from sparkwright.release.publish import changes


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Sign the manifest again, so that clients go on to believe it, and remove what killed runs left.
    """
    return publishing.show(
        changes.refresh(publishing.publisher(session, arguments), arguments.reason)
    )
