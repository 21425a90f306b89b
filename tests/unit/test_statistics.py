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
    NoiseModel,
    decide,
    evidence_path,
    expected_blocks,
    noise_model,
)

simulation = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "ci" / "bench" / "gate_simulation.py")))
GATES = 400


@pytest.mark.parametrize("sigma", simulation.MACHINES.values())
@pytest.mark.parametrize("aa_blocks", [1, 10])
def test_wrong_verdicts_are_rarer_than_alpha(sigma: float, aa_blocks: int) -> None:
    """Neither error exceeds alpha: 400 gates at the tolerated slowdown, and 400 at the margin."""
    for slowdown in (0.0, 0.005):
        assert simulation.current(sigma, slowdown, gates=GATES, aa_blocks=aa_blocks).failed <= 0.05
    assert simulation.current(sigma, 0.02, single=True, gates=GATES, aa_blocks=aa_blocks).passed <= 0.05


@pytest.mark.parametrize("machine", ["quiet", "typical"])
def test_equal_wheels_pass_and_slow_ones_fail_within_the_blocks(machine: str) -> None:
    """Version 1 lost one equal wheel in fifty there."""
    sigma = simulation.MACHINES[machine]
    assert simulation.current(sigma, 0.0, gates=GATES).passed >= 0.98
    assert simulation.current(sigma, 0.03, single=True, gates=GATES).failed >= 0.98


@pytest.mark.parametrize(("aa_blocks", "spread", "sigma"), simulation.GROSS)
def test_a_gross_slowdown_fails_within_three_blocks(
    aa_blocks: int, spread: float, sigma: float
) -> None:
    """Four times slower with a spread of 7 to 15 %, whatever the calibration says."""
    assert simulation.gross(aa_blocks, spread, sigma, gates=GATES) >= 0.99


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
        ((0.0, 0.001, -0.001), 0.005, "pass", "a slowdown of 2 % or more is excluded, one above 0.5 % is not shown"),
        ((0.04, 0.041, 0.039), 0.005, "fail", "a slowdown of 2 % or more is not excluded, one above 0.5 % is shown"),
        ((0.05, -0.05) * 6, 0.05, "inconclusive", "a slowdown of 2 % or more is not excluded, one above 0.5 % is not shown"),
    ],
)
def test_the_conclusion_says_what_was_excluded(values: tuple[float, ...], sigma: float, state: str, words: str) -> None:
    series = MetricSeries("s", values, Bounds(0.02, 0.005), NoiseModel(10 * sigma**2, 10.0))
    decision = decide(DecisionRule(0.05, 3, 12), [series])
    assert (decision.state, decision.series[0].conclusion) == (state, words)


def test_a_calibration_ages_and_weighs_little_and_expected_blocks_follow_the_noise() -> None:
    """
    A block halves in 60 days; thirty fresh ones weigh twelve, with the same spread. More noise needs more blocks, then a wider margin; the
    mean of simulated gates is near.
    """
    assert noise_model([(60, 0.01)], 60, 12) == NoiseModel(0.5 * 0.01**2, 0.5)
    many = noise_model([(0, 0.01)] * 30, 60, 12)
    assert (many.freedom, NoiseModel().sigma) == (12, None)
    assert many.sigma == pytest.approx(0.01)
    need = [
        expected_blocks(NoiseModel(12 * sigma**2, 12), math.log1p(0.02), 33, (3, 12), 4)
        for sigma in (0.005, 0.01, 0.02)
    ]
    assert need == [3, pytest.approx(simulation.current(0.01, 0.0, gates=GATES).blocks, abs=1.5), None]
