"""The options of ``notes``."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkwright.cli import clientoptions


def options(verb: argparse.ArgumentParser) -> None:
    """Add them; which index, and whose key, is said as for ``install``."""
    clientoptions.index(verb)
    verb.add_argument(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="name, address or release.json (default: the newest)",
    )
    verb.add_argument(
        "--at", dest="index", default="", metavar="FOLDER|URL", help="the same as --index"
    )
    verb.add_argument("--need", action="store_true", help="only: do you still need this fork?")
    verb.add_argument(
        "--stock",
        type=Path,
        action="append",
        default=[],
        metavar="WHEEL",
        help="the official wheel, to hold its libraries against ours",
    )
    verb.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs nothing else"
    )
    verb.add_argument("--markdown", type=Path, metavar="FILE", help="write Markdown")
