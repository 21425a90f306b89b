"""Whether a plan fits: on a Spark, with two servers at a time, and with the checkpoint that is really there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal

from sparkwright.bench.recipes import fitting, lint, memory, recipe
from sparkwright.bench.recipes.memory import SPARK_GIB, SPARK_MB, Finding, Held, Plan
from sparkwright.bench.recipes.workloads import Cell

ROOT = Path(__file__).parents[2]
PLAN = Plan(weights=40, weights_from="here", cache=16, max_model_len=65536, max_num_seqs=64, reserve=8, token=12288)

sizes = st.floats(0.5, 100)


def references(found: tuple[Finding, ...]) -> list[str]:
    return [one.reference for one in found]


def test_a_spark_has_so_many_gib() -> None:
    """At 0.90 of the memory a seed report's log has 44.2 GiB of weights and 62.2 of cache; in GB they would not fit."""
    assert 0.90 * SPARK_GIB > 44.2 + 62.2
    assert 0.90 * SPARK_GIB * 1e9 / 2**30 < 44.2 + 62.2
    assert pytest.approx(SPARK_GIB, abs=0.001) == SPARK_MB * 1e6 / 2**30


@given(sizes, sizes, sizes, st.integers(1, 2))
def test_a_plan_fits_exactly_where_its_parts_do(weights: float, cache: float, reserve: float, servers: int) -> None:
    """Weights, cache and reserve of every server and one floor are held against the machine, and nothing else decides."""
    plan = replace(PLAN, weights=weights, cache=cache, reserve=reserve, token=0)
    needed = servers * (weights + cache + reserve) + plan.floor

    assert ("memory-short" in references(memory.check(plan, servers=servers))) == (needed > SPARK_MB * 1e6 / 2**30)


@given(sizes)
def test_more_memory_never_makes_a_plan_worse(weights: float) -> None:
    """What fits a machine fits a larger one."""
    plan = replace(PLAN, weights=weights)
    if "memory-short" not in references(memory.check(plan)):
        assert "memory-short" not in references(memory.check(plan, SPARK_MB + 1000))


def test_the_plan_of_the_seed_report_leaves_less_than_the_floor() -> None:
    """At 0.90 of a Spark, 11.97 GiB are left, and gates.md asks for 12; at 0.89 it passes."""
    seed = replace(PLAN, weights=44.2, cache=None, pinned=False, gpu_memory_utilization=0.90, token=0)

    assert references(memory.check(seed)) == ["memory-utilization", "memory-unpinned"]
    assert references(memory.check(replace(seed, gpu_memory_utilization=0.89))) == ["memory-unpinned"]


def test_a_cache_holds_one_request_and_the_cells() -> None:
    """A cache that is shorter than the longest request is an error; one that is full of a cell's requests is shown."""
    tokens = int(16 * 2**30 / 12288)

    assert memory.check(PLAN, cells=[Cell(1024, 1024, 64)]) == ()
    assert references(memory.check(replace(PLAN, max_model_len=tokens + 1))) == ["cache-short"]
    crowded = memory.check(PLAN, cells=[Cell(tokens // 2, 10, 3)])
    assert references(crowded) == ["cache-crowded"]
    assert crowded[0].weight == "advice"
    assert memory.check(replace(PLAN, token=0), cells=[Cell(tokens, 10, 3)]) == (), "nobody counted what a token takes"


def test_the_checkpoint_outweighs_the_plan() -> None:
    """Bytes on disk are taken where they are known: shared by two nodes, shown where they differ, and an error where they do not fit."""
    assert memory.check(PLAN, checkpoint=40 * 2**30) == ()
    assert memory.check(PLAN, checkpoint=80 * 2**30, nodes=2) == ()
    assert references(memory.check(PLAN, checkpoint=50 * 2**30)) == ["weights-differ"]
    assert references(memory.check(PLAN, checkpoint=100 * 2**30)) == ["memory-short", "weights-differ"]
    assert memory.check(replace(PLAN, weights=0), checkpoint=40 * 2**30) == (), "the user brings the model"


def test_a_plan_is_said_in_flags() -> None:
    """Each number of a plan is a flag, the cache in bytes; what the plan leaves open is left to vLLM."""
    flags = replace(PLAN, gpu_memory_utilization=0.7).flags()

    assert flags == (
        "--max-model-len=65536", "--max-num-seqs=64", "--gpu-memory-utilization=0.7", f"--kv-cache-memory-bytes={16 * 2**30}",
    )  # fmt: skip
    assert replace(PLAN, pinned=False).flags() == ("--max-model-len=65536", "--max-num-seqs=64")


@pytest.mark.parametrize(
    "change", [{"cache": None}, {"weights": -1}, {"max_num_seqs": 0}, {"gpu_memory_utilization": 1.5}, {"floor": -1}, {"swap": 4}]
)
def test_an_impossible_plan_does_not_load(change: dict[str, Any]) -> None:
    """A pinned cache without a size, and numbers that no machine has, are refused."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(PLAN), **change}, Plan)


def model(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]]) -> Path:
    """Write a model whose tensors are of bfloat16 and those shapes; their bytes are a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, shape in tensors.items():
        size = 2
        for one in shape:
            size *= one
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return folder


CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
TENSORS = {"model.layers.0.self_attn.k_proj.weight": [32, 64], "model.layers.0.self_attn.v_proj.weight": [32, 64]}
DRAFTS = {"mtp.fc.weight": [64, 64]}


def test_a_checkpoint_on_disk_tells_its_bytes_and_whether_it_drafts(tmp_path: Path) -> None:
    """Bytes of all tensors, of a token in the cache, and layers that draft; Nemotron-H drafts only where its config says so."""
    plain = memory.held(model(tmp_path / "plain", CONFIG, TENSORS))
    drafting = memory.held(model(tmp_path / "drafting", CONFIG, {**TENSORS, **DRAFTS}))
    nemotron = {**CONFIG, "model_type": "nemotron_h"}
    silent = memory.held(model(tmp_path / "silent", nemotron, {**TENSORS, **DRAFTS}))
    said = memory.held(model(tmp_path / "said", {**nemotron, "num_nextn_predict_layers": 1}, {**TENSORS, **DRAFTS}))

    assert plain == Held(2 * 2 * 32 * 64, 2 * 2 * 32, False)
    assert (drafting.drafts, silent.drafts, said.drafts) == (True, False, True)


def test_a_recipe_is_held_against_the_checkpoint() -> None:
    """A checkpoint without the layers that draft is an error for a recipe that drafts, and another size or cache is shown."""
    drafting = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin-mtp")
    good = Held(round(44.2 * 2**30), 2 * drafting.plan.token, True)

    assert lint.of_checkpoint(drafting, good) == ()
    assert lint.of_checkpoint(drafting, replace(good, token=drafting.plan.token)) == (), "at one byte a number"
    assert references(lint.of_checkpoint(drafting, replace(good, drafts=False))) == ["speculation-headless"]
    assert references(lint.of_checkpoint(drafting, replace(good, token=drafting.plan.token * 3))) == ["token-differs"]
    assert references(lint.of_checkpoint(drafting, replace(good, weights=90 * 2**30))) == ["memory-short", "weights-differ"]
    assert "memory-short" in references(lint.of_checkpoint(drafting, good, servers=2)), "two of them are too many for a Spark"


def test_a_recipe_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The toy fits a small machine and not a tiny one; a large recipe does not fit a small machine; two large ones fit no Spark."""
    toy, large = recipe.load(ROOT, "toy-cpu"), recipe.load(ROOT, "gpt-oss-120b-mxfp4")
    here = model(tmp_path / "model", CONFIG, TENSORS)

    assert references(fitting.check(ROOT, toy, here, total=8_000)) == []
    assert references(fitting.check(ROOT, large, None, total=SPARK_MB)) == ["revision-unresolved"]
    assert fitting.machine() > 500
    for one, folder, total, servers in ((toy, here, 4_000, 1), (large, None, 24_000, 1), (toy, here, 8_000, 2)):
        with refusal("recipe-unfit") as refused:
            fitting.check(ROOT, one, folder, total=total, servers=servers)
        assert "memory-short" in refused.value.details[0]


def test_the_checkpoint_s_own_size_decides(tmp_path: Path) -> None:
    """Where the checkpoint is at hand, an estimate of the plan that is far too large refuses nothing, and the difference is shown."""
    large = recipe.load(ROOT, "gpt-oss-120b-mxfp4")
    wrong = replace(large, plan=replace(large.plan, weights=500.0))

    assert "weights-differ" in references(fitting.check(ROOT, wrong, model(tmp_path / "model", CONFIG, TENSORS), total=SPARK_MB))
    with refusal("recipe-unfit"):
        fitting.check(ROOT, wrong, None, total=SPARK_MB)
