"""A bench with the fields in which NVIDIA's recipes state theirs: the figures are those of its requests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.support.results import FORK, HOST, POINTS, bench

ROOT = Path(__file__).parents[2]


def test_the_figures_of_a_bench_are_written_with_the_fields_of_performance_yaml(tmp_path: Path) -> None:
    result = bench(*POINTS[:2])
    (tmp_path / "r.bench.json").write_bytes(msgspec.json.encode(result))
    recipe = ROOT / "ci" / "recipes" / "gpt-oss-120b-mxfp4.yaml"
    words: list[str | Path] = [ROOT / "ci" / "bench" / "performance.py", tmp_path / "r.bench.json", recipe, "c" * 40]
    done = subprocess.run([sys.executable, *words], env={"PYTHONPATH": str(ROOT / "ci")}, text=True, capture_output=True, check=True)
    document = yaml.safe_load(done.stdout)
    assert document["recipe_sha256"] == hashlib.sha256(recipe.read_bytes()).hexdigest()
    assert document["software"] == {"backend_version": FORK.version, "model_revision": "c" * 40, "runtime_revision": f"sha256:{FORK.sha256}"}
    assert document["system"]["driver_version"] == HOST["driver"]
    for profile, cell in zip(document["profiles"], result.cells, strict=True):
        requests = [request for leg in result.legs if leg.cell == cell.name and leg.run for request in leg.run.requests]
        assert profile["workload"]["requests"] == len(requests) > 0
        assert profile["workload"]["concurrency"] == cell.concurrency
        mean = sum(1 / request.tpot for request in requests) / len(requests)
        assert profile["results"]["decode_tokens_per_second_mean"] == pytest.approx(mean, abs=0.01)
        assert profile["results"]["e2e_latency_ms_mean"] == pytest.approx(1000 * sum(request.latency for request in requests) / len(requests), abs=0.01)
