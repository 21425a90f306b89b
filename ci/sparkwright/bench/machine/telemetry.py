"""What the machine tells of itself: GPU, load of others, memory, battery, and the versions that its speed may depend on."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import psutil

from sparkwright.bench.machine.nvml import GpuState, Nvml
from sparkwright.builder import host_info
from sparkwright.core import process

#: Seconds after which the driver counts as silent; it answers in milliseconds, or hangs.
PATIENCE = 10.0
#: The same where it is opened: a driver that nobody uses yet wakes the GPU first.
OPENING = 30.0

#: Where a machine's firmware is named; none of these is a serial number or a name that somebody gave.
DMI = Path("/sys/class/dmi/id")
FIRMWARE = {"machine": "product_name", "firmware": "bios_version", "firmware date": "bios_date", "controller": "ec_firmware_release"}


class Told(msgspec.Struct, frozen=True):
    """
    What the machine tells at a moment; see `sparkwright.bench.machine.snapshot.Snapshot`, which has the same fields.

    Attributes:
        gpu: What its driver says. *others*: processes beside ours that compute on it.
    """

    gpu: GpuState
    free: int
    others: tuple[str, ...] = ()
    battery: bool | None = None
    unknown: tuple[str, ...] = ()


class Telemetry:
    """
    The machine's own words, each asked for within `PATIENCE`.

    Args:
        uuid: Of the GPU to ask about; empty for the first.
    """

    def __init__(self, uuid: str = "") -> None:
        self._nvml: Nvml | None = host_info.run_probes({"open": lambda: Nvml(uuid)}, OPENING).get("open")

    def close(self) -> None:
        if self._nvml:
            self._nvml.close()
        self._nvml = None

    def told(self, ours: Collection[int]) -> Told:
        """Return what the machine tells now; processes on the GPU whose numbers are among *ours* are not others."""
        gpu = self._gpu()
        others, hidden = _named(set(gpu.computing) - set(ours))
        battery, doubt = on_battery()
        return Told(gpu, process.available_megabytes(), others, battery, gpu.unknown + hidden + doubt)

    def _gpu(self) -> GpuState:
        if self._nvml is None:
            return GpuState(unknown=("GPU: the driver does not answer",))
        late = GpuState(unknown=(f"GPU: the driver does not answer within {PATIENCE:g} s",))
        found = host_info.run_probes({"state": self._nvml.state}, PATIENCE).get("state", late)
        assert isinstance(found, GpuState)
        return found

    def unified(self) -> bool | None:
        """Return whether GPU and processor share the memory; None where that is not known, as without a GPU."""
        return self._nvml.unified() if self._nvml else None

    def fingerprint(self) -> dict[str, str]:
        """
        Return what this machine's speed depends on, by name: GPU, driver, firmware, kernel, processor, cores, memory.

        No serial number and no name of the host or of a user is in it, so that two machines of one kind and state have the same.
        """
        return {**(self._nvml.identity() if self._nvml else {}), **_host()}


@functools.cache
def _host() -> dict[str, str]:
    firmware = {name: text for name, file in FIRMWARE.items() if (text := _text(DMI / file))}
    return {
        **firmware,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        # A busy machine may answer too late once; another name would be taken for another machine.
        "processor": next(filter(None, (host_info.processor() for _ in range(5))), platform.machine()),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
    }


def _text(path: Path) -> str:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return ""
    return "".join(letter for letter in text if letter.isprintable()).strip()[:100]


def on_battery() -> tuple[bool | None, tuple[str, ...]]:
    """Return whether the machine runs on a battery (None without one), and what is unknown of that."""
    try:
        found = psutil.sensors_battery()
    except (OSError, ValueError, RuntimeError):  # what firmware writes into /sys is not always a number
        return None, ("battery",)
    if found is None:
        return None, ()
    return (None, ("battery",)) if found.power_plugged is None else (not found.power_plugged, ())


def _named(pids: Collection[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the processes *pids* by name, and those that are in another container: whether those are ours cannot be told."""
    others, hidden = [], []
    for pid in sorted(pids):
        try:
            others.append(f"{psutil.Process(pid).name()} ({pid})")
        except psutil.Error:
            hidden.append(f"whose process {pid} on the GPU is")
    return tuple(others), tuple(hidden)


class Meter:
    """
    The share of the processors' time that others use, from the meter's making on.

    Args:
        ours: Processes that are not others, beside this one and all that it started; with their descendants.
    """

    def __init__(self, ours: Sequence[psutil.Process] = ()) -> None:
        self._ours = tuple(one.pid for one in ours)
        self._began = time.monotonic()
        self._total, self._busy, self._own = self._now()

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # A guest's time is counted as its host process's, too; waiting for a disk is no work.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        mine = os.times()
        own = sum(mine[:4]) + _seconds_below(os.getpid())
        below = {one.pid for one in psutil.Process().children(recursive=True)}
        for pid in set(self._ours) - below - {os.getpid()}:
            own += _seconds_below(pid) + _seconds(pid)
        return whole, whole - times.idle - getattr(times, "iowait", 0.0), own

    def share(self, least: float = 0.5) -> float | None:
        """Return the share, from 0 to 1, over *least* seconds or more (the kernel counts in hundredths); None where it does not count."""
        time.sleep(max(0.0, self._began + least - time.monotonic()))
        total, busy, own = self._now()
        if total <= self._total:
            return None
        return min(1.0, max(0.0, (busy - self._busy - (own - self._own)) / (total - self._total)))


def _seconds_below(pid: int) -> float:
    """Return the seconds of CPU that the descendants of *pid* used."""
    try:
        return sum(_seconds(child.pid) for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return 0.0


def _seconds(pid: int) -> float:
    """Return the seconds that the process *pid* used, with those of its ended children; 0 for one that is no more."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:
        return 0.0
