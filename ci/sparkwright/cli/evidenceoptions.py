"""The options of ``evidence``."""

from __future__ import annotations

import argparse
from pathlib import Path


def evidence(verb: argparse.ArgumentParser) -> None:
    """Add them."""
    verb.add_argument(
        "wheels", nargs="+", type=Path, metavar="WHEEL", help="the wheel file in question"
    )
    verb.add_argument(
        "--at",
        default="",
        metavar="URL|FOLDER",
        help="the index that publishes it (default: as for `install`)",
    )
    verb.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="a folder with files of evidence, in place of an index",
    )
    verb.add_argument(
        "--key",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="public key of its publisher; may be repeated",
    )
    verb.add_argument(
        "--signed-for",
        default="",
        metavar="URL",
        help="the address that the manifest was signed for, where --at is a copy",
    )
