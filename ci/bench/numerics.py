"""
G1 over the real trees, in seconds and CPU seconds.

Exits with 1 when G1 takes more than 20 CPU seconds, its compilers among them: on an idle machine it
takes less by the clock.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import measure
from sparkwright.builder import toolchain
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.gates import numerics
from sparkwright.gates.numerics import NumericsPolicy

BUDGET = 20.0


def cpu() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    """Measure, print, and judge."""
    options = measure.arguments(__doc__ or "")
    console.json = options.json
    context = measure.context(options)
    policy = strict_yaml.load(
        context.project.root / "ci" / "gates" / "numerics.yaml", NumericsPolicy
    )
    trees = numerics.source_trees(context, policy)
    includes = numerics.include_folders(toolchain.obtain(context))
    seconds, spent = [], []
    for _ in range(options.runs + 1):
        began, before = time.perf_counter(), cpu()
        with tempfile.TemporaryDirectory() as scratch:
            checks = numerics.run(trees, policy, includes, Path(scratch))
        if wrong := [check.name for check in checks if check.state != "pass"]:
            raise SystemExit(f"G1 does not pass, so its time means nothing: {', '.join(wrong)}")
        seconds.append(time.perf_counter() - began)
        spent.append(cpu() - before)
    # The first run warms the caches.
    wall, used = statistics.median(seconds[1:]), statistics.median(spent[1:])
    console.table("G1", [">s", ">CPU s"], [[f"{wall:.2f}", f"{used:.2f}"]], result=True)
    verdict = "kept" if used <= BUDGET else "EXCEEDED"
    console.result(f"budget: {BUDGET:g} CPU s for G1; {used:.1f}, {verdict}")
    console.document({"seconds": wall, "cpu_seconds": used, "budget": BUDGET})
    console.finish()
    sys.exit(used > BUDGET)


if __name__ == "__main__":
    main()
