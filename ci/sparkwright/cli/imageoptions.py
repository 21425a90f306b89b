"""The options of ``image``."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkwright.cli import clientoptions


def options(verb: argparse.ArgumentParser) -> None:
    """Add them."""
    verb.add_argument(
        "release",
        nargs="?",
        default="",
        metavar="RELEASE",
        help="full name of a release (default: the newest of its channel)",
    )
    clientoptions.index(verb)
    verb.add_argument(
        "--channel",
        choices=("verified", "candidate"),
        default="verified",
        help="which releases (default: those whose every gate passed)",
    )
    verb.add_argument(
        "--platform",
        choices=("linux/arm64", "linux/amd64"),
        default="linux/arm64",
        help="what the image is for (default: linux/arm64)",
    )
    verb.add_argument(
        "--base",
        default="",
        metavar="IMAGE",
        help="the base, as NAME@sha256:… or an image's id (default: `image` in environment.yaml)",
    )
    verb.add_argument(
        "--tag",
        default="",
        metavar="NAME[:TAG]",
        help="a further name for the image in this machine's engine",
    )
    verb.add_argument(
        "--push",
        default="",
        metavar="REPOSITORY",
        help="push it there as RELEASE-PLATFORM, and record its digest",
    )
    verb.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="with --push: where the record of the digest goes (default: dist)",
    )
    verb.add_argument(
        "--at",
        type=Path,
        metavar="FOLDER",
        help="with --push: sign the record, too, and put it into this index",
    )
    verb.add_argument(
        "--signing-key", type=Path, metavar="FILE", help="with --at: the private key that signs"
    )
    verb.add_argument(
        "--identity",
        action="store_true",
        help="with --at: sign by Sigstore, as the identity that this machine has",
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="check the release, say what would be built, and ask no engine",
    )
