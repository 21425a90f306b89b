"""
The matrix-vector probe, which shows a slow state that the GPU's driver does not report.

In that state of a GB10 a matrix-vector product takes 3.3 times as long, while a copy is as fast as
ever. The probe is a child process that lives as long as the session, since torch takes seconds to
load; it holds no array between two readings.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from sparkwright.bench.machine.state_checks import Normal, Positive, ProbePolicy, Reading
from sparkwright.bench.records import Reason
from sparkwright.core import process
from sparkwright.core.console import one_line
from sparkwright.core.errors import CommandError
from sparkwright.core.files import content_key
from sparkwright.core.store import Store

SCRIPT = Path(__file__).parent / "gemv_probe.py"

#: Threads on a processor: enough for its memory, and few enough not to wait for each other.
MAX_THREADS = 8

T = TypeVar("T")


class ProbeError(Exception):
    """The probe gives no reading; the message says why."""


class Device(msgspec.Struct, frozen=True):
    """
    The device that the probe measures.

    Attributes:
        kind: ``cuda`` or ``cpu``. *name*: of the device and of the library.
        uuid: Of the GPU, without ``GPU-``; empty for the processor.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    uuid: str


class GemvProbe:
    """
    The probe, started by its first use and again after a failure.

    The kernel kills it with the thread that started it, so use it from one that lasts.

    Args:
        python: Python with torch or NumPy. *log*: file for its error output.
    """

    def __init__(self, policy: ProbePolicy, python: Path, log: Path) -> None:
        self._policy, self._python, self._log = policy, python, log
        self._child: subprocess.Popen[bytes] | None = None
        self._device: Device | None = None

    def device(self) -> Device:
        """
        Return the device that is measured.

        Raises:
            ProbeError: The program does not start.
        """
        if self._child is None or self._device is None:
            threads = str(min(MAX_THREADS, len(os.sched_getaffinity(0))))
            environment = process.clean_environment(
                OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads
            )
            command = [str(self._python), "-I", str(SCRIPT)]
            try:
                with self._log.open("wb") as sink:
                    self._child = subprocess.Popen(
                        process.wrap_with_limits(command, by=signal.SIGKILL),
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=sink,
                        bufsize=0,
                        start_new_session=True,
                    )
            except (OSError, CommandError) as error:
                raise ProbeError(f"{self._python} does not run: {error}") from error
            self._device = self._response(self._child, Device, self._policy.start_timeout)
        return self._device

    def reading(self, megabytes: int = 0) -> Reading:
        """
        Return a reading, of a matrix of so many *megabytes* instead of the policy's.

        Raises:
            ProbeError: The program does not start, fails or hangs.
        """
        self.device()
        assert self._child
        assert self._child.stdin
        policy = self._policy
        request = {
            "megabytes": megabytes or policy.matrix,
            "warmup": policy.warmup,
            "seconds": policy.seconds,
        }
        try:
            self._child.stdin.write(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            raise self._failure(f"it has ended ({error.strerror})") from None
        return self._response(self._child, Reading, policy.timeout)

    def bandwidth(self) -> float:
        """
        Return how fast memory is read, in bytes per second; raise `ProbeError` as `reading` does.

        It is the faster of two ways to read an array once: too low a ceiling would make sound
        measurements look impossible.
        """
        reading = self.reading(self._policy.stream)
        return reading.bytes / min(reading.gemv, reading.reduce)

    def _response(self, child: subprocess.Popen[bytes], kind: type[T], timeout: float) -> T:
        """Return the next line of *child*."""
        assert child.stdout
        line, end = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise self._failure(f"it did not answer within {timeout:.0f} s")
            if not (data := os.read(child.stdout.fileno(), 65536)):
                raise self._failure("it has ended")
            line += data
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise self._failure(f"it gives no reading ({error})") from None

    def _failure(self, message: str) -> ProbeError:
        """End the child and return the error, with the last line of its log."""
        self.stop()
        lines = self._log.read_text("utf-8", "replace")[-2000:].strip().splitlines()
        return ProbeError(f"{message}: {one_line(lines[-1], 200)}" if lines else message)

    def stop(self) -> None:
        """End the child; harmless when repeated."""
        if self._child:
            self._child.kill()
            self._child.communicate()
        self._child = None


class FastestSession(msgspec.Struct, frozen=True):
    """Median seconds of a session's first matrix-vector products, and its day."""

    gemv: Positive
    day: str


def history_key(fingerprint: Mapping[str, str], policy: ProbePolicy, device: str) -> str:
    """Return the key of a machine: another driver, device, library or matrix is another one."""
    return content_key("probe", [dict(fingerprint), policy.matrix, device])


def history_reasons(
    store: Store, key: str, normal: Normal, policy: ProbePolicy
) -> tuple[Reason, ...]:
    """Return a reason if a session that starts with *normal* is slower than the fastest one."""
    best = store.get("probe", key, FastestSession)
    if best is None or normal.median <= best.gemv * (1 + policy.band):
        return ()
    times = normal.median / best.gemv
    message = f"the GEMV takes {times:.2f} × as long as on {best.day}, with the same versions"
    return (Reason("slow-state", message),)


def store_session(store: Store, key: str, normal: Normal) -> None:
    """Store a session if it is the fastest on its machine."""
    best = store.get("probe", key, FastestSession)
    if best is None or normal.median < best.gemv:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        store.put("probe", key, FastestSession(normal.median, today))
