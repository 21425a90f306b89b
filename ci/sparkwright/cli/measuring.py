"""
What ``gate``, ``bench`` and ``verify`` share: a question from the command line, and where its
result goes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec

from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.recipes.recipe import Recipe
from sparkwright.gates.throughput.question import Environment, Question
from sparkwright.gates.throughput.records import Kind, Result

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def pair(text: str) -> tuple[str, str]:
    """
    Return name and value of ``NAME=VALUE``.

    Raises:
        UsageError: It is not of that form.
    """
    name, _, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or "=" not in text:
        raise UsageError("usage", f"--variable {text!r} is not of the form NAME=VALUE.")
    return name, value


def question(
    kind: Kind,
    arguments: argparse.Namespace,
    recipe: Recipe | None,
    *,
    url: str = "",
    blocks: int = 0,
) -> Question:
    """
    Return what the command line asks of one environment or server; a calibration holds the
    environment against itself.

    Raises:
        UsageError: What it names does not go together.
    """
    if bool(arguments.serve) != bool(arguments.python):
        raise UsageError(
            "usage",
            "A model is served from an environment.",
            todo="Give both --serve DIR and --python FILE.",
        )
    one = Environment(arguments.python, arguments.wheel) if arguments.python else None
    return Question(
        kind,
        one,
        one if kind == "calibration" else None,
        url,
        arguments.serve,
        arguments.model,
        recipe,
        tuple(arguments.flag),
        dict(map(pair, arguments.variable)),
        tuple(arguments.workload),
        arguments.texts,
        "both" if arguments.at_once else "turns",
        blocks,
        arguments.fresh,
        arguments.preheat,
    )


def keep(session: RunContext, result: Result) -> Path:
    """Write *result* beside where wheels go, and return the file."""
    about = result.candidate.wheel.removesuffix(".whl") or result.recipe or result.model
    kind = "throughput" if result.kind == "gate" else result.kind
    path = session.output / f"{_UNSAFE.sub('-', about).strip('-.') or 'result'}.{kind}.json"
    session.output.mkdir(parents=True, exist_ok=True)
    with session.store.replacing(path) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path
