"""
Serving: from the command line to vLLM's own process, with everything checked on the way, against starting that process by hand.

A stand-in for vLLM notes when it runs, so only what comes before is measured; the environment holds as many packages as a real one.
Exits with 1 when the start takes longer than promised.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure
from sparkwright.core.console import console

sys.path.insert(0, str(measure.ROOT))

from tests.support import standin
from tests.support.processes import until

#: Promised: seconds from the command to vLLM's process.
START = 1.5


def packages(python: Path, count: int, files: int) -> None:
    """Put *count* packages of *files* files in all beside the stand-in."""
    site = next(python.parents[1].glob("lib/python3.*/site-packages"))
    for number in range(count):
        name, each = f"package_{number}", files // count
        (site / name).mkdir()
        for place in range(each):
            (site / name / f"module{place}.py").write_text("value = 1\n")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(
            "".join(f"{name}/module{place}.py,,\n" for place in range(each))
        )


def started(machine: standin.Machine, command: list[str]) -> float:
    """Return the seconds from *command* to the moment at which the server's own program runs, and end it."""
    machine.record.unlink(missing_ok=True)
    began = time.time()
    one = subprocess.Popen(command, env={**machine.environment, "STANDIN": str(machine.record)}, cwd=machine.folder,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        return float(machine.told()["time"]) - began
    finally:
        os.killpg(one.pid, signal.SIGTERM)
        one.wait()
        until(lambda: not any(map(standin.alive, machine.told()["pids"])))


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packages", type=int, default=150)
    parser.add_argument("--files", type=int, default=20_000)


def main() -> int:
    options = measure.arguments(__doc__ or "", more)
    console.json = options.json
    with tempfile.TemporaryDirectory() as name:
        python = standin.environment(Path(name, "venv"))
        packages(python, options.packages, options.files)
        machine = standin.Machine(Path(name, "machine"), python)
        by_hand = [str(python), "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(machine.model), "--served-model-name", "toy",
                   "--host", "127.0.0.1", "--port", str(machine.port)]  # fmt: skip
        sides = {"sparkwright serve": machine.words("toy-cpu"), "python -m vllm": by_hand}
        found: dict[str, list[float]] = {side: [] for side in sides}
        for run in range(options.runs + 1):
            for side, command in sides.items():
                seconds = started(machine, command)
                if run:  # the first one warms the machine's file cache
                    found[side].append(seconds)
    ours = statistics.median(found["sparkwright serve"])
    rows = [[side, f"{statistics.median(all_):.2f}", f"{min(all_):.2f}–{max(all_):.2f}", f"{statistics.median(all_) / ours:.2f}"]
            for side, all_ in found.items()]  # fmt: skip
    about = f"{platform.machine()}, {os.cpu_count()} cores"
    title = f"to vLLM's process, {options.packages} packages with {options.files} files ({options.runs} runs; {about})"
    console.table(title, ["", ">seconds", ">range", ">times ours"], rows, result=True)
    console.result(
        f"start: {ours:.2f} s, promised {START:g}: {'kept' if ours <= START else 'BROKEN'}"
    )
    console.document({"machine": about, "seconds": found, "promised": START})
    console.finish()
    return int(ours > START)


if __name__ == "__main__":
    sys.exit(main())
