"""
The sentinel: a child that does two fixed things when asked, so that a machine in a slow state is seen before it is taken for a slow wheel.

On a GB10 the hidden slow state shows in no register of the driver; a matrix times a vector loses 3.3 times there while a copy is as fast
as ever (gates.md §2.2). The child lives as long as the session, since torch takes seconds to load; between two orders it holds no array.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sparkwright.bench.machine.policy import SentinelPolicy
from sparkwright.bench.server.serve import last_line
from sparkwright.core import process
from sparkwright.core.errors import CommandError

SCRIPT = Path(__file__).parent / "inside" / "sentinel.py"

#: The longest answer; each is a line of some hundred bytes.
MOST = 64 * 1024
#: Threads where the processor is measured: enough for its memory, and not so many that they wait for each other.
THREADS = 8

T = TypeVar("T", bound=msgspec.Struct)


class Silent(Exception):
    """The child gave no answer; the message says why."""


class _Died(Silent):
    """The child ended, or closed its pipe, before it answered."""


class Device(msgspec.Struct, frozen=True):
    """
    What the child measures.

    Attributes:
        kind: ``cuda``, or ``processor`` where it has no GPU, or no torch for one.
        by: The library that does the work, with its version.
        unified: Whether CUDA says that the GPU shares the processor's memory. *uuid*: the GPU's.
        note: Why it is the processor.
    """

    kind: str
    device: str
    by: str
    unified: bool
    uuid: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.device} by {self.by}"


class Reading(msgspec.Struct, frozen=True):
    """Seconds of the GEMV and of the copy, each the median of *times* stretches; *bytes*: of the matrix, which is what is copied."""

    gemv: float
    copy: float
    bytes: int
    times: int

    @property
    def ratio(self) -> float:
        """The bandwidth that the GEMV reads with, as a share of what the copy reads and writes with."""
        return self.copy / (2 * self.gemv)

    def __post_init__(self) -> None:
        if not (0 < self.gemv < 1e6 and 0 < self.copy < 1e6 and self.bytes > 0):
            raise ValueError("a reading is of seconds above 0")


class Stream(msgspec.Struct, frozen=True):
    """Bytes per second of reading, from the median of *times* stretches."""

    read: float
    times: int

    def __post_init__(self) -> None:
        if not 0 < self.read < 1e18:
            raise ValueError("a bandwidth is above 0")


class Failed(msgspec.Struct, frozen=True):
    """What went wrong in the child."""

    error: str


class Sentinel:
    """
    The child, started by the first question and again after it died. A question that a child died with is asked of one other child.

    The kernel ends it with the thread that started it, so ask from one that lasts.

    Args:
        python: The Python that it runs in; `sys.executable` where that has to do.
        log: What its libraries print.

    Attributes:
        device: What it measures; None before it said so.
    """

    def __init__(self, policy: SentinelPolicy, python: Path, log: Path) -> None:
        self._policy, self._python, self._log = policy, python, log
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.device: Device | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The child's number; None while there is none."""
        return self._child.pid if self._child else None

    def hello(self) -> Device:
        """
        Return what is measured, after starting the child where it does not run.

        Raises:
            Silent: It cannot be started, or says nothing in its time.
        """
        if self._child is None or self.device is None or self._child.poll() is not None:
            self._start()
            self.device = self._answer(Device, self._policy.start)
        return self.device

    def reading(self) -> Reading:
        """
        Return how long the two fixed things take now.

        Raises:
            Silent: The child died, hangs, or cannot do it (memory is short).
        """
        return self._ask("measure", Reading, self._policy.matrix, self._policy.seconds)

    def stream(self) -> Stream:
        """Return how fast memory is read now; raise `Silent` as `reading` does."""
        return self._ask("bandwidth", Stream, self._policy.stream, self._policy.seconds)

    def heat(self, seconds: float) -> None:
        """Do the two fixed things for some *seconds*; raise `Silent` as `reading` does."""
        self._ask("measure", Reading, self._policy.matrix, seconds / 2)

    def _ask(self, ask: str, kind: type[T], megabytes: int, seconds: float) -> T:
        order = {"ask": ask, "megabytes": megabytes, "warm": self._policy.warm, "seconds": seconds, "least": self._policy.least}
        patience = self._policy.patience + self._policy.warm + 3 * seconds
        earlier = self._child
        self.hello()
        started = self._child is not earlier
        try:
            return self._order(order, kind, patience)
        except _Died:
            # Until the last thread of a killed process has ended, it cannot be waited for, and its pipes take what is written.
            # What dies of the order itself dies as a fresh child, too, and is asked no third time.
            if started:
                raise
        self.hello()
        return self._order(order, kind, patience)

    def _order(self, order: dict[str, object], kind: type[T], patience: float) -> T:
        """Send *order* to the child, and return its answer."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(msgspec.json.encode(order) + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            raise self._silent(f"it does not listen: {error.strerror}", _Died) from error
        return self._answer(kind, patience)

    def _start(self) -> None:
        self.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(min(THREADS, len(os.sched_getaffinity(0))))
        variables = process.clean_environment(OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        try:
            with self._log.open("wb") as sink:
                self._child = subprocess.Popen(
                    process.wrap_with_limits([self._python, "-I", SCRIPT], by=signal.SIGKILL), env=variables, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=sink, start_new_session=True,
                )  # fmt: skip
        except (OSError, CommandError) as error:
            why = getattr(error, "strerror", None) or "there is no such program"
            raise Silent(f"{self._python} does not run: {why}") from error

    def _answer(self, kind: type[T], patience: float) -> T:
        line = self._line(patience)
        try:
            found: Any = msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            try:
                why = "".join(letter for letter in msgspec.json.decode(line, type=Failed).error if letter.isprintable())[:300]
            except msgspec.MsgspecError:
                raise self._silent("it answers something else") from error
            if kind is Device:
                raise self._silent(why) from error
            raise Silent(why) from error
        return found  # type: ignore[no-any-return]  # the decoder's result is of that kind

    def _line(self, patience: float) -> bytes:
        """Return the next line that the child says within *patience* seconds."""
        assert self._child is not None
        assert self._child.stdout is not None
        until = time.monotonic() + patience
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._child.stdout], [], [], left)[0]:
                raise self._silent(f"it did not answer within {patience:.0f} s")
            data = os.read(self._child.stdout.fileno(), 4096)
            self._rest += data
            if not data or len(self._rest) > MOST:
                raise self._silent("it answers without end") if data else self._silent("it died", _Died)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _silent(self, why: str, kind: type[Silent] = Silent) -> Silent:
        """End the child, and return that it said nothing, with its last words."""
        self.stop()
        words = last_line(self._log)
        return kind(why + (f": {words}" if words else ""))

    def stop(self) -> None:
        """End the child; harmless when repeated."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:  # what was not written yet cannot be any more
                    continue
        self._child, self._rest = None, b""


def own_python() -> Path:
    """Return the Python of this program, which has NumPy."""
    return Path(sys.executable)
