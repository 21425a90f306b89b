"""
``sparkwright bench``: the machinery of the throughput gate for people who want numbers, or who
calibrate a machine for the gate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import msgspec

from sparkwright.cli import measuring
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.errors import GateError
from sparkwright.gates.load import benchy, vllmrs
from sparkwright.gates.load.client import Own
from sparkwright.gates.load.order import Generator
from sparkwright.gates.recipes import recipe as recipes
from sparkwright.gates.throughput.answer import Answer
from sparkwright.gates.throughput.records import Kind
from sparkwright.release.report import terminal

#: The generators by name, each with what obtains it.
GENERATORS: Mapping[str, Callable[[RunContext], Generator]] = {
    "vllm-rs": vllmrs.obtain,
    "llama-benchy": benchy.obtain,
    "own": lambda _: Own(),
}


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Measure, print tables and plots, and keep the result."""
    if arguments.calibrate and arguments.server:
        raise UsageError(
            "usage",
            "A calibration starts servers again and again.",
            todo="Name an environment with --serve and --python.",
        )
    recipe = recipes.load(session.project.root, arguments.recipe) if arguments.recipe else None
    kind: Kind = "calibration" if arguments.calibrate else "bench"
    blocks = arguments.calibrate or arguments.launches or (1 if arguments.server else 0)
    asked = measuring.question(kind, arguments, recipe, url=arguments.server, blocks=blocks)
    result = Answer(session, asked, GENERATORS[arguments.generator](session)).result()
    terminal.show(result)
    path = measuring.keep(session, result)
    console.note(f"result: {path}")
    console.document({"result": msgspec.to_builtins(result), "file": str(path)})
    if result.state == "invalid":
        raise GateError(
            "measurement-invalid",
            f"{result.model} was not measured to the end.",
            details=[result.says],
        )
    return 0
