"""The options of ``site`` and ``night``."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path

from sparkwright.cli import clientoptions


def options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add to both verbs their own."""
    site(made["site"])
    night(made["night"])


def site(verb: argparse.ArgumentParser) -> None:
    """Add what the site is made from, and where it goes."""
    clientoptions.index(verb)
    verb.add_argument(
        "--nights", type=Path, metavar="FOLDER", help="records that `sparkwright night` wrote"
    )
    verb.add_argument(
        "--drift",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what `sparkwright drift --json` printed; may be repeated",
    )
    verb.add_argument(
        "--status",
        type=Path,
        metavar="FILE",
        help="what `sparkwright status --json` printed (default: asked here)",
    )
    verb.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the site goes; pages that did not change stay",
    )
    verb.add_argument(
        "--link",
        default="",
        metavar="URL",
        help="where readers find the index (default: as its manifest says)",
    )
    verb.add_argument(
        "--day",
        type=_day,
        default="",
        metavar="YYYY-MM-DD",
        help="the day of which the site tells (default: today, UTC)",
    )
    verb.add_argument(
        "--strict",
        action="store_true",
        help="fail where a record is damaged or missing; the site is made all the same",
    )


def night(verb: argparse.ArgumentParser) -> None:
    """Add what a run tells of itself; most of it is known under GitHub Actions."""
    verb.add_argument(
        "--at",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where the records of nights are kept",
    )
    verb.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="NAME=OUTCOME[:REFERENCE]",
        help="what came of a stage: a state, or success, failure, cancelled, skipped; may be "
        "repeated",
    )
    verb.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the same, told by what the verb printed with --json; outweighs a --stage of that "
        "name",
    )
    verb.add_argument(
        "--file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="verdicts or a measurement; may be repeated",
    )
    verb.add_argument(
        "--workflow",
        default="",
        metavar="NAME",
        help="which workflow ran (default: GITHUB_WORKFLOW)",
    )
    verb.add_argument(
        "--run",
        default="",
        metavar="ID",
        help="number of the run (default: GITHUB_RUN_ID and its attempt)",
    )
    verb.add_argument(
        "--url",
        default="",
        metavar="URL",
        help="where people see the run (default: its page on GitHub)",
    )
    verb.add_argument(
        "--commit", default="", metavar="COMMIT", help="of this repository (default: GITHUB_SHA)"
    )
    verb.add_argument(
        "--began", default="", metavar="TIME", help="when it began, as `date -u +%%FT%%TZ` says it"
    )
    verb.add_argument("--ended", default="", metavar="TIME", help="when it ended (default: now)")


def _day(text: str) -> str:
    try:
        # The default, which argparse converts like a text of the command line.
        return datetime.date.fromisoformat(text).isoformat() if text else ""
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day like 2026-11-22") from None
