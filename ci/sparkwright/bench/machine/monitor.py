"""
The machine that measures: its state (nvidia-smi, the load of others, readings of the probe), the
policy for it, and the reasons against measuring in it.

What the driver does not report is None, and no reason. Whether throttling under load is the result
of a candidate or noise is for the gate to decide.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from msgspec.structs import replace

from sparkwright.bench.model.modules import BANDWIDTH, Bandwidth
from sparkwright.bench.records import Count, Positive, Reason
from sparkwright.core import memory, process
from sparkwright.core.console import console, one_line
from sparkwright.core.errors import CommandError
from sparkwright.core.store import Store

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e5)]

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
    warmup: Annotated[float, msgspec.Meta(ge=0, lt=60)]
    seconds: Annotated[float, msgspec.Meta(gt=0, lt=60)]
    readings: Annotated[int, msgspec.Meta(ge=3, le=1000)]
    band: Positive
    min_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)]
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
    discards: Annotated[int, msgspec.Meta(ge=0, le=100)]
    cooldown: Seconds
    preheat: Seconds
    max_other_load: Annotated[float, msgspec.Meta(gt=0, le=1)]
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


#: Seconds over which the load of other programs is measured; the kernel counts in hundredths.
LOAD_SECONDS = 0.5

#: Fields of nvidia-smi that are read of the GPU.
_FIELDS = ("uuid", "vbios_version", "temperature.gpu", "clocks_event_reasons.active")
#: Files that name the machine and its firmware; none has a serial number or a host's name.
DMI = Path("/sys/class/dmi/id")
#: What keeps a GPU busy while its clocks are read: matrix-vector products for five seconds, then
#: copies of the matrix for five.
LOAD = ProbePolicy(
    matrix=268, stream=268, warmup=0, seconds=5, readings=3, band=0.1, min_ratio=0, timeout=110
)
#: Seconds between two looks at the clocks under load.
PERIOD = 0.5
#: Share of the highest clock below which a GPU under load is slow. Proposed.
SLOW = 0.5
#: GiB that the load takes: torch, its context on the GPU, and two matrices. Proposed.
TAKEN = 4.0

SCRIPT = Path(__file__).parent / "gemv_probe.py"


class ProbeError(Exception):
    """The probe gives no reading; the message says why."""


class ProbeResult(msgspec.Struct, frozen=True):
    """
    What the probe measured.

    Attributes:
        gpu: Whether it ran on a GPU. *name*: of the device and of the library.
        uuid: Of the GPU, without ``GPU-``; empty for the processor.
        bytes: Of the matrix.
        readings: At least one.
    """

    gpu: bool
    name: str
    uuid: str
    bytes: Annotated[int, msgspec.Meta(gt=0)]
    readings: Annotated[tuple[Reading, ...], msgspec.Meta(min_length=1)]


def probe(
    python: Path,
    policy: ProbePolicy,
    megabytes: int,
    readings: int = 1,
) -> ProbeResult:
    """
    Return *readings* of the matrix-vector probe in an environment with torch.

    A slow state of the GPU that its driver does not report shows in it: on a GB10 a matrix-vector
    product took 3.3 times as long there, while a copy was as fast as ever. The program ends after
    each call, so that it takes no memory from a server that is measured.

    Raises:
        ProbeError: The program does not start, fails, hangs or prints something else.
    """
    words = (str(number) for number in (megabytes, policy.warmup, policy.seconds, readings))
    timeout = policy.timeout + 2 * readings * (policy.warmup + policy.seconds)
    try:
        printed = process.output([python, "-I", SCRIPT, *words], timeout=timeout)
        return msgspec.json.decode(printed, type=ProbeResult)
    except CommandError as error:
        raise ProbeError(one_line(" ".join([error.what, *error.details[-1:]]), 300)) from None
    except msgspec.MsgspecError as error:
        raise ProbeError(f"it gives no reading: {error}") from None


class MachineMonitor:
    """
    The machine in one session. The bandwidth of its memory is measured, and kept in *store*.

    Args:
        python: Python of an environment with torch, such as the server's; None if there is none,
            and then nothing is probed. Without a GPU only the bandwidth of memory is measured.

    Attributes:
        policy: With the memory floor of this kind of machine.
        normal: The probe's readings while nothing is wrong; none before `settle`, and without a
            GPU.
    """

    def __init__(self, policy: MachinePolicy, store: Store, *, python: Path | None) -> None:
        self._python, self._failure = python, ""
        self._device: ProbeResult | None = None
        self.normal: tuple[Reading, ...] = ()
        try:
            if python:
                self._device = probe(python, policy.probe, policy.probe.stream)
        except ProbeError as error:
            self._failure = str(error)
        if device := self._device:
            # A product reads the matrix once, and a copy reads and writes it. The faster one
            # counts: too low a ceiling would make sound measurements look impossible.
            seconds = min(min(reading.gemv, reading.copy / 2) for reading in device.readings)
            store.put(*BANDWIDTH, Bandwidth(round(device.bytes / seconds / 1e9, 2), device.name))
        if not memory.MachineMemory.here().unified:
            policy = replace(policy, floor=policy.discrete_floor)
        self.policy = policy

    def _gpu(self) -> tuple[str, ...]:
        """Return what the driver states in `_FIELDS` of the chosen GPU, else of the first one."""
        uuid = self._device.uuid if self._device else ""
        for row in memory.query(f"gpu={','.join(_FIELDS)}")[0]:
            if row[0].endswith(uuid):
                return tuple("" if word.startswith("[") else word for word in row)
        return ("",) * len(_FIELDS)

    def firmware(self) -> dict[str, str]:
        """Return the versions of firmware that the machine's speed depends on, without serials."""
        facts = {
            "vbios": self._gpu()[1],
            "machine": _text(DMI / "product_name"),
            "firmware": _text(DMI / "bios_version"),
            "controller": _text(DMI / "ec_firmware_release"),
        }
        return {name: value for name, value in facts.items() if value}

    def _readings(self, policy: ProbePolicy, count: int = 1) -> tuple[Reading, ...]:
        """Return readings of the GPU; none without a GPU. Raise ProbeError as `probe`."""
        if not self._python or not self._device or not self._device.gpu:
            return ()
        return probe(self._python, policy, policy.matrix, count).readings

    def settle(self, preheat: float) -> tuple[Reason, ...]:
        """
        Record the normal state before any server runs; return reasons why no session may begin.

        Args:
            preheat: Seconds of work of the GPU, so that the first measurement is made warm.
        """
        policy = self.policy.probe
        try:
            if self._device:
                with console.step(f"preheat for {preheat:.0f} s, and probe the machine"):
                    self._readings(replace(policy, warmup=preheat / 2))
                    self.normal = self._readings(policy, policy.readings)
        except ProbeError as error:
            self._failure = str(error)
        state = self._state()
        reasons = disturbances(state, state, (), self.policy)
        if self._failure:
            return (Reason("probe-silent", self._failure), *reasons)
        if self.normal:
            # A sound GPU reads in a GEMV about as fast as it copies, which reads and writes.
            gemv = statistics.median(reading.gemv for reading in self.normal)
            ratio = statistics.median(reading.copy for reading in self.normal) / (2 * gemv)
            if ratio < policy.min_ratio:
                message = (
                    f"the GEMV has {ratio:.2f} of the copy's bandwidth, not {policy.min_ratio:g}"
                )
                reasons = (*reasons, Reason("slow-state", message))
        return reasons

    def snapshot(self) -> Snapshot:
        """Return the state now, with new readings of the probe."""
        try:
            readings = self._readings(self.policy.probe)
        except ProbeError as error:
            return replace(self._state(), probe_error=str(error))
        return replace(self._state(), gemv=readings[0].gemv if readings else None)

    def _state(self) -> Snapshot:
        """Return the state now, without the probe; own processes count as no load."""
        own = [psutil.Process(), *psutil.Process().children(recursive=True)]
        other_load = _other_load(own)
        uuid, _, celsius, reasons = self._gpu()
        bits = int(reasons, 16) if re.fullmatch("0x[0-9a-fA-F]+", reasons) else 0
        users, _ = memory.query("compute-apps=gpu_uuid,pid")
        computing = {int(pid) for gpu, pid in users if gpu == uuid and pid.isdecimal()}
        others = computing - {each.pid for each in own}
        return Snapshot(
            temperature=float(celsius) if celsius.isdecimal() else None,
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit),
            other_load=other_load,
            # Those of another container are not seen here, and may be the server.
            gpu_processes=tuple(
                f"process {pid}" for pid in sorted(others) if psutil.pid_exists(pid)
            ),
        )

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        """Return the reasons against a measurement between two snapshots."""
        return disturbances(before, after, self.normal, self.policy)


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


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").strip()[:100]
    return ""


def _other_load(own: Sequence[psutil.Process]) -> float:
    """
    Return the share of the processors' time that processes other than *own* use.

    Only the processors that this program may run on count: its servers run on the same ones.
    """
    processors, before = os.sched_getaffinity(0), _cpu_seconds(own)
    percents = psutil.cpu_percent(LOAD_SECONDS, percpu=True)
    busy = sum(part for number, part in enumerate(percents) if number in processors) / 100
    others = busy - (_cpu_seconds(own) - before) / LOAD_SECONDS
    return min(1.0, max(0.0, others / len(processors)))


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time of *processes* and their ended children."""
    seconds = 0.0
    for each in processes:
        with contextlib.suppress(psutil.Error):
            seconds += sum(each.cpu_times()[:4])
    return seconds


def under_load(python: Path) -> tuple[str, str]:
    """
    Return what the first GPU has while it works for ten seconds, and what is wrong with that.

    A Spark can be stuck at about 700 MHz, or 513, until its power was disconnected; idle, it cannot
    be told from a sound one, which has 2,400 of 3,003 MHz under load (eugr/spark-vllm-docker#334,
    model-serving-minefield#55). Whoever sets a limit on purpose takes 2,000 or more.

    Args:
        python: Of an environment with torch.

    Returns:
        Clocks, power, temperature and bandwidth, or an empty text if they cannot be seen; and a
        sentence, or an empty text if nothing is wrong.
    """
    samples = [["0"] * 4]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(probe, python, LOAD, LOAD.matrix)
        while not load.done():
            time.sleep(PERIOD)
            rows, _ = memory.query("gpu=clocks.sm,clocks.max.sm,power.draw,temperature.gpu")
            samples += rows[:1]
    try:
        result = load.result()
    except ProbeError as error:
        return "", f"the load did not run: {error}"
    if not result.gpu:
        return "", "torch sees no GPU"
    highest = list[float]()
    for column in zip(*samples, strict=True):
        # [N/A] is no number.
        highest.append(max(float(re.sub("[^0-9.]", "", word) or 0) for word in column))
    clock, most, watts, celsius = highest
    speed = result.bytes / result.readings[0].gemv / 1e9
    state = f"{clock:,.0f} of {most:,.0f} MHz, {watts:.0f} W, {celsius:.0f} °C, {speed:,.0f} GB/s"
    slow = f"the GPU stays at {clock:,.0f} MHz under load; disconnect its power for some minutes"
    return state, slow if 0 < clock < SLOW * most else ""
