"""``sparkwright night``: write down what came of a run, whatever it was."""

from __future__ import annotations

import argparse
import os
import re

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import StandaloneContext
from sparkwright.operate.site import night
from sparkwright.operate.site.records import Night, Stage
from sparkwright.release.manifest import times


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """Write the record, and show it."""
    made = _night(arguments)
    path = night.write(arguments.at, made)
    rows = [[one.name, one.state, one.reference, one.says[:80]] for one in made.stages]
    console.table(
        f"{made.workflow} of {made.day}: {made.state}",
        ["stage", "state", "reference", ""],
        rows,
        result=True,
    )
    for one in made.files:
        if not one.sha256:
            console.warn(f"{one.name}: {one.says}")
    console.result(str(path))
    console.document({"file": str(path), "state": made.state, "night": msgspec.to_builtins(made)})
    return 0


def _night(arguments: argparse.Namespace) -> Night:
    files, measured = night.files(arguments.file)
    given = {
        "workflow": arguments.workflow or os.environ.get("GITHUB_WORKFLOW", ""),
        "run": arguments.run or _run(),
        "stack": arguments.stack or "",
        "ended": arguments.ended or times.now(),
        "stages": msgspec.to_builtins(_stages(arguments)),
        "url": arguments.url or _url(),
        "commit": arguments.commit or os.environ.get("GITHUB_SHA", ""),
        "began": arguments.began,
        "files": msgspec.to_builtins(files),
        "measured": msgspec.to_builtins(measured),
    }
    for name in ("workflow", "run", "stack"):
        if not given[name]:
            raise UsageError(
                "usage", f"Nothing says which {name} this is about; name it with --{name}."
            )
    try:
        return msgspec.convert(given, Night)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError("usage", "That is no record of a night.", details=[str(error)]) from error


def _stages(arguments: argparse.Namespace) -> list[Stage]:
    """
    Return the stages in the order of their first mention on each side; a document says more than a
    word.
    """
    told = [night.stage(text) for text in arguments.stage]
    documents = {one.name: one for one in map(night.documented, arguments.document)}
    if len({one.name for one in told}) < len(told) or len(documents) < len(arguments.document):
        raise UsageError("usage", "A stage is named twice.")
    merged = [night.together(one, documents.pop(one.name, None)) for one in told]
    return [*merged, *documents.values()]


def _run() -> str:
    run, attempt = os.environ.get("GITHUB_RUN_ID", ""), os.environ.get("GITHUB_RUN_ATTEMPT", "1")
    return f"{run}.{attempt}" if run and attempt not in ("", "1") else run


def _url() -> str:
    server, repository, run = (
        os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY", "RUN_ID")
    )
    return (
        f"{server}/{repository}/actions/runs/{run}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and server and run
        else ""
    )
