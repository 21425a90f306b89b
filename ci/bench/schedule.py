"""
The compile schedule on a recorded build, replayed on machines of many sizes, against the best fixed MAX_JOBS; and what a launcher costs.

Exits with 1 when a bound is broken: makespan at most 1.10 times the lower bound; on 20 cores with 64 GB at most 1.15 times the work shared
among the cores, once no unit is longer than a twentieth of it; never over the memory; 20 ms of CPU for each unit that passes the gate.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import measure
from sparkwright.builder.compile import launch
from sparkwright.builder.compile.calls import Limits
from sparkwright.builder.compile.costs import Cost, Expected, ShippedFile
from sparkwright.builder.compile.gate import Gate
from sparkwright.core import schedule, strict_yaml
from sparkwright.core.console import console
from sparkwright.core.schedule import Unit

BOUND, SHARED, MILLISECONDS = 1.10, 1.15, 20.0
CORES, GIGABYTES = (2, 8, 20, 64), (16, 64, 119)
LAUNCHES = 200


class Row(msgspec.Struct, frozen=True):
    """
    One machine: makespans over the lower bound.

    Attributes:
        measured_late: The same order, when every unit takes up to 30 % more or less than was expected.
        fixed_jobs: The best ``MAX_JOBS`` that never overruns; it needs to know the trace, too.
    """

    cores: int
    gigabytes: int
    bound: float
    ours: float
    measured_late: float
    overruns: int
    fixed_jobs: int
    fixed: float


def trace(options: argparse.Namespace) -> list[Unit]:
    """Return the recorded build: a record of this machine, else the one that the stack ships."""
    if options.trace:
        costs = [msgspec.json.decode(line, type=Cost) for line in options.trace.read_bytes().splitlines()]
        return [Unit(cost.unit, cost.seconds, cost.megabytes) for cost in {cost.unit: cost for cost in costs}.values()]
    shipped = strict_yaml.load(options.root / "build" / "2026.11" / "traces.yaml", ShippedFile).forks["vllm"]
    return [Unit(unit, *cost) for unit, cost in shipped.units.items()]


def row(units: list[Unit], cores: int, gigabytes: int) -> Row:
    """Replay *units* on one machine."""
    megabytes = gigabytes * 1000
    bound, order = schedule.lower_bound(units, cores, megabytes), schedule.arrange(units, cores, megabytes)
    ours = schedule.replay(order, cores, megabytes)
    jobs, fixed = schedule.best_fixed_jobs(units, cores, megabytes)
    # Deterministic: the n-th unit takes 70 to 130 % of its time. The order was made without knowing that.
    late = [Unit(unit.name, unit.seconds * (0.7 + 0.6 * (number * 37 % 101) / 100), unit.megabytes) for number, unit in enumerate(order)]
    measured = schedule.replay(late, cores, megabytes).makespan / schedule.lower_bound(late, cores, megabytes)
    return Row(
        cores, gigabytes, round(bound, 1), round(ours.makespan / bound, 3), round(measured, 3), int(ours.peak > megabytes), jobs,
        round(fixed.makespan / bound, 3),
    )  # fmt: skip


def spent() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def calls(prefix: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Run `LAUNCHES` compilers that do nothing behind *prefix*, one after the other; return CPU and wall seconds of each."""
    cpu, wall = spent(), time.perf_counter()
    for number in range(LAUNCHES):
        subprocess.run([*prefix, "/bin/true", "-c", f"{number}.cu"], env=env, check=True)
    return (spent() - cpu) / LAUNCHES, (time.perf_counter() - wall) / LAUNCHES


def launcher_cost() -> dict[str, float]:
    """Return the milliseconds that launcher and gate add to a unit."""
    with tempfile.TemporaryDirectory() as folder:
        place, limits = Path(folder, "launch"), Limits(2, 1000, reserve=0)
        with Gate(place, limits, lambda _: Expected(1, 10, "kind"), coming=1, available=lambda: 10_000) as gate:
            env = {**os.environ, **gate.environment, "SPARKWRIGHT_LAUNCH": str(place)}
            prefix = [sys.executable, "-IS", launch.__file__]
            calls(prefix, env)
            bare, behind = calls([], env), calls(prefix, env)
    return {"cpu": round(1000 * (behind[0] - bare[0]), 2), "wall": round(1000 * (behind[1] - bare[1]), 2)}


def main() -> int:
    options = measure.arguments(__doc__ or "", lambda parser: parser.add_argument("--trace", type=Path, help="a record of records/traces"))
    console.json = options.json
    units = trace(options)
    rows = [row(units, cores, gigabytes) for cores in CORES for gigabytes in GIGABYTES]
    work, longest = sum(unit.seconds for unit in units), max(units, key=lambda unit: unit.seconds)
    shared = schedule.replay(schedule.arrange(units, 20, 64_000), 20, 64_000).makespan / (work / 20)
    cost = launcher_cost()
    broken = [f"{one.cores} cores, {one.gigabytes} GB: {one.ours}" for one in rows if one.ours > BOUND or one.overruns]
    if longest.seconds <= work / 20 and shared > SHARED:
        broken.append(f"20 cores, 64 GB: {shared:.3f} × work ÷ 20")
    if cost["cpu"] > MILLISECONDS:
        broken.append(f"{cost['cpu']} ms a unit")
    columns = [">cores", ">GB", ">bound s", ">ours ÷ bound", ">times ±30 %", ">overruns", ">best MAX_JOBS", ">that ÷ bound"]
    cells = [[str(value) for value in msgspec.structs.astuple(one)] for one in rows]
    console.table(f"{len(units)} units, {work:.0f} s of work; longest {longest.name}, {longest.seconds:.0f} s", columns, cells, result=True)
    console.result(f"20 cores, 64 GB: {shared:.2f} × work ÷ 20; {'a' if longest.seconds > work / 20 else 'no'} unit is above a twentieth")
    console.result(f"launcher and gate: {cost['cpu']} ms of CPU a unit, {cost['wall']} ms of time ({LAUNCHES} units, one after the other)")
    console.result(f"bounds: {'BROKEN: ' + '; '.join(broken) if broken else 'kept'}")
    about = {"units": len(units), "work": work, "longest": longest, "shared": shared}
    console.document({**about, "rows": rows, "launcher_ms": cost, "broken": broken})
    console.finish()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
