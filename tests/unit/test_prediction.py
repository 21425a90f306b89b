"""The speed of a model by its bytes: what a step reads, by hand and by enumeration; the levers; and layouts of other makers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.refusals import refusal
from tests.support.checkpoints import Told, write
from tests.unit.test_modules import mlp, plain, qwen, small

from sparkwright.bench.model import checkpoint, modules, prediction
from sparkwright.bench.model.checkpoint import Checkpoint
from sparkwright.bench.model.prediction import ACCEPTANCE, GB10, Serving
from sparkwright.bench.model.slim import Slimming
from sparkwright.core.memory import CacheShape

STATE = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}


def of(folder: Path, config: dict[str, Any], tensors: list[Told]) -> Checkpoint:
    return checkpoint.read(write(folder, config, tensors))


def drafting(folder: Path) -> Checkpoint:
    """Return four layers of Qwen3.6 with 16 experts, of which a token takes two, and a layer that drafts with as many."""
    config, tensors = qwen(4, 16, 2, 100_000)
    tensors += plain("mtp.fc", 2048, 4096)
    for expert in range(16):
        tensors += mlp(f"mtp.layers.0.mlp.experts.{expert}", 2048, 512)
    return of(folder, {**config, **STATE, "vocab_size": 100_000}, tensors)


@pytest.mark.parametrize(("every", "taken", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (4, 3, 2)])
def test_tokens_read_as_many_experts_as_an_even_router_picks(tmp_path: Path, every: int, taken: int, tokens: int) -> None:
    """The mean of all routings, each enumerated."""
    config, told = {**small(), "num_experts_per_tok": taken}, list[Told]()
    for expert in range(every):
        told += plain(f"model.layers.0.mlp.experts.{expert}.up_proj", 32, 32)
    model = prediction.read(of(tmp_path / "m", config, told))
    routes = itertools.combinations(range(every), taken)
    sizes = [len(set().union(*route)) for route in itertools.product([*routes], repeat=tokens)]
    step = model.step(Serving(requests=tokens, context=0))
    assert step.weights == pytest.approx(32 * 32 * 2 * sum(sizes) / len(sizes))


def test_a_step_reads_weights_cache_and_drafts(tmp_path: Path) -> None:
    """Of one request without context and drafts it is the audit's; each part by hand for four requests with two drafts."""
    source = drafting(tmp_path / "m")
    model = prediction.read(source)
    assert model.step(Serving(context=0)).weights == pytest.approx(model.audit.weights)
    rows = {(row.group, row.modules): row for row in model.audit.rows}
    step = model.step(Serving(requests=4, drafts=2, context=1000, cache="fp8", head="fp8", vocabulary=25_000))
    key, state = 2 * 2 * 256, 3 * 32 * 128 * 128 * 8
    assert step.cache == 4 * (1000 * key + state)
    experts = sum(row.bytes for (group, name), row in rows.items() if group == "mtp" and "experts" in name)
    head = 100_000 * 2048 * 2 / 4 / 2
    assert step.drafts == pytest.approx(2 * (experts * (1 - (14 / 16) ** 4) + 2048 * 4096 * 2 + head + 4 * 1000 * key))
    assert model.step(Serving(requests=4, drafts=0)).drafts == 0
    alone = model.step(Serving(requests=12, context=1000, cache="fp8")).weights
    assert step.weights == pytest.approx(alone)


def test_speed_follows_bytes_bandwidth_and_acceptance(tmp_path: Path) -> None:
    model = prediction.read(drafting(tmp_path / "m"))
    serving = Serving(drafts=2)
    rate = model.rate(serving, (200.0, 240.0), (0.5, 0.8))
    step, rows = model.step(serving).total, [row for row in model.audit.rows if row.group == "experts"]
    apart = sum(row.bytes for row in rows) * ((1 - (14 / 16) ** 3) - 2 / 16)
    assert (rate.low, rate.high) == pytest.approx((prediction.SHARE * 200e9 / step * 1.75, 240e9 / (step - apart) * 2.44))


def test_a_published_speed_is_in_the_interval(tmp_path: Path) -> None:
    """Seed report 003's 44.32 tok/s of Qwen3.6 without drafts, by the shapes of transformers' defaults, 200 tokens."""
    config, tensors = qwen(40, 256, 8, 248320)
    model = prediction.read(of(tmp_path / "m", {**config, **STATE}, tensors))
    rate = model.rate(Serving(context=200), GB10, ACCEPTANCE)
    assert rate.low < 44.32 < rate.high < 1.35 * 44.32


METHODS = {"modelopt": "yes", "compressed-tensors": "yes", "awq": "no: awq has one format", None: "yes"}


@pytest.mark.parametrize("method", METHODS)
def test_levers_say_what_is_saved_and_what_loads(tmp_path: Path, method: str | None) -> None:
    """Each gain is that of a step with fewer bytes; the largest comes first."""
    source = drafting(tmp_path / "m")
    stated = source.config if method is None else {**source.config, "quantization_config": {"quant_method": method}}
    if method is None:
        stated = {name: value for name, value in stated.items() if name != "quantization_config"}
    source = Checkpoint(stated, source.tensors)
    found = {lever.change: lever for lever in prediction.levers(prediction.read(source), Serving(drafts=2), ACCEPTANCE, "0.33.0", [prediction.VOCABULARY_PATCH])}
    gains = [lever.gain for lever in found.values()]
    assert gains == sorted(gains, reverse=True)
    side = 3 * (12288 * 2048 + 2048 * 4096 - 4 * (12288 + 2048))
    assert found["side layers in FP8"].saved == side
    assert found["side layers in FP8"].loads.startswith(METHODS[method])
    before = prediction.read(source).step(Serving(drafts=2)).total
    assert found["side layers in FP8"].gain == pytest.approx(before / (before - side) - 1)
    assert found["draft head in FP8"].saved == 2 * 100_000 * 2048
    assert found["cache in FP8"].saved == pytest.approx(3 * 4096 * 2 * 2 * 256)
    assert {name: found[name].loads.partition(":")[0] for name in found if "draft head" in name or "vocabulary" in name or "NVFP4" in name} == {
        "draft head in FP8": "yes", "draft head in NVFP4": "yes", "draft vocabulary of 32,768": "yes", "cache in NVFP4": "yes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "version", "word"),
    [({"head_dim": 64}, "0.33.0", "nvfp4-kv-head-64"), ({"model_type": "gpt_oss"}, "0.33.0", "nvfp4-kv-sinks"), ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "0.33.0", "latent"), ({}, "0.23.0", "0.33")],
)
def test_what_the_stack_cannot_load_says_why(tmp_path: Path, config: dict[str, Any], version: str, word: str) -> None:
    source = drafting(tmp_path / "m")
    model = prediction.read(replace(source, config={**source.config, **config}))
    levers = prediction.levers(model, Serving(drafts=1), ACCEPTANCE, version, [])
    loads = {lever.change: lever.loads for lever in levers}
    assert word in loads["cache in NVFP4"]
    assert loads["draft vocabulary of 32,768"] == "no: without our patch"


def test_a_cache_is_told_by_kind() -> None:
    """Gemma's windows, and the latent cache of MLA, by the bytes of a token, and what a step reads of 8,192."""
    gemma = {
        "layer_types": [*["sliding_attention"] * 5, "full_attention"], "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "num_global_key_value_heads": 2, "global_head_dim": 512, "sliding_window": 1024,
    }  # fmt: skip
    shape = CacheShape.of(gemma, "fp8")
    assert [(kind.name, kind.layers, kind.token, kind.window) for kind in shape.kinds] == [("full", 1, 2048, 0), ("sliding", 5, 20480, 1024)]
    assert shape.read(8192) == 2048 * 8192 + 20480 * 1024
    latent = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert [(kind.name, kind.token) for kind in CacheShape.of(latent, "nvfp4").kinds] == [("latent", 2 * 576 * 0.5625)]
    assert CacheShape.of({}).read(100) == 0


DEEPSEEK = [
    ("embed.weight", "BF16", [64, 256]), ("head.weight", "BF16", [64, 256]),
    ("layers.0.attn.wq_a.weight", "F8_E4M3", [128, 256]), ("layers.0.attn.wq_a.scale", "F8_E8M0", [1, 2]),
    *((f"layers.0.ffn.experts.{expert}.w1.{name}", kind, [32, size]) for expert in range(2) for name, kind, size in [("weight", "I8", 128), ("scale", "F8_E8M0", 8)]),
]  # fmt: skip


def test_layouts_of_other_makers_are_read(tmp_path: Path) -> None:
    """DeepSeek-V4's scales (faults.md C2), and Mistral's params.json (C4)."""
    audit = modules.audit(of(tmp_path / "d", small(), DEEPSEEK))
    assert {row.group: row.scheme for row in audit.rows} == {"embeddings": "BF16", "lm_head": "BF16", "layers": "FP8", "experts": "MXFP4 (modelopt)"}
    folder = write(tmp_path / "m", {}, [*plain("output", 64, 256), *plain("layers.0.experts.0.w1", 32, 256), *plain("layers.0.experts.1.w1", 32, 256)])
    (folder / "config.json").rename(folder / "consolidated.config")
    (folder / "params.json").write_text(json.dumps({"n_layers": 1, "dim": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "moe": {"num_experts_per_tok": 1}}))
    model = prediction.read(checkpoint.read(folder))
    assert (model.audit.layers, model.audit.experts, model.shape(Serving()).token) == (1, (2, 1), 2 * 2 * 64 * 2)
    with refusal("model-missing", match=r"config\.json"):
        Slimming(folder, "fp8")
