"""
Thousands of simulated throughput gates at once, under noise of every kind.

Run ``python ci/bench/gate_simulation.py [GATES]`` for the table of
docs/explanation/throughput.md; 4,000 gates a cell take a few minutes on one core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkwright.bench.statistics import DecisionRule, attempt_alpha, crossings, evidence_path
from sparkwright.core import strict_yaml
from sparkwright.gates.throughput_run import ThroughputPolicy

Numbers = NDArray[np.float64]

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
#: The deciding series of `primary`; time to the first token spreads 1.5 times as much.
BOUNDS = [POLICY.bounds[metric] for metric in ("tpot", "tpot", "rate", "ttft")]
MARGIN, TOLERATED = (
    np.log1p([getattr(bounds, name) for bounds in BOUNDS]) for name in ("margin", "tolerated")
)
SPREADS = np.array([1.0, 1.0, 1.0, 1.5])
#: Spread of a block's difference.
SIGMA = 0.01
#: Slowdowns of the four series: none, all as much as tolerated, one by the margin, one by 3 %.
EQUAL, BARELY = np.zeros(4), TOLERATED
AT_MARGIN, SLOW = np.array([np.log(1.02), 0, 0, 0]), np.array([np.log(1.03), 0, 0, 0])
#: Launches of a period, and amplitudes in spreads of a turn; a turn of one side is a launch.
PERIODS, AMPLITUDES = range(2, 10), (1.0, 4.0)


class Rule(NamedTuple):
    """
    How a gate is run.

    Attributes:
        lag: Longest wait before a turn, in turns; *shuffled*: whether each turn orders its cells.
    """

    min_blocks: int = POLICY.min_blocks
    lag: float = POLICY.lag
    shuffled: bool = True


#: Returns the machine's noise at times (gates, blocks, turns, series), in spreads of a turn.
Noise = Callable[[np.random.Generator, Numbers], Numbers]


def iid(rng: np.random.Generator, times: Numbers) -> Numbers:
    """Normal noise, another one in each turn."""
    return rng.normal(size=times.shape)


def heavy(rng: np.random.Generator, times: Numbers) -> Numbers:
    """Student's t with three degrees of freedom."""
    return np.asarray(rng.standard_t(3, size=times.shape) / np.sqrt(3))


def spikes(rng: np.random.Generator, times: Numbers) -> Numbers:
    """One turn in twenty is ten spreads slower."""
    return rng.normal(size=times.shape) + 10 * (rng.random(times.shape) < 0.05)


def autocorrelated(rng: np.random.Generator, times: Numbers) -> Numbers:
    """Each turn has 0.8 of the noise of the one before."""
    steps = rng.normal(size=times.shape).reshape(len(times), -1, times.shape[-1])
    for turn in range(1, steps.shape[1]):
        steps[:, turn] = 0.8 * steps[:, turn - 1] + 0.6 * steps[:, turn]
    return steps.reshape(times.shape)


def drift(rng: np.random.Generator, times: Numbers) -> Numbers:
    """The machine becomes slower by half a spread with every turn."""
    return rng.normal(size=times.shape) + times / 2


def periodic(wave: Callable[[Numbers], Numbers], period: float, amplitude: float) -> Noise:
    """Return noise whose *wave* has a *period* of so many turns, beside a little normal noise."""

    def noise(rng: np.random.Generator, times: Numbers) -> Numbers:
        phase = (times / period + rng.random((len(times), 1, 1, 1))) % 1.0
        return 0.2 * rng.normal(size=times.shape) + amplitude * wave(phase)

    return noise


NOISES: dict[str, Noise] = {
    "normal": iid,
    "heavy tails": heavy,
    "spikes": spikes,
    "autocorrelated": autocorrelated,
    "drift": drift,
}
WAVES: dict[str, Callable[[Numbers], Numbers]] = {
    "sine": lambda phase: np.sin(2 * np.pi * phase),
    "square": lambda phase: np.where(phase < 0.5, 1.0, -1.0),
    "one launch in the period": lambda phase: np.where(phase < 0.2, 2.0, 0.0),
}


class Row(NamedTuple):
    """Shares of gates that pass and fail, and the mean number of blocks."""

    passed: float
    failed: float
    blocks: float


def gates(
    rule: Rule, noise: Noise, slowdown: Numbers, count: int = 4000, sigma: float = SIGMA
) -> Row:
    """Return what *rule* decides in *count* gates of a candidate that is slower by *slowdown*."""
    rng, series = np.random.default_rng(1), len(slowdown)
    shape = (count, POLICY.max_blocks + 1, 4)
    starts = np.cumsum(1 + rule.lag * rng.random(shape).reshape(count, -1), axis=1).reshape(shape)
    order = np.broadcast_to(np.arange(series) / series, (*shape, series))
    times = starts[..., None] + (rng.permuted(order, axis=-1) if rule.shuffled else order)
    turns = sigma * SPREADS * noise(rng, times)
    coin = rng.choice([-1.0, 1.0], size=(*shape[:2], 1))
    blocks = coin * (turns[:, :, 0] - turns[:, :, 1] - turns[:, :, 2] + turns[:, :, 3]) / 2
    found = np.moveaxis(blocks[:, 1:], 1, 2) + slowdown[:, None]
    known = blocks[:, 0] ** 2
    limits = DecisionRule(attempt_alpha(POLICY.alpha, 1), rule.min_blocks, POLICY.max_blocks)
    passing = evidence_path(MARGIN[:, None] - found, known, 1.0)
    failing = evidence_path(found - TOLERATED[:, None], known, 1.0)
    passed, failed = (each for each in crossings(passing, failing, limits))
    last_pass, first_fail, most = passed.max(axis=-1), failed.min(axis=-1), limits.max_blocks
    fails = (first_fail <= most) & (first_fail < last_pass)
    end = np.minimum(np.minimum(last_pass, first_fail), most)
    passes = (last_pass <= most) & ~fails
    return Row(float(passes.mean()), float(fails.mean()), float(end.mean()))


def wrong(rule: Rule, noise: Noise, count: int) -> tuple[float, float]:
    """Return the shares of wrong passes and wrong fails."""
    return gates(rule, noise, AT_MARGIN, count).passed, gates(rule, noise, BARELY, count).failed


def worst(rule: Rule, wave: str, count: int) -> tuple[float, float, int]:
    """Return the largest shares of wrong passes and fails over periods, and that period."""
    rows = []
    for period in PERIODS:
        for amplitude in AMPLITUDES:
            shares = wrong(rule, periodic(WAVES[wave], period, amplitude), count)
            rows.append((*shares, period))
    return max(row[0] for row in rows), max(row[1] for row in rows), max(rows)[2]


def gross(spread: float, count: int = 2000) -> float:
    """Return the share of candidates 4 times slower that fail within the fewest blocks."""
    row = gates(Rule(), iid, np.full(4, np.log(4)), count, spread)
    return row.failed if row.blocks < POLICY.min_blocks + 0.01 else 0.0


def table(count: int) -> list[str]:
    """Return the lines of the table, in % and blocks."""
    lines = [
        "| noise | wrong passes | wrong fails | an equal wheel passes | 3 % slower fails |",
        "|---|---:|---:|---|---|",
    ]
    rule = Rule()

    def line(noise: str, shares: tuple[float, ...], sample: Noise) -> None:
        good, bad = (gates(rule, sample, effect, count) for effect in (EQUAL, SLOW))
        cells = [f"{100 * share:.1f}" for share in shares[:2]]
        cells += [f"{100 * good.passed:.0f} in {good.blocks:.1f} blocks"]
        cells += [f"{100 * bad.failed:.0f} in {bad.blocks:.1f}"]
        lines.append(f"| {noise} | {' | '.join(cells)} |")

    for noise, sample in NOISES.items():
        line(noise, wrong(rule, sample, count), sample)
    for wave, shape in WAVES.items():
        passes, fails, period = worst(rule, wave, count)
        line(f"periodic, {wave}", (passes, fails), periodic(shape, period, AMPLITUDES[0]))
    for sigma in (0.005, 0.02):
        row = gates(Rule(), iid, EQUAL, count, sigma)
        lines.append(
            f"σ {100 * sigma:g} %: {100 * row.passed:.1f} % of equal wheels pass, in {row.blocks:.1f} blocks"
        )
    for spread in (0.07, 0.15):
        lines.append(
            f"4 times slower, σ {spread:.0%}: {100 * gross(spread, count):.1f} % fail after {POLICY.min_blocks} blocks"
        )
    return lines


if __name__ == "__main__":
    began = time.monotonic()
    sys.stdout.write("\n".join(table(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)) + "\n")
    sys.stderr.write(f"{time.monotonic() - began:.0f} s\n")
