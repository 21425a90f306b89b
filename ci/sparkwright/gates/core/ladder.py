"""
The ladder: gates run in order up to the first failure, and their verdicts in a terminal and files.

A gate after a failure is listed as not run. A gate that cannot run here stops nothing, but a
ladder with one is not a pass.

Beside a wheel, ``NAME.verdicts.json`` holds the newest verdict of each gate and recipe.
``NAME.attempts.jsonl`` has a line for each gate that began and for each that ended, so that
gates that were killed count, and only grows. Its lines travel in the verdict document, too.
"""

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.audit.report import AuditedWheel
from sparkwright.bench.machine import monitor
from sparkwright.builder import host_info
from sparkwright.core import program
from sparkwright.core.console import NO_ROOM, console, duration, one_line
from sparkwright.core.errors import FileError, SparkwrightError
from sparkwright.core.files import canonical, list_folder, sha256_bytes
from sparkwright.core.states import State
from sparkwright.core.store import Store, append_line, read_lines
from sparkwright.gates.core.verdict import (
    FORMAT,
    Attempt,
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

#: Gates that judge the wheel or its sources alone, and those that judge a served model, and so
#: belong to a recipe.
UNSERVED = ("G0", "G1", "G2")
SERVED = ("G3", "G4", "G5", "G6", "G7", "G8")

#: Reasons why a gate did not begin or end that may be gone in another night.
BUDGET_SPENT, INTERRUPTED, UNREACHABLE = "budget-spent", "interrupted", "step-unreachable"
DISK_FULL, FAULT, DRIVER_FAILING = "disk-full", "program-fault", "driver-failing"
TRANSIENT = (
    BUDGET_SPENT, INTERRUPTED, UNREACHABLE, DISK_FULL, FAULT, DRIVER_FAILING,
    *monitor.PASSING,
)  # fmt: skip
STEP_FAILED = "step-failed"

REASONS: Mapping[str, str] = {
    "earlier-failed": "An earlier gate failed or was invalid, and the ladder stops there. Fix that "
    "first, or continue with --keep-going.",
    "floor-missing": "The recipe has no accuracy floor of the task, which verified asks for. "
    "Measure a trusted wheel, and add the floor to `floors` in the recipe.",
    "not-asked": (
        "The command line does not name a wheel, server, log, reference or baseline "
        "that the gate needs. The row names the option."
    ),
    BUDGET_SPENT: "The time of --hours was spent, or less was left than the gate takes. Run the "
    "same command again with more hours: what is finished is not repeated.",
    INTERRUPTED: "Ctrl-C, SIGTERM or the end of the session ended the gate, before it showed a "
    "finding; this is no attempt that counts. Run the same command again.",
    DISK_FULL: "The disk, or this user's share of it, was full. Make room, and run the same "
    "command again; this is no attempt that counts.",
    FAULT: "A fault of sparkwright ended the gate; this is no attempt that counts. Please report "
    "it with the log that the command named.",
    DRIVER_FAILING: "nvidia-smi is installed and fails, so the GPU cannot be seen. Repair the "
    "driver, or start the machine again.",
    UNREACHABLE: "What the gate needs is at a host that did not answer. Run the command again "
    "where it does.",
    STEP_FAILED: "What the gate needs could not be made: an environment, the stock wheel's "
    "reference or the gate's own set-up. Correct what the row says, and run the command again.",
}

#: The check by which the ladder reports, for any gate, that an option or an earlier gate stops it.
STOPPED = declare("ladder", role="reports")


def stopped(message: str, reason: str) -> Check:
    """Return the check `STOPPED`: why a gate did not begin, or did not end."""
    return not_run("ladder", message, reason)


#: The check that binds what a server answers to the wheel that the verdict is about.
WHEEL_SERVED = declare("wheel-served")

#: Fields that documents and verdicts of earlier versions lack.
LATER = ("attempts", "model")

#: Characters of the message of a step that failed.
LONGEST = 500

#: Samples shown of a check that failed; ``--json`` prints all.
SHOWN = 3

_ERRORS: Mapping[State, tuple[str, str]] = {
    "fail": ("gate-failed", "failed"),
    "invalid": ("measurement-invalid", "invalid"),
    "inconclusive": ("gate-inconclusive", "inconclusive"),
    "not-run": ("gate-not-run", "not run"),
}


def attempts(folder: Path, wheel: str, gate: str, recipe: str) -> int:
    """
    Return how often *gate* began for *recipe*, by the attempt logs and documents in *folder*.

    A gate that runs now counts; also one that was interrupted.

    Args:
        wheel: The sha256 of the wheel; lines about other bytes do not count.

    Raises:
        file-invalid: A file has other contents.
    """
    return sum(
        (line.gate, line.recipe, line.state) == (gate, recipe, None)
        for line in read_attempts([folder], wheel)
    )


def read_attempts(folders: Iterable[Path], wheel: str) -> list[Attempt]:
    """
    Return the attempts with the bytes *wheel*, a sha256, in all logs and documents in *folders*,
    oldest first.

    A copy of the wheel under another file name is the same wheel, and a document may come from
    another machine.

    Raises:
        file-invalid: A file has other contents.
    """
    lines = set[Attempt]()
    for folder in folders:
        for path in list_folder(folder, "*.attempts.jsonl"):
            lines.update(read_lines(path, Attempt, "attempt log"))
        for stored in read_documents(folder, wheel):
            lines.update(stored.attempts)
    return sorted((line for line in lines if line.wheel == wheel), key=lambda line: line.order)


def read_documents(folder: Path, wheel: str) -> list[Ladder]:
    """Return the documents in *folder* about the bytes *wheel*, a sha256; raise `file-invalid`."""
    ladders = map(_read_document, list_folder(folder, "*.verdicts.json"))
    return [stored for stored in ladders if stored.wheel and stored.wheel.sha256 == wheel]


def wheel_verdicts(folder: Path, wheel: str) -> list[Verdict]:
    """Return the verdicts of all documents that `read_documents` returns."""
    verdicts = list[Verdict]()
    for stored in read_documents(folder, wheel):
        verdicts += stored.verdicts
    return verdicts


def verdict_digest(verdict: Verdict) -> str:
    """Return the sha256 by which an attempt names its *verdict*."""
    # Through its own type first, so that a count which is an integer here has the digest that it
    # has after it was read as a number.
    typed = msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict)
    return sha256_bytes(canonical(typed))


def document(verdicts: Ladder) -> dict[str, Any]:
    """Return *verdicts* as a JSON document, with the states that follow and a digest of it all."""
    # Through its own type first, as in `verdict_digest`.
    typed = msgspec.json.decode(msgspec.json.encode(verdicts), type=Ladder)
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(typed))
    for verdict, record in zip(verdicts.verdicts, fields["verdicts"], strict=True):
        record["state"] = verdict.state
    fields["state"] = verdicts.state
    # A field of `LATER` is left out while it is empty, so that the digest of an older document
    # stays the same.
    for record in (fields, *fields["verdicts"]):
        for name in LATER:
            if not record.get(name, "absent"):
                del record[name]
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


def _read_document(path: Path) -> Ladder:
    try:
        return read_verdicts(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise FileError(
            "file-invalid",
            f"{path.name} is not a file that verdicts can be merged into.",
            details=[str(error)],
            todo="Move it away, or restore the file that `sparkwright gate` wrote.",
        ) from error


class VerdictFile:
    """
    The verdicts about *wheel* in the folder *output*, for one run of the gates.

    Attempts that other logs or documents have are brought into its log.

    Args:
        stack: The stack whose policies judge.
        beside: Another folder with attempts: that of the wheel.

    Attributes:
        path: The document.
        log: The attempt log.
        attempt: The number of the run.

    Raises:
        file-invalid: As `load`, so that no hours are spent on verdicts that could not be stored; or
            the attempt log has other contents.
    """

    def __init__(
        self,
        store: Store,
        output: Path,
        wheel: AuditedWheel,
        stack: str,
        beside: Path | None = None,
    ) -> None:
        self._store, self._wheel, self._stack = store, wheel, stack
        name = wheel.file.removesuffix(".whl")
        self.path = output / f"{name}.verdicts.json"
        self.log = output / f"{name}.attempts.jsonl"
        self.load()
        lines = read_attempts([output, *filter(None, [beside])], wheel.sha256)
        own = read_lines(self.log, Attempt, "attempt log") if self.log.exists() else []
        for line in lines:
            if line not in own:
                append_line(self.log, line)
        self.attempt = 1 + max((line.number for line in lines), default=0)
        self._last = lines[-1] if lines else None

    def load(self) -> Ladder | None:
        """
        Return the stored verdicts; None without a file, or if they are about other bytes.

        Raises:
            file-invalid: The file is not what `store` writes, or its verdicts are of another stack.
        """
        if not self.path.exists():
            return None
        stored = _read_document(self.path)
        if not stored.wheel or stored.wheel.sha256 != self._wheel.sha256:
            return None
        if stored.stack != self._stack:
            what = f"The verdicts in {self.path.name} are of another stack, {stored.stack}."
            raise FileError("file-invalid", what, todo="Move it away, or name another --output.")
        return stored

    def begin(self, gate: str, recipe: str, began: float) -> None:
        """Log that *gate* begins."""
        self._log(Attempt(self.attempt, self._wheel.sha256, gate, recipe, began))

    def _log(self, line: Attempt) -> None:
        after = sha256_bytes(canonical(self._last)) if self._last else ""
        self._last = replace(line, after=after)
        append_line(self.log, self._last)

    def store(self, now: Ladder) -> None:
        """
        Log the last verdict of *now* if its gate began, and merge *now* into the document.

        Raises:
            file-invalid: As `load`.
        """
        verdict, line = now.verdicts[-1], self._last
        with self._store.lock("verdicts"):
            subject = verdict.gate, verdict.recipe, verdict.began
            if line and not line.state and (line.gate, line.recipe, line.began) == subject:
                worst = verdict.worst_check
                reason = f"{worst.name} ({worst.reason}): {worst.message}" if worst else ""
                digest = verdict_digest(verdict)
                self._log(replace(line, state=verdict.state, reason=reason, verdict=digest))
            lines = read_attempts([self.path.parent], self._wheel.sha256)
            now = replace(now, attempts=tuple(lines))
            if before := self.load():
                now = merge(before, now)
            data = msgspec.json.format(msgspec.json.encode(document(now)), indent=1)
            self._store.write(self.path, data + b"\n")


class GateFindings(msgspec.Struct, frozen=True):
    """
    What a gate found.

    Attributes:
        device_code: As `Ladder.device_code`, of the gate that reads it; empty of the others.
        evidence: As `Verdict.evidence`.
    """

    checks: tuple[Check, ...]
    device_code: str = ""
    evidence: str = ""


class Gate(msgspec.Struct, frozen=True):
    """
    One gate, ready to run.

    Attributes:
        policy: The sha256 of the policy that it judges by; empty if it has none.
        run: Return its result; if it raises an `Exception`, the gate is not-run.
        recipe: The recipe that is served; empty without one.
        blocked: Why it cannot run; None if it can.
        model: As `Verdict.model`.
    """

    name: str
    policy: str
    run: Callable[[], GateFindings]
    recipe: str = ""
    blocked: Check | None = None
    model: str = ""


def host_facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel, GPUs and driver; ``none`` without a GPU."""
    gpus = host_info.gpus()
    kinds = Counter(f"{gpu.name} (SM {gpu.capability})" for gpu in gpus)
    return {
        "processor": host_info.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "kernel": platform.release(),
        "gpu": ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in kinds.items()) or "none",
        "driver": gpus[0].driver if gpus else host_info.driver_fault() or "none",
    }


def is_transient(verdict: Verdict) -> bool:
    """Return whether *verdict* is no pass for a reason that may be gone in the next run."""
    return bool(verdict.worst_check and verdict.worst_check.reason in TRANSIENT)


def step_failed(error: Exception) -> Check:
    """
    Return the check of a gate that could not be set up, or that ended with *error*.

    A fault of ours is logged.
    """
    if not isinstance(error, SparkwrightError):
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        if not full:
            program.write_log(sys.argv[1:])
        # A verdict holds no path.
        return stopped(f"it ended with {type(error).__name__}", DISK_FULL if full else FAULT)
    texts = (f"{error.reference}: {error.what}", *error.details[:3], error.todo)
    reason = DISK_FULL if error.reference == DISK_FULL else STEP_FAILED
    # 5: the network, or an upstream.
    reason = UNREACHABLE if error.exit_code == 5 else reason
    return stopped(one_line(" ".join(texts), LONGEST), reason)


def climb(
    gates: Sequence[Gate],
    *,
    stack: str,
    wheel: AuditedWheel | None = None,
    host: Mapping[str, str] | None = None,
    keep_going: bool = False,
    file: VerdictFile | None = None,
) -> Ladder:
    """
    Run *gates* in order and return their verdicts.

    A gate that Ctrl-C ends is not-run in the file before `KeyboardInterrupt` leaves this.

    Args:
        host: Facts of the machine (`Verdict.host`).
        keep_going: Also run the gates after a failure.
        file: Gets the verdicts so far after each gate, so that hours of measuring survive a crash
            of the next gate.
    """
    ladder, failed = Ladder(stack, wheel, ()), None
    for gate in gates:
        interruption: KeyboardInterrupt | None = None
        began, clock = time.time(), time.monotonic()
        if failed and not keep_going:
            message = f"{failed.gate} is {failed.state}, and the ladder stops there"
            result = GateFindings((stopped(message, "earlier-failed"),))
        elif gate.blocked:
            result = GateFindings((gate.blocked,))
        else:
            if file:
                file.begin(gate.name, gate.recipe, began)
            try:
                with console.step(f"{gate.name}: {GATES[gate.name]}"):
                    result = gate.run()
            except Exception as error:
                result = GateFindings((step_failed(error),))
            except KeyboardInterrupt as error:
                interruption = error
                result = GateFindings((stopped("it was ended from outside", INTERRUPTED),))
        verdict = Verdict(
            gate.name,
            GATES[gate.name],
            wheel.sha256 if wheel else "",
            gate.policy,
            result.checks,
            gate.recipe,
            host=dict(host or {}),
            attempt=file.attempt if file else 1,
            evidence=result.evidence,
            began=began,
            seconds=time.monotonic() - clock,
            model=gate.model,
        )
        console.note(f"{gate.name}: {verdict.state} after {duration(verdict.seconds)}")
        if verdict.state in ("fail", "invalid"):
            failed = failed or verdict
        device_code = result.device_code or ladder.device_code
        ladder = Ladder(stack, wheel, (*ladder.verdicts, verdict), device_code)
        if file:
            file.store(ladder)
        if interruption:
            raise interruption
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
                rows = [[each.case, each.expected, each.actual] for each in check.samples[:SHOWN]]
                title = f"{check.name}, {len(check.samples)} sample(s)"
                console.table(title, ["case", "expected", "actual"], rows, result=True)
    states = "  ".join(f"{verdict.label} {verdict.state}" for verdict in ladder.verdicts)
    console.result(f"{ladder.subject}: {ladder.state}   {states}")


def raise_for_state(ladder: Ladder) -> None:
    """
    Raise unless every verdict of *ladder* is a pass.

    Raises:
        gate-failed, measurement-invalid, gate-inconclusive, gate-not-run: By the worst state; the
            details are the gates in it, each with the first check.
    """
    if ladder.state == "pass":
        return
    reference, word = _ERRORS[ladder.state]
    details = list[str]()
    for verdict in ladder.verdicts:
        if verdict.state == ladder.state and verdict.worst_check:
            details.append(f"{verdict.label}: {verdict.worst_check.name}")
    raise GateError(reference, f"{ladder.subject}: {len(details)} gate(s) {word}.", details=details)
