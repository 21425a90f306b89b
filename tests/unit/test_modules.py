"""A model by its files: headers, sound and hostile, and the module audit, on sparse files of real models' shapes without a weight."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import allowed, refusal
from tests.support.checkpoints import Told, write

from sparkwright.bench.model import checkpoint, modules, prediction
from sparkwright.bench.model.checkpoint import Tensor
from sparkwright.bench.model.modules import ModuleAudit


def plain(name: str, rows: int, columns: int) -> list[Told]:
    return [(f"{name}.weight", "BF16", [rows, columns])]


def nvfp4(name: str, rows: int, columns: int) -> list[Told]:
    """As ModelOpt stores it: two numbers in a byte, a scale in FP8 for 16, one in FP32 for all, and one for what is multiplied."""
    return [
        (f"{name}.weight", "U8", [rows, columns // 2]), (f"{name}.weight_scale", "F8_E4M3", [rows, columns // 16]),
        (f"{name}.weight_scale_2", "F32", []), (f"{name}.input_scale", "F32", []),
    ]  # fmt: skip


def audited(folder: Path, **options: Any) -> ModuleAudit:
    return modules.audit(checkpoint.read(folder), **options)


def by_group(audit: ModuleAudit, what: str = "read") -> dict[str, float]:
    groups = {row.group for row in audit.rows}
    return {group: sum(getattr(row, what) for row in audit.rows if row.group == group) for group in groups}


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

    With them a token reads 3.9 GB. The shapes are transformers' defaults of Qwen3.5-35B-A3B, which give the seed's table.
    """
    found = audited(write(tmp_path / "m", *qwen(40, 256, 8, 248320)))
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


@pytest.mark.parametrize("name", SCHEMES)
def test_the_tensors_of_a_matrix_tell_its_format(tmp_path: Path, name: str) -> None:
    """All bytes belong to one module."""
    tensors, scheme = SCHEMES[name]
    found = audited(write(tmp_path / "m", small(quant_method="any"), tensors))
    assert [(row.scheme, row.count, row.bytes) for row in found.rows] == [(scheme, 1, found.bytes)]


# What a token does not read.


TABLE, HEAD, WHOLE = plain("model.embed_tokens", 1000, 256), plain("lm_head", 1000, 256), 1000 * 256 * 2


@pytest.mark.parametrize(
    ("config", "tensors", "read"),
    [({}, TABLE + HEAD, WHOLE), ({"tie_word_embeddings": False}, TABLE + HEAD, WHOLE + 512), ({"tie_word_embeddings": None}, TABLE, WHOLE)],
)
def test_tied_embeddings_are_read_as_the_output_layer(config: dict[str, Any], tensors: list[Told], read: int, tmp_path: Path) -> None:
    """The table counts whole; an output layer that is stored nevertheless is not read; untied, a row of the table is."""
    stated = {name: value for name, value in {**small(), **config}.items() if value is not None}
    assert audited(write(tmp_path / "m", stated, tensors)).weights == read


def test_parts_that_see_and_layers_that_draft_are_told_apart(tmp_path: Path) -> None:
    """They are stored and not read; drafting layers are those beyond the config's, or of that name."""
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "visual.blocks.0.mlp.fc1"]
    folder = write(tmp_path / "m", small(), [tensor for name in names for tensor in plain(name, 64, 256)])
    found = audited(folder)
    assert by_group(found) == {"layers": 64 * 256 * 2, "mtp": 0, "vision": 0}
    assert by_group(found, "bytes")["mtp"] == 2 * 64 * 256 * 2


@pytest.mark.parametrize("kinds", [{"layers_block_type": ["linear_attention", "moe"]}, {"hybrid_override_pattern": "M*"}])
def test_layers_may_be_stated_by_kind_alone(tmp_path: Path, kinds: dict[str, Any]) -> None:
    """Nemotron-H has no number of layers; what lies beyond its kinds drafts."""
    tensors = [tensor for number in range(3) for tensor in plain(f"backbone.layers.{number}.mixer.in_proj", 64, 256)]
    found = audited(write(tmp_path / "m", {**small(), "num_hidden_layers": None, **kinds}, tensors))
    assert by_group(found) == {"layers": 2 * 64 * 256 * 2, "mtp": 0}


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
    tensors = {name: Tensor(dtype, tuple(shape), 16) for name, dtype, shape in named}
    found = checkpoint.Checkpoint({"num_hidden_layers": 2, "num_experts_per_tok": 1, "quantization_config": quantization, **config}, tensors)
    with allowed("checkpoint-invalid", "mixture-joined", "mixture-undeclared"):
        audit = modules.audit(found)
        assert 0 < audit.weights <= audit.bytes
        assert msgspec.json.decode(msgspec.json.encode(audit), type=ModuleAudit) == audit
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


@pytest.mark.parametrize("name", FILES)
def test_a_header_that_lies_or_cannot_be_read_in_one_way_is_refused(tmp_path: Path, name: str) -> None:
    """Each lie is a stated failure that names the file; depth and long numbers cost neither memory nor a crash."""
    with refusal("checkpoint-invalid", match=r"model\.safetensors"):
        checkpoint.header(raw(tmp_path / "model.safetensors", *FILES[name]))


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HEADER", 100)
    with refusal("checkpoint-invalid", match="the format allows"):
        checkpoint.header(raw(tmp_path / "model.safetensors", json.dumps(GOOD).encode(), 8))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\0" * 7)], ids=["pipe", "folder", "short"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "model.safetensors")
    with refusal("checkpoint-invalid"):
        checkpoint.header(tmp_path / "model.safetensors")


ONE, TWO = ({name: entry("U8", [4], 0, 4)} for name in "ab")


@pytest.mark.parametrize(
    ("index", "other"), [({"a": "x-1.safetensors", "b": "x-2.safetensors"}, "old"), (None, "consolidated")], ids=["index", "no index"]
)
def test_shards_are_those_of_the_index_or_all(tmp_path: Path, index: dict[str, Any] | None, other: str) -> None:
    """A shard that the index does not name is none of the model's; without an index, files in the vendor's own form are left out."""
    shards = {"x-1.safetensors": ONE, "x-2.safetensors": TWO, f"{other}.safetensors": {"c": entry("U8", [1], 0, 1)}}
    assert set(checkpoint.read(sharded(tmp_path / "m", shards, index)).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "index",
    [
        {"a": "x-1.safetensors", "b": "x-1.safetensors"},
        {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"},
        {"a": "../m/x-1.safetensors", "b": "x-2.safetensors"},
        {"a": "/etc/passwd", "b": "x-2.safetensors"},
        {"a": 3, "b": "x-2.safetensors"},
        {"a": "x-2.safetensors", "b": "x-1.safetensors"},
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    """A tensor elsewhere, one too many, and names that leave the folder."""
    shards = {"x-1.safetensors": ONE, "x-2.safetensors": TWO}
    with refusal("checkpoint-invalid"):
        checkpoint.read(sharded(tmp_path / "m", shards, index))


@pytest.mark.parametrize("index", [{"a": "x-1.safetensors", "b": "x-2.safetensors"}, None])
@pytest.mark.parametrize("size", [4, 2])
def test_a_tensor_in_two_shards_counts_once_if_both_have_one_form(tmp_path: Path, index: dict[str, str] | None, size: int) -> None:
    """As vLLM's loader takes them (faults.md C1)."""
    copy = {"a": entry("U8", [size], 0, size), "b": entry("U8", [4], size, size + 4)}
    folder = sharded(tmp_path / "m", {"x-1.safetensors": ONE, "x-2.safetensors": copy}, index)
    if size == 4:
        assert [tensor.bytes for tensor in checkpoint.read(folder).tensors.values()] == [4, 4]
    else:
        with refusal("checkpoint-invalid", match="form"):
            checkpoint.read(folder)


@pytest.mark.parametrize(
    ("shards", "index", "message"),
    [({}, None, r"no \*\.safetensors"), ({}, {"a": "x-1.safetensors"}, r"x-1\.safetensors"), (None, None, r"config\.json")],
)
def test_what_is_missing_is_said_to_be_missing(
    tmp_path: Path, shards: dict[str, Any] | None, index: dict[str, Any] | None, message: str
) -> None:
    """No shards, a shard of the index that is not there, and no folder."""
    folder = tmp_path / "none" if shards is None else sharded(tmp_path / "m", shards, index)
    with refusal("model-missing", match=message):
        checkpoint.read(folder)


@pytest.mark.parametrize("text", [b" " * (checkpoint.CONFIG + 1), b"{", b"[]"], ids=len)
def test_a_config_that_is_huge_or_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    folder = sharded(tmp_path / "m", {"model.safetensors": GOOD})
    (folder / "config.json").write_bytes(text)
    with refusal("checkpoint-invalid"):
        checkpoint.read(folder)
