"""The report of experiments: its tables, a terminal, and the files that it reads."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support import verdicts, wheels

from sparkwright.bench import quick_look, report
from sparkwright.bench.quick_look import QuickLook
from sparkwright.bench.recipes.workloads import WorkloadCell
from sparkwright.bench.records import FIGURES, METRICS
from sparkwright.bench.results import load_figure
from sparkwright.core.pages import clean

ROOT = Path(__file__).parents[2]
CELLS = tuple(replace(WorkloadCell.parse(name), primary=("tpot",)) for name in ("128/128 c1", "1024/1024 c1"))
UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"


def test_every_series_has_a_ratio_and_the_figures_of_both_sides(tmp_path: Path) -> None:
    """A ratio with its interval for each cell and metric; the median of each side."""
    result = verdicts.result(wheels.plain(tmp_path, "tiny", "1.0"), cells=CELLS)
    ratios, figures = report.ratios(result), report.figures(result)
    series = [one for cell in result.cells for one in cell.series]
    assert [row[2] for row in ratios.rows] == [report.number((one.candidate or 0) / (one.baseline or 1)) for one in series]
    assert [row[3] for row in ratios.rows] == [report.interval(one.low, one.high) for one in series]
    assert [row[2] for row in figures.rows] == ["candidate", "baseline"] * len(series)
    for name, factor in (("time per token", 1000), ("throughput", 1)):
        ours = next(one.candidate for one in series if METRICS[one.metric][0] == name)
        row = next(row for row in figures.rows if row[1].startswith(name))
        assert row[3] == report.number((ours or 0) * factor)


def test_a_terminal_of_80_columns_is_enough_and_gets_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = tuple(load_figure(name, [0.0012, 1.2, 1234.5]) for name in FIGURES)
    quick_look.show(QuickLook("1024/1024 c8", 128, 8, 3, "vllm-rs 0.33.0", figures, 1.5), "a \x1b[31m\u202emodel")
    out = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())
    assert not re.search("[\x1b\u202e]", out)


@given(st.text(max_size=2000))
def test_clean_text_is_one_short_line(value: str) -> None:
    cleaned = clean(value)

    assert (len(cleaned) <= 1000, len(cleaned.splitlines()) <= 1) == (True, True)
    assert not re.search(UNSAFE, cleaned)


def test_the_figures_of_a_gate_are_written_with_the_fields_of_performance_yaml(tmp_path: Path) -> None:
    result = verdicts.result(wheels.plain(tmp_path, "tiny", "1.0"), cells=CELLS)
    (tmp_path / "r.throughput.json").write_bytes(msgspec.json.encode(result))
    recipe = ROOT / "ci" / "recipes" / "gpt-oss-120b-mxfp4.yaml"
    words: list[str | Path] = [ROOT / "ci" / "bench" / "performance.py", tmp_path / "r.throughput.json", recipe, "c" * 40]
    done = subprocess.run([sys.executable, *words], env={"PYTHONPATH": str(ROOT / "ci")}, text=True, capture_output=True, check=True)
    document = yaml.safe_load(done.stdout)
    assert document["recipe_sha256"] == hashlib.sha256(recipe.read_bytes()).hexdigest()
    assert document["software"] == {"backend_version": "1.0", "model_revision": "c" * 40, "runtime_revision": f"sha256:{result.candidate.sha256}"}
    assert document["system"]["driver_version"] == result.host["driver"]
    for profile, cell in zip(document["profiles"], result.cells, strict=True):
        runs = [leg.run.requests for leg in result.legs if (leg.cell, leg.side) == (cell.name, "candidate") and leg.run]
        requests = [request for run in runs for request in run]
        assert (profile["workload"]["requests"], profile["workload"]["concurrency"]) == (len(requests), cell.concurrency)
        assert profile["results"]["decode_tokens_per_second_mean"] == pytest.approx(fmean(1 / request.tpot for request in requests), abs=0.01)
        assert profile["results"]["e2e_latency_ms_mean"] == pytest.approx(1000 * fmean(request.latency for request in requests), abs=0.01)
