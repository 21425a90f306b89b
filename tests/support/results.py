"""
Results of experiments.

Only the measurements are made up, from a seed; series, evidence and verdict follow from them by the
gate's own code.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sparkwright.bench.load.vllm_bench import LoadResult, Request
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import Metric, Side
from sparkwright.bench.results import CONTROL_BLOCK, Measurement, Result, Subject
from sparkwright.bench.statistics import DecisionRule, attempt_alpha, decide
from sparkwright.core import strict_yaml
from sparkwright.gates import throughput_run
from sparkwright.gates.throughput_run import ThroughputPolicy

ROOT = Path(__file__).parents[2]
#: 2026-11-22 00:00 UTC.
BEGAN = 1_795_305_600.0
FORK = Subject(
    "vLLM 0.33.0+spark.202611", "vllm-0.33.0+spark.202611-cp38-abi3-linux_aarch64.whl", "ab" * 32,
    "0.33.0+spark.202611", "2026.11",
)  # fmt: skip
STOCK = Subject("stock vLLM 0.33.0", "vllm-0.33.0-cp38-abi3-linux_aarch64.whl", "cd" * 32, "0.33.0")
HOST = {
    "gpu": "GB10 (SM 12.1), made up",
    "driver": "580.00",
    "kernel": "6.14.0",
    "memory": "128 GB",
}

def cells(*names: str, primary: tuple[Metric, ...] = ("tpot",)) -> list[WorkloadCell]:
    """Return the cells *names*, in which *primary* decides."""
    return [replace(WorkloadCell.parse(name), primary=primary) for name in names]


POINTS = ("128/128 c1", "1024/1024 c1", "8192/1024 c1", "1024/1024 c8", "1024/1024 c32")
def _legs(
    workloads: Sequence[WorkloadCell], blocks: Sequence[int], sides: tuple[Side, ...], chance: random.Random,
    speed: float, slower: float, noise: float,
) -> Iterator[Measurement]:  # fmt: skip
    at = BEGAN
    for block, cell in itertools.product(blocks, workloads):
        for position, side in enumerate(sides or throughput_run.sides(1, block)):
            at += 31.5
            factor = (1 + 0.07 * float(cell.concurrency - 1) ** 0.85) * math.exp(
                chance.gauss(0, noise)
            )
            factor *= 1 + slower * (side == "candidate")
            tpot, ttft = speed * factor, (0.2 + cell.prompt / 4200) * factor
            latency = ttft + tpot * (cell.answer - 1)
            # A closed loop of three rounds.
            requests = [
                Request(0.9 * latency * turn + 0.01 * user, ttft, latency, cell.prompt, cell.answer)
                for turn in range(3) for user in range(cell.concurrency)
            ]  # fmt: skip
            run = LoadResult(
                "vllm-rs 0.33.0",
                3 * latency,
                tuple(requests),
                tpot,
                1.1 * tpot,
            )
            shot = Snapshot(0.001, temperature=60 + 5 * chance.random())
            yield Measurement(
                cell.name, block, 4 * block + position, side, position, 0, at, run, shot, shot, 1.6
            )


def gate(
    *names: str, workloads: Sequence[WorkloadCell] = (), slower: float = 0.0, noise: float = 0.001, blocks: int = 4, seed: int = 1,
    **changes: Any,
) -> Result:  # fmt: skip
    """Return a gate's result of *workloads* or of those *names*, with *changes* of its fields."""
    chance, workloads = random.Random(seed), workloads or cells(*(names or POINTS))
    legs = tuple(
        _legs(workloads, (CONTROL_BLOCK, *range(blocks)), (), chance, 0.024, slower, noise)
    )
    policy = strict_yaml.load(ROOT / "ci" / "gates" / "throughput.yaml", ThroughputPolicy)
    series = throughput_run.metric_series(workloads, legs, range(blocks), policy)
    rule = DecisionRule(attempt_alpha(policy.alpha, 1), policy.min_blocks, policy.max_blocks)
    decision = decide(rule, series)
    results = throughput_run.cell_results(
        workloads, legs, range(blocks), series, decision
    )
    result = Result(
        decision.state or "inconclusive", decision.message, FORK,
        results, legs,
        baseline=STOCK, recipe="qwen3-next-80b-nvfp4", model="Qwen3-Next-80B",
        host=HOST, alpha=rule.alpha, margin=max(entry.bounds.margin for entry in series),
        generator="vllm-rs 0.33.0", began=BEGAN,
    )  # fmt: skip
    return replace(result, **changes)
