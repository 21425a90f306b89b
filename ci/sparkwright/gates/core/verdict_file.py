"""
The files of verdicts: the document beside a wheel, and the log of every attempt.

``NAME.verdicts.json`` holds the newest verdict of each gate and recipe. ``NAME.attempts.jsonl`` has
a line for each gate that began and for each verdict, so that interrupted gates count, and only
grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit.report import AuditedWheel
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.store import Store, append_line, read_lines
from sparkwright.gates.core.verdict import FORMAT, Ladder, Verdict, merge


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


def attempt_log(output: Path, wheel: str) -> Path:
    """Return the attempt log of the wheel of the file name *wheel* in the folder *output*."""
    return output / f"{wheel.removesuffix('.whl')}.attempts.jsonl"


def attempts(log: Path, wheel: str, gate: str, recipe: str) -> int:
    """
    Return how often *gate* began for *recipe*, by the attempt log at *log*.

    A gate that runs now counts; also one that was interrupted.

    Args:
        wheel: The sha256 of the wheel; lines about other bytes do not count.

    Raises:
        file-invalid: The log has other contents.
    """
    begun = [line for line in read_log(log, wheel) if line.verdict is None]
    return sum((line.gate, line.recipe) == (gate, recipe) for line in begun)


def read_log(log: Path, wheel: str) -> list[Attempt]:
    """
    Return the lines about the bytes *wheel*, a sha256, in *log* and in the logs beside it.

    A copy of the wheel under another file name is the same wheel.

    Raises:
        file-invalid: A log has other contents.
    """
    logs = sorted(log.parent.glob("*.attempts.jsonl"))
    lines = [line for path in logs for line in read_lines(path, Attempt, "attempt log")]
    return [line for line in lines if line.wheel == wheel]


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


def read(data: bytes) -> Ladder:
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


def require_evidence(verdicts: Ladder, measurements: bytes) -> None:
    """
    Raise unless a verdict names the file *measurements* by its sha256 (`Verdict.evidence`).

    Raises:
        ValueError: None does.
    """
    if sha256_bytes(measurements) not in {verdict.evidence for verdict in verdicts.verdicts}:
        raise ValueError("the measurements are not those that a verdict names")


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
        self.path = output / f"{wheel.file.removesuffix('.whl')}.verdicts.json"
        self.log = attempt_log(output, wheel.file)
        self.load()
        self.attempt = 1 + max(
            (line.number for line in read_log(self.log, wheel.sha256)), default=0
        )

    def load(self) -> Ladder | None:
        """
        Return the stored verdicts; None without a file, or if they are about other bytes.

        Raises:
            file-invalid: The file is not what `store` writes, or its verdicts are of another stack.
        """
        try:
            stored = read(self.path.read_bytes())
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
