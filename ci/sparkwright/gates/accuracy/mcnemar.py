"""
Two servers answer the same questions: is the candidate worse than the baseline, and by how much? Arithmetic, no input or output.

Only the questions that one of them gets right and the other wrong tell anything; the many that both answer alike cancel, which makes a
paired comparison several times sharper than two scores side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec


class Pairs(msgspec.Struct, frozen=True):
    """
    Questions by who answered them right.

    Attributes:
        both, neither: Answered alike.
        gained: The candidate is right and the baseline wrong (n₁₀).
        lost: The candidate is wrong and the baseline right (n₀₁).
    """

    both: int
    gained: int
    lost: int
    neither: int

    @property
    def count(self) -> int:
        """How many questions there are."""
        return self.both + self.gained + self.lost + self.neither

    @property
    def difference(self) -> float:
        """Candidate less baseline, as a part of 1: (n₁₀ − n₀₁)/n."""
        return (self.gained - self.lost) / self.count

    @property
    def error(self) -> float:
        """The standard error of `difference`: √(n₁₀ + n₀₁ − (n₁₀ − n₀₁)²/n)/n."""
        return math.sqrt(self.gained + self.lost - (self.gained - self.lost) ** 2 / self.count) / self.count

    def limits(self, z: float) -> tuple[float, float]:
        """
        Return the one-sided lower and upper limit of the true difference, each *z* standard errors away.

        Half a question is added to each of the four kinds first: without it, few questions that are all answered alike would have no
        error at all and decide anything (Agresti and Min, Simple improved confidence intervals for comparing matched proportions, 2005).
        """
        count, gained, lost = self.count + 2, self.gained + 0.5, self.lost + 0.5
        middle = (gained - lost) / count
        error = math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
        return middle - z * error, middle + z * error

    @property
    def chance(self) -> float:
        """The exact two-sided p-value of McNemar's test: how often as many changes would fall so unevenly if none had a reason."""
        changed, fewer = self.gained + self.lost, min(self.gained, self.lost)
        if not changed:
            return 1.0
        return min(1.0, 2 * sum(math.comb(changed, k) for k in range(fewer + 1)) / (1 << changed))


def pairs(baseline: Iterable[bool], candidate: Iterable[bool]) -> Pairs:
    """Return the counts of two series of answers, right or wrong, to the same questions in the same order."""
    counts = {(True, True): 0, (False, True): 0, (True, False): 0, (False, False): 0}
    for before, now in zip(baseline, candidate, strict=True):
        counts[bool(before), bool(now)] += 1
    return Pairs(counts[True, True], counts[False, True], counts[True, False], counts[False, False])


def wilson(right: int, count: int, z: float) -> tuple[float, float]:
    """Return the one-sided lower and upper limits of a part of 1 of which *right* of *count* were seen (Wilson's score interval, 1927)."""
    middle = (right + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)
