"""
``sparkwright bench`` and ``gate``: measurements of a served model, and verdicts about a wheel and
the server that runs it, bound to the wheel's bytes.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit import wheel
from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import pipeline
from sparkwright.cli import options, quick_bench
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import ladder, report, verdict_file
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.errors import GateError
from sparkwright.gates.core.ladder import GATES, machine_facts
from sparkwright.gates.core.options import GateOptions
from sparkwright.gates.core.verdict_file import VerdictFile
from sparkwright.gates.throughput import published_figures
from sparkwright.gates.throughput.experiment import Environment, Experiment, ExperimentSpec
from sparkwright.gates.throughput.records import Kind, Result
from sparkwright.release import wheel_content
from sparkwright.release.errors import TrustError
from sparkwright.release.report import terminal

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``bench`` and ``gate``."""
    _add_bench(parsers["bench"])
    _add_gate(parsers["gate"])


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bench)
    _add_measuring(parser)
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
        "--calibrate",
        type=options.number(int, 1, 1000),
        default=0,
        metavar="N",
        help="measure N pairs of the same wheel, to calibrate the gate of this machine",
    )
    add(
        "--quick",
        action="store_true",
        help="only a quick look: one launch, the first cell, two minutes; not a gate",
    )


def _add_measuring(parser: argparse.ArgumentParser) -> None:
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


def _add_gate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=gate)
    _add_measuring(parser)
    add = parser.add_argument
    add(
        "wheel", nargs="?", type=Path, metavar="WHEEL", help="the wheel (default: the last build's)"
    )
    add(
        "--only",
        action="append",
        default=[],
        choices=tuple(GATES),
        help="only this gate; may be repeated (default: all)",
    )
    add("--keep-going", action="store_true", help="continue after a failure")
    add("--server-log", type=Path, metavar="FILE", help="log file of that server")
    add("--model-folder", type=Path, metavar="DIR", help="folder of the model that --server serves")
    add(
        "--recipe",
        default="",
        metavar="NAME",
        help="recipe of the model (ci/recipes)",
    )
    add(
        "--profile",
        default="default",
        metavar="NAME",
        help="kind of model for G4 (ci/gates/generation.yaml)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="profile of the server, by torch's profiler",
    )
    add(
        "--against",
        default="",
        metavar="URL|DIR",
        help="reference of G5 and G6: a server, or a folder written by --record",
    )
    add("--task", default="gsm8k", metavar="NAME", help="task of G6 (default: gsm8k)")
    add("--baseline", type=Path, metavar="WHEEL", help="the wheel that G8 compares with")
    add(
        "--baseline-python",
        type=Path,
        metavar="FILE",
        help="Python of the environment that the baseline is installed in",
    )
    add(
        "--reserve",
        type=int,
        default=0,
        metavar="MB",
        help="stop our server when less memory than this is available",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="only write this server's answers, as a reference for --against",
    )


def keep_result(context: RunContext, result: Result) -> Path:
    """Write *result* to the output folder, and return the file."""
    name = result.candidate.wheel.removesuffix(".whl") or result.recipe or result.model
    kind = "throughput" if result.kind == "gate" else result.kind
    path = context.output / f"{_UNSAFE.sub('-', name).strip('-.') or 'result'}.{kind}.json"
    data = msgspec.json.format(msgspec.json.encode(result), indent=1)
    return context.store.write(path, data + b"\n")


def bench(arguments: argparse.Namespace) -> None:
    """Measure, show tables and plots, and keep the result; with ``--published``, compare."""
    calibrate, published = arguments.calibrate, arguments.published
    options.refuse(
        (
            bool(arguments.serve) != bool(arguments.python),
            "--serve DIR and --python FILE belong together.",
        ),
        (calibrate and arguments.server, "--calibrate needs --serve and --python, not --server."),
        (
            published and (calibrate or arguments.server or not arguments.recipe),
            "--published needs --recipe, and an environment to serve it.",
        ),
        (
            arguments.quick and (calibrate or published or arguments.launches),
            "--quick is one launch, without --calibrate, --published and --launches.",
        ),
    )
    context = options.checkout(arguments)
    recipe = recipes.load(context.project.root, arguments.recipe) if arguments.recipe else None
    kind: Kind = "calibration" if calibrate else "verify" if published else "bench"
    candidate = Environment(arguments.python, arguments.wheel) if arguments.python else None
    query = ExperimentSpec(
        kind,
        candidate,
        candidate if calibrate else None,
        arguments.server,
        arguments.serve,
        arguments.model,
        recipe,
        tuple(arguments.flag),
        dict(arguments.variable),
        tuple(arguments.workload),
        arguments.texts,
        "concurrent" if arguments.at_once else "sequential",
        calibrate or arguments.launches or (1 if arguments.server else 0),
        arguments.fresh,
        arguments.preheat,
    )
    if arguments.quick:
        quick_bench.run(context, query)
        return
    spec = published_figures.only(query, recipe) if published and recipe else query
    answer = Experiment(context, spec)
    result = answer.result()
    terminal.show(result)
    path = keep_result(context, result)
    console.note(f"result: {path}")
    document = {"result": result, "file": str(path)}
    console.document(document)
    if result.state == "invalid":
        what = f"{result.model} was not measured to the end."
        raise GateError("measurement-invalid", what, details=[result.says])
    if published and recipe:
        held = published_figures.held(recipe, result, answer.policy.published_tolerance)
        console.document({**document, "claims": held})
        _compare(recipe.name, held)


def _compare(recipe: str, held: tuple[published_figures.FigureComparison, ...]) -> None:
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


def gate(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run the gates, show and store their verdicts; raise unless all pass."""
    options.refuse(
        (arguments.serve and not arguments.python, "--serve DIR needs --python FILE."),
        (arguments.serve and arguments.server, "Give either --serve or --server."),
        (arguments.record and not arguments.wheel, "--record DIR needs the WHEEL that serves."),
    )
    context, facts = options.checkout(arguments), machine_facts()
    named = {name: getattr(arguments, name) for name in GateOptions.__struct_fields__}
    named = {name: tuple(v) if isinstance(v, list) else v for name, v in named.items()}
    gate_options = GateOptions(**{**named, "wheel": arguments.wheel or _last_wheel(context)})
    names = [name for name in GATES if not arguments.only or name in arguments.only]
    with GateBuilder(context, gate_options, facts) as builder:
        if arguments.record:
            return {"recorded": [str(path) for path in builder.record(arguments.record)]}
        try:
            result = climb(context, gate_options, builder, names, facts, arguments.keep_going)
        finally:
            # Its journal has ended, so it is kept even if the verdicts cannot be stored.
            if builder.throughput:
                console.note(f"throughput: {keep_result(context, builder.throughput)}")
    report.show(result)
    console.document({"ladder": verdict_file.document(result)})
    report.raise_for_state(result)
    return None


def climb(
    context: RunContext,
    gate_options: GateOptions,
    builder: GateBuilder,
    names: Sequence[str],
    facts: Mapping[str, str],
    keep_going: bool = False,
) -> ladder.Ladder:
    """
    Run the gates *names* on the machine of *facts*, and store the verdicts after each.

    Raises:
        evidence-invalid: The wheel's file of verdicts has other contents, or is of another stack.
    """
    path, python = gate_options.wheel, gate_options.python
    site = wheel_identity.site_packages(python) if python else None
    run = functools.partial(
        ladder.climb,
        [builder.gate(name) for name in names],
        stack=context.project.stack,
        # The verdicts are about the wheel together with the packages that it is served with.
        host={**facts, **(wheel_content.of_environment(site) if site else {})},
        keep_going=keep_going,
    )
    if path is None:
        return run()
    subject = wheel.read_subject(path)
    failure = functools.partial(TrustError, "evidence-invalid")
    stored = VerdictFile(context.store, context.output, subject, context.project.stack, failure)
    attempt = stored.begin(names, gate_options.recipe)
    console.note(f"this is attempt {attempt} of this wheel ({stored.attempts})")
    result = run(
        wheel=subject, attempt=attempt, device_code=builder.device_code, store=stored.store
    )
    console.note(f"verdicts: {stored.path}")
    return result


def _last_wheel(context: RunContext) -> Path | None:
    """Return the last build's wheel of the first fork that is grafted, if it still exists."""
    grafts = (name for name in context.forks if context.project.fork(name).build == "graft")
    return next(filter(None, (pipeline.last_wheel(context, name) for name in grafts)), None)
