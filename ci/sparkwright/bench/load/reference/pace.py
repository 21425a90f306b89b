"""When each token of an answer is due, on a schedule that lateness does not move."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sparkwright.bench.load.reference.behaviour import Behaviour
from sparkwright.bench.statistics.noise import Machine

#: Seconds for which the noise's factor holds; drawing it anew for each chunk would make the server late.
STEP = 0.05


class Pace:
    """The times of *behaviour*, and of the noise in it, from the moment this is made."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._machine = Machine(behaviour.noise, behaviour.seed) if behaviour.noise else None
        self._launch = self._machine.launch(behaviour.side, behaviour.launch) if self._machine else None
        # What is the machine's zero on the clock that nobody sets.
        self._zero = time.monotonic() - (time.time() - behaviour.origin if behaviour.origin else 0.0)
        self._step, self._factor = -1, 1.0

    def factor(self, at: float) -> float:
        """Return by what times are multiplied, *at* a time of `time.monotonic`."""
        if self._machine is None or self._launch is None:
            return 1.0
        if (step := int(max(0.0, at - self._zero) / STEP)) != self._step:
            self._step, self._factor = step, self._machine.factor(step * STEP, self._launch)
        return self._factor

    def chunks(self, asked: float, tokens: int | None) -> Iterator[tuple[float, int]]:
        """
        Yield when each chunk is due and how many tokens it has, the first token alone.

        Args:
            asked: When the question had come.
            tokens: Of the answer; None for one without end.
        """
        due = asked + self._behaviour.ttft * self.factor(asked)
        yield due, 1
        left = tokens - 1 if tokens is not None else None
        while left is None or left > 0:
            size = self._behaviour.chunk if left is None else min(self._behaviour.chunk, left)
            due += size * self._behaviour.tpot * self.factor(due)
            yield due, size
            left = None if left is None else left - size
