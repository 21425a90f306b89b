"""The decision of a throughput gate: its error rates and messages, its report, and the gains of patches that it looks for."""

import hashlib
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support import verdicts, wheels

import write_pages as repository_pages
from sparkwright.bench import records, results, statistics
from sparkwright.bench.recipes import recipe as recipes, workloads
from sparkwright.cherry_picks import effects
from sparkwright.core import pages, strict_yaml
from sparkwright.gates import throughput

simulation = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "ci" / "bench" / "gate_simulation.py"))
)
GATES = 400
#: What the first gate of a wheel spends, and two standard errors of 400 gates.
LIMIT = statistics.attempt_alpha(simulation.POLICY.alpha, 1) + 0.018


@pytest.mark.parametrize("noise", simulation.NOISES)
def test_wrong_verdicts_are_rarer_than_the_first_gate_may_give(noise: str) -> None:
    """Normal or heavy-tailed, with spikes, memory or drift: 400 gates at the margin, and 400 at the tolerated slowdown."""
    shares = simulation.wrong(simulation.Rule(), simulation.NOISES[noise], GATES)
    assert max(shares) <= LIMIT, shares


@pytest.mark.parametrize("wave", simulation.WAVES)
def test_nothing_periodic_keeps_step_with_a_side(wave: str) -> None:
    """With a period of 2 to 9 launches."""
    shares = simulation.worst(simulation.Rule(), wave, GATES)
    assert max(shares[:2]) <= LIMIT, shares


@pytest.mark.parametrize("sigma", [0.005, 0.01])
def test_equal_wheels_pass_and_slow_ones_fail_within_the_blocks(sigma: float) -> None:
    """Nearly all, on a quiet machine and on a typical one."""
    rule = simulation.Rule()
    assert simulation.gates(rule, simulation.iid, simulation.EQUAL, GATES, sigma).passed >= 0.9
    assert simulation.gates(rule, simulation.iid, simulation.SLOW, GATES, sigma).failed >= 0.9


@pytest.mark.parametrize("spread", [0.07, 0.15])
def test_a_gross_slowdown_fails_after_the_fewest_blocks(spread: float) -> None:
    """Four times slower, on a machine as noisy as can be."""
    assert simulation.gross(spread, GATES) >= 0.99


@pytest.mark.parametrize("mean", [0.0, -0.5])
@pytest.mark.parametrize("aa_blocks", [0, 1, 8])
def test_the_evidence_rarely_ever_reaches_its_threshold(mean: float, aa_blocks: int) -> None:
    """Looked at after each of thirty blocks, without a gain: with and without A/A blocks."""
    rng = np.random.default_rng(5)
    squares = rng.chisquare(aa_blocks or 1, size=10_000) * (aa_blocks > 0)
    path = statistics.evidence_path(rng.normal(mean, size=(10_000, 30)), squares, aa_blocks)
    assert (path.max(axis=1) >= math.log(20)).mean() <= 0.05


@pytest.mark.parametrize(
    ("values", "sigma", "state", "words"),
    [
        (
            (0.0, 0.001, -0.001, 0.0),
            0.005,
            "pass",
            "a slowdown of 2 % or more is excluded, one above 0.5 % is not shown",
        ),
        (
            (0.04, 0.041, 0.039, 0.04),
            0.005,
            "fail",
            "a slowdown of 2 % or more is not excluded, one above 0.5 % is shown",
        ),
        (
            (0.05, -0.05) * 6,
            0.05,
            "inconclusive",
            "a slowdown of 2 % or more is not excluded, one above 0.5 % is not shown",
        ),
    ],
)
def test_the_conclusion_says_what_was_excluded(
    values: tuple[float, ...], sigma: float, state: str, words: str
) -> None:
    series = statistics.MetricSeries("s", values, statistics.Bounds(0.02, 0.005), sigma)
    decision = statistics.decide(statistics.DecisionRule(0.05, 3, 12), [series])
    assert (decision.state, decision.series[0].conclusion) == (state, words)


# The report of experiments.

ROOT = Path(__file__).parents[2]
CELLS = tuple(replace(workloads.WorkloadCell.parse(name), primary=("tpot",)) for name in ("128/128 c1", "1024/1024 c1"))
UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"


def test_every_series_has_a_ratio_and_the_figures_of_both_sides(tmp_path: Path) -> None:
    """A ratio with its interval for each cell and metric; the median of each side."""
    result = verdicts.result(wheels.plain(tmp_path, "tiny", "1.0"), cells=CELLS)
    ratios, figures = results.ratios(result), results.figures(result)
    series = [one for cell in result.cells for one in cell.series]
    assert [row[2] for row in ratios.rows] == [results.number((one.candidate or 0) / (one.baseline or 1)) for one in series]
    assert [row[3] for row in ratios.rows] == [results.interval(one.low, one.high) for one in series]
    assert [row[2] for row in figures.rows] == ["candidate", "baseline"] * len(series)
    for name, factor in (("time per token", 1000), ("throughput", 1)):
        ours = next(one.candidate for one in series if records.METRICS[one.metric][0] == name)
        row = next(row for row in figures.rows if row[1].startswith(name))
        assert row[3] == results.number((ours or 0) * factor)


@given(st.text(max_size=2000))
def test_clean_text_is_one_short_line(value: str) -> None:
    cleaned = pages.clean(value)

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


# The effects of what the stacks carry, and the gate that looks whether a gain is still there.

CARRIED = """\
s:
  vllm:
    draft-fewer-words.patch:
      problem: the draft reads all words
      change: it reads the frequent ones
      use: optional
      spark: fewer bytes a draft
      promise: {recipes: [mtp], metric: tpot, concurrency: 1, gain: 1.05}
      measured: [{figure: time per token, ratio: 0.9, low: 0.85, high: 0.95, count: 6, machine: H200, wheel: WHEEL, baseline: WHEEL, date: "2026-11-30"}]
""".replace("WHEEL", "a" * 64)


def result(*differences: float, recipe: str = "mtp", stack: str = "s", concurrency: int = 1) -> results.Result:
    """Return a gate's result with these differences of the time per token, one for each block."""
    cell = results.CellResult(f"1024/256 c{concurrency}", concurrency, (results.Series("tpot", True, differences), results.Series("ttft", False, differences)))
    return results.Result("pass", "", results.Subject("ours", stack=stack), (cell,), (), recipe=recipe, alpha=0.03)


def states(tmp_path: Path, measured: results.Result) -> list[tuple[str, str, str, bool]]:
    (tmp_path / "cherry_picks").mkdir(exist_ok=True)
    (tmp_path / "cherry_picks" / "effects.yaml").write_text(CARRIED)
    return [(check.name, check.state, check.reason, check.required) for check in throughput.effect_checks(measured, tmp_path)]


@pytest.mark.parametrize(
    ("differences", "state", "reason"),
    [
        # Equal to the stock wheel, and better by less than was promised.
        ((0.004, -0.005, 0.003, -0.002, 0.001), "fail", "no-effect"),
        ((-0.021, -0.019, -0.022, -0.018, -0.02), "fail", "no-effect"),
        ((-0.09, -0.11, -0.1, -0.1, -0.105), "pass", ""),
        # Too noisy to tell, and a single block.
        ((0.1, -0.2, 0.05, -0.1, 0.02), "inconclusive", "undecided"),
        ((0.0,), "inconclusive", "undecided"),
    ],
)
def test_a_gain_that_vanished_is_no_effect(differences: tuple[float, ...], state: str, reason: str, tmp_path: Path) -> None:
    """It fails the gate where less than the promise is shown; noise decides nothing."""
    name = "effect-draft-fewer-words-1024-256-c1"
    assert states(tmp_path, result(*differences)) == [(name, state, reason, state == "fail")]


def test_a_promise_counts_for_its_recipes_stack_and_concurrency(tmp_path: Path) -> None:
    equal = (0.004, -0.005, 0.003, -0.002, 0.001)
    for other in (result(*equal, recipe="plain"), result(*equal, stack="t")):
        assert states(tmp_path, other) == []
    for other in (result(*equal, concurrency=8), result()):
        assert states(tmp_path, other) == [("effect-draft-fewer-words", "not-run", "effect-unmeasured", False)]


def test_promises_share_the_error_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred promises, what excludes one at the rate of the gate decides nothing."""
    (promise,) = strict_yaml.parse(CARRIED, dict[str, dict[str, dict[str, effects.Effect]]], "carried")["s"]["vllm"].values()
    measured = result(0.004, -0.005, 0.003, -0.002, 0.001)
    for count, state in ((1, "fail"), (100, "inconclusive")):
        monkeypatch.setattr(effects, "promises", lambda *_, count=count: dict.fromkeys(map(str, range(count)), promise.promise))
        assert next(throughput.effect_checks(measured, tmp_path)).state == state


@pytest.mark.parametrize(
    ("old", "new"),
    [("low: 0.85", "low: 0.91"), ("gain: 1.05", "gain: 0.9"), ("metric: tpot", "metric: speed"), ("use: optional", "use: sometimes"), ("recipes: [mtp]", "recipes: []")],
)
def test_effects_that_say_nothing_are_refused(old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "cherry_picks").mkdir()
    (tmp_path / "cherry_picks" / "effects.yaml").write_text(CARRIED.replace(old, new))
    with refusal("file-invalid"):
        effects.load_effects(tmp_path)


def test_what_a_gpu_measured_is_written_into_the_reviewed_file(tmp_path: Path) -> None:
    """A further run changes nothing; where text differs, or rounds are too few, nothing is written."""
    shutil.copytree(ROOT / "cherry_picks", tmp_path / "cherry_picks")
    path, texts = tmp_path / "cherry_picks" / "effects.yaml", []
    common = {"what": "drafts", "model": "wide", "machine": "NVIDIA H200", "wheel": "0" * 64, "baseline": "1" * 64, "date": "2026-12-01"}
    for rounds, equal in ((3, 23), (2, 24), (3, 24), (3, 24)):
        texts.append(path.read_text("utf-8"))
        record = ""
        for drafted in (3.0, 3.01, 3.02)[:rounds]:
            values = {side: {"time per token, c1, ms": [time, time]} for side, time in (("stock", 6.0), ("ours", 6.0), ("draft vocabulary", drafted))}
            record += json.dumps({**common, "key": "k", "values": values, "equal": {"stock": 24, "ours": equal}}) + "\n"
        (tmp_path / "drafts.jsonl").write_text(record)
        subprocess.run([sys.executable, ROOT / "ci/bench/effects.py", "fill", "--root", tmp_path, "--output", tmp_path], check=True, capture_output=True)
    assert texts[0] == texts[2] != texts[3] == path.read_text("utf-8")
    by_stock, by_option = effects.load_effects(tmp_path)["2026.11"]["vllm"]["let-a-drafter-propose-from-a-reduced-vocabulary.patch"].measured
    assert (by_stock.figure, by_stock.ratio, by_stock.count) == ("time per token, c1, ms (draft vocabulary / stock; wide)", 0.5017, 3)
    assert by_stock.low < 0.5017 < by_stock.high
    assert (by_stock.baseline, by_option.baseline) == ("1" * 64, "0" * 64)


def test_every_change_of_the_default_stack_has_its_effect() -> None:
    """A patch or pick without a record, and a record of something that is not carried, are mistakes; options are those of recipes."""
    carried = {fork: {patch.name for patch, _ in changes} for fork, changes in repository_pages.carried(repository_pages.DEFAULT).items() if changes}
    recorded = effects.load_effects(ROOT)[repository_pages.DEFAULT]
    assert {fork: set(changes) for fork, changes in recorded.items() if fork != "recipes"} == carried
    files = recipes.files(ROOT)
    text = "".join(path.read_text("utf-8") for path in files.values())
    for name, effect in recorded.get("recipes", {}).items():
        assert name in text
        assert effect.upstream
        assert effect.drop_when
    for fork in recorded.values():
        for name, effect in fork.items():
            own, _, test = effect.test.partition("::")
            assert not own or f"def {test}(" in (ROOT / own).read_text("utf-8"), name
            for recipe in effect.promise.recipes if effect.promise else ():
                assert recipe in files, name


def test_the_readme_stays_short() -> None:
    assert len(repository_pages.README.read_text("utf-8").splitlines()) <= 110
