"""
The options of the verbs that work on an environment: install, rollback, uninstall, and doctor's
part of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add to each of these verbs its own."""
    install(made["install"])
    environment(made["rollback"])
    environment(made["uninstall"])
    doctor(made["doctor"])


def environment(verb: argparse.ArgumentParser) -> None:
    """Add ``--into``."""
    verb.add_argument(
        "--into",
        type=Path,
        metavar="VENV",
        help="the Python environment (default: the active one, or the one this program runs in)",
    )


def install(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``install``."""
    environment(verb)
    index(verb)
    verb.add_argument(
        "--channel",
        choices=("verified", "candidate"),
        default="verified",
        help="which releases (default: those whose every gate passed)",
    )
    verb.add_argument(
        "--version",
        dest="release",
        default="",
        metavar="NAME",
        help="this release, by its full name; also a yanked one",
    )
    verb.add_argument(
        "--list", action="store_true", help="show the releases of the index, and change nothing"
    )
    verb.add_argument(
        "--replace",
        action="store_true",
        help="replace packages of the set that something else installed",
    )
    verb.add_argument(
        "--repair",
        action="store_true",
        help="put back what something else changed in the installed set",
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, say what would be done, and change nothing",
    )
    verb.add_argument(
        "--onsite",
        action="store_true",
        help="only what a checkout's onsite.yaml installs and edits; needs no index",
    )
    verb.add_argument(
        "--built",
        type=Path,
        metavar="DIR",
        help="the matched set around wheels in this folder, as they were built: to gate in, "
        "unproved",
    )
    verb.add_argument(
        "--stock",
        action="store_true",
        help="the official wheel that the stack is grafted onto, to measure against",
    )
    verb.add_argument(
        "--restore",
        action="store_true",
        help="with --onsite: put the unedited files of the pinned wheels back",
    )


def index(verb: argparse.ArgumentParser) -> None:
    """Add what names an index and whom to believe about it."""
    verb.add_argument(
        "--index",
        default="",
        metavar="URL|FOLDER",
        help="the index (default: SPARKWRIGHT_RELEASES, `releases` in the user's configuration, "
        "or the one this program came from)",
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
        help="the address that the manifest was signed for, where --index is a copy",
    )


def doctor(verb: argparse.ArgumentParser) -> None:
    """Add what ``doctor`` needs to look into an environment."""
    verb.add_argument(
        "--into",
        type=Path,
        metavar="VENV",
        help="say whether something broke what is installed in this environment",
    )
    verb.add_argument(
        "--deep",
        action="store_true",
        help="with --into: read every byte instead of looking at sizes and times",
    )
