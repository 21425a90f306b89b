"""
The compile schedule on a recorded build, replayed on machines of many sizes, and the launcher's
cost.

Exits with 1 if a bound is broken: makespan at most 1.10 times the lower bound where no unit and no
pool of large units decides it, and on a Spark at least 10 % less than a plain ``-j``; never over the memory; 25 ms of CPU for each unit that the launcher
runs.
"""

from __future__ import annotations

import argparse
import heapq
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import measure
from sparkwright.builder import launcher, ninja
from sparkwright.builder.ninja import HEAVY, Cost, ShippedFile
from sparkwright.core import strict_yaml
from sparkwright.core.console import console

BOUND, MILLISECONDS = 1.10, 25.0
CORES, GIGABYTES = (2, 8, 20), (16, 64, 119)
#: Cores and gigabytes of the machine that the order is kept for.
SPARK = (20, 119)
LAUNCHES = 200


class Row(msgspec.Struct, frozen=True):
    """
    One machine: makespans over the lower bound.

    Attributes:
        jobs, heavy: The chosen order.
        varied: The same order, if every unit takes up to 30 % more or less than was expected.
        plain_jobs: ``-j`` by cores and memory alone: 1.2 GB a unit, in the order of the sources' names. *plain*: what
            that takes, with the units that the kernel kills made again, alone, at the end. *killed*: their number.
    """

    cores: int
    gigabytes: int
    bound: float
    jobs: int
    heavy: int
    makespan: float
    varied: float
    overruns: int
    plain_jobs: int
    plain: float
    killed: int


class Replay(msgspec.Struct, frozen=True):
    """Seconds from the first start to the last end, and the most megabytes held at once."""

    makespan: float
    peak: float


def recorded(options: argparse.Namespace) -> list[Cost]:
    """Return the recorded build that the stack ships."""
    path = options.root / "build" / "2026.11" / "costs.yaml"
    return [*strict_yaml.load(path, ShippedFile).forks["vllm"].values()]


def lower_bound(units: Sequence[Cost], cores: int, megabytes: float) -> float:
    """
    Return the seconds below which no schedule can be.

    All work is shared among the cores, all memory-time fits the memory, and the longest unit has to
    run. A unit larger than the memory counts as large as that, since it runs alone.
    """
    work = sum(unit.seconds for unit in units) / cores
    held = sum(unit.seconds * min(unit.megabytes, megabytes) for unit in units) / megabytes
    return max(work, held, *(unit.seconds for unit in units))


def replay(units: Sequence[Cost], order: tuple[int, int]) -> Replay:
    """Return what ninja makes of *units* that stand in this order."""
    waiting, running = list(units), list[tuple[float, int, Cost]]()
    now = peak = 0.0
    started = 0
    while waiting or running:
        heavy = sum(unit.megabytes > HEAVY for *_, unit in running)
        for unit in list(waiting):
            large = unit.megabytes > HEAVY
            if len(running) < order[0] and not (large and heavy >= order[1]):
                waiting.remove(unit)
                heapq.heappush(running, (now + unit.seconds, started, unit))
                started, heavy = started + 1, heavy + large
        peak = max(peak, sum(unit.megabytes for *_, unit in running))
        now = heapq.heappop(running)[0]
    return Replay(now, peak)


def replay_plain(units: Sequence[Cost], jobs: int, megabytes: float) -> tuple[float, int]:
    """
    Return the seconds of *units* with ``-j`` *jobs*, and how many of them are killed: whenever those that run need more
    than there is, the kernel kills the largest.
    """
    waiting, running, killed = list(units), list[tuple[float, int, Cost]](), list[Cost]()
    now, started = 0.0, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            unit = waiting.pop(0)
            started += 1
            running.append((now + unit.seconds, started, unit))
            while len(running) > 1 and sum(each.megabytes for *_, each in running) > megabytes:
                largest = max(running, key=lambda entry: entry[2].megabytes)
                running.remove(largest)
                killed.append(largest[2])
        first = min(running)
        running.remove(first)
        now = first[0]
    return now + sum(unit.seconds for unit in killed), len(killed)


def row(units: Sequence[Cost], cores: int, gigabytes: int) -> Row:
    """Replay *units* on one machine."""
    megabytes = gigabytes * 1000
    bound, order = lower_bound(units, cores, megabytes), ninja.order(units, cores, megabytes)
    longest = sorted(units, key=lambda unit: -unit.seconds)
    chosen = replay(longest, order)
    jobs = max(1, min(cores, megabytes // 1200))
    plain, killed = replay_plain(units, jobs, megabytes)
    # Deterministic: the n-th unit takes 70 to 130 % of its time, which the order did not know.
    varied = [
        unit._replace(seconds=unit.seconds * (0.7 + 0.6 * (number * 37 % 101) / 100))
        for number, unit in enumerate(longest)
    ]
    late = replay(varied, order)
    return Row(
        cores,
        gigabytes,
        round(bound, 1),
        *order,
        round(chosen.makespan / bound, 3),
        round(late.makespan / lower_bound(varied, cores, megabytes), 3),
        int(chosen.peak > megabytes) + int(late.peak > megabytes),
        jobs,
        round(plain / bound, 3),
        killed,
    )


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def calls(prefix: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Run `LAUNCHES` idle compilers behind *prefix*; return CPU and wall seconds of each."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    for number in range(LAUNCHES):
        subprocess.run([*prefix, "/bin/true", "-c", f"{number}.cu"], env=env, check=True)
    return (cpu_seconds() - cpu) / LAUNCHES, (time.perf_counter() - wall) / LAUNCHES


def launcher_cost() -> dict[str, float]:
    """Return the milliseconds that the launcher adds to a unit."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SPARKWRIGHT_CALLS": str(Path(folder, "calls")), "TMPDIR": folder}
        prefix = [sys.executable, "-IS", launcher.__file__]
        calls(prefix, env)
        bare, behind = calls([], env), calls(prefix, env)
    return {
        "cpu": round(1000 * (behind[0] - bare[0]), 2),
        "wall": round(1000 * (behind[1] - bare[1]), 2),
    }


def main() -> int:
    """Print the table, and return 1 if a bound is broken."""
    options = measure.arguments(__doc__ or "")
    console.json = options.json
    units = recorded(options)
    rows = [row(units, cores, gigabytes) for cores in CORES for gigabytes in GIGABYTES]
    cost = launcher_cost()
    broken = [
        f"{each.cores} cores, {each.gigabytes} GB: over the memory"
        for each in rows
        if each.overruns
    ]
    # One large unit at a time: with 16 GB their seconds one after the other are the bound of ours.
    broken += [
        f"{each.cores} cores, {each.gigabytes} GB: {each.makespan}"
        for each in rows
        if each.makespan > BOUND and (each.gigabytes > min(GIGABYTES) or each.cores <= min(CORES))
    ]
    broken += [
        f"{each.cores} cores, {each.gigabytes} GB: plain -j is as good"
        for each in rows
        if each.cores == SPARK[0]
        and each.gigabytes == SPARK[1]
        and each.plain < 1.1 * each.makespan
    ]
    if cost["cpu"] > MILLISECONDS:
        broken.append(f"{cost['cpu']} ms a unit")
    columns = [
        ">cores", ">GB", ">bound s", ">jobs", ">heavy", ">makespan ÷ bound", ">times ±30 %",
        ">overruns", ">plain -j", ">that ÷ bound", ">killed",
    ]  # fmt: skip
    cells = [[str(value) for value in msgspec.structs.astuple(each)] for each in rows]
    work, longest = sum(unit.seconds for unit in units), max(unit.seconds for unit in units)
    title = f"{len(units)} units, {work:.0f} s of work; the longest {longest:.0f} s"
    console.table(title, columns, cells, result=True)
    console.result(
        f"launcher: {cost['cpu']} ms of CPU a unit, {cost['wall']} ms of time "
        f"({LAUNCHES} units, one after the other)"
    )
    console.result(f"bounds: {'BROKEN: ' + '; '.join(broken) if broken else 'kept'}")
    about = {"units": len(units), "work": work, "longest": longest}
    console.document({**about, "rows": rows, "launcher_ms": cost, "broken": broken})
    console.finish()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
