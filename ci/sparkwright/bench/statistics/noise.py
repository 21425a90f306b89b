"""
A model of a noisy machine, to try decisions on before a real one is at hand.

The time per token is its true value times a factor. The factor's logarithm is a sum: what a launch happened to get (autotuning,
placement of memory), which does not average out inside the launch; a drift that wanders and comes back (Ornstein-Uhlenbeck: temperature,
other load); what a run has of its own, now and then with a wide tail; and a hidden slow state, in which a GB10 was seen to decode at 94
instead of 63 ms per step while nvidia-smi shows nothing. The candidate's true slowdown is added to its launches.

Everything is a function of the seed: two processes with one seed see one machine, in whatever order they ask.
"""

from __future__ import annotations

import bisect
import math
import random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sparkwright.bench.records import Side

#: How much slower a step was in the hidden slow state: 94 ms instead of 63 (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#1).
SLOW = 94 / 63
#: How much longer the sentinel's matrix times vector takes in that state; its copy is not slower.
SLOW_GEMV = 1.5
#: The drift is drawn at this many points of its time constant, and is a straight line between them.
POINTS = 50
#: A machine's life in the model, in seconds: a gate takes hours, not years, and a wrong clock must not fill the memory.
LIFE = 1e7


class Noise(msgspec.Struct, frozen=True):
    """
    How noisy a machine is. Spreads are standard deviations of a logarithm, so 0.01 is about 1 %.

    Attributes:
        run: Spread of what a run has of its own. *run_seconds*: how long a run's draw holds; give legs that are further apart. launch:
        Spread of a launch's effect. drift: Spread of the drift. *drift_seconds*: its time constant. tail: Share of runs with a spread
        *tail_width* times as wide. flips: Of the slow state, per hour on average. *flip_seconds*: how long one lasts on average.
        *flip_factor*: on the time per token. slowdown: The candidate's true effect: ln(candidate / baseline) of its time per token.
    """

    run: float = 0.004
    run_seconds: float = 30.0
    launch: float = 0.005
    drift: float = 0.01
    drift_seconds: float = 1800.0
    tail: float = 0.05
    tail_width: float = 4.0
    flips: float = 0.0
    flip_seconds: float = 120.0
    flip_factor: float = SLOW
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        amounts = (self.run, self.launch, self.drift, self.tail, self.tail_width, self.flips)
        lengths = (self.run_seconds, self.drift_seconds, self.flip_seconds, self.flip_factor)
        if not all(math.isfinite(one) and one >= 0 for one in amounts) or not all(math.isfinite(one) and one > 0 for one in lengths):
            raise ValueError(f"a spread, share or rate is negative, or a length is not above 0: {self}")
        if self.tail > 1 or not math.isfinite(self.slowdown):
            raise ValueError(f"a share is above 1, or the slowdown is no number: {self}")


#: The run's spread is that of a seed report (0.39 %: four runs of one launch); the other figures are assumptions, from gates.md §2.4.
PRESETS: dict[str, Noise] = {
    "quiet": Noise(launch=0.002, drift=0.003, tail=0.0),
    "typical": Noise(launch=0.005, drift=0.01, flips=1.0),
    "rough": Noise(launch=0.01, drift=0.02, flips=1.0),
}
QUIET, TYPICAL, ROUGH = PRESETS["quiet"], PRESETS["typical"], PRESETS["rough"]


class Launch(msgspec.Struct, frozen=True):
    """A server that was started: whose wheel it has, its number on that side from 0 on, and ln of its factor while it lives."""

    side: Side
    number: int
    effect: float


class Machine:
    """
    A machine with *noise*; all seconds are counted from its beginning.

    Args:
        seed: Decides everything about it.
    """

    def __init__(self, noise: Noise, seed: int) -> None:
        self.noise, self._seed = noise, seed
        self._launches = {"baseline": 0, "candidate": 0}
        self._drift = [self._random("drift").gauss(0.0, noise.drift)]
        self._drifting = self._random("steps of the drift")
        self._flips: list[float] = [0.0]
        self._flipping = self._random("flips")
        self._drawn: tuple[object, float] = ((), 0.0)

    def launch(self, side: Side, number: int | None = None) -> Launch:
        """Return the next launch of *side*, or the one with this *number* (a server in a process of its own knows its number)."""
        if number is None:
            number = self._launches[side]
        self._launches[side] = number + 1
        effect = self._random("launch", side, number).gauss(0.0, self.noise.launch)
        return Launch(side, number, effect + (self.noise.slowdown if side == "candidate" else 0.0))

    def factor(self, at: float, launch: Launch) -> float:
        """
        Return by what the true time per token is multiplied, *at* seconds, in *launch*.

        Raises:
            ValueError: *at* is before the beginning or beyond `LIFE`.
        """
        logarithm = launch.effect + self.drift(at) + self._run(at, launch)
        return math.exp(logarithm) * (self.noise.flip_factor if self.slow(at) else 1.0)

    def gemv(self, at: float) -> float:
        """Return by what the sentinel's matrix times vector takes longer; its copy always has 1."""
        return SLOW_GEMV if self.slow(at) else 1.0

    def drift(self, at: float) -> float:
        """Return ln of the drift's factor; its spread is the same at all times, and it halves in 0.69 time constants."""
        step = self.noise.drift_seconds / POINTS
        place = self._checked(at) / step
        stays = math.exp(-1 / POINTS)
        while len(self._drift) < place + 2:
            self._drift.append(self._drift[-1] * stays + self._drifting.gauss(0.0, self.noise.drift * math.sqrt(1 - stays * stays)))
        before, part = int(place), place - int(place)
        return self._drift[before] * (1 - part) + self._drift[before + 1] * part

    def slow(self, at: float) -> bool:
        """Is the hidden slow state on? The sentinel sees it; the driver does not tell."""
        self._checked(at)
        if not self.noise.flips:
            return False
        # The list holds ends and beginnings in turns: it is fast up to [1], slow up to [2], and so on.
        while self._flips[-1] <= at:
            lasts = 3600 / self.noise.flips if len(self._flips) % 2 else self.noise.flip_seconds
            self._flips.append(self._flips[-1] + self._flipping.expovariate(1 / lasts))
        return bisect.bisect_right(self._flips, at) % 2 == 0

    def _run(self, at: float, launch: Launch) -> float:
        of = ("run", launch.side, launch.number, int(at // self.noise.run_seconds))
        # A server asks for every token of a run; the draw is kept until another run begins.
        if self._drawn[0] != of:
            draw = self._random(*of)
            wide = self.noise.tail_width if draw.random() < self.noise.tail else 1.0
            self._drawn = (of, draw.gauss(0.0, self.noise.run * wide))
        return self._drawn[1]

    def _checked(self, at: float) -> float:
        if not 0 <= at <= LIFE:
            raise ValueError(f"{at} s is not in the machine's life of {LIFE:.0f} s; count from its beginning, not from 1970")
        return at

    def _random(self, *of: object) -> random.Random:
        # A string as seed goes through SHA-512, so each purpose has its own draws and none depends on how often another was asked.
        return random.Random("/".join(str(one) for one in (self._seed, *of)))  # noqa: S311 - a model of noise, no secret
