"""
Which unit of a build may start now, under a number of cores and an amount of memory; and what that makes of a whole build.

Everything here is a pure function of its arguments. The gate in front of real compilers and the replay of a recorded build ask the
same `startable`, so a figure of the replay is a figure of the policy that runs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

#: What `arrange` may spend on looking for a better order: replays times units, about two seconds of one core for the core of vLLM.
SEARCH = 40_000
#: A makespan this near to the lower bound is not worth looking further.
ENOUGH = 1.01


class Unit(msgspec.Struct, frozen=True):
    """A piece of work, with the seconds that it should take on one core and the peak of its memory."""

    name: str
    seconds: float
    megabytes: float


class Holder(msgspec.Struct, frozen=True):
    """A unit that runs, with the memory granted to it and the time at which it should end."""

    name: str
    megabytes: float
    ends: float


class Replay(msgspec.Struct, frozen=True):
    """
    What a schedule makes of the units.

    Attributes:
        makespan: Seconds from the first start to the last end.
        peak: The most megabytes that units held together.
        starts: Name and second of each start, in that order.
    """

    makespan: float
    peak: float
    starts: tuple[tuple[str, float], ...]


def lower_bound(units: Sequence[Unit], cores: int, megabytes: float) -> float:
    """
    Return the seconds below which no schedule can be: all work shared among the cores, all memory-time within the memory, and the
    longest unit. A unit larger than the memory counts as large as that, since it runs alone.
    """
    work = sum(unit.seconds for unit in units) / cores
    held = sum(unit.seconds * min(unit.megabytes, megabytes) for unit in units) / megabytes
    return max(work, held, max((unit.seconds for unit in units), default=0.0))


def startable(waiting: Sequence[Unit], running: Sequence[Holder], now: float, cores: int, free: float) -> list[Unit]:
    """
    Return which of the *waiting* units may start *now*, in their order.

    The first one that does not fit gets a reservation: the earliest time at which enough memory is free, were every running unit to
    end when it should. A later unit may pass it if it ends before that time, or is small enough to run beside it (the rule of
    the EASY scheduler; Mu'alem and Feitelson 2001). So a large unit never starves, and memory that it cannot use yet is used.

    Args:
        waiting: Most urgent first.
        free: Megabytes that are granted to nobody; below 0 when units hold more than was granted.
    """
    started: list[Unit] = []
    holders = list(running)
    reserved = float("inf")
    spare = 0.0
    for unit in waiting:
        if len(holders) >= cores:
            break
        fits = unit.megabytes <= free or not holders
        beside = unit.megabytes <= spare
        if fits and (reserved == float("inf") or now + unit.seconds <= reserved or beside):
            started.append(unit)
            holders.append(Holder(unit.name, unit.megabytes, now + unit.seconds))
            free -= unit.megabytes
            if reserved != float("inf") and now + unit.seconds > reserved:
                spare -= unit.megabytes
        elif not fits and reserved == float("inf"):
            reserved, spare = _reservation(unit, holders, now, free)
    return started


def _reservation(unit: Unit, holders: Sequence[Holder], now: float, free: float) -> tuple[float, float]:
    """Return when *unit* can start, and the megabytes that are left beside it then."""
    when = now
    for holder in sorted(holders, key=lambda one: one.ends):
        free += holder.megabytes
        when = max(now, holder.ends)  # one that should have ended already is expected to end at any moment
        if free >= unit.megabytes:
            return when, free - unit.megabytes
    return when, 0.0  # larger than everything: it runs alone, once all have ended


def replay(units: Sequence[Unit], cores: int, megabytes: float, window: int = 0) -> Replay:
    """
    Return what `startable` makes of *units*, most urgent first.

    Args:
        window: How many units ask at once, the most urgent ones; 0 for all.
    """

    def choose(waiting: Sequence[Unit], running: Sequence[Holder], now: float) -> list[Unit]:
        free = megabytes - sum(holder.megabytes for holder in running)
        return startable(waiting[: window or None], running, now, cores, free)

    return _simulate(units, choose)


def fixed_jobs(units: Sequence[Unit], jobs: int) -> Replay:
    """Return what ``MAX_JOBS=jobs`` makes of *units*: they start in their order as soon as one of the jobs is free, whatever they hold."""
    return _simulate(units, lambda waiting, running, _: list(waiting[: jobs - len(running)]))


def best_fixed_jobs(units: Sequence[Unit], cores: int, megabytes: float) -> tuple[int, Replay]:
    """Return the fastest number of jobs that never holds more than the memory, and its replay; one job where each overruns."""
    made = [(jobs, fixed_jobs(units, jobs)) for jobs in range(1, cores + 1)]
    return min((one for one in made if one[1].peak <= megabytes), key=lambda one: one[1].makespan, default=made[0])


def _simulate(units: Sequence[Unit], choose: Callable[[Sequence[Unit], Sequence[Holder], float], list[Unit]]) -> Replay:
    waiting = list(units)
    running: list[tuple[float, int, Holder]] = []
    starts: list[tuple[str, float]] = []
    now = peak = 0.0
    while waiting or running:
        chosen = choose(waiting, [holder for *_, holder in running], now)
        for unit in chosen:
            waiting.remove(unit)
            heapq.heappush(running, (now + unit.seconds, len(starts), Holder(unit.name, unit.megabytes, now + unit.seconds)))
            starts.append((unit.name, now))
        peak = max(peak, sum(holder.megabytes for *_, holder in running))
        now = heapq.heappop(running)[0]
        while running and running[0][0] <= now:
            heapq.heappop(running)
    return Replay(now, peak, tuple(starts))


def arrange(units: Sequence[Unit], cores: int, megabytes: float, near: frozenset[str] = frozenset()) -> list[Unit]:
    """
    Return *units* in the order of urgency whose replay ends first: the units of *near*, then the rest.

    Longest first is the start; it is near the bound while cores are scarce, and far from it where memory is. The others weigh a unit by
    the share of cores or of memory that it takes, and the best of them is bettered by moving single units. The result depends on the
    arguments alone.
    """
    first = _best([unit for unit in units if unit.name in near], cores, megabytes)
    return first + _best([unit for unit in units if unit.name not in near], cores, megabytes)


def _best(units: list[Unit], cores: int, megabytes: float) -> list[Unit]:
    if not units:
        return []
    best = min(_candidates(units, cores, megabytes), key=lambda order: replay(order, cores, megabytes).makespan)
    least, bound = replay(best, cores, megabytes).makespan, lower_bound(units, cores, megabytes)
    dice = random.Random(len(units))  # noqa: S311  a search, not a secret
    for _ in range(min(20 * len(units), SEARCH // len(units))):
        if least <= bound * ENOUGH:
            break
        tried = list(best)
        unit = tried.pop(dice.randrange(len(tried)))
        tried.insert(dice.randrange(len(tried) + 1), unit)
        if (makespan := replay(tried, cores, megabytes).makespan) <= least:
            best, least = tried, makespan
    return best


def _candidates(units: Sequence[Unit], cores: int, megabytes: float) -> Iterator[list[Unit]]:
    keys: tuple[Callable[[Unit], float], ...] = (
        lambda unit: unit.seconds,
        lambda unit: unit.seconds * max(1 / cores, unit.megabytes / megabytes),
        lambda unit: unit.megabytes,
        lambda unit: unit.seconds * (1 / cores + unit.megabytes / megabytes),
    )
    for key in keys:
        yield sorted(units, key=lambda unit: (-key(unit), unit.name))
