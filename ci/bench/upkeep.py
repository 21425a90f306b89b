"""What the upkeep verbs cost without a network, as whole processes: seconds, and the most memory. Needs a drift before."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import measure
from sparkwright.core.console import console

#: What the project has promised: megabytes of any upkeep verb.
MEGABYTES = 300

options = measure.arguments(__doc__ or "")
shared = ["--offline", "--root", str(options.root), "--cache-dir", str(options.cache_dir)]
one = ["--stack", "2026.05", "--fork", "vllm", "--source", "sdist"]
VERBS = {
    "apply, nothing changed": ["apply", *one],
    "drift to a release": ["patch", "drift", *one, "--to", "0.21.0"],
    "rebase": ["patch", "rebase", *one],
    "rebase --abort": ["patch", "rebase", "--abort", *one],
}


def cost(words: list[str]) -> tuple[float, float]:
    """Run the program with *words* and return its seconds and the megabytes that its largest process held."""
    began = time.perf_counter()
    null = os.open(os.devnull, os.O_WRONLY)
    child = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "sparkwright", *words, *shared], os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)],
    )  # fmt: skip
    _, status, usage = os.wait4(child, 0)
    os.close(null)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(
            f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}; fetch, and run a drift with a network first"
        )
    return time.perf_counter() - began, usage.ru_maxrss / 1000


console.json = options.json
rows, found = [], []
for title, words in VERBS.items():
    runs = [cost(words) for _ in range(1 if "rebase" in words else options.runs)]
    seconds, memory = (
        sorted(second for second, _ in runs)[len(runs) // 2],
        max(size for _, size in runs),
    )
    found.append(
        {"verb": title, "runs": len(runs), "seconds": round(seconds, 3), "megabytes": round(memory)}
    )
    rows.append(
        [
            title,
            str(len(runs)),
            f"{seconds:.2f}",
            f"{memory:.0f}",
            "kept" if memory <= MEGABYTES else "EXCEEDED",
        ]
    )
console.table(
    f"upkeep, without a network ({Path(sys.executable).name})",
    ["", ">runs", ">median s", ">peak MB", f"{MEGABYTES} MB"],
    rows,
    result=True,
)
console.document({"verbs": found})
console.finish()
