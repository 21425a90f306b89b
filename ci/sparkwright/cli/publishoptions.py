"""
The options of the verbs that change an index: publish, promote, yank, rollback --at, retain,
refresh.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def _at(verb: argparse.ArgumentParser, *, required: bool = True) -> None:
    verb.add_argument(
        "--at",
        type=Path,
        required=required,
        metavar="FOLDER",
        help="the index: the folder that is served",
    )
    verb.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the private key that signs (made by `sparkwright key`)",
    )
    verb.add_argument(
        "--identity",
        action="store_true",
        help="sign by Sigstore, as the identity that this machine has (a workflow's)",
    )
    verb.add_argument(
        "--predecessor",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="public key that signed the index until now, where keys change; may be repeated",
    )
    verb.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="why; it stands in the manifest, and people see it",
    )


def publish(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``publish``."""
    _at(verb)
    verb.add_argument(
        "wheels",
        nargs="+",
        type=Path,
        metavar="WHEEL",
        help="the wheels of one release; their verdicts lie beside them",
    )
    verb.add_argument(
        "--channel",
        choices=("verified", "candidate"),
        help="candidate takes what is not proved, labelled (default: verified or nothing)",
    )
    verb.add_argument(
        "--verdicts",
        type=Path,
        metavar="DIR",
        help="where the verdicts lie (default: beside each wheel)",
    )
    verb.add_argument(
        "--files",
        default="folder",
        metavar="folder|github:OWNER/REPO",
        help="where wheels are kept (default: folder, that of the index)",
    )
    verb.add_argument(
        "--url",
        default="",
        metavar="URL",
        help="where a new index will be served (default: `url` in ci/release.yaml)",
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="decide, say what would be published, and write nothing",
    )


def promote(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``promote``."""
    _at(verb)
    verb.add_argument("release", metavar="RELEASE", help="name of the candidate (2026.11.3)")
    verb.add_argument(
        "--verdicts",
        type=Path,
        required=True,
        metavar="DIR",
        help="the new verdicts about its wheels",
    )


def yank(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``yank``."""
    _at(verb)
    verb.add_argument("release", metavar="RELEASE", help="name of the release (2026.11.3)")


def rollback(verb: argparse.ArgumentParser) -> None:
    """Add the publisher's half of ``rollback``."""
    _at(verb, required=False)
    verb.add_argument(
        "--channel",
        choices=("verified", "candidate"),
        default="verified",
        help="with --at: which channel goes back",
    )


def retain(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``retain``."""
    _at(verb)
    verb.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="candidates of each stack that stay (default: ci/release.yaml)",
    )
    verb.add_argument(
        "--verified", action="store_true", help="remove old releases of verified, too"
    )


def refresh(verb: argparse.ArgumentParser) -> None:
    """Add the options of ``refresh``."""
    _at(verb)


def options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options of all of them, by verb."""
    for verb, add in {
        "publish": publish,
        "promote": promote,
        "yank": yank,
        "rollback": rollback,
        "retain": retain,
        "refresh": refresh,
    }.items():
        add(made[verb])
