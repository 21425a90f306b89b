"""The admission policy: what no schedule may do, what every schedule can be held to, and what it makes of a real build's shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkwright.core import schedule
from sparkwright.core.schedule import Holder, Unit

MEMORY = 1000.0

units = st.lists(
    st.builds(Unit, name=st.just(""), seconds=st.integers(1, 100).map(float), megabytes=st.integers(1, 1000).map(float)), max_size=25
).map(lambda found: [Unit(f"u{number}", unit.seconds, unit.megabytes) for number, unit in enumerate(found)])
cores = st.integers(1, 8)


def intervals(of: list[Unit], made: schedule.Replay) -> dict[str, tuple[float, float]]:
    """Return when each unit ran."""
    seconds = {unit.name: unit.seconds for unit in of}
    return {name: (start, start + seconds[name]) for name, start in made.starts}


def held(of: list[Unit], made: schedule.Replay, at: float) -> list[Unit]:
    """Return the units that ran at the second *at*."""
    times = intervals(of, made)
    return [unit for unit in of if times[unit.name][0] <= at < times[unit.name][1]]


@given(units, cores)
def test_every_unit_runs_once_and_nothing_is_exceeded(of: list[Unit], cores: int) -> None:
    """At every start, the running units fit the cores and the memory."""
    made = schedule.replay(of, cores, MEMORY)

    assert sorted(name for name, _ in made.starts) == sorted(unit.name for unit in of)
    for _, start in made.starts:
        running = held(of, made, start)
        assert len(running) <= cores
        assert sum(unit.megabytes for unit in running) <= MEMORY
    assert made.peak <= MEMORY


@given(units, cores)
def test_a_unit_larger_than_the_memory_runs_alone(of: list[Unit], cores: int) -> None:
    """What can never fit is run when nothing else does, and everything else is as before."""
    giant = Unit("giant", 10, MEMORY * 2)
    made = schedule.replay([*of, giant], cores, MEMORY)
    start, end = intervals([*of, giant], made)["giant"]

    for unit in of:
        one = intervals([*of, giant], made)[unit.name]
        assert one[1] <= start or one[0] >= end


@settings(max_examples=20)
@given(units, cores)
def test_no_schedule_is_below_the_lower_bound_or_slower_than_one_after_the_other(of: list[Unit], cores: int) -> None:
    """The bound is one, and something runs at every moment."""
    for order in (of, schedule.arrange(of, cores, MEMORY)):
        made = schedule.replay(order, cores, MEMORY)
        assert schedule.lower_bound(of, cores, MEMORY) <= made.makespan + 1e-6
        assert made.makespan <= sum(unit.seconds for unit in of) + 1e-6


@given(units, cores)
def test_units_of_at_most_half_the_memory_end_within_the_proven_bound(of: list[Unit], cores: int) -> None:
    """
    While a unit waits, all cores are busy or more than half of the memory is held; so the last one starts by work ÷ cores plus twice the
    memory-time ÷ memory, and ends by the longest unit later.
    """
    of = [Unit(unit.name, unit.seconds, min(unit.megabytes, MEMORY / 2)) for unit in of]
    made = schedule.replay(of, cores, MEMORY)
    work = sum(unit.seconds for unit in of) / cores
    memory_time = sum(unit.seconds * unit.megabytes for unit in of) / MEMORY

    assert made.makespan <= work + 2 * memory_time + max((unit.seconds for unit in of), default=0) + 1e-6


@given(units, cores, st.integers(1, 1000))
def test_the_first_unit_that_waits_is_not_delayed_by_those_behind_it(of: list[Unit], cores: int, megabytes: int) -> None:
    """With the true times known, the first unit in the queue starts when it would if nothing else waited."""
    first = Unit("first", 10, float(megabytes))
    running = [Holder("a", 400, 30.0), Holder("b", 300, 50.0), Holder("c", 200, 70.0)]

    def start(waiting: list[Unit]) -> float:
        now, left = 0.0, list(running)
        while True:
            free = MEMORY - sum(holder.megabytes for holder in left)
            chosen = schedule.startable(waiting, left, now, cores + 3, free)
            if any(unit.name == "first" for unit in chosen):
                return now
            waiting = [unit for unit in waiting if unit not in chosen]
            left += [Holder(unit.name, unit.megabytes, now + unit.seconds) for unit in chosen]
            now = min(holder.ends for holder in left)
            left = [holder for holder in left if holder.ends > now]

    if cores + 3 > len(running) + len(of):  # cores are not what it waits for
        assert start([first, *of]) == start([first])


def test_a_stream_of_small_units_does_not_starve_a_large_one() -> None:
    """The large unit starts when the unit before it ends, however many small ones would fit meanwhile."""
    small = [Unit(f"s{number}", 10, 100) for number in range(50)]
    made = schedule.replay([Unit("first", 35, 200), Unit("large", 10, 900), *small], 4, MEMORY)

    assert dict(made.starts)["large"] == 35


def test_a_small_unit_passes_a_large_one_that_waits() -> None:
    """Memory that the first in the queue cannot use yet is used."""
    made = schedule.replay([Unit("first", 30, 200), Unit("large", 10, 900), Unit("small", 20, 100)], 4, MEMORY)

    assert dict(made.starts) == {"first": 0, "small": 0, "large": 30}


def test_a_unit_that_runs_longer_than_expected_lets_nothing_pass_that_could_delay_the_next() -> None:
    """Overdue units are expected to end at any moment: only what fits beside the waiting unit may start."""
    overdue = [Holder("late", 500, 10.0)]
    waiting = [Unit("large", 10, 900), Unit("beside", 1, 100), Unit("between", 1, 101)]

    assert [unit.name for unit in schedule.startable(waiting, overdue, 20.0, 8, 500)] == ["beside"]


@settings(max_examples=20)
@given(units, cores)
def test_an_arranged_order_is_no_worse_than_longest_first_and_always_the_same(of: list[Unit], cores: int) -> None:
    """Looking for a better order never gives a worse one, and two machines find the same."""
    longest_first = sorted(of, key=lambda unit: (-unit.seconds, unit.name))
    arranged = schedule.arrange(of, cores, MEMORY)

    assert schedule.replay(arranged, cores, MEMORY).makespan <= schedule.replay(longest_first, cores, MEMORY).makespan + 1e-6
    assert arranged == schedule.arrange(of, cores, MEMORY)
    assert sorted(unit.name for unit in arranged) == sorted(unit.name for unit in of)


@settings(max_examples=20)
@given(units, cores)
def test_units_near_to_a_change_come_first(of: list[Unit], cores: int) -> None:
    """What our patches reach is compiled before the rest, to fail early."""
    near = frozenset(unit.name for unit in of[::3])
    names = [unit.name for unit in schedule.arrange(of, cores, MEMORY, near)]

    assert set(names[: len(near)]) == near


@given(units, cores)
def test_a_fixed_number_of_jobs_runs_in_file_order(of: list[Unit], cores: int) -> None:
    """``MAX_JOBS=1`` is one after the other; the best number never overruns where one job does not."""
    alone = schedule.fixed_jobs(of, 1)
    assert alone.makespan == pytest.approx(sum(unit.seconds for unit in of))
    assert [name for name, _ in alone.starts] == [unit.name for unit in of]
    jobs, best = schedule.best_fixed_jobs(of, cores, MEMORY)

    assert best.makespan <= alone.makespan
    assert best.peak <= MEMORY
    assert 1 <= jobs <= cores


#: Shaped like the core of vLLM 0.33.0 without its longest unit: four units that hold most of the memory, many small ones.
CORE = [
    Unit("fp8", 135, 9317), Unit("blockwise", 82, 7733), Unit("nvfp4", 132, 7296), Unit("moe", 63, 5843), Unit("router", 210, 1084),
    Unit("marlin", 144, 627), *(Unit(f"t{number}", 6 + number % 11 * 3.5, 450 + number * 37 % 310) for number in range(101)),
]  # fmt: skip


@pytest.mark.parametrize("gigabytes", [16, 64, 119])
@pytest.mark.parametrize("cores", [2, 8, 20, 64])
def test_a_build_of_that_shape_ends_near_the_bound(cores: int, gigabytes: int) -> None:
    """At most a tenth above the lower bound, on few cores and on many, and never above the memory."""
    made = schedule.replay(schedule.arrange(CORE, cores, gigabytes * 1000), cores, gigabytes * 1000)

    assert made.makespan <= 1.10 * schedule.lower_bound(CORE, cores, gigabytes * 1000)
    assert made.peak <= gigabytes * 1000
