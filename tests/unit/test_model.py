"""A model by its files: headers, sound and hostile, from a folder or a hub; the audit of its modules, mixtures of formats, and the speed that follows."""

import itertools
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace
from tests.refusals import allowed, outcome, refusal
from tests.support.badserver import Listener, Say, endless, head, silent, whole
from tests.support.checkpoints import Told, write
from tests.support.mixtures import MIXTURES, Mixture
from tests.support.model_hub import COMMIT, ModelHub
from tests.unit.conftest import Cli, Mini

from sparkwright.bench.model import checkpoint, hub, modules, prediction, slim
from sparkwright.core.store import Store


def plain(name: str, rows: int, columns: int) -> list[Told]:
    return [(f"{name}.weight", "BF16", [rows, columns])]


def nvfp4(name: str, rows: int, columns: int) -> list[Told]:
    """As ModelOpt stores it: two numbers in a byte, a scale in FP8 for 16, one in FP32 for all, and one for what is multiplied."""
    return [
        (f"{name}.weight", "U8", [rows, columns // 2]), (f"{name}.weight_scale", "F8_E4M3", [rows, columns // 16]),
        (f"{name}.weight_scale_2", "F32", []), (f"{name}.input_scale", "F32", []),
    ]  # fmt: skip


def audited(folder: Path, **options: Any) -> modules.ModuleAudit:
    return modules.audit(checkpoint.read(folder), **options)


def mlp(name: str, hidden: int, inner: int) -> list[Told]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [tensor for part, (rows, columns) in shapes.items() for tensor in nvfp4(f"{name}.{part}", rows, columns)]


#: Parts of a layer with linear and with full attention.
LINEAR: tuple[tuple[Any, ...], ...] = (
    ("linear_attn.in_proj_qkvz", plain, 12288, 2048), ("linear_attn.in_proj_ba", plain, 64, 2048), ("linear_attn.out_proj", plain, 2048, 4096),
    ("linear_attn.conv1d.weight", lambda name: [(name, "BF16", [8192, 1, 4])]), ("linear_attn.A_log", lambda name: [(name, "F32", [32])]),
)  # fmt: skip
FULL: tuple[tuple[Any, ...], ...] = (
    ("self_attn.q_proj", nvfp4, 8192, 2048), ("self_attn.k_proj", nvfp4, 512, 2048), ("self_attn.v_proj", nvfp4, 512, 2048),
    ("self_attn.o_proj", nvfp4, 2048, 4096),
)  # fmt: skip


def qwen(layers: int, experts: int, taken: int, vocabulary: int) -> tuple[dict[str, Any], list[Told]]:
    """
    A hybrid of Qwen's: three layers with linear attention to one with gated attention, all with experts, hidden size 2048.

    Sizes are the public defaults of transformers' Qwen3_5MoeTextConfig (35B-A3B). Linear attention, router and output layer are plain.
    """
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": layers, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "full_attention_interval": 4, "num_experts": experts, "num_experts_per_tok": taken, "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
        },
    }  # fmt: skip
    tensors = plain("model.embed_tokens", vocabulary, 2048) + plain("lm_head", vocabulary, 2048)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, make, *shape in (*(LINEAR if (layer + 1) % 4 else FULL), ("mlp.gate", plain, experts, 2048), ("mlp.shared_expert_gate", plain, 1, 2048)):
            tensors += make(f"{name}.{part}", *shape)
        for part in ("shared_expert", *(f"experts.{number}" for number in range(experts))):
            tensors += mlp(f"{name}.mlp.{part}", 2048, 512)
    return config, tensors


# Real models' shapes.


def test_unquantised_layers_of_a_seed_report_are_in_the_table(tmp_path: Path) -> None:
    """
    Seed 003's Qwen 3.6 35B-A3B: 1440, 480, 40 and 970 MiB of BF16 in four kinds of modules, by their shapes.

    With them a token reads 3.9 GB, and its 44.32 tok/s without drafts are in the interval. The shapes are transformers' defaults of
    Qwen3.5-35B-A3B, which give the seed's table.
    """
    config, tensors = qwen(40, 256, 8, 248320)
    model = prediction.read(checkpoint.read(write(tmp_path / "m", {**config, **STATE}, tensors)))
    found, rate = model.audit, model.rate(prediction.Serving(context=200), prediction.GB10, prediction.ACCEPTANCE)
    assert rate.low < 44.32 < rate.high < 1.35 * 44.32
    rows = {row.modules: (row.count, row.bytes >> 20) for row in found.rows}

    table = {"linear_attn.in_proj_qkvz": (30, 1440), "linear_attn.out_proj": (30, 480), "mlp.gate": (40, 40), "lm_head": (1, 970)}
    assert {name: rows[name] for name in table} == table
    assert round(found.weights / 1e9, 1) == 3.9
    assert sum(row.read for row in found.rows if not row.quantised) / found.weights > 0.75


# How a module is stored.


def small(**quantization: Any) -> dict[str, Any]:
    stated = {"quantization_config": quantization} if quantization else {}
    return {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True, "num_experts_per_tok": 1, **stated}


NAME = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"


def stored(weight: str, kind: str, *shape: int, **scales: tuple[str, list[int]]) -> list[Told]:
    """Return a matrix whose tensors, by parameter, have these types and shapes."""
    return [(f"{NAME}.{weight}", kind, [*shape]), *((f"{NAME}.{name}", *scale) for name, scale in scales.items())]


GLOBAL = {"weight_global_scale": ("F32", [1]), "input_global_scale": ("F32", [1])}
#: Tensors → their scheme.
SCHEMES: dict[str, tuple[list[Told], str]] = {
    "NVFP4 of ModelOpt": (nvfp4(NAME, 64, 256), "NVFP4 (modelopt)"),
    "NVFP4 with weights alone": (nvfp4(NAME, 64, 256)[:-1], "NVFP4 (modelopt, W4A16)"),
    "NVFP4 of compressed-tensors": (
        stored("weight_packed", "U8", 64, 128, weight_scale=("F8_E4M3", [64, 16]), **GLOBAL), "NVFP4 (compressed-tensors)",
    ),
    "MXFP4": (stored("weight_packed", "U8", 64, 128, weight_scale=("U8", [64, 8])), "MXFP4 (compressed-tensors)"),
    "packed integers": (stored("weight_packed", "I32", 64, 32, weight_scale=("BF16", [64, 2])), "INT (any)"),
    "AWQ": (stored("qweight", "I32", 256, 8, qzeros=("I32", [2, 8]), scales=("F16", [2, 64])), "INT (any)"),
    "INT8": (stored("weight", "I8", 64, 256, weight_scale=("BF16", [64, 1])), "INT8"),
    "MXFP8": (stored("weight", "F8_E4M3", 64, 256, weight_scale=("U8", [64, 8])), "MXFP8 (modelopt)"),
    "FP8": (stored("weight", "F8_E4M3", 64, 256, weight_scale=("F32", [])), "FP8"),
    "FP8 in blocks": (stored("weight", "F8_E4M3", 256, 256, weight_scale_inv=("F32", [2, 2])), "FP8"),
    "MXFP4 of gpt-oss": (
        [(f"{EXPERTS}.up_blocks", "U8", [4, 64, 8, 16]), (f"{EXPERTS}.up_scales", "U8", [4, 64, 8]), (f"{EXPERTS}.up_bias", "BF16", [4, 64])],
        "MXFP4",
    ),
    "NVFP4 of experts in one tensor": (
        [(f"{EXPERTS}.down_proj", "U8", [4, 64, 128]), (f"{EXPERTS}.down_proj_weight_scale", "F8_E4M3", [4, 64, 16]),
         (f"{EXPERTS}.down_proj_weight_scale_2", "F32", [4]), (f"{EXPERTS}.down_proj_input_scale", "F32", [4])],
        "NVFP4 (modelopt)",
    ),
    "BF16": (plain(NAME, 64, 256), "BF16"),
    "NVFP4 without scales": (nvfp4(NAME, 64, 256)[:1], "packed"),
    "FP8 without a scale": (stored("weight", "F8_E4M3", 64, 256), "packed"),
    "scales of an unknown type": (stored("weight", "U8", 64, 128, weight_scale=("BF16", [64, 8])), "packed"),
    "plain numbers with scales": (stored("weight", "BF16", 64, 128, weight_scale=("BF16", [64, 8])), "packed"),
    "scales without a weight": (stored("weight_scale", "BF16", 64, 8), "packed"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "scheme"), SCHEMES.values(), ids=SCHEMES)
def test_the_tensors_of_a_matrix_tell_its_format(tmp_path: Path, tensors: list[Told], scheme: str) -> None:
    """All bytes belong to one module."""
    found = audited(write(tmp_path / "m", small(quant_method="any"), tensors))
    assert [(row.scheme, row.count, row.bytes) for row in found.rows] == [(scheme, 1, found.bytes)]


# What a token does not read.


TABLE, HEAD, WHOLE = plain("model.embed_tokens", 1000, 256), plain("lm_head", 1000, 256), 1000 * 256 * 2
#: Bytes of a matrix of a layer, and names of some.
MATRIX = 64 * 256 * 2
PARTS = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "visual.blocks.0.mlp.fc1")
KINDS = [tensor for number in range(3) for tensor in plain(f"backbone.layers.{number}.mixer.in_proj", 64, 256)]
#: What is stored → changes of the config, the tensors, and the bytes that a token reads of each group.
READS: dict[str, tuple[dict[str, Any], list[Told], dict[str, float]]] = {
    "a tied table counts whole, and an output layer that is stored nevertheless is not read": ({}, TABLE + HEAD, {"embeddings": WHOLE, "lm_head": 0}),
    "of an untied table a row is read": ({"tie_word_embeddings": False}, TABLE + HEAD, {"embeddings": 512, "lm_head": WHOLE}),
    "a table alone is tied": ({"tie_word_embeddings": None}, TABLE, {"embeddings": WHOLE}),
    "layers beyond the config's or of that name draft, and others see": (
        {}, [tensor for name in PARTS for tensor in plain(name, 64, 256)], {"layers": MATRIX, "mtp": 0, "vision": 0},
    ),
    # Nemotron-H has no number of layers; what lies beyond its kinds drafts.
    "layers by kind": ({"num_hidden_layers": None, "layers_block_type": ["linear_attention", "moe"]}, KINDS, {"layers": 2 * MATRIX, "mtp": 0}),
    "layers by letter": ({"num_hidden_layers": None, "hybrid_override_pattern": "M*"}, KINDS, {"layers": 2 * MATRIX, "mtp": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "tensors", "read"), READS.values(), ids=READS)
def test_a_token_reads_what_it_needs(changes: dict[str, Any], tensors: list[Told], read: dict[str, float], tmp_path: Path) -> None:
    stated = {field: value for field, value in {**small(), **changes}.items() if value is not None}
    found = audited(write(tmp_path / "m", stated, tensors))
    assert {group: sum(row.read for row in found.rows if row.group == group) for group in read} == read
    assert found.weights == sum(read.values())
    assert sum(row.bytes for row in found.rows) == found.bytes


CONFIGS: dict[str, dict[str, Any]] = {
    "a billion kinds of layers": {"num_hidden_layers": None, "hybrid_override_pattern": "M" * 10**6},
    "no layers": {"num_hidden_layers": None},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers that are no number": {"num_hidden_layers": "4"},
    "experts without a number taken": {"num_experts_per_tok": None},
    "more taken than there are": {"num_experts_per_tok": 5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    """Absurd and missing numbers are stated failures, not crashes, endless loops or guesses."""
    tensors = [tensor for number in range(4) for tensor in plain(f"model.layers.0.mlp.experts.{number}.up_proj", 64, 256)]
    with refusal("checkpoint-invalid"):
        audited(write(tmp_path / "m", {**small(), **CONFIGS[name]}, tensors))


FIELDS = (
    "num_hidden_layers", "num_experts", "num_experts_per_tok", "tie_word_embeddings", "model_type", "text_config", "quant_method",
    "quant_algo", "quantized_layers", "quantization", "ignore", "num_nextn_predict_layers", "vocab_size", "kv_lora_rank", "layer_types",
    "num_attention_heads", "hidden_size",
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["full_attention", "M*", "awq", "", "a.b", "modelopt", "mixed_precision"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4), max_leaves=8
)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=8), st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_any_config_gives_an_audit_or_a_reason(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    """Fields of any type, nested anyhow, give figures or one stated failure; never a crash."""
    named = [
        *plain("model.layers.0.self_attn.k_proj", 4, 8), *plain("model.embed_tokens", 4, 8),
        *nvfp4("model.layers.0.mlp.experts.1.up", 4, 16), ("model.layers.0.self_attn.v_proj.weight", "BF16", []),
        ("model.layers.0.mlp.up.qweight", "I32", [8, 4]), ("model.layers.0.mlp.up.scales", "F16", [1, 4]),
        ("model.layers.1.x.weight_packed", "I32", [4]), ("model.layers.1.x.weight_scale", "F16", []),
        ("model.layers.1.self_attn.k_proj.qweight", "I32", []), ("model.layers.1.self_attn.k_proj.scales", "F16", []),
        ("model.layers.0.mlp.experts.scale", "F32", []), ("model.layers.0.mlp.experts.down_proj", "BF16", [0]),
        ("model.layers.1.y_proj.weight", "U8", []), ("model.layers.1.y_proj.weight_scale", "F8_E4M3", []),
    ]  # fmt: skip
    tensors = {name: checkpoint.Tensor(dtype, tuple(shape), 16) for name, dtype, shape in named}
    found = checkpoint.Checkpoint({"num_hidden_layers": 2, "num_experts_per_tok": 1, "quantization_config": quantization, **config}, tensors)
    with allowed("checkpoint-invalid", "mixture-joined", "mixture-undeclared"):
        audit = modules.audit(found)
        assert 0 < audit.weights <= audit.bytes
        assert msgspec.json.decode(msgspec.json.encode(audit), type=modules.ModuleAudit) == audit
        model, serving = prediction.read(found), prediction.Serving(drafts=2)
        assert model.step(serving).total > 0
        assert all(lever.gain > 0 for lever in prediction.levers(model, serving, (0.5, 0.9), "0.33", []))


# The files.


def raw(path: Path, text: bytes, data: int, length: int | None = None) -> Path:
    """Write a file with the header *text* and room for *data* bytes; the length that it states may be a lie."""
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text) if length is None else length) + text)
        stream.truncate(8 + len(text) + data)
    return path


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def sharded(folder: Path, shards: dict[str, dict[str, Any]], index: dict[str, Any] | None = None) -> Path:
    """Write a model whose *shards* hold those tensors, each behind the one before."""
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    for name, tensors in shards.items():
        raw(folder / name, json.dumps(tensors).encode(), max(tensor["data_offsets"][1] for tensor in tensors.values()))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_a_header_gives_every_tensor_in_its_place(tmp_path: Path) -> None:
    """Types, shapes and sizes come from the header, sub-byte types among them; the order is that of the data."""
    tensors = {
        "b": entry("BF16", [3, 2], 4, 16), "a": entry("F32", [], 0, 4), "c": entry("F4", [2, 3], 16, 19), "d": entry("U8", [0, 5], 19, 19),
        "__metadata__": {"format": "pt"},
    }  # fmt: skip
    raw(tmp_path / "blob", json.dumps(tensors).encode() + b"   ", 19)
    # A link, as the cache of models has it.
    (tmp_path / "model.safetensors").symlink_to("blob")
    found = checkpoint.header(tmp_path / "model.safetensors")
    assert [(name, one.dtype, one.shape, one.bytes) for name, one in found.items()] == [
        ("a", "F32", (), 4), ("b", "BF16", (3, 2), 12), ("c", "F4", (2, 3), 3), ("d", "U8", (0, 5), 0),
    ]  # fmt: skip


GOOD = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}

HOSTILE = {
    "a length beyond the file": (GOOD, 8, 1 << 40),
    "the largest length": (GOOD, 8, (1 << 64) - 1),
    "more data than is described": (GOOD, 9, None),
    "less data than is described": (GOOD, 7, None),
    "overlapping ranges": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, None),
    "the same range twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, None),
    "a gap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, 10, None),
    "a range backwards": ({"a": entry("U8", [4], 4, 0)}, 4, None),
    "a negative range": ({"a": entry("U8", [4], -4, 0)}, 4, None),
    "another size than the shape's": ({"a": entry("BF16", [4], 0, 4)}, 4, None),
    "a shape whose product wraps around": ({"a": entry("U8", [1 << 32, 1 << 32, 4], 0, 4)}, 4, None),
    "a dimension beyond all machines": ({"a": entry("U8", [0, 1 << 62], 0, 0)}, 0, None),
    "a negative dimension": ({"a": entry("U8", [-2, -2], 0, 4)}, 4, None),
    "too many dimensions": ({"a": entry("U8", [1] * 5000, 0, 1)}, 1, None),
    "an unknown type": ({"a": entry("F3", [4], 0, 4)}, 4, None),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, 2, None),
    "a field too many": ({"a": {**entry("U8", [4], 0, 4), "url": "http://upstream.example"}}, 4, None),
    "a field too few": ({"a": {"dtype": "U8", "shape": [4]}}, 4, None),
    "a number that is no integer": ({"a": entry("U8", [4.5], 0, 4)}, 4, None),  # type: ignore[list-item]  # what a stranger may write
    "a tensor that is no object": ({"a": [1, 2, 3]}, 0, None),
}


TEXTS = {
    "no JSON": b'{"a": ',
    "no object": b"[1, 2]",
    "no text": b"\xff\xfe{}",
    "depth": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}',
    "half of a pair as a name": b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "nothing": b"",
}  # fmt: skip


FILES = {
    **{name: (json.dumps(tensors).encode(), data, length) for name, (tensors, data, length) in HOSTILE.items()},
    **{name: (text, 4, None) for name, text in TEXTS.items()},
}


@pytest.mark.parametrize("name", [*FILES, "pipe", "folder"])
def test_a_header_that_lies_or_cannot_be_read_in_one_way_is_refused(tmp_path: Path, name: str) -> None:
    """Each lie is a stated failure that names the file; depth and long numbers cost neither memory nor a crash, and what is no file is not opened."""
    path = tmp_path / "model.safetensors"
    if name in FILES:
        raw(path, *FILES[name])
    elif name == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with refusal("checkpoint-invalid", match=r"model\.safetensors"):
        checkpoint.header(path)


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HEADER", 100)
    with refusal("checkpoint-invalid", match="the format allows"):
        checkpoint.header(raw(tmp_path / "model.safetensors", json.dumps(GOOD).encode(), 8))


ONE, TWO = ({name: entry("U8", [4], 0, 4)} for name in "ab")


BOTH = {"x-1.safetensors": ONE, "x-2.safetensors": TWO}
INDEX = {"a": "x-1.safetensors", "b": "x-2.safetensors"}


def copied(size: int) -> dict[str, dict[str, Any]]:
    """Return shards of which the second holds the tensor of the first, too, with that size."""
    return {"x-1.safetensors": ONE, "x-2.safetensors": {"a": entry("U8", [size], 0, size), "b": entry("U8", [4], size, size + 4)}}


#: Shards and an index → the tensors of the model, or the reference of the refusal and what it says.
SHARDS: dict[str, tuple[dict[str, dict[str, Any]] | None, dict[str, Any] | None, str, str]] = {
    "a shard that the index does not name": ({**BOTH, "old.safetensors": {"c": entry("U8", [1], 0, 1)}}, INDEX, "", "ab"),
    "the vendor's own form": ({**BOTH, "consolidated.safetensors": {"c": entry("U8", [1], 0, 1)}}, None, "", "ab"),
    # As vLLM's loader takes them (faults.md C1).
    "a tensor in two shards": (copied(4), None, "", "ab"),
    "a tensor in two shards of an index": (copied(4), INDEX, "", "ab"),
    "a tensor in two forms": (copied(2), None, "checkpoint-invalid", "form"),
    "a tensor in two forms of an index": (copied(2), INDEX, "checkpoint-invalid", "form"),
    "a tensor elsewhere": (BOTH, {**INDEX, "b": "x-1.safetensors"}, "checkpoint-invalid", ""),
    "swapped": (BOTH, {"a": "x-2.safetensors", "b": "x-1.safetensors"}, "checkpoint-invalid", ""),
    "a tensor too many": (BOTH, {**INDEX, "c": "x-2.safetensors"}, "checkpoint-invalid", ""),
    "a name that climbs": (BOTH, {**INDEX, "a": "../m/x-1.safetensors"}, "checkpoint-invalid", ""),
    "an absolute name": (BOTH, {**INDEX, "a": "/etc/passwd"}, "checkpoint-invalid", ""),
    "a number for a name": (BOTH, {**INDEX, "a": 3}, "checkpoint-invalid", ""),
    "no shards": ({}, None, "model-missing", r"no \*\.safetensors"),
    "no shard of the index": ({}, {"a": "x-1.safetensors"}, "model-missing", r"x-1\.safetensors"),
    "no folder": (None, None, "model-missing", r"config\.json"),
}  # fmt: skip


@pytest.mark.parametrize(("shards", "index", "reference", "says"), SHARDS.values(), ids=SHARDS)
def test_a_model_has_the_shards_of_its_index_or_all_and_each_tensor_once(shards: dict[str, dict[str, Any]] | None, index: dict[str, Any] | None, reference: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "none" if shards is None else sharded(tmp_path / "m", shards, index)
    if reference:
        with refusal(reference, match=says or "."):
            checkpoint.read(folder)
    else:
        assert "".join(checkpoint.read(folder).tensors) == says


@pytest.mark.parametrize("text", [b" " * (checkpoint.CONFIG + 1), b"{", b"[]"], ids=len)
def test_a_config_that_is_huge_or_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    folder = sharded(tmp_path / "m", {"model.safetensors": GOOD})
    (folder / "config.json").write_bytes(text)
    with refusal("checkpoint-invalid"):
        checkpoint.read(folder)


@pytest.mark.parametrize("root", ["model.", "model.language_model.", "backbone."])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_refused_exactly_if_vllm_would_load_it_wrongly(tmp_path: Path, name: str, root: str) -> None:
    mixture = MIXTURES[name]
    folder = write(tmp_path / "m", mixture.config(root), mixture.tensors(root))
    with outcome(mixture.refused):
        assert modules.audit(checkpoint.read(folder)).bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a part of attention left in BF16", ["q_proj is FP8 with a scale for a row", "v_proj is not quantised"]),
        ("side layers in a checkpoint of NVFP4", ["declared as NVFP4"]),
        ("head not declared", ["lm_head is FP8", "declared as nothing"]),
        ("static FP8 without the scale of its inputs", ["o_proj is FP8", "has no input_scale"]),
    ],
)
def test_the_verb_names_the_layer_and_what_differs(mini: Mini, cli: Cli, tmp_path: Path, name: str, words: list[str]) -> None:
    folder = write(tmp_path / "m", MIXTURES[name].config("model."), MIXTURES[name].tensors("model."))
    done = cli("model", "inspect", *mini.words, folder)
    assert done.returncode == 1
    assert all(word in " ".join(done.stderr.split()) for word in (MIXTURES[name].refused, *words)), done.stderr


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({"quant_algo": None, "quantized_layers": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quantized_layers": None}, True),  # the layers are in hf_quant_config.json
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:(a+)+$"]}}}, True),
        ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}}, True),
        ({"ignore": "lm_head"}, False),
        ({"quantized_layers": {"a": 1}}, False),
        ({"quantization": [1]}, False),
    ],
)
def test_a_declaration_without_layers_is_not_guessed_at_and_an_impossible_one_is_refused(tmp_path: Path, changes: dict[str, Any], sound: bool) -> None:
    mixture = MIXTURES["experts declared as one"]
    config = mixture.config("model.")
    config["quantization_config"] |= changes
    folder = write(tmp_path / "m", config, mixture.tensors("model."))
    with outcome("" if sound else "checkpoint-invalid"):
        assert modules.audit(checkpoint.read(folder)).scheme == "NVFP4 (modelopt)"


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


STATE = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}


def of(folder: Path, config: dict[str, Any], tensors: list[Told]) -> checkpoint.Checkpoint:
    return checkpoint.read(write(folder, config, tensors))


def drafting(folder: Path) -> checkpoint.Checkpoint:
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
    step = model.step(prediction.Serving(requests=tokens, context=0))
    assert step.weights == pytest.approx(32 * 32 * 2 * sum(sizes) / len(sizes))


def test_a_step_reads_weights_cache_and_drafts(tmp_path: Path) -> None:
    """Of one request without context and drafts it is the audit's; each part by hand for four requests with two drafts."""
    source = drafting(tmp_path / "m")
    model = prediction.read(source)
    assert model.step(prediction.Serving(context=0)).weights == pytest.approx(model.audit.weights)
    rows = {(row.group, row.modules): row for row in model.audit.rows}
    step = model.step(prediction.Serving(requests=4, drafts=2, context=1000, cache="fp8", head="fp8", vocabulary=25_000))
    key, state = 2 * 2 * 256, 3 * 32 * 128 * 128 * 8
    assert step.cache == 4 * (1000 * key + state)
    experts = sum(row.bytes for (group, name), row in rows.items() if group == "mtp" and "experts" in name)
    head = 100_000 * 2048 * 2 / 4 / 2
    assert step.drafts == pytest.approx(2 * (experts * (1 - (14 / 16) ** 4) + 2048 * 4096 * 2 + head + 4 * 1000 * key))
    assert model.step(prediction.Serving(requests=4, drafts=0)).drafts == 0
    alone = model.step(prediction.Serving(requests=12, context=1000, cache="fp8")).weights
    assert step.weights == pytest.approx(alone)


def test_speed_follows_bytes_bandwidth_and_acceptance(tmp_path: Path) -> None:
    model = prediction.read(drafting(tmp_path / "m"))
    serving = prediction.Serving(drafts=2)
    rate = model.rate(serving, (200.0, 240.0), (0.5, 0.8))
    step, rows = model.step(serving).total, [row for row in model.audit.rows if row.group == "experts"]
    apart = sum(row.bytes for row in rows) * ((1 - (14 / 16) ** 3) - 2 / 16)
    assert (rate.low, rate.high) == pytest.approx((prediction.SHARE * 200e9 / step * 1.75, 240e9 / (step - apart) * 2.44))


METHODS = {"modelopt": "yes", "compressed-tensors": "yes", "awq": "no: awq has one format", None: "yes"}


@pytest.mark.parametrize("method", METHODS)
def test_levers_say_what_is_saved_and_what_loads(tmp_path: Path, method: str | None) -> None:
    """Each gain is that of a step with fewer bytes; the largest comes first."""
    source = drafting(tmp_path / "m")
    stated = source.config if method is None else {**source.config, "quantization_config": {"quant_method": method}}
    if method is None:
        stated = {name: value for name, value in stated.items() if name != "quantization_config"}
    source = checkpoint.Checkpoint(stated, source.tensors)
    found = {lever.change: lever for lever in prediction.levers(prediction.read(source), prediction.Serving(drafts=2), prediction.ACCEPTANCE, "0.33.0", [prediction.VOCABULARY_PATCH])}
    gains = [lever.gain for lever in found.values()]
    assert gains == sorted(gains, reverse=True)
    side = 3 * (12288 * 2048 + 2048 * 4096 - 4 * (12288 + 2048))
    assert found["side layers in FP8"].saved == side
    assert found["side layers in FP8"].loads.startswith(METHODS[method])
    before = prediction.read(source).step(prediction.Serving(drafts=2)).total
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
    levers = prediction.levers(model, prediction.Serving(drafts=1), prediction.ACCEPTANCE, version, [])
    loads = {lever.change: lever.loads for lever in levers}
    assert word in loads["cache in NVFP4"]
    assert loads["draft vocabulary of 32,768"] == "no: without our patch"


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
    assert (model.audit.layers, model.audit.experts, model.shape(prediction.Serving()).token) == (1, (2, 1), 2 * 2 * 64 * 2)
    with refusal("model-missing", match=r"config\.json"):
        slim.Slimming(folder, "fp8")


FIRST_SHARD, SECOND_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def models(tmp_path: Path) -> Iterator[ModelHub]:
    with ModelHub(tmp_path / "hub") as server:
        yield server


def folder(models: ModelHub, shards: int = 2) -> Path:
    """Write a model of 200 layers, whose headers are longer than the first range."""
    tensors = [tensor for layer in range(700) for part in "qkvo" for tensor in plain(f"model.layers.{layer}.self_attn.{part}_proj", 64, 256)]
    return write(models.root / "org/toy", {**small(), "num_hidden_layers": 700}, tensors, shards)


def fetched(server: ModelHub | Listener, store: Store, *, offline: bool = False, seconds: float = 20, **variables: str) -> checkpoint.Checkpoint:
    source = hub.Hub({"HF_ENDPOINT": server.url, **variables}, offline=offline, seconds=seconds)
    found = source.headers(store, "org/toy", "main")
    return checkpoint.join("org/toy", found.config, found.index, found.shards.items())


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_headers_come_without_weights_and_once(models: ModelHub, store: Store, ranges: bool) -> None:
    """The model is the one in the folder; a second time, and without the hub, the store has it."""
    local = checkpoint.read(folder(models))
    models.ranges = ranges
    assert fetched(models, store) == local
    asked = models.headers_asked
    assert sorted(set(asked)) == [FIRST_SHARD, SECOND_SHARD]
    assert len(asked) == 4
    if ranges:
        assert models.sent < 700_000 < sum(tensor.bytes for tensor in local.tensors.values())
    assert fetched(models, store) == local
    assert models.headers_asked == asked
    assert fetched(models, store, offline=True) == local
    assert fetched(models, store, HF_ENDPOINT="http://127.0.0.1:1", seconds=2) == local


def test_an_interrupted_run_goes_on_with_the_shard_that_is_missing(models: ModelHub, store: Store) -> None:
    path = folder(models)
    local, aside = checkpoint.read(path), path / "aside"
    (path / SECOND_SHARD).rename(aside)
    (path / SECOND_SHARD).write_bytes(struct.pack("<Q", 1 << 63))
    with refusal("checkpoint-invalid", match=SECOND_SHARD):
        fetched(models, store)
    aside.replace(path / SECOND_SHARD)
    models.asked.clear()
    assert fetched(models, store) == local
    assert set(models.headers_asked) == {SECOND_SHARD}


def test_a_token_goes_to_the_hub_alone(models: ModelHub, store: Store, tmp_path: Path) -> None:
    """Files are redirected to another host, which gets none, and no message shows it."""
    folder(models)
    models.token = "hf_geheim"
    with refusal("hub-refused", match="without HF_TOKEN"):
        fetched(models, store)
    with refusal("hub-refused", match="with this HF_TOKEN", hides="hf_wrong"):
        fetched(models, store, HF_TOKEN="hf_wrong")
    with ModelHub(models.root) as storage:
        models.storage = storage.url.replace("127.0.0.1", "localhost")
        assert fetched(models, store, HF_TOKEN="hf_geheim").tensors
        assert {authorization for _, authorization, _ in storage.asked} == {""}
    assert {authorization for _, authorization, _ in models.asked[2:]} == {"Bearer hf_geheim"}


STATED = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in ("config.json", "model.safetensors.index.json", FIRST_SHARD)]}


def answering(shard: bytes | Say) -> Say:
    """Return a hub whose only shard is answered by *shard*."""

    def say(connection: object, path: str) -> None:
        if path.endswith(".safetensors") and callable(shard):
            return shard(connection, path)  # type: ignore[arg-type]  # a socket
        index = {"weight_map": {"a": FIRST_SHARD}}
        reply = {"api": whole(STATED), "config.json": whole(small()), "index.json": whole(index), "safetensors": shard}
        data = next(body for name, body in reply.items() if name in path)
        connection.sendall(data)  # type: ignore[attr-defined]
        return None

    return say


def part(data: bytes, of: int | str) -> bytes:
    return head("x/y", len(data), "206 Partial Content", f"content-range: bytes 0-{len(data) - 1}/{of}") + data


FAILURES: dict[str, tuple[Say, str]] = {
    "a header of 2^63 bytes": (answering(part(struct.pack("<Q", 1 << 63), 1 << 40)), "checkpoint-invalid"),
    "a header that never comes": (answering(part(struct.pack("<Q", 90_000_000), 1 << 40)), "hub-unreachable"),
    "no length of the file": (answering(part(b"12345678", "*")), "hub-unreachable"),
    "another range": (answering(part(b"12345678", 8).replace(b"bytes 0-7", b"bytes 8-15")), "hub-unreachable"),
    "a file without end": (answering(endless(b"x" * 4096, head("x/y"))), "hub-unreachable"),
    "silence": (silent, "hub-unreachable"),
    "a redirect to itself": (lambda connection, path: connection.sendall(head(length=0, status="302 Found") [:-2] + f"location: {path}\r\n\r\n".encode()), "hub-unreachable"),
    "a page": (lambda connection, _: connection.sendall(whole(b"<html>")), "hub-unreachable"),
    "an odd commit": (lambda connection, _: connection.sendall(whole({"sha": "../../etc"})), "hub-unreachable"),
    "no model": (lambda connection, _: connection.sendall(whole({}, "404 Not Found")), "hub-missing"),
    "no safetensors": (lambda connection, _: connection.sendall(whole({"sha": COMMIT, "siblings": [{"rfilename": "x.gguf"}]})), "model-missing"),
    "a shard that is not there": (answering(whole({}, "404 Not Found")), "hub-missing"),
}  # fmt: skip


@pytest.mark.parametrize(("say", "reference"), FAILURES.values(), ids=FAILURES)
def test_a_hub_that_fails_or_lies_is_refused_in_time(say: Say, reference: str, store: Store, listen: Callable[[Say], Listener]) -> None:
    with refusal(reference):
        fetched(listen(say), store, seconds=2)


# The verb.


def test_the_verb_predicts_a_model_that_is_not_here(models: ModelHub, mini: Mini, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, by the file that it saved, and by the folder: one document."""
    path = write(models.root / "org/toy", *qwen(4, 16, 2, 1000), 3)
    monkeypatch.setenv("HF_ENDPOINT", models.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    saved = tmp_path / "toy.headers"
    shown = cli("model", "inspect", *mini.words, "--json", "--save", saved, "org/toy")
    documents = [json.loads(cli("model", "inspect", *mini.words, "--json", where).stdout) for where in ("org/toy", saved, path)]
    assert documents == [json.loads(shown.stdout)] * 3
    lines = cli("model", "inspect", *mini.words, saved).stdout.splitlines()
    assert max(map(len, lines)) <= 100
