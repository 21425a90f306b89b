"""
Thousands of simulated throughput gates at once: the rule of the product beside version 1's rule and
a fixed-size design, on blocks with normal noise.

Run ``python ci/bench/gate_simulation.py [GATES]`` for the table of
docs/explanation/throughput.md; 4,000 gates a row take about three minutes on one core.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sparkwright.bench.statistics import DecisionRule, attempt_alpha, crossings, evidence_path
from sparkwright.core import strict_yaml
from sparkwright.gates.throughput.paired_differences import ThroughputPolicy

Numbers = NDArray[np.float64]

ROOT = Path(__file__).parents[2]
POLICY = strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
#: Spread of a block's difference; time to the first token spreads 1.5 times as much.
MACHINES = {"quiet": 0.005, "typical": 0.01, "rough": 0.02}
SPREADS = {"tpot": 1.0, "rate": 1.0, "ttft": 1.5}
#: The deciding series of this version, and of version 1 (all with a margin of 2 %).
SERIES = ("tpot", "tpot", "rate", "ttft")
SERIES_V1 = ("tpot", "ttft") * 4 + ("rate",) * 2
#: Slowdowns of each row, and whether one series alone has them.
EFFECTS = ((0.0, False), (0.005, False), (0.015, False), (0.02, True), (0.03, True))
#: A/A blocks, spread of a block, and spread of the A/A blocks, of a gross slowdown.
GROSS = ((1, 0.07, 0.07), (1, 0.15, 0.15), (1, 0.15, 0.01), (10, 0.15, 0.15), (30, 0.07, 0.01))


class Row(NamedTuple):
    """Shares of gates that pass and fail, and the mean number of blocks."""

    passed: float
    failed: float
    blocks: float


def blocks_of(
    rng: np.random.Generator, series: tuple[str, ...], gates: int, sigma: float, slowdown: float,
    *, single: bool, blocks: int,
) -> tuple[Numbers, Numbers]:  # fmt: skip
    """
    Return differences (gates, series, blocks) and the spread of each series.

    *slowdown* is of a time per token; other metrics have it in proportion to their margins.
    """
    spread = sigma * np.array([SPREADS[one] for one in series])
    ratio = [POLICY.bounds[one].margin / POLICY.bounds["tpot"].margin for one in series]  # type: ignore[index]
    true = np.log1p(
        slowdown * np.array(ratio if len(series) == len(SERIES) else [1.0] * len(series))
    )
    if single:
        true[1:] = 0.0
    noise = rng.normal(size=(gates, len(series), blocks)) * spread[:, None]
    return noise + true[:, None], spread


def current(
    sigma: float, slowdown: float, *, single: bool = False, gates: int = 4000, seed: int = 1,
    aa_blocks: int = 10, aa_sigma: float | None = None, attempt: int = 1,
) -> Row:  # fmt: skip
    """Return what this version decides; *aa_blocks* include the gate's own."""
    rng = np.random.default_rng([seed, 1])
    rule = DecisionRule(attempt_alpha(POLICY.alpha, attempt), POLICY.min_blocks, POLICY.max_blocks)
    found, spread = blocks_of(
        rng, SERIES, gates, sigma, slowdown, single=single, blocks=rule.max_blocks
    )
    bounds = [POLICY.bounds[one] for one in SERIES]  # type: ignore[index]
    margin = np.log1p([one.margin for one in bounds])[:, None]
    tolerated = np.log1p([one.tolerated for one in bounds])[:, None]
    weight = min(1.0, POLICY.calibration_weight / aa_blocks)
    calibrated = spread if aa_sigma is None else spread * aa_sigma / sigma
    squares = weight * calibrated**2 * rng.chisquare(aa_blocks, size=(gates, len(SERIES)))
    freedom = weight * aa_blocks
    passing = evidence_path(margin - found, squares, freedom)
    failing = evidence_path(found - tolerated, squares, freedom)
    passed, failed = crossings(passing, failing, rule)
    return _row(passed.max(axis=-1), failed.min(axis=-1), rule.max_blocks)


def version_1(
    sigma: float, slowdown: float, *, single: bool = False, gates: int = 4000, seed: int = 1
) -> Row:
    """
    Return what version 1 decides: a fixed bet of δ/σ against "slower by the margin" and against
    "not slower at all", with the upper bound of σ from 30 A/A blocks and e-BH over ten series.
    """
    rng, alpha, most = np.random.default_rng([seed, 2]), 0.05, 12
    found, spread = blocks_of(rng, SERIES_V1, gates, sigma, slowdown, single=single, blocks=most)
    delta = math.log1p(0.02)
    bound = np.sqrt(rng.chisquare(29, size=(gates, len(SERIES_V1))) / stats.chi2.ppf(0.05, 29))
    upper = (spread * bound)[..., None]
    bet = np.minimum(delta / upper, 3.0)

    def path(gains: Numbers) -> Numbers:
        steps: Numbers = bet * np.minimum(gains / upper, 4.0) - bet**2 / 2
        return np.cumsum(steps, axis=-1)

    blocks = np.arange(1, most + 1)
    passed = _first((path(delta - found) >= math.log(1 / alpha)) & (blocks >= 3))
    against = np.where(passed[..., None] <= blocks, -np.inf, path(found))
    ranked = -np.sort(-against, axis=-2)
    ranks = np.arange(1, len(SERIES_V1) + 1)[:, None]
    named = (ranked >= np.log(len(SERIES_V1) / (alpha * ranks))).any(axis=-2)
    return _row(passed.max(axis=-1), _first(named & (blocks >= 3)), most)


def fixed_size(
    sigma: float, slowdown: float, *, single: bool = False, gates: int = 4000, seed: int = 1,
    blocks: int = 12,
) -> Row:  # fmt: skip
    """Return what t-tests after *blocks* decide: pass all series at α, fail one at α/S."""
    rng = np.random.default_rng([seed, 3])
    found, _ = blocks_of(rng, SERIES, gates, sigma, slowdown, single=single, blocks=blocks)
    error = found.std(axis=-1, ddof=1) / math.sqrt(blocks)
    mean, bounds = found.mean(axis=-1), [POLICY.bounds[one] for one in SERIES]  # type: ignore[index]
    margin, tolerated = (
        np.log1p([getattr(one, name) for one in bounds]) for name in ("margin", "tolerated")
    )
    alpha, freedom = attempt_alpha(POLICY.alpha, 1), blocks - 1
    passed = ((margin - mean) / error >= stats.t.ppf(1 - alpha, freedom)).all(axis=-1)
    slower = (mean - tolerated) / error >= stats.t.ppf(1 - alpha / len(SERIES), freedom)
    failed = slower.any(axis=-1) & ~passed
    return Row(float(passed.mean()), float(failed.mean()), float(blocks))


def gross(aa_blocks: int, spread: float, aa_sigma: float, gates: int = 2000) -> float:
    """Return the share of candidates 4 times slower that fail within three blocks."""
    rule = DecisionRule(attempt_alpha(POLICY.alpha, 1), 3, 3)
    rng = np.random.default_rng([1, 4])
    found = math.log(4) + spread * rng.normal(size=(gates, len(SERIES), 3))
    weight = min(1.0, POLICY.calibration_weight / aa_blocks)
    squares = weight * aa_sigma**2 * rng.chisquare(aa_blocks, size=found.shape[:2])
    tolerated = math.log1p(POLICY.bounds["tpot"].tolerated)
    failing = evidence_path(found - tolerated, squares, weight * aa_blocks)
    _, failed = crossings(np.full_like(failing, -np.inf), failing, rule)
    return float((failed.min(axis=-1) <= 3).mean())


def _first(reached: Any) -> Any:
    return np.where(reached.any(axis=-1), reached.argmax(axis=-1) + 1, reached.shape[-1] + 1)


def _row(passed: Any, failed: Any, most: int) -> Row:
    end = np.minimum(np.minimum(passed, failed), most)
    fails = (failed <= most) & (failed < passed)
    passes = (passed <= most) & ~fails
    return Row(float(passes.mean()), float(fails.mean()), float(end.mean()))


def table(gates: int) -> list[str]:
    """Return the lines of the table: pass / fail in %, and the mean number of blocks."""
    titles = [f"{'one ' if one else ''}{100 * slow:g} % slower" for slow, one in EFFECTS]
    lines = [f"| machine | rule | {' | '.join(titles)} |", "|---|---|" + "---|" * len(EFFECTS)]
    rules: dict[str, Any] = {
        "this version": current,
        "this version, without a calibration": functools.partial(current, aa_blocks=1),
        "version 1": version_1,
        "t-tests after 6 blocks": functools.partial(fixed_size, blocks=6),
        "t-tests after 12 blocks": fixed_size,
    }
    for machine, sigma in MACHINES.items():
        for name, rule in rules.items():
            rows = [rule(sigma, slow, single=one, gates=gates) for slow, one in EFFECTS]
            cells = [f"{100 * r.passed:.1f} / {100 * r.failed:.1f} / {r.blocks:.1f}" for r in rows]
            lines.append(f"| {machine}, σ {100 * sigma:g} % | {name} | {' | '.join(cells)} |")
    for known, spread, sigma in GROSS:
        share = 100 * gross(known, spread, sigma)
        lines.append(
            f"4 times slower, block spread {spread:.0%}, {known} A/A blocks of spread {sigma:.0%}: "
            f"{share:.1f} % fail within 3 blocks"
        )
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)) + "\n")
