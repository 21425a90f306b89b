"""
G1 over the real trees in seconds and CPU seconds, and its reference of E2M1 against ml_dtypes, vectorised and value by value.

Exits with 1 when G1 takes more than 20 CPU seconds, its compilers among them: on an idle machine it takes less by the clock.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

import measure
from sparkwright.builder import toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.forks.context import RunContext
from sparkwright.gates.numerics import e2m1, trees, values
from sparkwright.gates.numerics import gate as numerics
from sparkwright.gates.numerics.gate import NumericsPolicy

BUDGET = 20.0


class Row(msgspec.Struct, frozen=True):
    """One way of doing a thing: medians of its runs."""

    name: str
    seconds: float
    cpu_seconds: float
    inputs: int


def cpu() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(name: str, inputs: int, runs: int, work: Callable[[], object]) -> Row:
    """Run *work* once for warmth, then *runs* times."""
    work()
    seconds, spent = [], []
    for _ in range(runs):
        began, before = time.perf_counter(), cpu()
        work()
        seconds.append(time.perf_counter() - began)
        spent.append(cpu() - before)
    return Row(name, statistics.median(seconds), statistics.median(spent), inputs)


def whole(context: RunContext) -> Callable[[], object]:
    """Return what runs G1 on the trees of the default stack."""
    policy = strict_yaml.load(context.project.root / "ci" / "gates" / "numerics.yaml", NumericsPolicy)
    made, includes = trees.made(context, policy.forks), trees.includes(toolchain.obtain(context))

    def work() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            checks = numerics.run(made, policy, includes, Path(scratch))
        if wrong := [check.name for check in checks if check.state != "pass"]:
            raise SystemExit(f"G1 does not pass, so its time means nothing: {', '.join(wrong)}")

    return work


def main() -> None:
    """Measure, print, and judge."""
    options = measure.arguments(__doc__ or "")
    console.json = options.json
    numbers = values.every("bf16").values
    numbers = numbers[~np.isnan(numbers)]
    rows = [
        timed("G1, whole", 1, options.runs, whole(measure.context(options))),
        timed("E2M1 of every bf16: ours", len(numbers), options.runs, lambda: e2m1.encode(numbers)),
        timed("the same: ml_dtypes, vectorised", len(numbers), options.runs, lambda: numbers.astype(ml_dtypes.float4_e2m1fn)),
        timed("the same: ml_dtypes, value by value", len(numbers), options.runs, lambda: [ml_dtypes.float4_e2m1fn(one) for one in numbers]),
    ]
    ours = rows[1].cpu_seconds
    ratios = ["", *(f"{row.cpu_seconds / ours:.2f}" for row in rows[1:])]
    shown = [[row.name, f"{row.seconds:.4f}", f"{row.cpu_seconds:.4f}", ratio] for row, ratio in zip(rows, ratios, strict=True)]
    console.table(f"numerics ({options.runs} runs, medians)", ["", ">s", ">CPU s", ">times ours"], shown, result=True)
    kept = rows[0].cpu_seconds <= BUDGET
    console.result(f"budget: {BUDGET:g} CPU s for G1; {rows[0].cpu_seconds:.1f}, {'kept' if kept else 'EXCEEDED'}")
    console.document({"rows": rows, "budget": BUDGET})
    console.finish()
    sys.exit(not kept)


if __name__ == "__main__":
    main()
