"""The GPU as its driver describes it, through NVIDIA's management library; a machine without one is no error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) → in words. An idle GPU (1) and clocks that somebody set (2) are no throttling.
THROTTLES: Mapping[int, str] = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}


class GpuState(msgspec.Struct, frozen=True):
    """
    The GPU now.

    Attributes:
        clock, memory_clock, temperature, power, throttled: See `sparkwright.bench.machine.snapshot.Snapshot`.
        computing: Numbers of the processes that compute on it; those that only draw on a screen are not among them.
        unknown: What the driver does not tell.
    """

    clock: float | None = None
    memory_clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    throttled: tuple[str, ...] = ()
    computing: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()


class Nvml:
    """
    The driver's library, loaded where there is one.

    Attributes:
        absent: Why there is no GPU to ask; empty where there is.
    """

    def __init__(self, uuid: str = "") -> None:
        """Open the GPU of that *uuid* (as CUDA says it, without ``GPU-``), or the first."""
        self._nvml: Any = None
        self.absent = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        except ImportError:
            self.absent = "nvidia-ml-py is not installed"
        except pynvml.NVMLError as error:
            self.close()
            self.absent = f"the driver's library answers: {error}"

    def close(self) -> None:
        """Give the library back; harmless when repeated."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._nvml = None
        self.absent = self.absent or "the driver's library was closed"

    def _told(self, call: Callable[[], T]) -> T | None:
        """Return what *call* returns, or None where the driver does not tell or is too old to know the question."""
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError, UnicodeDecodeError):
            return None

    def state(self) -> GpuState:
        """Return the GPU now; without one, that it is unknown."""
        if self.absent:
            return GpuState(unknown=(f"GPU: {self.absent}",))
        nvml, device = self._nvml, self._device
        clock = self._told(lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)))
        memory = self._told(lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)))
        temperature = self._told(lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)))
        power = self._told(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000)
        bits = self._told(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device)))
        if bits is None:  # the name before driver 535
            bits = self._told(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)))
        computing = self._told(lambda: tuple(int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)))
        asked = {
            "GPU clock": clock, "memory clock": memory, "GPU temperature": temperature, "GPU power": power,
            "throttle reasons": bits, "processes on the GPU": computing,
        }  # fmt: skip
        unknown = tuple(name for name, found in asked.items() if found is None)
        return GpuState(clock, memory, temperature, power, in_words(bits or 0), computing or (), unknown)

    def identity(self) -> dict[str, str]:
        """Return the GPU's name and the versions of its driver and firmware, without what only this one GPU has; empty without one."""
        if self.absent:
            return {}
        nvml, device = self._nvml, self._device
        asked: dict[str, Callable[[], Any]] = {
            "gpu": lambda: nvml.nvmlDeviceGetName(device),
            "driver": nvml.nvmlSystemGetDriverVersion,
            "vbios": lambda: nvml.nvmlDeviceGetVbiosVersion(device),
            "gsp firmware": lambda: nvml.nvmlDeviceGetGspFirmwareVersion(device),
        }
        return {name: _text(found) for name, call in asked.items() if (found := self._told(call))}

    def unified(self) -> bool | None:
        """Return whether the GPU has no memory of its own: then the driver refuses to say how much (a GB10). None without a GPU."""
        if self.absent:
            return None
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        except self._nvml.NVMLError_NotSupported:
            return True
        except self._nvml.NVMLError:
            return None
        return False


def _text(found: Any) -> str:
    """Return *found* as text; the library forgets to decode some of its answers."""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)


def in_words(bits: int) -> tuple[str, ...]:
    """Return why clocks are held back; bits that nobody has named yet are said as such."""
    unnamed = bits & ~(0x3 | sum(THROTTLES))
    return tuple(text for bit, text in THROTTLES.items() if bits & bit) + ((f"reason {unnamed:#x}",) if unnamed else ())
