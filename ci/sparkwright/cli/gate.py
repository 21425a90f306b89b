"""``sparkwright gate``: verdicts about a wheel and the server that runs it, bound to its bytes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.audit import wheel_reader
from sparkwright.builder import pipeline
from sparkwright.cli import argtypes, bench, context, stages
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates import host, ladder, recording, show
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ladder import RUNGS, Ladder
from sparkwright.gates.ready import Ready
from sparkwright.gates.server import installed
from sparkwright.release import content
from sparkwright.release.errors import TrustError


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of ``gate``."""
    parser = parsers["gate"]
    parser.set_defaults(run=gate)
    bench.add_measuring(parser)
    argtypes.add_server_arguments(parser)
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
    add("--keep-going", action="store_true", help="go on after a failure")
    add(
        "--python",
        type=Path,
        metavar="FILE",
        help="interpreter of the environment that the wheel is installed in",
    )
    add("--serve", type=Path, metavar="DIR", help="serve the model in this folder from there")
    add(
        "--server",
        default="",
        metavar="URL",
        help="a server that runs already, in place of --serve",
    )
    add("--server-log", type=Path, metavar="FILE", help="what that server printed")
    add(
        "--model",
        default="",
        metavar="NAME",
        help="the name under which the model is served (default: its own)",
    )
    add("--model-folder", type=Path, metavar="DIR", help="files of the model that --server serves")
    add(
        "--recipe",
        default="",
        metavar="NAME",
        help="of ci/recipes, or what G3 expects of the log (contract.yaml)",
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
        help="a profile of the server (of torch's profiler, or nsys)",
    )
    add(
        "--against",
        default="",
        metavar="URL|DIR",
        help="reference of G5 and G6: its server, or a folder of --record",
    )
    add("--task", default="gsm8k", metavar="NAME", help="task of G6 (default: gsm8k)")
    add(
        "--minutes",
        type=float,
        default=0,
        metavar="N",
        help="length of G7 (default: see ci/gates/soak.yaml)",
    )
    add("--baseline", type=Path, metavar="WHEEL", help="the wheel that G8 compares with")
    add(
        "--baseline-python",
        type=Path,
        metavar="FILE",
        help="interpreter of the environment that it is installed in",
    )
    add(
        "--reserve",
        type=int,
        default=0,
        metavar="MB",
        help="end our server where less memory than this is left",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="judge nothing; write what this server says as a reference for --against",
    )
    add("--output", type=Path, metavar="DIR", help="where the verdicts are kept (default: dist)")


def gate(arguments: argparse.Namespace) -> int:
    """Run the gates, show their verdicts, add them to the wheel's; fail unless all pass."""
    session = context.checkout(arguments)
    facts = host.facts()
    inputs = _inputs(session, arguments)
    if inputs.wheel and not arguments.record:
        # A file that cannot be added to is refused before hours are spent on measuring.
        _stored(verdicts_path(session, inputs.wheel.name))
    with Ready(
        session,
        inputs,
        lambda path: stages.audited(session, path, stages.policy_kind(path)),
        facts,
    ) as ready:
        if arguments.record:
            recorded = recording.record(session, ready, inputs, arguments.record)
            console.document({"recorded": [str(path) for path in recorded]})
            return 0
        names = [name for name in RUNGS if not arguments.rung or name in arguments.rung]
        # The companions that the wheel is served with are part of what the verdicts are about.
        companions = content.facts(installed.places(inputs.python)[1]) if inputs.python else {}
        result = ladder.climb(
            [ready.rung(name) for name in names],
            stack=session.project.stack,
            wheel=wheel_reader.subject(inputs.wheel) if inputs.wheel else None,
            device_code=ready.device_code if "G0" in names else str,
            host={**facts, **companions},
            keep_going=arguments.keep_going,
            keep=lambda so_far: keep(session, so_far),
        )
        measured = ready.throughput
    show.show(result)
    if measured:
        console.note(f"throughput: {bench.keep(session, measured)}")
    if path := keep(session, result):
        console.note(f"verdicts: {path}")
    console.document({"ladder": ladder.document(result)})
    show.raise_for_state(result)
    return 0


def _inputs(session: RunContext, arguments: argparse.Namespace) -> Inputs:
    return Inputs(
        wheel=arguments.wheel or _last_wheel(session),
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
        minutes=arguments.minutes,
        reserve=arguments.reserve,
        baseline=arguments.baseline,
        baseline_python=arguments.baseline_python,
        workloads=tuple(arguments.workload),
        texts=arguments.texts,
        at_once=arguments.at_once,
        fresh=arguments.fresh,
        preheat=arguments.preheat,
    )


def _last_wheel(session: RunContext) -> Path | None:
    """Return the wheel that the last build compiled, if it is still there."""
    for fork in session.forks:
        built = pipeline.current(session, fork)
        if session.project.fork(fork).build == "graft" and built:
            path = pipeline.wheel_path(session, built)
            return path if path.exists() else None
    return None


def verdicts_path(session: RunContext, wheel: str) -> Path:
    """Return the file of the verdicts about *wheel*."""
    return session.output / f"{wheel.removesuffix('.whl')}.verdicts.json"


def keep(session: RunContext, result: Ladder) -> Path | None:
    """
    Add the verdicts to the file of the wheel, and return the file; None if no wheel was judged.

    Verdicts that the file holds about the same bytes stay, unless they were made again. Those of
    other bytes are replaced.

    Raises:
        evidence-invalid: The file holds something else, or verdicts for another stack.
    """
    if result.wheel is None:
        return None
    path = verdicts_path(session, result.wheel.file)
    with session.store.lock("verdicts"):
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
        with session.store.replacing(path) as unfinished:
            unfinished.write_bytes(
                msgspec.json.format(msgspec.json.encode(ladder.document(result)), indent=1) + b"\n"
            )
    return path


def _stored(path: Path) -> Ladder | None:
    """
    Return the verdicts at *path*; None without a file.

    Raises:
        evidence-invalid: It holds something else.
    """
    try:
        return ladder.read(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.MsgspecError, RecursionError, OSError) as error:
        raise TrustError(
            "evidence-invalid",
            f"{path.name} is not what `sparkwright gate` writes, and no verdicts can be added.",
            details=[str(error)],
            todo="Move it away, or bring back the file that was there.",
        ) from error
