"""Preflight: a recipe's flags, the memory of a Spark, and the checkpoint that is really there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.refusals import refusal
from tests.unit.test_recipes import ROOT, WORKLOADS, plain

from sparkwright.bench.recipes import preflight, recipe
from sparkwright.bench.recipes.preflight import REASONS, SPARK_GIB, SPARK_MB, CheckpointSize
from sparkwright.bench.recipes.recipe import Recipe


def changed(**changes: Any) -> Recipe:
    return msgspec.convert({**plain(), **changes}, Recipe)


def served(*arguments: str, vllm: str = ">=0.20.1,<0.34", **variables: str) -> Recipe:
    return changed(versions=[{"vllm": vllm, "flags": list(arguments), "variables": variables}])


def planned(**changes: Any) -> Recipe:
    return changed(plan={**plain()["plan"], **changes})


def references(found: tuple[preflight.PreflightFinding, ...], weight: str = "error") -> set[str]:
    return {finding.reference for finding in found if finding.weight == weight}


MTP = {"method": "mtp", "tokens": 3}

WRONG: dict[str, tuple[Recipe, str]] = {
    "a flag twice": (served("--dtype=auto", "--dtype=half"), "flag-twice"),
    "a flag and its opposite": (served("--async-scheduling", "--no-async-scheduling"), "flag-twice"),
    "a dotted flag twice": (served("--compilation-config.mode=3", "--compilation-config.mode=1"), "flag-twice"),
    "a flag of the plan": (served("--max-model-len=4096"), "flag-planned"),
    "a flag of the plan by its other name": (served("--device-memory-utilization=0.9"), "flag-planned"),
    "a flag of speculation": (served('--speculative-config={"method":"ngram"}'), "flag-planned"),
    "a flag of the measurement": (served("--no-enable-prefix-caching"), "flag-planned"),
    "drafts without a head": (changed(speculation=MTP), "speculation-headless"),
    "another workload": (changed(workloads=["fastest"]), "workload-unknown"),
    "a cell that is too long": (planned(max_model_len=4096), "cell-too-long"),
    "a cell that is too wide": (planned(max_num_seqs=8), "cell-too-wide"),
    "no memory left": (planned(weights=110), "memory-short"),
    "too much at the start": (planned(gpu_memory_utilization=0.95), "memory-utilization"),
    "a short cache": (planned(cache=1), "cache-short"),
}


@pytest.mark.parametrize("case", WRONG)
def test_error_of_a_recipe_has_its_reference(case: str) -> None:
    wrong, reference = WRONG[case]
    assert references(preflight.findings(wrong, WORKLOADS)) == {reference}
    assert reference in REASONS


def test_recipe_without_errors_is_not_refused() -> None:
    two = served("--compilation-config.mode=3", "--compilation-config.level=1")
    assert preflight.check(two, WORKLOADS, None, total=SPARK_MB) == ()


sizes = st.floats(0.5, 100)


@given(sizes, sizes, sizes, st.integers(1, 2))
def test_plan_fits_exactly_where_its_parts_do(weights: float, cache: float, reserve: float, servers: int) -> None:
    small = planned(weights=weights, cache=cache, reserve=reserve, token=0)
    needed = servers * (weights + cache + reserve) + small.plan.floor
    assert ("memory-short" in references(preflight.findings(small, None, servers=servers))) == (needed > SPARK_MB * 1e6 / 2**30)


def test_spark_s_memory_is_that_of_a_seed_report_s_log() -> None:
    """At 0.90 of it lay 44.2 GiB of weights and 62.2 GiB of cache; in GB they would not fit."""
    assert 0.90 * SPARK_GIB > 44.2 + 62.2
    assert 0.90 * SPARK_GIB * 1e9 / 2**30 < 44.2 + 62.2


def test_plan_becomes_flags() -> None:
    assert planned(cache=16, gpu_memory_utilization=0.7).plan.flags() == (
        "--max-model-len=65536", "--max-num-seqs=64", "--gpu-memory-utilization=0.7", f"--kv-cache-memory-bytes={16 * 2**30}",
    )  # fmt: skip


def model(folder: Path, config: dict[str, Any], *tensors: str) -> Path:
    """Write a model whose tensors are 64 x 64 of bfloat16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    size = 2 * 64 * 64
    entries = {
        name: {"dtype": "BF16", "shape": [64, 64], "data_offsets": [place * size, (place + 1) * size]} for place, name in enumerate(tensors)
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * (size * len(tensors)))
    return folder


CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
TENSORS = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight")
DRAFTS = (*TENSORS, "mtp.fc.weight")


def test_checkpoint_has_its_bytes_and_drafting_layers(tmp_path: Path) -> None:
    """Nemotron-H drafts only if its config says so."""
    nemotron = {**CONFIG, "model_type": "nemotron_h"}
    drafting = {**nemotron, "num_nextn_predict_layers": 1}
    assert preflight.checkpoint_size(model(tmp_path / "a", CONFIG, *TENSORS)) == CheckpointSize(
        2 * 2 * 64 * 64, 2 * 2 * 64, False, "llama"
    )
    assert preflight.checkpoint_size(model(tmp_path / "b", CONFIG, *DRAFTS)).drafts
    assert not preflight.checkpoint_size(model(tmp_path / "c", nemotron, *DRAFTS)).drafts
    assert preflight.checkpoint_size(model(tmp_path / "d", drafting, *DRAFTS)).drafts


def test_checkpoint_on_disk_decides_over_the_plan() -> None:
    drafting = recipe.load(ROOT, "qwen3-next-80b-nvfp4-marlin-mtp")
    token = drafting.plan.token
    good = CheckpointSize(round(44.2 * 2**30), 2 * token, True, "qwen3_next", "NVFP4 (modelopt)")

    def found(checkpoint: CheckpointSize, servers: int = 1) -> set[str]:
        return {one.reference for one in preflight.findings(drafting, None, checkpoint=checkpoint, servers=servers)}

    assert found(good) == set()
    assert found(replace(good, token=token)) == set(), "at one byte a number"
    assert found(replace(good, drafts=False)) == {"speculation-headless"}
    assert found(replace(good, token=token * 3)) == {"token-differs"}
    assert found(replace(good, weights=50 * 2**30)) == {"weights-differ"}
    assert found(good, servers=2) == {"memory-short"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-next-80b-nvfp4-marlin", {}),
        ("qwen3-next-80b-nvfp4-marlin", {"architecture": "qwen3_moe"}),
        ("qwen3-next-80b-nvfp4-marlin", {"scheme": "FP8"}),
        ("qwen3-next-80b-nvfp4-marlin", {"scheme": ""}),
        ("qwen3-next-80b-nvfp4-marlin", {"weights": 20 * 2**30}),
        ("nemotron-3-nano-w4a4-b12x", {"architecture": "nemotron_h", "scheme": "NVFP4 (modelopt, W4A16)", "weights": 19 * 2**30}),
        ("qwen3-next-80b-awq", {"scheme": "INT4 (awq)"}),
        ("toy-cpu", {"scheme": ""}),
    ],
)
def test_checkpoint_of_another_model_is_refused(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Architecture, format and size decide, not the name of the folder; a recipe for any model takes any."""
    known = CheckpointSize(round(44.2 * 2**30), 0, True, "qwen3_next", "NVFP4 (modelopt)")
    monkeypatch.setattr(preflight, "checkpoint_size", lambda _: replace(known, **changes))
    sound = not changes or name in ("qwen3-next-80b-awq", "toy-cpu")
    with contextlib.nullcontext() if sound else refusal("recipe-unfit", match="does not hold the checkpoint"):
        preflight.require_checkpoint(recipe.load(ROOT, name), Path("model"))


def test_recipe_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    toy, here = recipe.load(ROOT, "toy-cpu"), model(tmp_path / "model", CONFIG, *TENSORS)
    assert preflight.check(toy, WORKLOADS, here, total=8_000) == ()
    assert preflight.machine_memory() > 500
    for total, servers in ((4_000, 1), (8_000, 2)):
        with refusal("recipe-unfit", match="toy-cpu"):
            preflight.check(toy, WORKLOADS, here, total=total, servers=servers)
