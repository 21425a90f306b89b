"""The machine that measures, as the throughput gate sees it: warmed up, asked before and after each leg, and watched in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from sparkwright.bench.machine import bandwidth, conditions
from sparkwright.bench.machine.conditions import Normal
from sparkwright.bench.machine.history import Kept
from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.sentinel import Device, Reading, Sentinel, Silent, own_python
from sparkwright.bench.machine.snapshot import Snapshot
from sparkwright.bench.machine.telemetry import Meter, Telemetry
from sparkwright.bench.machine.watch import MemoryWatch
from sparkwright.bench.model.roofline import Bandwidth
from sparkwright.bench.records import Reason
from sparkwright.bench.server.serve import Server
from sparkwright.core.console import console
from sparkwright.core.store import Store

#: Seconds of one order while the machine is heated.
ROUND = 2.0


class Machine:
    """
    This machine; leave its ``with`` block to end the sentinel.

    Args:
        python: The Python of an environment with torch for the GPU at hand, such as the server's; None, or one in which the sentinel does
            not start: the processor is measured, by NumPy.

    Attributes:
        policy: As it holds here: its floor of memory is that of this kind of machine.
        normal: What the sentinel reads here; None before `settle`, and where it is silent.
        notes: What a reader of the result should know of this session, as sentences.
    """

    def __init__(self, policy: MachinePolicy, store: Store, *, python: Path | None) -> None:
        self.policy, self._store = policy, store
        log = store.folder("logs") / "sentinel.log"
        self._sentinel = Sentinel(policy.sentinel, python or own_python(), log)
        self._telemetry: Telemetry | None = None
        self._device: Device | None = None
        self._bandwidth: Bandwidth | None = None
        self.normal: Normal | None = None
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        try:
            with console.progress("start the sentinel", 0) as line:
                line.update(0)
                self._device = self._started()
            self._telemetry = Telemetry(self._device.uuid if self._device else "")
            shares = self._telemetry.unified()
            self.policy = self.policy.resolved(unified=bool(shares or (self._device and self._device.unified)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the sentinel and let go of the driver; harmless when repeated."""
        self._sentinel.stop()
        if self._telemetry:
            self._telemetry.close()

    def _started(self) -> Device | None:
        """Return what the sentinel measures: in the Python that was named, else in this one."""
        try:
            device = self._sentinel.hello()
        except Silent as first:
            self._say(f"The sentinel does not start in the Python that was named: {first}.")
            self._sentinel = Sentinel(self.policy.sentinel, own_python(), self._store.folder("logs") / "sentinel.log")
            try:
                device = self._sentinel.hello()
            except Silent as second:
                self._say(f"There is no sentinel: {second}. A hidden slow state would not be noticed.")
                return None
        if device.note and device.note != "there is no CUDA driver":
            self._say(f"The sentinel measures the processor: {device.note}.")
        return device

    def _say(self, note: str) -> None:
        self.notes = (*self.notes, note)
        console.warn(note)

    def fingerprint(self) -> dict[str, str]:
        """Return what this machine's speed depends on; see `sparkwright.bench.machine.telemetry.Telemetry.fingerprint`."""
        if self._telemetry:
            return self._telemetry.fingerprint()
        with contextlib.closing(Telemetry()) as telemetry:
            return telemetry.fingerprint()

    def preheat(self, seconds: float) -> None:
        """Do the sentinel's work for some *seconds*, so that what is measured next is measured warm; without a sentinel, nothing."""
        if self._device is None:
            return
        began = time.monotonic()
        with console.progress("preheat", seconds) as line:
            while (done := time.monotonic() - began) < seconds:
                line.update(round(done), "s")
                try:
                    self._sentinel.heat(min(ROUND, seconds - done))
                except Silent as error:
                    self._say(f"The machine was preheated for {done:.0f} s only: {error}.")
                    return

    def settle(self, known: Normal | None = None) -> tuple[Reason, ...]:
        """
        Take what is normal from some readings, and return why nothing should start; called before any server runs, and again later.

        Args:
            known: What was normal minutes ago, before an interruption; no readings are taken where the same device measures.
        """
        if known and self._device and known.device == str(self._device):
            self.normal = known
            shot = self.snapshot()
            return (*conditions.startable(shot, self.policy), *conditions.slow(shot, known))
        readings = self._readings()
        shot = self.snapshot()
        reasons = list(conditions.startable(shot, self.policy))
        if not readings or self._device is None:
            self.normal = None
            return (*reasons, Reason("sentinel-silent", "no reading of the sentinel"))
        self.normal = Normal.of(readings, self._device, self.policy)
        kept = Kept(self._store, self.fingerprint(), self.policy.sentinel, f"{self._device.kind}: {self._device}")
        odd = [*conditions.sound(readings[-1], self._device, self.policy), *kept.slower(self.normal)]
        if not kept.sessions and not odd:
            note = "No earlier session on this machine with these versions is known: what is normal here is what this one began with."
            self.notes = (*self.notes, note)
            console.note(note)
        if not odd and not reasons:
            kept.keep(self.normal)
        return (*reasons, *odd[:1])

    def _readings(self) -> list[Reading]:
        found: list[Reading] = []
        count = self.policy.sentinel.readings if self._device else 0
        with console.progress("what is normal here", count) as line:
            for number in range(count):
                line.update(number)
                try:
                    found.append(self._sentinel.reading())
                except Silent as error:
                    self._say(f"The sentinel is silent: {error}.")
                    return []
        return found

    def snapshot(self, ours: Sequence[psutil.Process] = ()) -> Snapshot:
        """Return the machine's state now, within seconds; *ours* are processes that count as ours, beside all that this program started."""
        meter = Meter(ours)
        reading, silent = self._reading()
        assert self._telemetry is not None, "inside the with block"
        told = self._telemetry.told(_numbers(ours))
        load = meter.share()
        unknown = (*silent, *told.unknown, *(("load of others",) if load is None else ()))
        return Snapshot(
            at=time.time(), steady=time.monotonic(), gemv=reading.gemv if reading else None, copy=reading.copy if reading else None,
            clock=told.gpu.clock, memory_clock=told.gpu.memory_clock, temperature=told.gpu.temperature, power=told.gpu.power,
            throttled=told.gpu.throttled, free=told.free, load=load, others=told.others, battery=told.battery, unknown=unknown,
        )  # fmt: skip

    def _reading(self) -> tuple[Reading | None, tuple[str, ...]]:
        if self._device is None:
            return None, ("sentinel",)
        try:
            reading = self._sentinel.reading()
        except Silent as error:
            return None, (f"sentinel: {error}",)
        # A child that was started anew may not find the GPU any more.
        same = self._sentinel.device == self._device
        return (reading, ()) if same else (None, (f"sentinel: it measures {self._sentinel.device} now",))

    def disturbed(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        """Return why a leg between two snapshots does not count."""
        return conditions.disturbed(before, after, self.normal, self.policy)

    def bandwidth(self) -> Bandwidth | None:
        """Return how fast memory is read, measured once in this session, before a server runs; None where the sentinel is silent."""
        if self._bandwidth is None and self._device is not None:
            try:
                self._bandwidth = bandwidth.measure(self._sentinel, self._store)
            except Silent as error:
                self._say(f"The memory's bandwidth is not measured: {error}.")
        return self._bandwidth

    def watching(self, server: Server) -> contextlib.AbstractContextManager[object]:
        """
        Return a watch over memory for a ``with`` block around a leg, which ends *server* at once where the machine is in danger.

        It is for when every server is ready: one that loads its weights takes memory faster than the policy lets it fall.
        """
        return MemoryWatch(self.policy.memory, server.kill)


def _numbers(ours: Sequence[psutil.Process]) -> set[int]:
    """Return the process numbers of this program, of *ours*, and of all that they started."""
    found = set()
    for one in (psutil.Process(), *ours):
        with contextlib.suppress(psutil.Error):
            found |= {one.pid, *(child.pid for child in one.children(recursive=True))}
    return found
