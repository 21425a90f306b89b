"""Observe the machine: GPU (NVML), load of others, memory, battery, and the matrix-vector probe."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
import psutil
import pynvml
from msgspec.structs import replace

from sparkwright.bench.machine.state_checks import (
    THROTTLE_REASONS,
    MachinePolicy,
    Normal,
    Positive,
    ProbePolicy,
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
from sparkwright.core.console import console, one_line
from sparkwright.core.errors import CommandError
from sparkwright.core.files import content_key
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
