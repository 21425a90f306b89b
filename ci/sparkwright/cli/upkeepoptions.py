"""
Options of the verbs that keep a stack up to date: pick, bisect, drift, rebase, export and bump.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add them."""
    _pick(made["pick"])
    _bisect(made["bisect"])
    _drift(made["drift"])
    _bump(made["bump"])
    made["rebase"].add_argument(
        "--onto",
        default="",
        metavar="NAME",
        help="a release, branch, tag or commit (default: the locked source)",
    )
    made["rebase"].add_argument(
        "--abort", action="store_true", help="remove the worktree and what was done in it"
    )
    made["export"].add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="PATCH",
        help="this patch may go; may be repeated",
    )
    made["export"].add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where a file is not in the exported form",
    )


def _pick(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("pulls", nargs="+", metavar="FORK#NUMBER", help="the pull request")
    verb.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="why it is carried or watched (needed for a new record)",
    )
    verb.add_argument(
        "--drop-when",
        default="",
        metavar="TEXT",
        help="what has to be true for it to go (needed for a new record)",
    )
    verb.add_argument("--carry", action="store_true", help="the stack carries it from now on")
    verb.add_argument("--drop", action="store_true", help="the stack no longer carries it")
    verb.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATH=REASON",
        help="a file that the stack leaves out of it; may be repeated",
    )
    verb.add_argument(
        "--accept", action="store_true", help="pin the new state of a pull request that moved"
    )


def _bisect(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "patch",
        nargs="?",
        default="",
        metavar="PATCH",
        help="name of a patch file, or number of a pull request",
    )
    verb.add_argument(
        "--from",
        dest="start",
        default="",
        metavar="NAME",
        help="where to begin (default: the pick's own base)",
    )
    verb.add_argument(
        "--to",
        dest="end",
        default="",
        metavar="NAME",
        help="where to end (default: upstream's newest)",
    )
    verb.add_argument(
        "--releases",
        action="store_true",
        help="search releases of the package index instead of commits",
    )
    verb.add_argument(
        "--alone",
        action="store_true",
        help="without the patches before it; with --run, upstream without any",
    )
    verb.add_argument(
        "--over",
        choices=("commits", "patches"),
        default="commits",
        help="with --run: what may have changed the answer",
    )
    verb.add_argument(
        "--build", action="store_true", help="with --run: build the wheel of each state, too"
    )
    verb.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="COMMAND",
        help="search by the exit status of this command and its arguments, which come last: 0 "
        "good, 125 no answer, else bad",
    )


def _drift(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--ideas",
        action="store_true",
        help="which release took each patch idea of cherry_picks/ideas.yaml",
    )
    verb.add_argument(
        "--releases",
        action="store_true",
        help="every release after the locked one (default: the newest)",
    )
    verb.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="NAME",
        help="this release, branch, tag or commit; may be repeated",
    )
    verb.add_argument(
        "--issue",
        default="",
        metavar="OWNER/REPO",
        help="keep one issue of this repository about it",
    )
    verb.add_argument(
        "--author",
        default="github-actions[bot]",
        metavar="LOGIN",
        help="with --issue: whom the token stands for (default: a workflow)",
    )
    verb.add_argument(
        "--given",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="tell of this earlier `drift --json`; may be repeated",
    )


def _bump(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--to", required=True, metavar="VERSION", help="the release, or `newest`")
    verb.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="PATCH",
        help="leave this patch or pick (#NUMBER) out; may be repeated",
    )
    verb.add_argument(
        "--pull",
        default="",
        metavar="OWNER/REPO",
        help="offer the result as a pull request of this repository",
    )
    verb.add_argument(
        "--base",
        default="main",
        metavar="BRANCH",
        help="with --pull: the branch that it is made for (default: main)",
    )
