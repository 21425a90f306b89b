"""Mixtures of formats that vLLM would load wrongly are refused before it starts; the others are not. vLLM itself judges them in tests/server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from tests.support.checkpoints import write
from tests.support.mixtures import MIXTURES, Mixture
from tests.unit.conftest import Cli, Mini

from sparkwright.bench.model import checkpoint, modules


@pytest.mark.parametrize("root", ["model.", "model.language_model.", "backbone."])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_refused_exactly_if_vllm_would_load_it_wrongly(tmp_path: Path, name: str, root: str) -> None:
    mixture = MIXTURES[name]
    folder = write(tmp_path / "m", mixture.config(root), mixture.tensors(root))
    with refusal(mixture.refused) if mixture.refused else contextlib.nullcontext():
        assert modules.audit(checkpoint.read(folder)).bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a part of attention left in BF16", ["q_proj is FP8 with a scale for a row", "v_proj is not quantised"]),
        ("side layers in a checkpoint of NVFP4", ["declared as NVFP4"]),
        ("head not declared", ["lm_head is FP8", "declared as nothing"]),
        ("static FP8 without the scale of its inputs", ["o_proj has no input_scale"]),
    ],
)
def test_the_verb_names_the_layer_and_what_differs(mini: Mini, cli: Cli, tmp_path: Path, name: str, words: list[str]) -> None:
    folder = write(tmp_path / "m", MIXTURES[name].config("model."), MIXTURES[name].tensors("model."))
    done = cli("model", "inspect", *mini.words, folder)
    assert done.returncode == 1
    assert all(word in " ".join(done.stderr.split()) for word in (MIXTURES[name].refused, *words)), done.stderr


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},  # the layers are in hf_quant_config.json
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:(a+)+$"]}}},
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}},
    ],
)
def test_a_config_that_declares_no_layers_is_not_guessed_at(tmp_path: Path, quantization: dict[str, Any]) -> None:
    mixture = MIXTURES["experts declared as one"]
    folder = write(tmp_path / "m", {**mixture.config("model."), "quantization_config": quantization}, mixture.tensors("model."))
    assert modules.audit(checkpoint.read(folder)).scheme == "NVFP4 (modelopt)"


@pytest.mark.parametrize("shards", [2, 0])
def test_a_published_mixture_is_accepted(tmp_path: Path, shards: int) -> None:
    """
    As NVIDIA stores Qwen3.8-Flash-Next: NVFP4 experts, FP8 experts that draft, and a table in FP8 with one scale for all shards, by the
    description in sglang #38121.
    """
    mixture, table, root = MIXTURES["experts declared as one"], "layers.1.ple.ple_embedding.ngram_embedding", "model.language_model."
    config = mixture.config(root)
    layers = {root + table: "FP8", "mtp.layers.0.mlp.experts": "FP8_BLOCK_SCALES"}
    config["quantization_config"]["quantized_layers"] |= {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    names = [f"{root}{table}.shard_{number}" for number in range(shards)] or [root + table]
    tensors = [*((f"{name}.weight", "F8_E4M3", [64, 16]) for name in names), (f"{root}{table}.weight_scale", "BF16", [])]
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"mtp.layers.0.mlp.experts.0.{part}"
        tensors += [(f"{name}.weight", "F8_E4M3", [128, 128]), (f"{name}.weight_scale_inv", "F32", [1, 1])]
    folder = write(tmp_path / "m", config, [*mixture.tensors(root), *tensors])
    assert modules.audit(checkpoint.read(folder)).scheme == "NVFP4 (modelopt)"


@pytest.mark.parametrize("wrong", [{"ignore": "lm_head"}, {"quantized_layers": {"a": 1}}, {"quantization": [1]}])
def test_a_declaration_of_an_impossible_form_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    mixture = MIXTURES["experts declared as one"]
    config = mixture.config("model.")
    folder = write(tmp_path / "m", {**config, "quantization_config": {**config["quantization_config"], **wrong}}, mixture.tensors("model."))
    with refusal("checkpoint-invalid"):
        modules.audit(checkpoint.read(folder))


def test_large_and_hostile_declarations_are_judged_in_linear_time(tmp_path: Path) -> None:
    """Four times as many layers, patterns and dots take no more than some eight times as long."""

    def seconds(count: int) -> float:
        names = [f"layers.{number % 90}.mlp.experts.{number // 90}.up_proj" for number in range(count)]
        declared = {**dict.fromkeys(names, "NVFP4"), "." * count: "FP8", "a." * count + "z": "FP8"}
        ignored = ("b" * count, *(f"{'c' * (number % 50)}*" for number in range(1, count)), *("*" * 5 + f"{number}" for number in range(count)))
        mixture = Mixture(dict.fromkeys(names, "NVFP4"), declared, ignored)
        tensors = [tensor for name in names for tensor in ((f"model.{name}.weight", "U8", [2, 8]), (f"model.{name}.weight_scale", "F8_E4M3", [2, 1]))]
        folder = write(tmp_path / f"{count}", {**mixture.config("model."), "num_hidden_layers": 90}, tensors)
        found = checkpoint.read(folder)
        start = time.perf_counter()
        modules.audit(found)
        return time.perf_counter() - start

    few, many = (min(seconds(count) for _ in range(2)) for count in (1000, 4000))
    assert many < 8 * few + 1.0
