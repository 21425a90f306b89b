"""``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to its bytes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit import wheel
from sparkwright.builder import pipeline
from sparkwright.cli import bench, options
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates import host, ladder, recording, show
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ladder import RUNGS
from sparkwright.gates.ready import Ready
from sparkwright.gates.server import installed
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
        "--rung",
        action="append",
        default=[],
        choices=tuple(RUNGS),
        help="only this gate; may be repeated (default: all)",
    )
    add("--keep-going", action="store_true", help="continue after a failure")
    add("--server-log", type=Path, metavar="FILE", help="log file of that server")
    add("--model-folder", type=Path, metavar="DIR", help="folder of the model that --server serves")
    add(
        "--recipe",
        default="",
        metavar="NAME",
        help="recipe of ci/recipes, or for G3 an entry of contract.yaml",
    )
    add(
        "--profile",
        default="default",
        metavar="NAME",
        help="kind of model for G4 (ci/gates/words.yaml)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="profile of the server, by torch's profiler or nsys",
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
    """Run the gates, show their verdicts, add them to the wheel's file; raise unless all pass."""
    context, facts = options.checkout(arguments), host.facts()
    inputs = _inputs(context, arguments)
    if inputs.wheel and not arguments.record:
        # Refuse a damaged file before hours are spent on measuring.
        _stored(verdicts_path(context, inputs.wheel.name))
    with Ready(context, inputs, facts) as ready:
        if arguments.record:
            recorded = recording.record(context, ready, inputs, arguments.record)
            return {"recorded": [str(path) for path in recorded]}
        names = [name for name in RUNGS if not arguments.rung or name in arguments.rung]
        result = climb(context, inputs, ready, names, facts, keep_going=arguments.keep_going)
    show.show(result)
    if ready.throughput:
        console.note(f"throughput: {bench.keep(context, ready.throughput)}")
    if result.wheel:
        console.note(f"verdicts: {verdicts_path(context, result.wheel.file)}")
    console.document({"ladder": ladder.document(result)})
    show.raise_for_state(result)
    return None


def climb(
    context: RunContext,
    inputs: Inputs,
    ready: Ready,
    names: Sequence[str],
    facts: Mapping[str, str],
    *,
    keep_going: bool = False,
) -> ladder.Ladder:
    """Run the gates *names* on the machine of *facts*, and store the verdicts after each."""
    # The verdicts are about the wheel together with the packages that it is served with.
    companions = content.facts(installed.places(inputs.python)[1]) if inputs.python else {}
    return ladder.climb(
        [ready.rung(name) for name in names],
        stack=context.project.stack,
        wheel=wheel.read_subject(inputs.wheel) if inputs.wheel else None,
        device_code=ready.device_code if "G0" in names else str,
        host={**facts, **companions},
        keep_going=keep_going,
        keep=lambda so_far: keep(context, so_far),
    )


def _inputs(context: RunContext, arguments: argparse.Namespace) -> Inputs:
    return Inputs(
        wheel=arguments.wheel or _last_wheel(context),
        python=arguments.python,
        serve=arguments.serve,
        flags=tuple(arguments.flag),
        variables=dict(arguments.variable),
        server=arguments.server,
        log=arguments.server_log,
        model=arguments.model,
        model_folder=arguments.model_folder,
        recipe=arguments.recipe,
        profile=arguments.profile,
        trace=arguments.trace,
        against=arguments.against,
        task=arguments.task,
        reserve=arguments.reserve,
        baseline=arguments.baseline,
        baseline_python=arguments.baseline_python,
        workloads=tuple(arguments.workload),
        texts=arguments.texts,
        at_once=arguments.at_once,
        fresh=arguments.fresh,
        preheat=arguments.preheat,
    )


def _last_wheel(context: RunContext) -> Path | None:
    """Return the last build's wheel of the first fork that is grafted, if it still exists."""
    grafts = (name for name in context.forks if context.project.fork(name).build == "graft")
    return next(filter(None, (pipeline.last_wheel(context, name) for name in grafts)), None)


def verdicts_path(context: RunContext, wheel: str) -> Path:
    """Return the file of the verdicts about *wheel*."""
    return context.output / f"{wheel.removesuffix('.whl')}.verdicts.json"


def keep(context: RunContext, result: ladder.Ladder) -> Path | None:
    """
    Add the verdicts to the file of the wheel, and return the file; None if no wheel was judged.

    Earlier verdicts about the same bytes stay unless *result* has newer ones. Verdicts about other
    bytes are replaced.

    Raises:
        evidence-invalid: The file has other contents, or verdicts for another stack.
    """
    if result.wheel is None:
        return None
    path = verdicts_path(context, result.wheel.file)
    with context.store.lock("verdicts"):
        stored = _stored(path)
        if stored and stored.wheel and stored.wheel.sha256 == result.wheel.sha256:
            if stored.stack != result.stack:
                raise TrustError(
                    "evidence-invalid",
                    f"{path.name} holds verdicts of this wheel for the stack {stored.stack}, and "
                    f"this run is for {result.stack}.",
                    todo=f"Move the file away, or run the gate with --stack {stored.stack}.",
                )
            result = ladder.merged(stored, result)
        elif stored:
            console.warn(f"{path.name} held verdicts of another wheel; they are replaced.")
        data = msgspec.json.format(msgspec.json.encode(ladder.document(result)), indent=1)
        return context.store.write(path, data + b"\n")


def _stored(path: Path) -> ladder.Ladder | None:
    """
    Return the verdicts at *path*; None if there is no file.

    Raises:
        evidence-invalid: The file has other contents.
    """
    try:
        return ladder.read(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.MsgspecError, RecursionError, OSError) as error:
        raise TrustError(
            "evidence-invalid",
            f"{path.name} is not a file of verdicts, so none can be added.",
            details=[str(error)],
            todo="Move it away, or restore the file that `sparkwright gate` wrote.",
        ) from error
