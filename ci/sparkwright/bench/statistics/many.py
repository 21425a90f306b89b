"""
Thousands of gates at once: `sparkwright.bench.statistics.decision` over arrays, to measure its error rates. A test holds the two
together.

Axes are gates, series, blocks, in this order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from sparkwright.bench.statistics.decision import Rule
from sparkwright.bench.statistics.evidence import BET, CAP, STAKE
from sparkwright.gates.core.verdict import State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]
    Counts = NDArray[np.int64]
    Flags = NDArray[np.bool_]

#: What a number of `Outcome.states` stands for.
STATES: tuple[State, ...] = ("inconclusive", "pass", "fail")


class Outcome(msgspec.Struct, frozen=True):
    """
    What came of each gate.

    Attributes:
        states: Places in `STATES`. *blocks*: after which it was decided. *measured*: blocks of all series together.
        named: Whether each series was named as a culprit.
    """

    states: Counts
    blocks: Counts
    measured: Counts
    named: Flags


def evidence(gains: Numbers, delta: float, sigma: Numbers) -> Numbers:
    """Return ln of the e-process after each block (last axis); *sigma* has the shape of the other axes. See `evidence.passing`."""
    import numpy as np

    spread = sigma[..., None]
    bet = np.minimum(delta / spread, BET)
    return np.cumsum(bet * np.minimum(gains / spread, CAP) - bet**2 / 2, axis=-1)


def signs(gains: Numbers) -> Numbers:
    """Return ln of the sign e-process after each block, where a gain above 0 is a sign won."""
    import numpy as np

    return np.cumsum(np.where(gains > 0, math.log1p(STAKE), math.log1p(-STAKE)), axis=-1)


def crossings(good: Numbers, rule: Rule) -> Counts:
    """Return the first block, from the least on, at which ln evidence reaches ln 1/α; one more than there are where it does not."""
    import numpy as np

    over = good >= math.log(1 / rule.alpha)
    over[..., : rule.least - 1] = False
    first: Counts = np.where(over.any(axis=-1), over.argmax(axis=-1) + 1, over.shape[-1] + 1)
    return first


def decide(rule: Rule, differences: Numbers, sigma: Numbers | None, *, in_band: bool = True) -> Outcome:
    """Return what `decision.decide` says of each gate, all of whose series have the same number of blocks, the rule's most."""
    import numpy as np

    if differences.shape[-1] != rule.most:
        raise ValueError(f"{differences.shape[-1]} blocks; the rule goes on to {rule.most}")
    good, bad = signs(rule.delta - differences), signs(differences)
    if sigma is not None:
        first = evidence(rule.delta - differences, rule.delta, sigma), evidence(differences, rule.delta, sigma)
        good, bad = first if in_band else (np.minimum(first[0], good), np.minimum(first[1], bad))
    settled = crossings(good, rule)
    gates, series, blocks = differences.shape
    states, taken = np.zeros(gates, np.int64), np.full(gates, blocks, np.int64)
    named = np.zeros((gates, series), np.bool_)
    undecided = np.ones(gates, np.bool_)
    for block in range(rule.least, blocks + 1):
        culprits = _e_bh(np.where(settled <= block, -math.inf, bad[..., block - 1]), rule.alpha)
        failed = undecided & culprits.any(axis=-1)
        passed = undecided & ~failed & (settled <= block).all(axis=-1)
        named[failed] = culprits[failed]
        states[failed], states[passed] = STATES.index("fail"), STATES.index("pass")
        taken[failed | passed] = block
        undecided &= ~(failed | passed)
    return Outcome(states, taken, np.minimum(settled, taken[:, None]).sum(axis=-1), named)


def _e_bh(logarithms: Numbers, alpha: float) -> Flags:
    """Return which of the series (last axis) e-BH names; see `evidence.e_bh`."""
    import numpy as np

    series = logarithms.shape[-1]
    ranked = -np.sort(-logarithms, axis=-1)
    wanted = np.log(series / (alpha * np.arange(1, series + 1)))
    enough = ranked >= wanted
    last = series - 1 - enough[..., ::-1].argmax(axis=-1)
    limit = np.take_along_axis(ranked, last[..., None], axis=-1)
    named: Flags = enough.any(axis=-1)[..., None] & (logarithms >= limit)
    return named
