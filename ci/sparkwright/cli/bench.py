"""``sparkwright bench``: measurements of a served model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.cli import options
from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.gates.errors import GateError
from sparkwright.gates.load import benchy, client, order, vllmrs
from sparkwright.gates.recipes import recipe as recipes
from sparkwright.gates.throughput import claims
from sparkwright.gates.throughput.answer import Answer
from sparkwright.gates.throughput.question import Environment, Question
from sparkwright.gates.throughput.records import Kind, Result
from sparkwright.release.report import terminal

#: Load generator → the function that obtains it.
GENERATORS: Mapping[str, Callable[[RunContext], order.Generator]] = {
    "vllm-rs": vllmrs.obtain,
    "llama-benchy": benchy.obtain,
    "own": lambda _: client.Own(),
}
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``bench``."""
    parser = parsers["bench"]
    parser.set_defaults(run=bench)
    add_measuring(parser)
    add = parser.add_argument
    add(
        "--recipe",
        default="",
        metavar="NAME",
        help="recipe of the model (ci/recipes)",
    )
    add(
        "--published",
        action="store_true",
        help="measure the published figures of the recipe, and fail if they are not reached",
    )
    add("--wheel", type=Path, metavar="WHEEL", help="the wheel that is installed there")
    add(
        "--launches",
        type=options.number(int, 1, 1000),
        default=0,
        metavar="N",
        help="launches of the server; each is one sample (default: 5)",
    )
    add(
        "--generator",
        choices=tuple(GENERATORS),
        default="vllm-rs",
        help="load generator (default: vllm-rs)",
    )
    add(
        "--calibrate",
        type=options.number(int, 1, 1000),
        default=0,
        metavar="N",
        help="measure N pairs of the same wheel, to calibrate the gate of this machine",
    )


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench` and `gate`: the server, the workloads and the output folder."""
    options.add_server_arguments(parser)
    add = parser.add_argument
    add(
        "--serve",
        type=Path,
        metavar="DIR",
        help="serve the model in this folder from that environment",
    )
    add(
        "--python",
        type=Path,
        metavar="FILE",
        help="Python of the environment that the wheel is installed in",
    )
    add(
        "--model",
        default="",
        metavar="NAME",
        help="name under which the model is served (default: its own)",
    )
    add(
        "--server",
        default="",
        metavar="URL",
        help="a running server, instead of --serve",
    )
    add("--output", type=Path, metavar="DIR", help="folder for the results (default: dist)")
    add(
        "--workload",
        action="append",
        default=[],
        metavar="NAME",
        help="workload or cell of workloads.yaml; may be repeated",
    )
    add(
        "--texts",
        type=Path,
        metavar="FILE",
        help="file of real prompts, for the workloads that need them",
    )
    add(
        "--at-once",
        action="store_true",
        help="keep both servers running at the same time (small models)",
    )
    add(
        "--fresh",
        action="store_true",
        help="start again, even if an interrupted measurement could be continued",
    )
    add(
        "--preheat",
        type=float,
        metavar="SECONDS",
        help="load before the measurement (default: see ci/gates/machine.yaml)",
    )


def question(arguments: argparse.Namespace, recipe: recipes.Recipe | None) -> Question:
    """
    Return the question about one environment or server.

    Raises:
        UsageError: The arguments do not go together.
    """
    if bool(arguments.serve) != bool(arguments.python):
        raise UsageError(
            "usage",
            "--serve and --python belong together.",
            todo="Give both --serve DIR and --python FILE.",
        )
    kind: Kind = "verify" if arguments.published else "bench"
    candidate = Environment(arguments.python, arguments.wheel) if arguments.python else None
    return Question(
        "calibration" if arguments.calibrate else kind,
        candidate,
        candidate if arguments.calibrate else None,
        arguments.server,
        arguments.serve,
        arguments.model,
        recipe,
        tuple(arguments.flag),
        dict(arguments.variable),
        tuple(arguments.workload),
        arguments.texts,
        "both" if arguments.at_once else "turns",
        arguments.calibrate or arguments.launches or (1 if arguments.server else 0),
        arguments.fresh,
        arguments.preheat,
    )


def keep(context: RunContext, result: Result) -> Path:
    """Write *result* to the output folder, and return the file."""
    name = result.candidate.wheel.removesuffix(".whl") or result.recipe or result.model
    kind = "throughput" if result.kind == "gate" else result.kind
    path = context.output / f"{_UNSAFE.sub('-', name).strip('-.') or 'result'}.{kind}.json"
    data = msgspec.json.format(msgspec.json.encode(result), indent=1)
    return context.store.write(path, data + b"\n")


def bench(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Measure, show tables and plots, and keep the result; with ``--published``, compare."""
    context = options.checkout(arguments)
    if arguments.calibrate and arguments.server:
        raise UsageError(
            "usage",
            "A calibration has to start servers itself.",
            todo="Name an environment with --serve and --python.",
        )
    if arguments.published and (arguments.calibrate or arguments.server or not arguments.recipe):
        raise UsageError("usage", "--published needs --recipe, and an environment to serve it.")
    recipe = recipes.load(context.project.root, arguments.recipe) if arguments.recipe else None
    query = question(arguments, recipe)
    published = recipe if arguments.published else None
    if published:
        query = claims.only(query, published)
    answer = Answer(context, query, GENERATORS[arguments.generator](context))
    result = answer.result()
    terminal.show(result)
    path = keep(context, result)
    console.note(f"result: {path}")
    document = {"result": result, "file": str(path)}
    console.document(document)
    if result.state == "invalid":
        what = f"{result.model} was not measured to the end."
        raise GateError("measurement-invalid", what, details=[result.says])
    if published:
        held = claims.held(published, result, answer.policy.claim)
        console.document({**document, "claims": held})
        _compare(published.name, held)
    return None


def _compare(recipe: str, held: tuple[claims.Held, ...]) -> None:
    """
    Show the published figures beside the measured ones.

    Raises:
        gate-not-run: No figure is published.
        gate-failed: A figure is not reached.
        gate-inconclusive: A figure cannot be decided.
    """
    rows = [
        [claim.cell, claim.metric, claim.published, claim.measured, claim.agreement, claim.source]
        for claim in held
    ]
    columns = ["cell", "metric", "published", "here", "", "source"]
    console.table(f"{recipe}: published by others", columns, rows, result=True)
    if not held:
        raise GateError("gate-not-run", f"No figure of {recipe} was published to compare with.")
    for agreement, state, reference in (
        ("slower", "not reached here", "gate-failed"),
        ("open", "undecided here", "gate-inconclusive"),
    ):
        worse = [f"{claim.cell}: {claim.says}" for claim in held if claim.agreement == agreement]
        if worse:
            what = f"{len(worse)} of {len(held)} published figures are {state}."
            raise GateError(reference, what, details=worse)
