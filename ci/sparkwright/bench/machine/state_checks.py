"""
The state of the machine, the policy for it, and the reasons against measuring in it.

Nothing here measures: the functions take snapshots and return reasons. What the driver does not
report is None, and no reason. Whether throttling under load is the result of a candidate or noise
is for the gate to decide.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.records import Count, Positive, Reason

Seconds = Annotated[float, Meta(ge=0, lt=1e5)]

#: Reason → what it means and what to do.
REASONS: Mapping[str, str] = {
    "slow-state": (
        "The matrix-vector probe is slower than normal on this machine: a state "
        "that the driver does not report. Wait; if it stays, update firmware and "
        "driver, and disconnect the power for a minute."
    ),
    "throttled": "The driver holds the GPU's clocks back. Check cooling and power supply.",
    "too-hot": "The GPU is hotter than the policy allows. Let it cool down, and check its cooling.",
    "machine-busy": "Other programs use the processors. End them, or measure later.",
    "gpu-shared": "Another process computes on the GPU. End it.",
    "memory-low": "Too little memory is available, or it shrinks too fast: without free unified "
    "memory the host hangs. Give the server less, or end other programs.",
    "probe-silent": (
        "The matrix-vector probe gave no reading, so slow states are not "
        "detected. It needs torch in the environment that serves; its last "
        "message is quoted."
    ),
    "kernel-no-memory": "The GPU's driver ran out of memory, which on unified memory comes shortly "
    "before the machine hangs.",
}

#: The reference of a run that the machine's own state spoiled again and again.
UNSTEADY = "machine-unsteady"
#: Reasons that go away without a repair: the machine recovers, or another program ends.
PASSING = ("slow-state", "throttled", "too-hot", "machine-busy", "gpu-shared", UNSTEADY)

#: Bits of clocks_event_reasons.active (nvml.h) → names. An idle GPU and clocks set by a program are
#: no throttling; a power cap is common under load, and shows in the probe if it matters.
THROTTLE_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class ProbePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The matrix-vector probe.

    Attributes:
        matrix: MB of the matrix, several times the processor's cache.
        stream: MB that are read to measure the bandwidth of the memory.
        warmup: Seconds of the same work before the measurement, for the clocks to rise.
        seconds: Seconds of each measurement.
        readings: Readings that define what is normal.
        band: Allowed distance from the range of those readings (0.03 is 3 %).
        min_ratio: Minimum of the product's bandwidth in parts of the copy's.
        timeout: Seconds beyond the work itself, to load torch from a cold disk.
    """

    matrix: Count
    stream: Count
    warmup: Annotated[float, Meta(ge=0, lt=60)]
    seconds: Annotated[float, Meta(gt=0, lt=60)]
    readings: Annotated[int, Meta(ge=3, le=1000)]
    band: Positive
    min_ratio: Annotated[float, Meta(ge=0, lt=1)]
    timeout: Positive


class MachinePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/machine.yaml``, which has the source of each threshold.

    Attributes:
        floor: Megabytes (10^6 bytes) that must stay available on a host whose GPU shares its
            memory. *discrete_floor*: on another.
        max_temperature: Maximum around a measurement.
        discards: Measurements in a row that may be repeated because of the machine's state.
        cooldown: Seconds to wait before such a repetition.
        preheat: Seconds of work before a session.
        max_other_load: Maximum share of the processors' time that other programs use.
        recent: Seconds for which the state after a measurement is that before the next one; 0 for a
            probe before each.
    """

    probe: ProbePolicy
    floor: Count
    discrete_floor: Count
    max_temperature: Positive
    discards: Annotated[int, Meta(ge=0, le=100)]
    cooldown: Seconds
    preheat: Seconds
    max_other_load: Annotated[float, Meta(gt=0, le=1)]
    recent: Seconds


class Snapshot(msgspec.Struct, frozen=True):
    """
    The machine at a moment; None for what is not reported.

    Attributes:
        gemv: Seconds of the probe's matrix-vector product.
        temperature: Degrees Celsius of the GPU.
        throttle_reasons: Why the GPU's clocks are held back.
        other_load: Share of the processors' time used by other programs, 0 to 1.
        gpu_processes: Other processes that compute on the GPU.
        probe_error: Why there is no reading of the probe.
    """

    gemv: float | None = None
    temperature: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    other_load: float | None = None
    gpu_processes: tuple[str, ...] = ()
    probe_error: str = ""


class Reading(msgspec.Struct, frozen=True):
    """Median seconds of the probe's matrix-vector product, and of its copy of the matrix."""

    gemv: Positive
    copy: Positive


def normal_reasons(normal: Sequence[Reading], policy: ProbePolicy) -> tuple[Reason, ...]:
    """
    Return the reasons not to take the first readings of a session as *normal*.

    A sound GPU reads in a GEMV about as fast as it copies. (A copy reads and writes every byte.)
    """
    gemv = statistics.median(reading.gemv for reading in normal)
    ratio = statistics.median(reading.copy for reading in normal) / (2 * gemv)
    if ratio >= policy.min_ratio:
        return ()
    message = f"the GEMV has {ratio:.2f} of the copy's bandwidth, not {policy.min_ratio:g}"
    return (Reason("slow-state", message),)


def disturbances(
    before: Snapshot, after: Snapshot, normal: Sequence[Reading], policy: MachinePolicy
) -> tuple[Reason, ...]:
    """
    Return the reasons against a measurement between two snapshots, each reference once.

    Args:
        normal: The probe's readings at the start of the session; empty without a probe.
    """
    reasons = (*_reasons(before, normal, policy), *_reasons(after, normal, policy))
    return tuple({reason.reference: reason for reason in reasons}.values())


def _reasons(
    snapshot: Snapshot, normal: Sequence[Reading], policy: MachinePolicy
) -> Iterator[Reason]:
    """Yield the reasons against measuring in the state of *snapshot*."""
    if normal and snapshot.gemv is None:
        yield Reason("probe-silent", snapshot.probe_error or "there is no reading")
    elif normal and snapshot.gemv is not None:
        low, high = min(each.gemv for each in normal), max(each.gemv for each in normal)
        if not low / (1 + policy.probe.band) <= snapshot.gemv <= high * (1 + policy.probe.band):
            yield Reason(
                "slow-state",
                f"the GEMV took {1000 * snapshot.gemv:.3g} ms, not {1000 * low:.3g} to "
                f"{1000 * high:.3g} ms as at the start",
            )
    if snapshot.gpu_processes:
        yield Reason("gpu-shared", f"on the GPU: {', '.join(snapshot.gpu_processes[:5])}")
    if (load := snapshot.other_load) is not None and load > policy.max_other_load:
        yield Reason(
            "machine-busy",
            f"others use {load:.0%} of the processors, allowed: {policy.max_other_load:.0%}",
        )
    if snapshot.throttle_reasons:
        yield Reason("throttled", ", ".join(snapshot.throttle_reasons))
    if (celsius := snapshot.temperature) is not None and celsius > policy.max_temperature:
        yield Reason(
            "too-hot", f"the GPU has {celsius:.0f} °C, allowed are {policy.max_temperature:g} °C"
        )
