"""The options of ``sparkwright runner``."""

from __future__ import annotations

import argparse
from pathlib import Path

#: Action → what it does.
ACTIONS = {
    "plan": "print everything that setup would do here, as commands and files",
    "setup": "do it; what is done already is not done again",
    "check": "say what is not as set-up leaves it, tried as the jobs' user",
    "drain": "take no job any more, and wait for the one that runs; --end takes jobs again",
    "remove": "drain, and undo set-up; models stay",
    "once": "do one job (the unit runs this)",
    "clean": "end what a job left, and empty what it wrote to (the unit runs this)",
    "admit": "say whether a job may run here (GitHub's runner runs this, before its first step)",
    "egress": "renew the addresses that jobs may connect to (a timer runs this)",
    "lease": "be leased by the leader of a pair until it lets go (its ssh runs this)",
}
#: Actions that work on a checkout's ci/runner.yaml; the others read what set-up wrote.
REVIEWED = frozenset(("plan", "setup"))


def options(verb: argparse.ArgumentParser) -> None:
    """Add the action and its options."""
    verb.add_argument(
        "action",
        choices=tuple(ACTIONS),
        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()),
    )
    verb.add_argument(
        "--repository", default="", metavar="OWNER/NAME", help="plan, setup: whose jobs run here"
    )
    verb.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="plan, setup: of this machine (default: its host name)",
    )
    verb.add_argument(
        "--labels",
        default="",
        metavar="LABEL,…",
        help="plan, setup: of ci/runner.yaml (default: all that are true of this machine)",
    )
    verb.add_argument(
        "--partner",
        default="",
        metavar="NAME=ADDRESS",
        help="plan, setup: the Spark that this one leases for two nodes",
    )
    verb.add_argument(
        "--leader",
        default="",
        metavar="NAME",
        help="plan, setup, lease: the Spark that may lease this one",
    )
    verb.add_argument(
        "--leader-key", type=Path, metavar="FILE", help="plan, setup: its public ssh key"
    )
    verb.add_argument(
        "--sysroot",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="the root of the machine (default: of this one)",
    )
    verb.add_argument(
        "--config",
        default="/etc/sparkwright",
        metavar="DIR",
        help="where set-up wrote its settings",
    )
    verb.add_argument(
        "--workflows", type=Path, metavar="DIR", help="check: look at these workflows, too"
    )
    verb.add_argument(
        "--patience",
        type=float,
        default=2,
        metavar="MINUTES",
        help="drain, remove: wait for a job (default: 2)",
    )
    verb.add_argument("--end", action="store_true", help="drain: take jobs again")
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="setup, remove: print what would be done, and change nothing",
    )
    verb.add_argument("--yes", action="store_true", help="setup, remove: change this machine")
