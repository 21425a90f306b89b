"""The effects of what the stacks carry: the reviewed file, the pages that are made of it, and the gate that looks whether a gain is still there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refusal
from tests.unit import pages

from sparkwright.bench.recipes import recipe as recipes
from sparkwright.bench.results import CellResult, Result, Series, Subject
from sparkwright.cherry_picks import effects
from sparkwright.core import strict_yaml
from sparkwright.gates import throughput

ROOT = Path(__file__).parents[2]
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


def result(*differences: float, recipe: str = "mtp", stack: str = "s", concurrency: int = 1) -> Result:
    """Return a gate's result with these differences of the time per token, one for each block."""
    cell = CellResult(f"1024/256 c{concurrency}", concurrency, (Series("tpot", True, differences), Series("ttft", False, differences)))
    return Result("pass", "", Subject("ours", stack=stack), (cell,), (), recipe=recipe, alpha=0.03)


def states(tmp_path: Path, measured: Result) -> list[tuple[str, str, str, bool]]:
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
    """Of sixty promises, what excludes one at the rate of the gate decides nothing."""
    (promise,) = strict_yaml.parse(CARRIED, dict[str, dict[str, dict[str, effects.Effect]]], "carried")["s"]["vllm"].values()
    measured = result(0.004, -0.005, 0.003, -0.002, 0.001)
    for count, state in ((1, "fail"), (10**6, "inconclusive")):
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
    carried = {fork: {patch.name for patch, _ in changes} for fork, changes in pages.carried(pages.DEFAULT).items() if changes}
    recorded = effects.load_effects(ROOT)[pages.DEFAULT]
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
    assert len(pages.README.read_text("utf-8").splitlines()) <= 110
