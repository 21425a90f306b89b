"""
``sparkwright gate``: climb the ladder with a wheel, and with the server that runs it; a verdict per
rung, bound to the wheel's bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from sparkwright.audit import wheel_reader
from sparkwright.builder import pipeline as building
from sparkwright.cli import audit, measuring
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates import host, ladder, recording, show
from sparkwright.gates.athand import Inputs
from sparkwright.gates.ladder import RUNGS, Ladder
from sparkwright.gates.ready import Ready
from sparkwright.gates.server import installed
from sparkwright.release import content
from sparkwright.release.errors import TrustError


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Run the rungs that were asked for, print their verdicts and add them to the wheel's; fail unless
    all of them pass.
    """
    facts = host.facts()
    inputs = _inputs(session, arguments)
    if inputs.wheel and not arguments.record:
        # A file that cannot be added to is refused before hours are spent on measuring.
        _before(_file(session, inputs.wheel.name))
    with Ready(
        session,
        inputs,
        lambda path: audit.audited(session, path, audit.judged_as(path, "auto")),
        facts,
    ) as ready:
        if arguments.record:
            made = recording.record(session, ready, inputs, arguments.record)
            console.document({"recorded": [str(path) for path in made]})
            return 0
        asked = [name for name in RUNGS if not arguments.rung or name in arguments.rung]
        result = ladder.climb(
            [ready.rung(name) for name in asked],
            stack=session.project.stack,
            wheel=wheel_reader.subject(inputs.wheel) if inputs.wheel else None,
            device_code=ready.device_code if "G0" in asked else str,
            host={**facts, **_companions(arguments.python)},
            keep_going=arguments.keep_going,
            keep=lambda so_far: keep(session, so_far),
        )
        measured = ready.throughput
    show.show(result)
    if measured:
        console.note(f"throughput: {measuring.keep(session, measured)}")
    if path := keep(session, result):
        console.note(f"verdicts: {path}")
    console.document({"ladder": ladder.document(result)})
    show.raise_for_state(result)
    return 0


def keep(session: RunContext, result: Ladder) -> Path | None:
    """
    Add the verdicts to the file of the wheel, beside where wheels go, and return the file; None if
    no wheel was judged.

    Rungs that the file already holds of the same bytes stay, unless they were measured again.
    Verdicts of other bytes are replaced.

    Raises:
        evidence-invalid: The file holds something else than verdicts, or verdicts of this wheel for
            another stack.
    """
    if result.wheel is None:
        return None
    path = _file(session, result.wheel.file)
    with session.store.lock("verdicts"):
        if before := _before(path):
            about = before.wheel.sha256 if before.wheel else ""
            if about == result.wheel.sha256:
                _same_stack(before, result.stack, path)
                result = ladder.merged(before, result)
            else:
                console.warn(
                    f"{path.name} held verdicts of another wheel (sha256 {about[:16]}); they are "
                    f"replaced."
                )
        with session.store.replacing(path) as unfinished:
            unfinished.write_bytes(
                msgspec.json.format(msgspec.json.encode(ladder.document(result)), indent=1) + b"\n"
            )
    return path


def _same_stack(before: Ladder, stack: str, path: Path) -> None:
    """
    Raise evidence-invalid if the verdicts *before* at *path* are for another stack than *stack*.
    """
    if before.stack != stack:
        what = (
            f"{path.name} holds verdicts of this wheel for the stack {before.stack}, and this "
            f"run is for {stack}."
        )
        raise TrustError(
            "evidence-invalid",
            what,
            todo=f"Move the file away, or run the gate with --stack {before.stack}.",
        )


def _file(session: RunContext, wheel: str) -> Path:
    """Return the file that the verdicts about *wheel* are kept in."""
    return session.output / f"{wheel.removesuffix('.whl')}.verdicts.json"


def _before(path: Path) -> Ladder | None:
    """
    Return the verdicts at *path*; None without a file; raise `evidence-invalid` if it holds
    something else.
    """
    try:
        return ladder.read(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.MsgspecError, RecursionError, OSError) as error:
        says = (
            f"{path.name} is not what `sparkwright gate` writes, and no verdicts can be added "
            f"to it."
        )
        todo = "Move it away, or bring back the file that was there."
        raise TrustError("evidence-invalid", says, details=[str(error)], todo=todo) from error


def _inputs(session: RunContext, arguments: argparse.Namespace) -> Inputs:
    return Inputs(
        wheel=arguments.wheel or _last(session),
        python=arguments.python,
        serve=arguments.serve,
        flags=tuple(arguments.flag),
        variables=dict(map(measuring.pair, arguments.variable)),
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


def _companions(python: Path | None) -> dict[str, str]:
    """
    Return which builds of ours are installed beside the wheel, so that the rungs that were climbed
    with them speak of them, too.
    """
    return content.facts(installed.places(python)[1]) if python else {}


def _last(session: RunContext) -> Path | None:
    """
    Return the wheel that the last build made of the fork that is compiled, if it is still there.
    """
    for fork in session.forks:
        built = building.current(session, fork)
        if built and session.project.fork(fork).build == "graft":
            path = building.wheel_path(session, built)
            return path if path.exists() else None
    return None
