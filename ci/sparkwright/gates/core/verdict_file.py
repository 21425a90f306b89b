"""
The files of verdicts: the document beside a wheel, and the log of every attempt.

``NAME.verdicts.json`` holds the newest verdict of each gate and recipe. ``NAME.attempts.jsonl``
keeps all of them, also of attempts that were interrupted, and only grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.audit.report import AuditedWheel
from sparkwright.core.errors import Failure
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.store import Store
from sparkwright.gates.core import journal, ladder
from sparkwright.gates.core.ladder import FORMAT, Ladder
from sparkwright.gates.core.verdict import Verdict

#: Bytes read of an attempt log: some thousand verdicts.
LARGEST = 256 * 1024**2


class Attempt(msgspec.Struct, frozen=True):
    """
    A line of the attempt log: the beginning of an attempt, or one verdict of it.

    Attributes:
        number: Of the attempt, from 1, counted for the bytes of the wheel.
        wheel: The sha256 of the wheel.
        gates: The gates that the attempt was to run.
        recipe: The recipe that was to be served.
        verdict: None on the line of the beginning.
    """

    number: int
    wheel: str
    gates: tuple[str, ...] = ()
    recipe: str = ""
    verdict: Verdict | None = None


def document(verdicts: Ladder) -> dict[str, Any]:
    """Return *verdicts* as a JSON document, with the states that follow and a digest of it all."""
    # Through its own type first, so that a count which is an integer here has the digest that it
    # has after it was read as a number.
    typed = msgspec.json.decode(msgspec.json.encode(verdicts), type=Ladder)
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(typed))
    for verdict, record in zip(verdicts.verdicts, made["verdicts"], strict=True):
        record["state"] = verdict.state
    made["state"] = verdicts.state
    return {**made, "digest": sha256_bytes(canonical(made))}


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


class VerdictFile:
    """
    The verdicts about *wheel* in the folder *output*.

    Args:
        stack: The stack whose policies judge.
        failure: The error that `load` raises.

    Attributes:
        path: The document. *attempts*: the log beside it.
    """

    def __init__(
        self, store: Store, output: Path, wheel: AuditedWheel, stack: str, failure: Failure
    ) -> None:
        stem = wheel.file.removesuffix(".whl")
        self._store, self._wheel, self._stack, self._failure = store, wheel, stack, failure
        self.path = output / f"{stem}.verdicts.json"
        self.attempts = output / f"{stem}.attempts.jsonl"

    def load(self) -> Ladder | None:
        """
        Return the stored verdicts; None without a file, or if they are about other bytes.

        Raises:
            failure: The file is not what `store` writes, or its verdicts are of another stack.
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
            raise self._failure(
                f"{self.path.name} is not a file that verdicts can be merged into.",
                details=[str(error)],
                todo="Move it away, or restore the file that `sparkwright gate` wrote.",
            ) from error
        return stored

    def begin(self, gates: Sequence[str], recipe: str) -> int:
        """
        Log the beginning of an attempt, and return its number.

        Raises:
            file-invalid: The attempt log has other contents.
            failure: As `load`, so that no hours are spent on verdicts that could not be stored.
        """
        with self._store.lock("verdicts"):
            self.load()
            number = 1 + max((line.number for line in self.log()), default=0)
            self._append(Attempt(number, self._wheel.sha256, tuple(gates), recipe))
        return number

    def log(self) -> list[Attempt]:
        """Return the lines of the attempt log about these bytes."""
        if not self.attempts.exists():
            return []
        lines = journal.read(self.attempts, Attempt, largest=LARGEST, what="attempt log")
        return [line for line in lines if line.wheel == self._wheel.sha256]

    def store(self, now: Ladder) -> None:
        """
        Log the last verdict of *now*, and merge all of *now* into the document.

        Raises:
            failure: As `load`.
        """
        with self._store.lock("verdicts"):
            last = now.verdicts[-1]
            if last.measured:
                self._append(Attempt(last.attempt, last.wheel, verdict=last))
            if before := self.load():
                now = ladder.merge(before, now)
            data = msgspec.json.format(msgspec.json.encode(document(now)), indent=1)
            self._store.write(self.path, data + b"\n")

    def _append(self, line: Attempt) -> None:
        with journal.JournalWriter(self.attempts, more=True) as log:
            log.add(line)
