"""Does a published figure hold on this machine? Answered with an interval, as the claim has one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sparkwright.gates.statistics import bounds
from sparkwright.gates.verdict import State

#: Launches behind an answer, at least: two have an interval that is ten times as wide as their distance.
LEAST = 3


def judge(
    claim: tuple[float, float], values: Sequence[float], confidence: float = 0.95, *, more_is_better: bool = True, unit: str = ""
) -> tuple[State, str]:
    """
    Return whether *claim* holds here, and that in a sentence.

    The t-interval of the mean of ln *values* is held against the end of the claim that promises least. It lies at that end or on the
    better side: pass. It lies on the worse side: fail. Else the launches decide neither way. Either of the two is wrong with a
    probability of at most (1 − confidence)/2, if the number of launches was fixed beforehand: this is not evidence that one may wait for.

    Args:
        claim: Its interval, lowest first, in the unit of *values*. A claim that is a single figure is undecided by a machine that just
        reaches it. values: One for each launch: launches of one build differ by more than its requests do. more_is_better: False for
        times.

    Raises:
        ValueError: The claim's ends are not above 0 and in order, or a value is not above 0 and finite.
    """
    low, high = claim
    if not (0 < low <= high < math.inf) or not all(0 < one < math.inf for one in values):
        raise ValueError(f"figures are above 0, and a claim goes from low to high: {claim}, {list(values)}")
    if len(values) < LEAST:
        return "not-run", f"{len(values)} launches were measured; an answer needs {LEAST}"
    below, above = (math.exp(end) for end in bounds.mean_interval([math.log(one) for one in values], confidence))
    middle = _figure(math.exp(statistics.fmean(map(math.log, values))), unit)
    measured = f"{middle} ({100 * confidence:g} % interval {_figure(below)} to {_figure(above, unit)}, {len(values)} launches)"
    claimed = f"{_figure(low)} to {_figure(high, unit)} claimed" if low < high else f"{_figure(low, unit)} claimed"
    # Mirrored for times: the promise is then the high end, and less is better.
    worst, best, promise, top = (below, above, low, high) if more_is_better else (-above, -below, -high, -low)
    if worst > top:
        return "pass", f"better than claimed: {measured}; {claimed}"
    if worst >= promise:
        return "pass", f"the claim holds: {measured}; {claimed}"
    if best < promise:
        return "fail", f"the claim does not hold: {measured}; {claimed}"
    return "inconclusive", f"the launches decide neither way: {measured}; {claimed}"


def _figure(value: float, unit: str = "") -> str:
    return f"{value:.4g} {unit}".rstrip()
