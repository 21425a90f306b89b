"""
Blocks of many simulated gates at once, on machines of `sparkwright.bench.statistics.noise`: what the benchmark of error rates feeds on.

Both servers are resident; a block is a fresh launch of each and some quads A B B A or B A A B of each cell. The sentinel looks before and
after each leg: one that it finds slow is waited for, and a leg after which it finds it slow is measured again. A slow state that comes
and goes inside a leg stays unseen and slows that leg by its share of the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sparkwright.bench.statistics.noise import Noise

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]
    Flags = NDArray[np.bool_]


class Design(msgspec.Struct, frozen=True):
    """
    How a gate measures.

    Attributes:
        quads: In a block, of each cell. *cells*: measured in one launch.
        leg: Seconds of one. *gap*: between two, for the sentinel and the warm-up. *pause*: between blocks, for the launches.
        shared: Whether a launch has one effect on all of its cells; else each cell has its own, the harder case for many cells.
    """

    quads: int = 3
    cells: int = 1
    leg: float = 60.0
    gap: float = 15.0
    pause: float = 300.0
    shared: bool = False


class Machines:
    """
    Many machines with the same *noise*, each with its own draws.

    Attributes:
        discarded: Legs that the sentinel threw away, of all machines.
    """

    def __init__(self, noise: Noise, count: int, seed: int, leg: float) -> None:
        import numpy as np

        self.noise, self.count, self._leg = noise, count, leg
        self._random = np.random.default_rng(seed)
        self._drift = self._random.normal(0.0, noise.drift, count)
        self._rate = noise.flips / 3600
        self.discarded = 0

    def rest(self, seconds: float | Numbers) -> None:
        """Let time pass without measuring."""
        import numpy as np

        stays = np.exp(-np.asarray(seconds) / self.noise.drift_seconds)
        self._drift = self._drift * stays + self._random.normal(0.0, self.noise.drift, self.count) * np.sqrt(1 - stays**2)

    def launches(self, *shape: int) -> Numbers:
        """Return effects of fresh launches, by *shape* and machine."""
        return self._random.normal(0.0, self.noise.launch, (*shape, self.count))

    def measured(self, gap: float) -> Numbers:
        """Return ln of the factor of one leg on each machine, after *gap* seconds."""
        import numpy as np

        found, waits = np.zeros(self.count), np.where(self._flipped(gap), self._slow(), 0.0)
        left = np.ones(self.count, np.bool_)
        while left.any():
            self.rest(np.where(left, gap + waits + self._leg / 2, 0.0))
            value, slow_after, lasts = self._once()
            found = np.where(left, value, found)
            self.rest(np.where(left, self._leg / 2, 0.0))
            left &= slow_after
            waits = np.where(left, lasts, 0.0)
            self.discarded += int(left.sum())
        return found

    def _once(self) -> tuple[Numbers, Flags, Numbers]:
        """Return a leg's ln of the factor, whether the machine is slow after it, and for how long it then stays so."""
        import numpy as np

        wide = np.where(self._random.random(self.count) < self.noise.tail, self.noise.tail_width, 1.0)
        value = self._drift + self._random.normal(0.0, self.noise.run, self.count) * wide
        if not self._rate:
            return value, np.zeros(self.count, np.bool_), np.zeros(self.count)
        begins, lasts = self._random.exponential(1 / self._rate, self.count), self._slow()
        inside = begins + lasts < self._leg
        value += np.where(inside, np.log1p((self.noise.flip_factor - 1) * lasts / self._leg), 0.0)
        return value, (begins < self._leg) & ~inside, begins + lasts - self._leg

    def _flipped(self, seconds: float) -> Flags:
        import numpy as np

        found: Flags = self._random.random(self.count) < -np.expm1(-seconds * self._rate)
        return found

    def _slow(self) -> Numbers:
        return self._random.exponential(self.noise.flip_seconds, self.count)


def differences(noise: Noise, design: Design, gates: int, blocks: int, seed: int) -> tuple[Numbers, float]:
    """
    Return the differences of A/A blocks (gates × cells × blocks), and the share of legs that were discarded.

    A true slowdown adds to each difference as it is, so one set serves for all; *noise*'s own is not added.
    """
    import numpy as np

    machines = Machines(noise, gates, seed, design.leg)
    order = np.random.default_rng([seed, 1])
    found = np.empty((gates, design.cells, blocks))
    for block in range(blocks):
        machines.rest(design.pause)
        effects = machines.launches(2, 1 if design.shared else design.cells)
        apart = effects[1] - effects[0]
        outer = order.choice([-1.0, 1.0], gates)
        for cell in range(design.cells):
            legs = np.array([[machines.measured(design.gap) for _ in range(4)] for _ in range(design.quads)])
            quads = outer * (legs[:, 0] - legs[:, 1] - legs[:, 2] + legs[:, 3]) / 2
            found[:, cell, block] = np.median(quads, axis=0) + apart[0 if design.shared else cell]
    made = gates * design.cells * blocks * design.quads * 4
    return found, machines.discarded / (made + machines.discarded)


def single(noise: Noise, gates: int, seed: int, runs: int = 3, leg: float = 60.0) -> Numbers:
    """
    Return ln(new / stored) as the seed reports compare: each is the median of some runs of one launch, on another day, without a
    sentinel.

    All runs of one launch are slow together, with the share of time that a machine is slow.
    """
    import numpy as np

    chance = noise.flips * noise.flip_seconds / (3600 + noise.flips * noise.flip_seconds)
    found = []
    for day in range(2):
        machines = Machines(replace(noise, flips=0.0), gates, 2 * seed + day, leg)
        slow = np.random.default_rng([seed, 2, day]).random(gates) < chance
        values = np.median([machines.measured(15.0) for _ in range(runs)], axis=0)
        found.append(values + machines.launches() + np.where(slow, math.log(noise.flip_factor), 0.0))
    return np.asarray(found[1] - found[0])
