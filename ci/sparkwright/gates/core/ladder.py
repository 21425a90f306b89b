"""
The ladder: gates run in order up to the first failure, and their verdicts in a terminal and files.

A gate after a failure is listed as not run. A gate that cannot run here stops nothing, but a
ladder with one is not a pass.

Beside a wheel, ``NAME.verdicts.json`` holds the newest verdict of each gate and recipe.
``NAME.attempts.jsonl`` has a line for each gate that began and for each verdict, so that
interrupted gates count, and only grows.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from sparkwright.audit.report import AuditedWheel
from sparkwright.builder import host_info
from sparkwright.core.console import console, duration
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, list_folder, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import Store, append_line, read_lines
from sparkwright.gates.core.verdict import (
    FORMAT,
    Check,
    GateError,
    Ladder,
    Verdict,
    declare,
    merge,
    not_run,
)

#: The gates by name, and what each examines.
GATES: Mapping[str, str] = {
    "G0": "the bytes of the wheel",
    "G1": "numerics of the patched sources, without a GPU",
    "G2": "numerics of the wheel on the GPU",
    "G3": "the kernels that serve the recipe",
    "G4": "the text that the server generates",
    "G5": "the distributions behind the text",
    "G6": "accuracy, paired with a baseline",
    "G7": "hours of mixed load",
    "G8": "throughput against a baseline",
}

#: Gates that judge a served model, and so belong to a recipe.
SERVED = ("G3", "G4", "G5", "G6", "G7", "G8")

REASONS: Mapping[str, str] = {
    "earlier-failed": "An earlier gate failed or was invalid, and the ladder stops there. Fix that "
    "first, or continue with --keep-going.",
    "not-asked": (
        "The command line does not name a wheel, server, log, reference or baseline "
        "that the gate needs. The row names the option."
    ),
}

#: The check by which the ladder reports, for any gate, that an option or an earlier gate stops it.
STOPPED = declare("ladder", role="reports")

#: The check that binds what a server answers to the wheel that the verdict is about.
WHEEL_SERVED = declare("wheel-served")

#: Samples shown of a check that failed; ``--json`` prints all.
SHOWN = 3

_ERRORS: Mapping[State, tuple[str, str]] = {
    "fail": ("gate-failed", "failed"),
    "invalid": ("measurement-invalid", "invalid"),
    "inconclusive": ("gate-inconclusive", "inconclusive"),
    "not-run": ("gate-not-run", "not run"),
}


class Attempt(msgspec.Struct, frozen=True):
    """
    A line of the attempt log: a gate begins, or its verdict.

    Attributes:
        number: Of the run of the gates, from 1, counted for the bytes of the wheel.
        wheel: The sha256 of the wheel.
        gate: The gate.
        recipe: The recipe that is served; empty without one.
        verdict: None on the line of the beginning.
    """

    number: int
    wheel: str
    gate: str
    recipe: str = ""
    verdict: Verdict | None = None


def attempts(folder: Path, wheel: str, gate: str, recipe: str) -> int:
    """
    Return how often *gate* began for *recipe*, by the attempt logs in *folder*.

    A gate that runs now counts; also one that was interrupted.

    Args:
        wheel: The sha256 of the wheel; lines about other bytes do not count.

    Raises:
        file-invalid: A log has other contents.
    """
    return sum(
        (line.gate, line.recipe, line.verdict) == (gate, recipe, None)
        for line in read_logs(folder, wheel)
    )


def read_logs(folder: Path, wheel: str) -> list[Attempt]:
    """
    Return the lines about the bytes *wheel*, a sha256, of all attempt logs in *folder*.

    A copy of the wheel under another file name is the same wheel.

    Raises:
        file-invalid: A log has other contents.
    """
    return [
        line
        for path in list_folder(folder, "*.attempts.jsonl")
        for line in read_lines(path, Attempt, "attempt log")
        if line.wheel == wheel
    ]


def document(verdicts: Ladder) -> dict[str, Any]:
    """Return *verdicts* as a JSON document, with the states that follow and a digest of it all."""
    # Through its own type first, so that a count which is an integer here has the digest that it
    # has after it was read as a number.
    typed = msgspec.json.decode(msgspec.json.encode(verdicts), type=Ladder)
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(typed))
    for verdict, record in zip(verdicts.verdicts, fields["verdicts"], strict=True):
        record["state"] = verdict.state
    fields["state"] = verdicts.state
    return {**fields, "digest": sha256_bytes(canonical(fields))}


def read_verdicts(data: bytes) -> Ladder:
    """
    Return the verdicts of a JSON document.

    Raises:
        ValueError: It is not one, is of another format, or was changed after it was written.
    """
    verdicts = msgspec.json.decode(data, type=Ladder)
    if verdicts.format != FORMAT:
        raise ValueError(f"the verdicts are of format {verdicts.format}; {FORMAT} is read")
    if document(verdicts) != msgspec.json.decode(data):
        raise ValueError("the document was changed after it was written: its digest does not match")
    return verdicts


class VerdictFile:
    """
    The verdicts about *wheel* in the folder *output*, for one run of the gates.

    Args:
        stack: The stack whose policies judge.

    Attributes:
        path: The document.
        log: The attempt log.
        attempt: The number of the run.

    Raises:
        file-invalid: As `load`, so that no hours are spent on verdicts that could not be stored; or
            the attempt log has other contents.
    """

    def __init__(self, store: Store, output: Path, wheel: AuditedWheel, stack: str) -> None:
        self._store, self._wheel, self._stack = store, wheel, stack
        name = wheel.file.removesuffix(".whl")
        self.path = output / f"{name}.verdicts.json"
        self.log = output / f"{name}.attempts.jsonl"
        self.load()
        lines = read_logs(output, wheel.sha256)
        self.attempt = 1 + max((line.number for line in lines), default=0)

    def load(self) -> Ladder | None:
        """
        Return the stored verdicts; None without a file, or if they are about other bytes.

        Raises:
            file-invalid: The file is not what `store` writes, or its verdicts are of another stack.
        """
        try:
            stored = read_verdicts(self.path.read_bytes())
            if not stored.wheel or stored.wheel.sha256 != self._wheel.sha256:
                return None
            if stored.stack != self._stack:
                raise ValueError(f"its verdicts are of stack {stored.stack}, not {self._stack}")
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, OSError) as error:
            raise FileError(
                "file-invalid",
                f"{self.path.name} is not a file that verdicts can be merged into.",
                details=[str(error)],
                todo="Move it away, or restore the file that `sparkwright gate` wrote.",
            ) from error
        return stored

    def log_line(self, gate: str, recipe: str, verdict: Verdict | None = None) -> None:
        """Log that *gate* begins, or its *verdict*."""
        append_line(self.log, Attempt(self.attempt, self._wheel.sha256, gate, recipe, verdict))

    def store(self, now: Ladder) -> None:
        """
        Log the last verdict of *now* if anything was measured and merge *now* into the document.

        Raises:
            file-invalid: As `load`.
        """
        last = now.verdicts[-1]
        with self._store.lock("verdicts"):
            if last.measured:
                self.log_line(last.gate, last.recipe, last)
            if before := self.load():
                now = merge(before, now)
            data = msgspec.json.format(msgspec.json.encode(document(now)), indent=1)
            self._store.write(self.path, data + b"\n")


class Gate(msgspec.Struct, frozen=True):
    """
    One gate, ready to run.

    Attributes:
        policy: The sha256 of the policy that it judges by; empty if it has none.
        run: Return its checks; a failure of the set-up may raise.
        recipe: The recipe that is served; empty without one.
        blocked: Why it cannot run; None if it can.
        evidence: Return the sha256 of the file that holds its measurements, after it ran; empty
            without one.
    """

    name: str
    policy: str
    run: Callable[[], tuple[Check, ...]]
    recipe: str = ""
    blocked: Check | None = None
    evidence: Callable[[], str] = str


def host_facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel, GPUs and driver; ``none`` without a GPU."""
    gpus = host_info.gpus()
    return {
        "processor": host_info.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "kernel": platform.release(),
        "gpu": ", ".join(f"{gpu.name} (SM {gpu.capability})" for gpu in gpus) or "none",
        "driver": gpus[0].driver if gpus else "none",
    }


def climb(
    gates: Sequence[Gate],
    *,
    stack: str,
    wheel: AuditedWheel | None = None,
    device_code: Callable[[], str] = str,
    host: Mapping[str, str] | None = None,
    keep_going: bool = False,
    file: VerdictFile | None = None,
) -> Ladder:
    """
    Run *gates* in order and return their verdicts.

    Args:
        device_code: Called after each gate, as the first of them computes it.
        host: Facts of the machine (`Verdict.host`).
        keep_going: Also run the gates after a failure.
        file: Gets the verdicts so far after each gate, so that hours of measuring survive a crash
            of the next gate.

    Raises:
        SparkwrightError: A gate could not be set up.
    """
    ladder = Ladder(stack, wheel, ())
    for gate in gates:
        stopped = next((v for v in ladder.verdicts if v.state in ("fail", "invalid")), None)
        began, clock = time.time(), time.monotonic()
        checks: tuple[Check, ...] = (gate.blocked,) if gate.blocked else ()
        if stopped and not keep_going:
            message = f"{stopped.gate} is {stopped.state}, and the ladder stops there"
            checks = (not_run("ladder", message, "earlier-failed"),)
        elif not gate.blocked:
            if file:
                file.log_line(gate.name, gate.recipe)
            with console.step(f"{gate.name}: {GATES[gate.name]}"):
                checks = gate.run()
        verdict = Verdict(
            gate.name,
            GATES[gate.name],
            wheel.sha256 if wheel else "",
            gate.policy,
            checks,
            gate.recipe,
            host=dict(host or {}),
            attempt=file.attempt if file else 1,
            evidence=gate.evidence(),
            began=began,
            seconds=time.monotonic() - clock,
        )
        console.note(f"{gate.name}: {verdict.state} after {duration(verdict.seconds)}")
        ladder = Ladder(stack, wheel, (*ladder.verdicts, verdict), device_code())
        if file:
            file.store(ladder)
    return ladder


def show(ladder: Ladder) -> None:
    """Print every verdict, and one line that sums them up."""
    for verdict in ladder.verdicts:
        rows = [
            [check.name, f"{check.state} ({check.reason})".replace(" ()", ""), check.message]
            for check in verdict.checks
        ]
        title = f"{verdict.label} {verdict.title}: {verdict.state}, {duration(verdict.seconds)}"
        console.table(title, ["check", "state", "result"], rows, result=True)
        for check in verdict.checks:
            if check.state in ("fail", "invalid") and check.samples:
                samples = check.samples[:SHOWN]
                rows = [[sample.case, sample.expected, sample.actual] for sample in samples]
                title = f"{check.name}, {len(check.samples)} sample(s)"
                console.table(title, ["case", "expected", "actual"], rows, result=True)
    states = "  ".join(f"{verdict.label} {verdict.state}" for verdict in ladder.verdicts)
    console.result(f"{ladder.subject}: {ladder.state}   {states}")


def raise_for_state(ladder: Ladder) -> None:
    """
    Raise unless every verdict of *ladder* is a pass.

    Raises:
        gate-failed, measurement-invalid, gate-inconclusive, gate-not-run: By the worst state; the
            details are the checks in it.
    """
    if ladder.state == "pass":
        return
    reference, word = _ERRORS[ladder.state]
    unmet = {
        verdict.label: [
            check.name for check in verdict.checks if check.required and check.state == ladder.state
        ]
        for verdict in ladder.verdicts
    }
    details = [f"{label}: {', '.join(names)}" for label, names in unmet.items() if names]
    raise GateError(reference, f"{ladder.subject}: {len(details)} gate(s) {word}.", details=details)
