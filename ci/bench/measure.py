"""Times what sparkwright does against what a user would use instead, in turns in one run, and prints the ratios."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from sparkwright.cli.options import default_cache
from sparkwright.core.console import console
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

ROOT = Path(__file__).parents[2]


class Case(msgspec.Struct, frozen=True):
    """One side of a comparison: seconds of its runs, and its median over that of the first side."""

    name: str
    seconds: tuple[float, ...]
    ratio: float


def arguments(
    about: str, more: Callable[[argparse.ArgumentParser], object] | None = None
) -> argparse.Namespace:
    """Return the options that every benchmark has, and those that *more* adds."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache-dir", type=Path, default=default_cache())
    parser.add_argument("--root", type=Path, default=ROOT)
    if more:
        more(parser)
    return parser.parse_args()


def context(options: argparse.Namespace) -> RunContext:
    """Return a run on stack 2026.11 that never asks the network: a benchmark measures no connection."""
    project = Project(options.root.absolute(), "2026.11")
    return RunContext(
        project,
        Store(options.cache_dir),
        tuple(project.spec.forks),
        project.root / "dist",
        offline=True,
    )


def child(command: list[str]) -> tuple[float, float, str]:
    """Run Python with *command*; return its seconds, its peak in megabytes, and what it printed."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024, printed


def compare(
    title: str,
    cases: Mapping[str, Callable[[], object]],
    options: argparse.Namespace,
    budget: float = 0,
    *,
    above: bool = False,
) -> None:
    """
    Run every case once for warmth, then all in turns, and print a table.

    Args:
        cases: By name; the first one is ours, the others are what a user would use instead.
        budget: Seconds that ours may take, where the project has promised any; with *above*, more than the second case.
    """
    console.json = options.json
    for work in cases.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.runs):
        for name, work in cases.items():
            began = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - began)
    ours = statistics.median(next(iter(taken.values())))
    found = [
        Case(name, tuple(round(one, 4) for one in seconds), statistics.median(seconds) / ours)
        for name, seconds in taken.items()
    ]
    rows = []
    for case in found:
        low, middle, high = min(case.seconds), statistics.median(case.seconds), max(case.seconds)
        rows.append([case.name, f"{low:.3f}", f"{middle:.3f}", f"{high:.3f}", f"{case.ratio:.2f}"])
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    console.table(
        f"{title} ({options.runs} runs; {host})",
        ["", ">min s", ">median s", ">max s", ">times ours"],
        rows,
        result=True,
    )
    if above:
        budget += statistics.median(found[1].seconds)
    if budget:
        console.result(
            f"budget: {budget:.3g} s; median of ours: {ours:.3f} s, {'kept' if ours <= budget else 'EXCEEDED'}"
        )
    console.document({"title": title, "host": host, "budget": budget, "cases": found})
    console.finish()
