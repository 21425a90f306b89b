"""Observe the machine: GPU (nvidia-smi), load of others, and readings of the probe."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil
from msgspec.structs import replace

from sparkwright.bench.machine.probe import ProbeError, ProbeResult, probe
from sparkwright.bench.machine.state_checks import (
    THROTTLE_REASONS,
    MachinePolicy,
    ProbePolicy,
    Reading,
    Snapshot,
    disturbances,
    normal_reasons,
)
from sparkwright.bench.model.modules import BANDWIDTH, Bandwidth
from sparkwright.bench.records import Reason
from sparkwright.core import memory
from sparkwright.core.console import console
from sparkwright.core.memory import MachineMemory
from sparkwright.core.store import Store

#: Seconds over which the load of other programs is measured; the kernel counts in hundredths.
LOAD_SECONDS = 0.5

#: Fields of nvidia-smi that are read of the GPU.
_FIELDS = ("uuid", "vbios_version", "temperature.gpu", "clocks_event_reasons.active")
#: Files that name the machine and its firmware; none has a serial number or a host's name.
DMI = Path("/sys/class/dmi/id")


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
            gigabytes = round(device.bytes / seconds / 1e9, 2)
            store.put(*BANDWIDTH, Bandwidth(gigabytes, device.name))
        if not MachineMemory.here().unified:
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
        slow = normal_reasons(self.normal, policy) if self.normal else ()
        return (*reasons, *slow)

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
