"""``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to its bytes."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkwright.audit import wheel
from sparkwright.bench.server import wheel_identity
from sparkwright.builder import pipeline
from sparkwright.cli import bench, options
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.core import ladder, report, verdict_file
from sparkwright.gates.core.builder import GateBuilder
from sparkwright.gates.core.ladder import GATES, machine_facts
from sparkwright.gates.core.options import GateOptions
from sparkwright.gates.core.verdict_file import VerdictFile
from sparkwright.release import content
from sparkwright.release.errors import TrustError


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``gate``."""
    parser = parsers["gate"]
    parser.set_defaults(run=gate)
    bench.add_measuring(parser)
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
                console.note(f"throughput: {bench.keep_result(context, builder.throughput)}")
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
    run = functools.partial(
        ladder.climb,
        [builder.gate(name) for name in names],
        stack=context.project.stack,
        # The verdicts are about the wheel together with the packages that it is served with.
        host={**facts, **(content.facts(wheel_identity.site_packages(python)) if python else {})},
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
