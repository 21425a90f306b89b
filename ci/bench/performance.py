"""
Write a gate's figures with the fields of `performance.yaml`, in which NVIDIA/local-ai-inference-recipes states its figures.

    performance.py RESULT.throughput.json RECIPE.yaml [MODEL_REVISION] > performance.yaml

The fields are theirs and the figures ours, so that they can be compared: means over the requests of all launches that count, the
prompt's tokens by the time to the first token, and tokens of an answer in the seconds behind its first. What was not recorded is left
out. The model's revision is that of its folder below `snapshots`, or of `sparkwright-slim.json`.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from sparkwright.bench import results
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.results import CellResult, Result
from sparkwright.core.files import sha256_file


def profile(result: Result, cell: CellResult) -> dict[str, Any]:
    """Return the entry of *cell*; without results if none of its measurements counts."""
    load = WorkloadCell.parse(cell.name)
    runs = [leg.run for leg in result.legs if leg.cell == cell.name and leg.side == "candidate" and leg.counts and leg.run]
    requests = [request for run in runs for request in run.requests]
    workload = {
        "input_tokens": load.prompt, "output_tokens": load.answer, "concurrency": load.concurrency, "requests": len(requests),
        "launches": len(runs),
    }  # fmt: skip
    entry: dict[str, Any] = {"id": cell.name.replace(" ", "-").replace("/", "-"), "workload": workload}
    if requests:
        entry["results"] = {
            "prefill_tokens_per_second_mean": round(fmean(request.prompt_tokens / request.ttft for request in requests), 2),
            "decode_tokens_per_second_mean": round(fmean(1 / request.tpot for request in requests if request.tpot), 2),
            "e2e_latency_ms_mean": round(1000 * fmean(request.latency for request in requests), 2),
        }
    return entry


def document(result: Result, recipe: Path, revision: str = "") -> dict[str, Any]:
    """Return the figures of *result*, which was served by the file *recipe*."""
    name, _, version = result.generator.partition(" ")
    software = {"backend_version": result.candidate.version, "model_revision": revision, "runtime_revision": f"sha256:{result.candidate.sha256}"}
    return {
        "schema_version": 1,
        "status": "measured",
        "recipe_sha256": sha256_file(recipe),
        "launch_id": result.recipe,
        "measured_at": datetime.fromtimestamp(result.began, UTC).date().isoformat(),
        "harness": {"name": name, "version": version},
        "system": {"accelerator": result.host.get("gpu", ""), "operating_system": "linux", "driver_version": result.host.get("driver", "")},
        "software": {key: value for key, value in software.items() if value not in ("", "sha256:")},
        "profiles": [profile(result, cell) for cell in result.cells],
    }


if __name__ == "__main__":
    file, recipe, *revision = sys.argv[1:]
    sys.stdout.write(yaml.safe_dump(document(results.read(Path(file)), Path(recipe), *revision), sort_keys=False))
