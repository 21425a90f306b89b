"""
Intervals, and decisions that may be asked for after every block without a higher error rate.

The evidence of a series is the t-type e-process with a half-normal mixture over effect sizes: the
likelihood ratio of "the mean gain is η·σ, with η ~ |N(0, EFFECT²)|" against "the mean gain is 0",
with the right Haar prior dσ/σ on the unknown spread σ (Pérez-Ortiz, Lardy, de Heide and Grünwald,
E-statistics, group invariance and anytime-valid testing, 2024; Wang and Ramdas, Anytime-valid
t-tests, 2025). The gate's own A/A block enters as an earlier observation with mean 0; no other
one does, as the noise of another day is not this day's.

For normal blocks the evidence is a nonnegative martingale of the scale-invariant statistics when
the mean gain is 0, and smaller when it is negative. By Ville's inequality it ever reaches 1/α with
a probability of at most α, however often it is looked at and whenever measuring stops.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from sparkwright.core.states import State

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

#: Values behind an interval; two give one that is a hundred times wider than they are.
MIN_INTERVAL = 3

#: Standard deviation of the mixture over effect sizes, in spreads of a block. At 3, a 4-fold
#: slowdown fails in three blocks beside a single A/A block
#: [measured: docs/explanation/throughput.md].
EFFECT = 3.0
#: A smaller number is raised to the first before its logarithm is taken, which might be infinite; a
#: larger logarithm is cut to the second before it becomes a number, which would overflow.
_TINY, _LARGEST = 1e-300, 700.0


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The two bounds of a metric, as shares (0.02 is 2 %).

    Attributes:
        margin: A slowdown that must be excluded for a pass.
        tolerated: A slowdown that never fails; evidence has to show more than it.
    """

    margin: float
    tolerated: float

    def __post_init__(self) -> None:
        if not 0 <= self.tolerated < self.margin < 1:
            raise ValueError(f"0 <= tolerated < margin < 1 is required: {self}")


class DecisionRule(msgspec.Struct, frozen=True):
    """The probability of each kind of wrong verdict, and how many blocks may be measured."""

    alpha: float
    min_blocks: int
    max_blocks: int


class MetricSeries(msgspec.Struct, frozen=True):
    """
    A deciding series as far as it was measured.

    Attributes:
        differences: ln(candidate / baseline) of each block, above 0 where the candidate is worse.
        aa: The same of the gate's A/A block; None before it was measured.
    """

    name: str
    differences: tuple[float, ...]
    bounds: Bounds
    aa: float | None = None


class SeriesDecision(msgspec.Struct, frozen=True):
    """
    What the blocks of a series show.

    Attributes:
        pass_evidence, fail_evidence: After each block, against "slower by the margin or more" and
            against "slower by no more than what is tolerated".
        conclusion: What was excluded, in words.
    """

    name: str
    state: State
    pass_evidence: tuple[float, ...]
    fail_evidence: tuple[float, ...]
    conclusion: str


class Decision(msgspec.Struct, frozen=True):
    """
    What all series show together.

    Attributes:
        state: None while another block is needed.
        open: Series that need another block; empty once there is a decision.
        message: The decision in a sentence.
    """

    state: State | None
    series: tuple[SeriesDecision, ...]
    open: tuple[str, ...]
    message: str


def attempt_alpha(alpha: float, attempt: int) -> float:
    """Return the error rate that gate number *attempt* spends: 6α/(π²k²), whose sum over k is α."""
    return alpha * 6 / (math.pi * attempt) ** 2


def evidence_path(gains: Any, squares: Any = 0.0, freedom: Any = 0.0) -> Numbers:
    """
    Return the logarithm of the evidence that a mean gain is above 0, after each block (last axis).

    Args:
        squares: Sum of the squares of the A/A blocks.
        freedom: Number of A/A blocks.

    Raises:
        ValueError: A gain is not a finite number.
    """
    values = np.asarray(gains, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a difference is not a finite number")
    blocks, total = np.arange(1, values.shape[-1] + 1), np.cumsum(values, axis=-1)
    scatter = np.asarray(squares)[..., None] + np.cumsum(values**2, axis=-1)
    degrees = np.asarray(freedom)[..., None] + blocks
    share = EFFECT**2 / (1 + blocks * EFFECT**2)
    rest = np.maximum(scatter - share * total**2, _TINY)
    one_sided = 2 * stdtr(degrees, total * np.sqrt(share * degrees / rest))
    evidence: Numbers = degrees / 2 * np.log(np.maximum(scatter, _TINY) / rest)
    evidence -= np.log1p(blocks * EFFECT**2) / 2
    evidence += np.log(np.maximum(one_sided, _TINY))
    return evidence


def crossings(passing: Numbers, failing: Numbers, rule: DecisionRule) -> tuple[Counts, Counts]:
    """
    Return after which block each series passed, and after which it failed; blocks + 1 if never.

    A series passes when "slower by the margin" is refuted at 1/α: all have to, so no correction for
    their number is due. It fails when "slower by no more than tolerated" is refuted at S/α of S
    series (Bonferroni, valid under any dependence). Where both are refuted, the stronger evidence
    decides, which is the nearer bound: the midpoint divides, on a quiet machine as on a noisy one.

    Args:
        passing, failing: Logarithms of the evidence, by series and block (the last two axes).
    """
    series, count = passing.shape[-2:]
    blocks = np.arange(1, count + 1)
    allowed = blocks >= rule.min_blocks

    def first(reached: Any) -> Counts:
        return np.asarray(np.where(reached.any(axis=-1), reached.argmax(axis=-1) + 1, count + 1))

    passed = first(allowed & (passing >= math.log(1 / rule.alpha)) & (passing >= failing))
    slower = (failing >= math.log(series / rule.alpha)) & (failing > passing)
    return passed, first(allowed & slower & (blocks < passed[..., None]))


def decide(rule: DecisionRule, series: Sequence[MetricSeries]) -> Decision:
    """
    Return what *series* decide, as if asked after each block; later blocks change nothing.

    Raises:
        ValueError: A difference is not a finite number.
    """
    cut = [each.differences[: rule.max_blocks] for each in series]
    longest = max(1, *map(len, cut))
    paths = np.full((2, len(series), longest), -np.inf)
    for index, (each, values) in enumerate(zip(series, cut, strict=True)):
        high, low = math.log1p(each.bounds.margin), math.log1p(each.bounds.tolerated)
        own = slice(len(values))
        noise = (0.0, 0.0) if each.aa is None else (each.aa**2, 1.0)
        paths[0, index, own] = evidence_path(high - np.array(values), *noise)
        paths[1, index, own] = evidence_path(np.array(values) - low, *noise)
    passed, failed = crossings(paths[0], paths[1], rule)
    end = int(min(failed.min(), passed.max(), longest))
    results = tuple(
        _series_decision(each, paths[:, index, : min(len(cut[index]), end, passed[index])], rule,
                         passed[index] <= end, failed[index] <= end)
        for index, each in enumerate(series)
    )  # fmt: skip
    slower = tuple(result.name for result in results if result.state == "fail")
    waiting = [index for index in range(len(series)) if passed[index] > longest]
    names = tuple(series[index].name for index in waiting if len(cut[index]) < rule.max_blocks)
    state: State | None
    if slower:
        state, text = "fail", f"slower than tolerated: {', '.join(slower)}"
    elif not waiting:
        state, text = (
            "pass",
            f"{len(series)} series passed: slowdowns of their margins are excluded",
        )
    elif not names:
        state, text = "inconclusive", (
            f"{len(waiting)} of {len(series)} series are undecided: neither is a slowdown of the "
            "margin excluded, nor one above the tolerated shown"
        )  # fmt: skip
    else:
        state, text = None, f"{len(series) - len(waiting)} of {len(series)} series passed"
    return Decision(state, results, () if state else names, f"{text}, after {end} blocks")


def _series_decision(
    series: MetricSeries, paths: Numbers, rule: DecisionRule, passed: bool, failed: bool
) -> SeriesDecision:
    good, bad = (tuple(map(float, np.exp(np.minimum(path, _LARGEST)))) for path in paths)
    excluded = passed or (good and good[-1] >= 1 / rule.alpha)
    slower = failed or (bad and bad[-1] >= 1 / rule.alpha)
    conclusion = (
        f"a slowdown of {100 * series.bounds.margin:g} % or more is "
        f"{'' if excluded else 'not '}excluded, one above {100 * series.bounds.tolerated:g} % is "
        f"{'' if slower else 'not '}shown"
    )
    state: State = "pass" if passed else "fail" if failed else "inconclusive"
    return SeriesDecision(series.name, state if good else "not-run", good, bad, conclusion)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    Return the 95 % t-interval of the mean of independent *values*, one per launch, at least two.
    """
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, 0.975)) * error
    return mean - half, mean + half
