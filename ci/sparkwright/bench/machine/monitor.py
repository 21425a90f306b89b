"""Observe the machine: GPU (NVML), load of others, memory, battery, and the matrix-vector probe."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pynvml
from msgspec.structs import replace

from sparkwright.bench.machine.probe import (
    GemvProbe,
    ProbeError,
    history_key,
    history_reasons,
    store_session,
)
from sparkwright.bench.machine.state_checks import (
    THROTTLE_REASONS,
    MachinePolicy,
    Normal,
    Reading,
    Snapshot,
    disturbances,
    normal_reasons,
    start_reasons,
)
from sparkwright.bench.model import decode_bytes
from sparkwright.bench.model.decode_bytes import Bandwidth
from sparkwright.bench.records import Reason
from sparkwright.builder import host_info
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.store import Store

#: Seconds over which the load of other programs is measured; the kernel counts in hundredths.
LOAD_SECONDS = 0.5

#: Files that name the machine and its firmware; none has a serial number or a host's name.
DMI = Path("/sys/class/dmi/id")


class Telemetry:
    """What GPU driver and operating system report, about the GPU of that *uuid* or the first."""

    def __init__(self, uuid: str = "") -> None:
        self._gpu: Any = None
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._gpu = (
                pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                if uuid
                else pynvml.nvmlDeviceGetHandleByIndex(0)
            )

    def _query(self, function: str, *arguments: Any) -> Any:
        """Return what an NVML *function* reports of the GPU; None if it is not supported."""
        if self._gpu is not None:
            with contextlib.suppress(pynvml.NVMLError):
                return getattr(pynvml, function)(self._gpu, *arguments)
        return None

    def adapt(self, policy: MachinePolicy) -> MachinePolicy:
        """Return *policy* with the memory floor of this kind of machine."""
        # A GPU without memory of its own does not report any.
        if self._gpu is not None and self._query("nvmlDeviceGetMemoryInfo") is None:
            return policy
        memory = replace(policy.memory, floor=policy.memory.discrete_floor)
        return replace(policy, memory=memory)

    def fingerprint(self) -> dict[str, str]:
        """Return the names and versions that the machine's speed depends on, without serials."""
        facts = {
            "gpu": self._query("nvmlDeviceGetName"),
            "driver": pynvml.nvmlSystemGetDriverVersion() if self._gpu is not None else None,
            "vbios": self._query("nvmlDeviceGetVbiosVersion"),
            "machine": _text(DMI / "product_name"),
            "firmware": _text(DMI / "bios_version"),
            "controller": _text(DMI / "ec_firmware_release"),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "processor": host_info.processor(),
            "cores": str(len(os.sched_getaffinity(0))),
            "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        }
        return {name: str(value) for name, value in facts.items() if value}

    def snapshot(
        self,
        server: Sequence[psutil.Process] = (),
        reading: Reading | None = None,
        probe_error: str = "",
    ) -> Snapshot:
        """Return the state now; this program, *server* and their children are not others."""
        own = [psutil.Process(), *server]
        for parent in tuple(own):
            with contextlib.suppress(psutil.Error):
                own += parent.children(recursive=True)
        other_load = _other_load(own)
        bits = self._query("nvmlDeviceGetCurrentClocksEventReasons") or 0
        computing = self._query("nvmlDeviceGetComputeRunningProcesses") or ()
        power = self._query("nvmlDeviceGetPowerUsage")
        return Snapshot(
            time=time.time(),
            monotonic=time.monotonic(),
            gemv=reading.gemv if reading else None,
            copy=reading.copy if reading else None,
            sm_clock=self._query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock=self._query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            temperature=self._query("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit),
            available=process.available_megabytes(),
            other_load=other_load,
            gpu_processes=_process_names({one.pid for one in computing} - {one.pid for one in own}),
            on_battery=_on_battery(),
            probe_error=probe_error,
        )


def _on_battery() -> bool:
    """Return whether a battery alone feeds the machine; False where the kernel knows of no power supply."""
    try:
        battery = psutil.sensors_battery()
    except OSError:  # psutil lists a directory that a kernel without power supplies does not have
        return False
    return battery is not None and battery.power_plugged is False


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").strip()[:100]
    return ""


def _process_names(pids: set[int]) -> tuple[str, ...]:
    """Return the processes by name; those of another container have none, and may be the server."""
    names = []
    for pid in sorted(pids):
        with contextlib.suppress(psutil.Error):
            names.append(f"{psutil.Process(pid).name()} ({pid})")
    return tuple(names)


def _other_load(own: Sequence[psutil.Process]) -> float:
    """Return the share of the processors' time that processes other than *own* use."""

    def cpu_seconds() -> tuple[float, float]:
        times, busy_own = psutil.cpu_times(), 0.0
        for one in own:
            with contextlib.suppress(psutil.Error):
                busy_own += sum(one.cpu_times()[:4])  # with those of ended children
        # A guest's time is counted in its host process, too.
        total = sum(times) - times.guest - times.guest_nice
        return total, total - times.idle - times.iowait - busy_own

    total, others = cpu_seconds()
    time.sleep(LOAD_SECONDS)
    total_after, others_after = cpu_seconds()
    return min(1.0, max(0.0, (others_after - others) / max(total_after - total, 0.01)))


class MachineMonitor:
    """
    The machine in one session; leave the ``with`` block to end the probe.

    Args:
        python: Python of an environment with torch for the GPU, such as the server's; None for this
            program's. Without a GPU only the bandwidth of the memory is measured.

    Attributes:
        policy: With the memory floor of this kind of machine.
        bandwidth: Of the memory; None if the probe fails.
        normal: The probe's normal readings; None before `settle`, and without a GPU.
        notes: Sentences for the reader of the result.
    """

    def __init__(self, policy: MachinePolicy, store: Store, *, python: Path | None) -> None:
        self._store, self._device, uuid = store, "", ""
        log = store.folder("logs") / "probe.log"
        self._probe = GemvProbe(policy.probe, python or Path(sys.executable), log)
        self.bandwidth: Bandwidth | None = None
        self.normal: Normal | None = None
        self.notes: tuple[str, ...] = ()
        self._failure = ""
        try:
            device = self._probe.device()
            gigabytes = round(self._probe.bandwidth() / 1e9, 2)
            self.bandwidth = Bandwidth(gigabytes, "measured", device.name)
            decode_bytes.store_bandwidth(store, self.bandwidth)
            if device.kind == "cuda":
                self._device, uuid = device.name, device.uuid
        except ProbeError as error:
            self._failure = str(error)
            self._note(f"The probe fails, so a slow state would not be noticed: {error}.")
        self._telemetry = Telemetry(uuid)
        self.policy = self._telemetry.adapt(policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._probe.stop()

    def _note(self, note: str) -> None:
        self.notes = (*self.notes, note)
        console.warn(note)

    def fingerprint(self) -> dict[str, str]:
        """Return the names and versions that the machine's speed depends on."""
        return self._telemetry.fingerprint()

    def preheat(self, seconds: float) -> None:
        """Work for some *seconds*, so that the next measurement is made warm."""
        end = time.monotonic() + seconds
        with console.progress("preheat", seconds) as line:
            while self._device and (left := end - time.monotonic()) > 0:
                line.update(round(seconds - left), "s")
                try:
                    self._probe.reading()
                except ProbeError as error:
                    return self._note(f"The machine was not preheated: {error}.")
        return None

    def settle(self) -> tuple[Reason, ...]:
        """Define what is normal, before any server runs; return the reasons against a session."""
        reasons: tuple[Reason, ...] = ()
        if self._failure:
            return (Reason("probe-silent", self._failure),)
        if self._device:
            probe = self.policy.probe
            key = history_key(self.fingerprint(), probe, self._device)
            try:
                readings = [self._probe.reading() for _ in range(probe.readings)]
            except ProbeError as error:
                return (Reason("probe-silent", str(error)),)
            self.normal = Normal.of(readings, self._device)
            reasons = (
                *normal_reasons(self.normal, probe),
                *history_reasons(self._store, key, self.normal, probe),
            )[:1]
            if not reasons:
                store_session(self._store, key, self.normal)
        return (*start_reasons(self._telemetry.snapshot(), self.policy), *reasons)

    def snapshot(self, server: Sequence[psutil.Process] = ()) -> Snapshot:
        """Return the state now; *server* are the processes of the server that is measured."""
        reading, error = None, ""
        if self._device:
            try:
                reading = self._probe.reading()
            except ProbeError as failure:
                error = str(failure)
        return self._telemetry.snapshot(server, reading, error)

    def disturbances(self, before: Snapshot, after: Snapshot) -> tuple[Reason, ...]:
        """Return the reasons against a measurement between two snapshots."""
        return disturbances(before, after, self.normal, self.policy)
