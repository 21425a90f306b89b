"""``ci/gates/machine.yaml``: what a machine must be like for a measurement on it to count."""

from __future__ import annotations

import msgspec

from sparkwright.bench.machine.nvml import THROTTLES


def _positive(record: msgspec.Struct, *names: str) -> None:
    for name in names:
        if not 0 < getattr(record, name) < 1e9:
            raise ValueError(f"{name} is a number above 0")


class SentinelPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The two fixed things that the sentinel does around every leg, and how far its matrix times vector may be off.

    Attributes:
        matrix: MB of the matrix, and of what is copied; several times the processor's cache, so that it comes from memory.
        stream: MB that are read to measure the memory's bandwidth.
        warm: Seconds of the same work before the clock runs, in which an idle GPU raises its clocks.
        seconds: For which each of the two is repeated. *least*: repetitions at least.
        readings: Taken at the start of a session, to know what is normal.
        band: How far a GEMV may lie outside the range of those readings (0.03 is 3 %). *processor*: the same without a GPU.
        ratio: The least share of the copy's bandwidth that a sound GPU's GEMV reads with.
        start: Seconds until it must answer at first, with torch still to be loaded. *patience*: beyond the time of the work, later.
    """

    matrix: int
    stream: int
    warm: float
    seconds: float
    least: int
    readings: int
    band: float
    processor: float
    ratio: float
    start: float
    patience: float

    def __post_init__(self) -> None:
        _positive(self, "matrix", "stream", "seconds", "band", "processor", "start", "patience")
        if not (0 <= self.warm < 60 and self.least >= 1 and 3 <= self.readings <= 1000 and 0 <= self.ratio < 1 and self.seconds < 60):
            raise ValueError("warm and seconds are below 60, least is at least 1, readings are 3 to 1000, ratio is a part of 1")


class MemoryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The watch over memory, in MB (10^6 bytes).

    Attributes:
        floor: What must stay available where GPU and processor share the memory; below that the server is ended.
        elsewhere: The same where the GPU has memory of its own, or there is none.
        fall: The most by which it may fall within a second.
        period: Seconds between two looks.
    """

    floor: int
    elsewhere: int
    fall: int
    period: float

    def __post_init__(self) -> None:
        _positive(self, "floor", "elsewhere", "fall", "period")
        if self.period > 0.5:
            raise ValueError("period is at most 0.5 s: unified memory goes within seconds")


class TemperaturePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees Celsius of the GPU above which nothing *starts*, and above which a *leg* does not count."""

    start: float
    leg: float

    def __post_init__(self) -> None:
        _positive(self, "start", "leg")
        if self.start > self.leg:
            raise ValueError("start is at most leg")


class MachinePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    ``ci/gates/machine.yaml``, which says where each threshold comes from.

    Attributes:
        discards: Legs in a row that may be measured again for a passing state; one more, and the session is invalid.
        cooldown: Seconds to wait before a discarded leg is measured again.
        preheat: Seconds of the sentinel's work before the session.
        load: The most that others may use of the processors' time, from 0 to 1.
        jump: Seconds by which the clock may be set during a leg.
        throttles: The driver's reasons for lower clocks (`sparkwright.bench.machine.nvml.THROTTLES`) that count; the others are only shown.
    """

    sentinel: SentinelPolicy
    memory: MemoryPolicy
    temperature: TemperaturePolicy
    discards: int
    cooldown: float
    preheat: float
    load: float
    jump: float
    throttles: tuple[str, ...]

    def __post_init__(self) -> None:
        _positive(self, "jump")
        if not (0 <= self.discards <= 100 and 0 <= self.cooldown < 1e5 and 0 <= self.preheat < 1e5 and 0 < self.load <= 1):
            raise ValueError("discards are 0 to 100, cooldown and preheat at least 0 s, load is a part of 1")
        if unknown := set(self.throttles) - set(THROTTLES.values()):
            raise ValueError(f"the driver knows no {', '.join(sorted(unknown))}")

    def resolved(self, *, unified: bool) -> MachinePolicy:
        """Return the policy of a machine whose GPU shares the processor's memory, or does not: ``memory.floor`` is what holds there."""
        if unified:
            return self
        return msgspec.structs.replace(self, memory=msgspec.structs.replace(self.memory, floor=self.memory.elsewhere))
