"""The decision of a throughput gate: its error rates, its messages, and the noise behind it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparkwright.bench.statistics import eprocess, student
from sparkwright.bench.statistics.eprocess import (
    Bounds,
    Decision,
    DecisionRule,
    MetricSeries,
    NoiseModel,
    decide,
)
from sparkwright.bench.statistics.student import mean_interval, noise_model

simulation = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "ci" / "bench" / "gate_simulation.py")))
BOUNDS, RULE = Bounds(0.02, 0.005), DecisionRule(0.05, 3, 12)
#: Ten A/A blocks with a spread of 0.5 %.
NOISE = NoiseModel(10 * 0.005**2, 10.0)
GATES = 400


def decision(*series: tuple[float, ...], noise: NoiseModel = NOISE) -> Decision:
    return decide(
        RULE,
        [MetricSeries(f"s{i}", values, BOUNDS, noise) for i, values in enumerate(series)],
    )


@pytest.mark.parametrize("sigma", simulation.MACHINES.values())
@pytest.mark.parametrize("aa_blocks", [1, 10])
def test_wrong_verdicts_are_rarer_than_alpha(sigma: float, aa_blocks: int) -> None:
    """Neither error exceeds alpha: 400 gates at the tolerated slowdown, and 400 at the margin."""
    for slowdown in (0.0, 0.005):
        row = simulation.current(sigma, slowdown, gates=GATES, aa_blocks=aa_blocks)
        assert row.failed <= 0.05
    assert (
        simulation.current(sigma, 0.02, single=True, gates=GATES, aa_blocks=aa_blocks).passed
        <= 0.05
    )


def test_equal_wheels_pass_and_slow_ones_fail_within_the_blocks() -> None:
    """On quiet and typical machines; version 1 lost one equal wheel in fifty there."""
    for machine in ("quiet", "typical"):
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
def test_the_evidence_rarely_ever_reaches_its_threshold(mean: float) -> None:
    """Looked at after each of thirty blocks, without a gain: with and without A/A blocks."""
    rng = np.random.default_rng(5)
    for aa_blocks in (0, 1, 8):
        squares = rng.chisquare(aa_blocks, size=10_000) if aa_blocks else np.zeros(10_000)
        gains = rng.normal(mean, size=(10_000, 30))
        path = eprocess.evidence_path(gains, squares, aa_blocks)
        assert (path.max(axis=1) >= math.log(20)).mean() <= 0.05


def test_the_product_decides_as_the_simulation() -> None:
    """One series that is too slow fails, is named, and says what was excluded."""
    found = decision((0.0, 0.001, -0.001), (0.04, 0.041, 0.039))
    assert (found.state, found.culprits) == ("fail", ("s1",))
    assert found.series[0].conclusion.startswith("a slowdown of 2 % or more is excluded")
    assert found.series[1].conclusion.endswith("one above 0.5 % is shown")
    assert decision((0.0, 0.001, -0.001)).state == "pass"


def test_a_series_that_passed_is_not_measured_again() -> None:
    """Only open series need another block; later blocks of a settled one change nothing."""
    found = decision((0.0, 0.001, -0.001), (0.01, 0.02, 0.0))
    assert (found.state, found.open) == (None, ("s1",))
    assert decision((0.0, 0.001, -0.001, 0.5)).state == "pass"


def test_blocks_that_show_nothing_are_inconclusive() -> None:
    """After the most blocks, with a noise that supports neither verdict."""
    found = decision((0.05, -0.05) * 6, noise=NoiseModel(10 * 0.05**2, 10.0))
    assert found.state == "inconclusive"
    assert found.series[0].conclusion.count("not") == 2


def test_values_that_are_no_measurement_are_refused() -> None:
    """Not a number is neither a block nor an interval, and bounds have an order."""
    for wrong in (
        lambda: decision((math.nan,)),
        lambda: noise_model([(0, math.inf)], 60, 12),
        lambda: mean_interval([1.0]),
        lambda: Bounds(0.01, 0.02),
    ):
        with pytest.raises(ValueError, match=r"finite|required"):
            wrong()


def test_a_calibration_ages_and_weighs_little() -> None:
    """A block halves in 60 days; thirty fresh ones weigh twelve, with the same spread."""
    assert noise_model([(60, 0.01)], 60, 12) == NoiseModel(0.5 * 0.01**2, 0.5)
    many = noise_model([(0, 0.01)] * 30, 60, 12)
    assert many.freedom == 12
    assert many.sigma == pytest.approx(0.01)
    assert NoiseModel().sigma is None


def test_a_changed_machine_is_noticed() -> None:
    """An A/A block of five spreads does not agree with the calibration; without one, all do."""
    assert student.agrees(NOISE, 0.006)
    assert not student.agrees(NOISE, 0.025)
    assert student.agrees(NoiseModel(), 0.025)


def test_expected_blocks_and_margins_follow_the_noise() -> None:
    """More noise needs more blocks, then a wider margin; the mean of simulated gates is near."""
    need = [
        student.expected_blocks(NoiseModel(12 * sigma**2, 12), math.log1p(0.02), 33, (3, 12), 4)
        for sigma in (0.005, 0.01, 0.02)
    ]
    assert need[0] == 3
    assert need[1] == pytest.approx(simulation.current(0.01, 0.0, gates=GATES).blocks, abs=1.5)
    assert need[2] is None
