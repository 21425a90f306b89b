"""Times the sentinel on the machine at hand: what it reads, how far its readings lie apart, and what it costs beside a leg."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import msgspec

from sparkwright.bench.machine.policy import MachinePolicy
from sparkwright.bench.machine.state import Machine
from sparkwright.cli.options import default_cache
from sparkwright.core import strict_yaml
from sparkwright.core.console import console
from sparkwright.core.store import Store

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache-dir", type=Path, default=default_cache())
    parser.add_argument("--python", type=Path, help="of an environment with torch for the GPU at hand")
    options = parser.parse_args()
    console.json = options.json
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "machine.yaml", MachinePolicy)
    began = time.monotonic()
    with Machine(policy, Store(options.cache_dir), python=options.python) as machine:
        started = time.monotonic() - began
        machine.preheat(5)
        reasons, shots, took = machine.settle(), [], []
        for _ in range(options.runs):
            began = time.monotonic()
            shots.append(machine.snapshot())
            took.append(time.monotonic() - began)
        bandwidth, facts = machine.bandwidth(), machine.fingerprint()
        disturbed = [machine.disturbed(one, two) for one, two in itertools.pairwise(shots)]
        normal = machine.normal
    rows = []
    for name, unit, values in (
        ("GEMV", "ms", [1000 * one.gemv for one in shots if one.gemv]),
        ("copy", "ms", [1000 * one.copy for one in shots if one.copy]),
        ("snapshot", "s", took),
    ):
        if values:
            low, middle, high = min(values), statistics.median(values), max(values)
            rows.append([name, unit, f"{low:.4g}", f"{middle:.4g}", f"{high:.4g}", f"{100 * (high / low - 1):.2f} %"])
    console.result(f"{options.runs} snapshots, {normal.device if normal else 'no sentinel'}, started in {started:.1f} s")
    console.table("", ["", "", ">min", ">median", ">max", ">range"], rows, result=True)
    console.result(f"bandwidth: {f'{bandwidth.gigabytes:g} GB/s, {bandwidth.device}' if bandwidth else 'not measured'}")
    console.result(f"at the start: {'; '.join(one.says for one in reasons) or 'nothing against measuring'}")
    console.result(f"pairs of snapshots that would discard a leg: {sum(map(bool, disturbed))} of {len(disturbed)}")
    document = {"host": facts, "normal": normal, "reasons": reasons, "bandwidth": bandwidth, "shots": shots, "disturbed": disturbed}
    console.document(msgspec.to_builtins(document))
    console.finish()


if __name__ == "__main__":
    main()
