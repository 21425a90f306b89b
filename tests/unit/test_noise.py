"""The model of a noisy machine, one machine at a time and thousands at once."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sparkwright.bench.statistics import simulated
from sparkwright.bench.statistics.noise import (
    LIFE,
    PRESETS,
    QUIET,
    ROUGH,
    SLOW,
    TYPICAL,
    Machine,
    Noise,
)
from sparkwright.bench.statistics.simulated import Design

#: Nothing moves: each test adds the one thing that it looks at.
STILL = Noise(run=0.0, launch=0.0, drift=0.0, tail=0.0)

moments = st.lists(st.floats(0, 200_000), min_size=1, max_size=20)


@given(moments, st.integers(0, 2**64))
def test_a_seed_is_a_machine_in_whatever_order_one_asks(times: list[float], seed: int) -> None:
    """Two processes with one seed see the same factors, though one asks backwards and for other launches between."""
    one, other = Machine(ROUGH, seed), Machine(ROUGH, seed)
    launch = one.launch("candidate")
    forwards = {at: one.factor(at, launch) for at in times}
    other.launch("baseline")
    other.factor(100.0, other.launch("candidate", 7))

    assert {at: other.factor(at, other.launch("candidate", 0)) for at in reversed(times)} == forwards


def test_other_seeds_are_other_machines() -> None:
    """Neither launches nor drift nor runs are the same."""
    first, second = Machine(TYPICAL, 1), Machine(TYPICAL, 2)

    assert first.launch("baseline") != second.launch("baseline")
    assert first.drift(1000.0) != second.drift(1000.0)


def test_a_launch_keeps_its_effect_and_the_next_has_another() -> None:
    """What a launch happened to get does not average out inside it."""
    machine = Machine(replace(STILL, launch=0.01), 1)
    first, second = machine.launch("baseline"), machine.launch("baseline")

    assert {machine.factor(at, first) for at in (0.0, 1e3, 1e5)} == {math.exp(first.effect)}
    assert (first.number, second.number) == (0, 1)
    assert first.effect != second.effect
    assert machine.launch("baseline", 0) == first


def test_each_part_has_its_spread() -> None:
    """Launches, drift and runs each spread by what the record says, within the error of so many draws."""
    launches, drifting, running = (Machine(replace(STILL, **{name: 0.01}), 3) for name in ("launch", "drift", "run"))
    draws = {
        "launch": [launches.launch("baseline").effect for _ in range(2000)],
        "drift": [drifting.drift(7200.0 * step) for step in range(1300)],
        "run": [math.log(running.factor(30.0 * step, running.launch("baseline", 0))) for step in range(2000)],
    }

    for name, values in draws.items():
        assert statistics.pstdev(values) == pytest.approx(0.01, rel=0.08), name
        assert statistics.fmean(values) == pytest.approx(0.0, abs=0.001), name


def test_a_drift_is_forgotten_with_its_time_constant() -> None:
    """Values one time constant apart correlate by 1/e."""
    machine = Machine(replace(STILL, drift=0.01), 5)
    values = np.array([machine.drift(1800.0 * step) for step in range(4000)])

    assert np.corrcoef(values[:-1], values[1:])[0, 1] == pytest.approx(math.exp(-1), abs=0.06)


def test_some_runs_have_a_wide_tail() -> None:
    """A twentieth of them spread four times as wide: more than three spreads off, 25 times as often as of a normal."""
    machine = Machine(replace(STILL, run=0.01, tail=0.05), 1)
    far = sum(abs(math.log(machine.factor(30.0 * step, machine.launch("baseline", 0)))) > 0.03 for step in range(4000))

    assert 60 < far < 160


def test_the_slow_state_is_hidden_from_all_but_the_sentinel() -> None:
    """63 become 94 ms, the matrix times vector takes half as long again, and it is on for its share of the time."""
    machine = Machine(replace(STILL, flips=6.0, flip_seconds=100.0), 2)
    launch = machine.launch("baseline")
    states = [machine.slow(at) for at in range(0, 1_000_000, 10)]

    assert statistics.fmean(states) == pytest.approx(100 / (600 + 100), rel=0.1)
    slow, fast = states.index(True) * 10.0, states.index(False) * 10.0
    assert (machine.factor(slow, launch), machine.gemv(slow)) == pytest.approx((SLOW, 1.5))
    assert (machine.factor(fast, launch), machine.gemv(fast)) == (1.0, 1.0)
    assert not any(Machine(QUIET, 2).slow(at) for at in range(0, 100_000, 50))


def test_a_slowdown_is_the_candidates_alone() -> None:
    """Its true effect is in each of its launches, and in none of the baseline's."""
    machine = Machine(replace(STILL, slowdown=math.log(1.05)), 1)

    assert machine.factor(0.0, machine.launch("candidate")) == pytest.approx(1.05)
    assert machine.factor(0.0, machine.launch("baseline")) == 1.0


@pytest.mark.parametrize("at", [-1.0, 1.8e9, math.nan])
def test_a_machine_has_a_beginning_and_an_end(at: float) -> None:
    """Seconds since 1970 are a mistake that would take hours and gigabytes to answer."""
    assert LIFE < 1e9
    machine = Machine(TYPICAL, 1)
    for ask in (machine.drift, machine.slow, machine.gemv):
        with pytest.raises(ValueError, match="life"):
            ask(at)


@pytest.mark.parametrize("wrong", [{"launch": -0.1}, {"tail": 1.5}, {"flip_seconds": 0.0}, {"drift": math.nan}, {"slowdown": math.inf}])
def test_an_impossible_noise_is_refused(wrong: dict[str, float]) -> None:
    """Spreads and rates are 0 or more, lengths above 0, shares at most 1."""
    with pytest.raises(ValueError, match=r"negative|share"):
        replace(TYPICAL, **wrong)


def test_the_model_loads_without_heavy_libraries() -> None:
    """The reference server imports it, and starts at once."""
    code = "import sys; import sparkwright.bench.statistics.noise; sys.exit(bool({'numpy', 'scipy'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def by_hand(noise: Noise, blocks: int, seed: int) -> list[float]:
    """Measure A/A blocks on one `Machine`, leg by leg, as `simulated` does on many."""
    machine, at, found = Machine(noise, seed), 0.0, []
    for block in range(blocks):
        at += 300
        sides = [machine.launch("baseline"), machine.launch("candidate")]
        quads: list[float] = []
        for _ in range(3):
            legs = []
            for place in (0, 1, 1, 0) if block % 2 else (1, 0, 0, 1):
                legs.append((place, math.log(machine.factor(at + 45, sides[place]))))
                at += 75
            first, second = ([value for side, value in legs if side == place] for place in (0, 1))
            quads.append((sum(second) - sum(first)) / 2)
        found.append(statistics.median(quads))
    return found


@pytest.mark.parametrize("name", ["quiet", "rough"])
def test_thousands_of_machines_spread_like_one(name: str) -> None:
    """The vectorised blocks have the spread of blocks that one machine gives leg by leg."""
    noise = replace(PRESETS[name], flips=0.0)
    one = by_hand(noise, 600, 4)
    many, discarded = simulated.differences(noise, Design(), 2000, 3, 4)

    assert discarded == 0
    assert statistics.pstdev(one) == pytest.approx(float(many.std()), rel=0.1)
    assert float(many.mean()) == pytest.approx(0.0, abs=0.001)


def test_the_sentinel_keeps_the_slow_state_out_of_the_blocks() -> None:
    """Legs are discarded, and the blocks hardly spread more than without flips."""
    calm, _ = simulated.differences(replace(TYPICAL, flips=0.0), Design(), 3000, 4, 1)
    flips, discarded = simulated.differences(TYPICAL, Design(), 3000, 4, 1)

    assert 0.005 < discarded < 0.05
    assert float(flips.std()) < 1.2 * float(calm.std())


def test_cells_of_one_launch_share_its_effect_or_do_not() -> None:
    """With one effect the cells of a block move together; with their own they hardly do."""
    correlations = []
    for shared in (True, False):
        found, _ = simulated.differences(replace(STILL, launch=0.01, run=0.002), Design(cells=2, shared=shared), 3000, 2, 1)
        correlations.append(float(np.corrcoef(found[:, 0].ravel(), found[:, 1].ravel())[0, 1]))

    assert correlations[0] > 0.9
    assert abs(correlations[1]) < 0.1


def test_the_seed_reports_rule_blocks_every_fourth_good_build() -> None:
    """gates.md §2.4 found 28.0 % on a rough machine with flips; the model is the one that was used there."""
    blocked = float((simulated.single(ROUGH, 20_000, 1) > math.log(1.02)).mean())

    assert blocked == pytest.approx(0.280, abs=0.015)
