"""The decision of a throughput gate: its error rates, its messages, and the noise behind it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparkwright.bench.statistics import (
    Bounds,
    DecisionRule,
    MetricSeries,
    attempt_alpha,
    decide,
    evidence_path,
)

simulation = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "ci" / "bench" / "gate_simulation.py"))
)
GATES = 400
#: What the first gate of a wheel spends, and two standard errors of 400 gates.
LIMIT = attempt_alpha(simulation.POLICY.alpha, 1) + 0.018


@pytest.mark.parametrize("noise", simulation.NOISES)
def test_wrong_verdicts_are_rarer_than_the_first_gate_may_give(noise: str) -> None:
    """Normal or heavy-tailed, with spikes, memory or drift: 400 gates at the margin, and 400 at the tolerated slowdown."""
    shares = simulation.wrong(simulation.Rule(), simulation.NOISES[noise], GATES)
    assert max(shares) <= LIMIT, shares


@pytest.mark.parametrize("wave", simulation.WAVES)
def test_nothing_periodic_keeps_step_with_a_side(wave: str) -> None:
    """With a period of 2 to 9 launches."""
    shares = simulation.worst(simulation.Rule(), wave, GATES)
    assert max(shares[:2]) <= LIMIT, shares


@pytest.mark.parametrize("sigma", [0.005, 0.01])
def test_equal_wheels_pass_and_slow_ones_fail_within_the_blocks(sigma: float) -> None:
    """Nearly all, on a quiet machine and on a typical one."""
    rule = simulation.Rule()
    assert simulation.gates(rule, simulation.iid, simulation.EQUAL, GATES, sigma).passed >= 0.9
    assert simulation.gates(rule, simulation.iid, simulation.SLOW, GATES, sigma).failed >= 0.9


@pytest.mark.parametrize("spread", [0.07, 0.15])
def test_a_gross_slowdown_fails_after_the_fewest_blocks(spread: float) -> None:
    """Four times slower, on a machine as noisy as can be."""
    assert simulation.gross(spread, GATES) >= 0.99


@pytest.mark.parametrize("mean", [0.0, -0.5])
@pytest.mark.parametrize("aa_blocks", [0, 1, 8])
def test_the_evidence_rarely_ever_reaches_its_threshold(mean: float, aa_blocks: int) -> None:
    """Looked at after each of thirty blocks, without a gain: with and without A/A blocks."""
    rng = np.random.default_rng(5)
    squares = rng.chisquare(aa_blocks or 1, size=10_000) * (aa_blocks > 0)
    path = evidence_path(rng.normal(mean, size=(10_000, 30)), squares, aa_blocks)
    assert (path.max(axis=1) >= math.log(20)).mean() <= 0.05


@pytest.mark.parametrize(
    ("values", "sigma", "state", "words"),
    [
        (
            (0.0, 0.001, -0.001, 0.0),
            0.005,
            "pass",
            "a slowdown of 2 % or more is excluded, one above 0.5 % is not shown",
        ),
        (
            (0.04, 0.041, 0.039, 0.04),
            0.005,
            "fail",
            "a slowdown of 2 % or more is not excluded, one above 0.5 % is shown",
        ),
        (
            (0.05, -0.05) * 6,
            0.05,
            "inconclusive",
            "a slowdown of 2 % or more is not excluded, one above 0.5 % is not shown",
        ),
    ],
)
def test_the_conclusion_says_what_was_excluded(
    values: tuple[float, ...], sigma: float, state: str, words: str
) -> None:
    series = MetricSeries("s", values, Bounds(0.02, 0.005), sigma)
    decision = decide(DecisionRule(0.05, 3, 12), [series])
    assert (decision.state, decision.series[0].conclusion) == (state, words)
