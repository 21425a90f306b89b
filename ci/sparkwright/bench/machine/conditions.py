"""
What the state of a machine means: may a measurement start, and does a leg count?

Nothing here measures; every function takes snapshots and gives reasons. What is not known (a driver that does not tell) is no reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from sparkwright.bench.machine import kernel_log
from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.sentinel import Device, Reading
from sparkwright.bench.machine.snapshot import Snapshot
from sparkwright.bench.records import Reason

TITLE = "the state of the machine"

REASONS: Mapping[str, str] = {
    "slow-state": "The fixed matrix times vector takes another time than is normal here: a hidden slow state, which drivers do not show. "
    "Wait; if it stays, update firmware and driver, and take the power away for a minute.",
    "throttled": "The driver holds the GPU's clocks back. Look at cooling and power supply.",
    "too-hot": "The GPU is hotter than the policy allows. Let it cool down, and look at its cooling.",
    "machine-busy": "Other programs use the processors. End them, or measure when they are done.",
    "gpu-shared": "Another process computes on the GPU. End it: a measurement beside it says nothing.",
    "on-battery": "The machine runs on its battery, which lowers clocks. Plug it in.",
    "clock-jumped": "The clock was set, or the machine slept, while the leg ran, so no time of it is known.",
    "memory-low": "Less memory is available than must stay, or it falls too fast: unified memory hangs the host when it is gone. Give the "
    "server less, or end other programs.",
    "sentinel-silent": "The sentinel did not answer, so nobody knows whether the machine was in a slow state. Its log is in the cache "
    "directory, under logs.",
    "kernel-no-memory": kernel_log.MEANINGS["kernel-no-memory"],
}


class Span(msgspec.Struct, frozen=True):
    """The range of some readings, and their median, in seconds."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Span:
        """Return the span of at least one reading."""
        return cls(min(seconds), statistics.median(seconds), max(seconds))

    def off(self, seconds: float, band: float) -> float:
        """Return how many times the median *seconds* are (above 1: slower) where they lie out of the range by more than *band*, else 0."""
        return 0.0 if self.low / (1 + band) <= seconds <= self.high * (1 + band) else seconds / self.middle


class Normal(msgspec.Struct, frozen=True):
    """
    What the sentinel reads on this machine when nothing is wrong.

    Attributes:
        band: How far out of the range a reading may lie.
        device: What was measured.
    """

    gemv: Span
    copy: Span
    band: float
    device: str

    @classmethod
    def of(cls, readings: Sequence[Reading], device: Device, policy: MachinePolicy) -> Normal:
        """Return the normal of the *readings* at the beginning of a session."""
        band = policy.sentinel.band if device.kind == "cuda" else policy.sentinel.processor
        return cls(Span.of([one.gemv for one in readings]), Span.of([one.copy for one in readings]), band, str(device))


def slow(snapshot: Snapshot, normal: Normal | None) -> Iterator[Reason]:
    """Yield why the sentinel's reading in *snapshot* is not *normal*; without a normal, nothing is expected."""
    if normal is None:
        return
    if snapshot.gemv is None or snapshot.copy is None:
        said = next((text for text in snapshot.unknown if text.startswith("sentinel")), "sentinel")
        yield Reason("sentinel-silent", f"no reading of the {said}")
    elif times := normal.gemv.off(snapshot.gemv, normal.band):
        copied = normal.copy.off(snapshot.copy, normal.band)
        says = f"the fixed GEMV took {_ms(snapshot.gemv)}, {times:.2f} times the normal {_ms(normal.gemv.middle)}; "
        yield Reason("slow-state", says + (f"the copy took {copied:.2f} times its normal time, too" if copied else "the copy is unchanged"))


def sound(reading: Reading, device: Device, policy: MachinePolicy) -> Iterator[Reason]:
    """Yield why even a first *reading* is not believed: a sound GPU reads in a GEMV about as fast as it copies."""
    if device.kind == "cuda" and reading.ratio < policy.sentinel.ratio:
        says = f"the fixed GEMV reads with {reading.ratio:.2f} of the copy's bandwidth; at least {policy.sentinel.ratio:g} is sound"
        yield Reason("slow-state", says)


def startable(snapshot: Snapshot, policy: MachinePolicy) -> tuple[Reason, ...]:
    """Return why nothing should be measured on a machine in the state of *snapshot*, taken before any server runs."""
    return tuple(_held(snapshot, policy, policy.temperature.start))


def disturbed(before: Snapshot, after: Snapshot, normal: Normal | None, policy: MachinePolicy) -> tuple[Reason, ...]:
    """Return why a leg between two snapshots does not count, each reason once: the later state, or else the earlier."""
    hottest = policy.temperature.leg
    reasons = {one.reference: one for shot in (before, after) for one in (*slow(shot, normal), *_held(shot, policy, hottest))}
    jump = (after.at - before.at) - (after.steady - before.steady)
    # A steady clock that went back is another one: the machine was started anew.
    if after.steady < before.steady or abs(jump) > policy.jump:
        reasons["clock-jumped"] = Reason("clock-jumped", f"the clock went {jump:+.1f} s against a steady one")
    return tuple(reasons.values())


def _held(shot: Snapshot, policy: MachinePolicy, hottest: float) -> Iterator[Reason]:
    if shot.others:
        yield Reason("gpu-shared", f"{', '.join(shot.others[:5])} computes on the GPU")
    if shot.load is not None and shot.load > policy.load:
        says = f"others use {100 * shot.load:.0f} % of the processors' time; at most {100 * policy.load:g} % is allowed"
        yield Reason("machine-busy", says)
    if shot.battery:
        yield Reason("on-battery", "the machine runs on its battery")
    if held := [one for one in shot.throttled if one in policy.throttles]:
        yield Reason("throttled", f"the GPU's clocks are held back: {', '.join(held)}")
    if shot.temperature is not None and shot.temperature > hottest:
        yield Reason("too-hot", f"the GPU has {shot.temperature:.0f} °C; at most {hottest:g} °C is allowed")
    if shot.free is not None and shot.free < policy.memory.floor:
        yield Reason("memory-low", f"{shot.free} MB are available; {policy.memory.floor} MB must stay")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
