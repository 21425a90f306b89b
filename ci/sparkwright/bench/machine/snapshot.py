"""The state of the machine at a moment, as it stands beside a leg."""

from __future__ import annotations

import msgspec


class Snapshot(msgspec.Struct, frozen=True):
    """
    What the machine does at a moment, and how fast it does two fixed things.

    Attributes:
        at: Seconds since 1970. *steady*: seconds of a clock that nobody sets; their difference tells a clock that jumped.
        gemv: Seconds of the fixed matrix times vector. *copy*: seconds of the fixed copy; None where the sentinel did not run.
        clock, memory_clock: MHz of the GPU; None where the driver does not tell (the GB10's memory clock).
        temperature: Degrees Celsius of the GPU. *power*: watts. *throttled*: why its clocks are held back, in the driver's words.
        free: MB of memory that are available on the machine.
        load: Share of the processors' time used by others than the server and us, from 0 to 1.
        others: Processes beside the server that use the GPU.
        battery: Whether the machine runs on one; None where it has none.
        unknown: What could not be read, in a few words each.
    """

    at: float
    steady: float
    gemv: float | None = None
    copy: float | None = None
    clock: float | None = None
    memory_clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    throttled: tuple[str, ...] = ()
    free: int | None = None
    load: float | None = None
    others: tuple[str, ...] = ()
    battery: bool | None = None
    unknown: tuple[str, ...] = ()
