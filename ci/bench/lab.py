"""
How a lab of 1 to 20 Sparks waits and compiles: a queue of gates simulated over years, and recorded units on the cores of several machines.

The work of compiling is what the stack's ``costs.yaml`` recorded; how long a gate lasts and how often one is asked for are options, as
they are a lab's own. Prints the table of docs/explanation/scaling.md, the same every time.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import measure
from sparkwright.builder.ninja import ShippedFile
from sparkwright.core import strict_yaml
from sparkwright.core.console import console

SPARKS = (1, 2, 4, 8, 20)
#: Days that are simulated, with a fixed seed.
DAYS = 20_000
CORES = 20


class Waiting(msgspec.Struct, frozen=True):
    """
    One size of a lab.

    Attributes:
        share: Of the time that its Sparks are busy, 0 to 1; above 1 the queue grows without end.
        mean, late: Hours that a gate waits: on average, and 95 of 100 no longer than that; infinite where the queue grows.
    """

    sparks: int
    share: float
    mean: float
    late: float


class Compiling(msgspec.Struct, frozen=True):
    """
    One number of machines that compile.

    Attributes:
        seconds: Until the last unit is done, longest first (Graham's bound: at most 4/3 of the best).
        bound: What no order can beat: the work shared by all cores, or the longest unit.
    """

    machines: int
    seconds: float
    bound: float


def arrivals(random_: random.Random, nightly: int, daily: float, days: int) -> Iterator[float]:
    """Yield hours at which gates are asked for: *nightly* at two o'clock, and by people *daily* times, at any of eight hours of the day."""
    for day in range(days):
        hours = [2.0] * nightly
        asked = random_.expovariate(daily) if daily else 2.0
        while asked < 1:
            hours.append(9 + 8 * asked)
            asked += random_.expovariate(daily)
        yield from (24 * day + hour for hour in sorted(hours))


def waiting(sparks: int, gate: float, pair: float, nightly: int, daily: float, days: int = DAYS) -> Waiting:
    """
    Return how gates of *gate* hours wait for one of *sparks*; the share *pair* of them takes two at once, where there are two.

    First come, first served: a gate for two that waits holds back those behind it, so that it is not overtaken for ever.
    """
    random_ = random.Random(12)
    free = [0.0] * sparks
    waits, busy, end = list[float](), 0.0, 0.0
    head = 0.0
    for asked in arrivals(random_, nightly, daily, days):
        takes = 2 if sparks > 1 and random_.random() < pair else 1
        taken = [heapq.heappop(free) for _ in range(takes)]
        began = head = max(asked, head, *taken)
        for _ in taken:
            heapq.heappush(free, began + gate)
        waits.append(began - asked)
        busy += takes * gate
        end = max(end, began + gate)
    waits.sort()
    share = busy / (sparks * 24 * days)
    grows = share >= 1
    return Waiting(
        sparks, round(share, 2), float("inf") if grows else round(sum(waits) / len(waits), 1),
        float("inf") if grows else round(waits[int(0.95 * len(waits))], 1),
    )  # fmt: skip


def carried(sparks: int, gate: float, pair: float, nightly: int) -> int:
    """Return how many gates a day people may ask for, at most 200, until 5 of 100 gates wait longer than one lasts."""
    low, high = 0, 200
    while low < high:
        middle = (low + high + 1) // 2
        found = waiting(sparks, gate, pair, nightly, middle, DAYS // 10)
        low, high = (middle, high) if found.late <= gate else (low, middle - 1)
    return low


def compiling(seconds: Sequence[float], machines: int, cores: int) -> Compiling:
    """Return how long units of *seconds* take on all cores of *machines*, the longest first."""
    ends = [0.0] * (machines * cores)
    for one in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + one)
    bound = max(sum(seconds) / len(ends), *seconds)
    return Compiling(machines, round(max(ends), 1), round(bound, 1))


def tables(
    gate: float, pair: float, nightly: int, daily: float, seconds: Sequence[float]
) -> tuple[list[Waiting], list[int], list[Compiling]]:
    """Return what waits, what is carried, and what compiling takes, for each size of a lab."""
    return (
        [waiting(sparks, gate, pair, nightly, daily) for sparks in SPARKS], [carried(sparks, gate, pair, nightly) for sparks in SPARKS],
        [compiling(seconds, count, CORES) for count in SPARKS],
    )  # fmt: skip


def _hours(value: float) -> str:
    return "grows" if value == float("inf") else f"{value:.1f}"


def rows(found: tuple[list[Waiting], list[int], list[Compiling]]) -> list[list[str]]:
    """Return the table that docs/explanation/scaling.md shows, a row for each size of a lab."""
    return [
        [str(one.sparks), f"{one.share:.0%}", _hours(one.mean), _hours(one.late), str(most), f"{two.seconds:.0f}", f"{two.bound:.0f}"]
        for one, most, two in zip(*found, strict=True)
    ]


def units(root: Path, stack: str) -> list[float]:
    """Return the recorded seconds of every unit of vLLM."""
    shipped = strict_yaml.load(root / "build" / stack / "costs.yaml", ShippedFile).forks["vllm"]
    return [seconds for seconds, _ in shipped.units.values()]


COLUMNS = [">Sparks", ">busy", ">mean wait, h", ">95 of 100, h", ">gates a day", ">compile, s", ">bound, s"]
STACK = "2026.11"
#: What docs/explanation/scaling.md assumes, and says that it does.
GATE, PAIR, NIGHTLY, DAILY = 22.0, 0.1, 2, 1.0


def main() -> None:
    """Print the tables."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gate", type=float, default=GATE, help="hours that a gate lasts (an assumption: not measured on a Spark)")
        parser.add_argument("--pair", type=float, default=PAIR, help="share of gates that take two Sparks")
        parser.add_argument("--nightly", type=int, default=NIGHTLY, help="gates that begin every night")
        parser.add_argument("--daily", type=float, default=DAILY, help="gates that people ask for in a working day")

    options = measure.arguments(__doc__ or "", more)
    seconds = units(options.root, STACK)
    found = tables(options.gate, options.pair, options.nightly, options.daily, seconds)
    asked = f"gates of {options.gate:g} h, {options.nightly} a night, {options.daily:g} a day"
    title = f"{len(seconds)} units, {sum(seconds):.0f} s of CPU; {asked}"
    console.json = options.json
    console.table(title, COLUMNS, rows(found), result=True)
    console.document({"waiting": found[0], "carried": found[1], "compiling": found[2]})
    console.finish()


if __name__ == "__main__":
    main()
