"""The module audit, on checkpoints of real models' shapes: sparse files with true headers, of which no weight is there."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import allowed, refusal

from sparkwright.bench.model import checkpoint, modules, quantisation
from sparkwright.bench.model.checkpoint import BITS, Tensor
from sparkwright.bench.model.decode_bytes import (
    GB10,
    ceiling,
    distinct_experts,
)
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import preflight

if TYPE_CHECKING:
    from tests.unit.conftest import Cli, Mini

#: A tensor: name, type, shape.
Told = tuple[str, str, list[int]]
#: Makes the tensors of a matrix with so many rows and columns.
Store = Callable[[str, int, int], list[Told]]


def plain(name: str, rows: int, columns: int) -> list[Told]:
    return [(f"{name}.weight", "BF16", [rows, columns])]


def nvfp4(name: str, rows: int, columns: int) -> list[Told]:
    """As ModelOpt stores it: two numbers in a byte, a scale in FP8 for 16, one in FP32 for all, and one for what is multiplied."""
    return [
        (f"{name}.weight", "U8", [rows, columns // 2]), (f"{name}.weight_scale", "F8_E4M3", [rows, columns // 16]),
        (f"{name}.weight_scale_2", "F32", []), (f"{name}.input_scale", "F32", []),
    ]  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: Iterable[Told], shards: int = 1) -> Path:
    """Write a model; the data of its shards is a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    listed = list(tensors)
    for number in range(shards):
        entries, place = {}, 0
        for name, dtype, shape in listed[number::shards]:
            bits = BITS[dtype]
            for one in shape:
                bits *= one
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + bits // 8]}
            place += bits // 8
        header = json.dumps(entries).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + place)
    return folder


def audited(folder: Path, **options: Any) -> ModuleAudit:
    return modules.audit(checkpoint.read(folder), **options)


def by_group(found: ModuleAudit, what: str = "read") -> dict[str, float]:
    groups: dict[str, float] = {}
    for row in found.rows:
        groups[row.group] = groups.get(row.group, 0.0) + getattr(row, what)
    return groups


def mlp(name: str, hidden: int, inner: int, store: Store) -> list[Told]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [tensor for part, (rows, columns) in shapes.items() for tensor in store(f"{name}.{part}", rows, columns)]


def attention(name: str, hidden: int, rows: tuple[int, int, int], store: Store) -> list[Told]:
    """The four projections: rows of q (with a gate where there is one), of k and v each, and columns of o."""
    q, kv, o = rows
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, o)}
    return [tensor for part, (height, width) in shapes.items() for tensor in store(f"{name}.{part}", height, width)]


def llama_70b() -> tuple[dict[str, Any], list[Told]]:
    """Llama-3.3-70B-Instruct in NVFP4, by its public config: all projections quantised, the output layer and the table not."""
    config = {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    }  # fmt: skip
    tensors = plain("model.embed_tokens", 128256, 8192) + plain("lm_head", 128256, 8192) + [("model.norm.weight", "BF16", [8192])]
    for layer in range(80):
        name = f"model.layers.{layer}"
        tensors += attention(f"{name}.self_attn", 8192, (8192, 1024, 8192), nvfp4) + mlp(f"{name}.mlp", 8192, 28672, nvfp4)
        tensors += [(f"{name}.{norm}.weight", "BF16", [8192]) for norm in ("input_layernorm", "post_attention_layernorm")]
    return config, tensors


def qwen(layers: int, experts: int, taken: int, vocabulary: int, *, rest: Store, joined: bool) -> tuple[dict[str, Any], list[Told]]:
    """
    A hybrid of Qwen's: three layers with linear attention to one with gated attention, all with experts, hidden size 2048.

    Sizes are the public defaults of transformers' Qwen3NextConfig (80B-A3B) and Qwen3_5MoeTextConfig (35B-A3B).

    Args:
        rest: How attention and shared experts are stored; routed experts are NVFP4, linear attention, router and output layer plain.
        joined: Linear attention's projections are one matrix.
    """
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": layers, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "full_attention_interval": 4, "num_experts": experts, "num_experts_per_tok": taken, "tie_word_embeddings": False,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            "ignore": ["lm_head", "re:.*linear_attn.*", "re:.*mlp\\.gate$", "re:.*shared_expert_gate$"]
            + (["re:.*self_attn.*", "re:.*shared_expert\\..*"] if rest is plain else []),
        },
    }  # fmt: skip
    tensors = plain("model.embed_tokens", vocabulary, 2048) + plain("lm_head", vocabulary, 2048)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        if (layer + 1) % 4:
            parts = (
                {"in_proj_qkvz": 12288, "in_proj_ba": 64}
                if joined
                else {"in_proj_qkv": 8192, "in_proj_z": 4096, "in_proj_b": 32, "in_proj_a": 32}
            )
            for part, rows in parts.items():
                tensors += plain(f"{name}.linear_attn.{part}", rows, 2048)
            tensors += plain(f"{name}.linear_attn.out_proj", 2048, 4096)
            tensors += [(f"{name}.linear_attn.conv1d.weight", "BF16", [8192, 1, 4]), (f"{name}.linear_attn.A_log", "F32", [32])]
        else:
            tensors += attention(f"{name}.self_attn", 2048, (8192, 512, 4096), rest)
        tensors += plain(f"{name}.mlp.gate", experts, 2048) + plain(f"{name}.mlp.shared_expert_gate", 1, 2048)
        tensors += mlp(f"{name}.mlp.shared_expert", 2048, 512, rest)
        for expert in range(experts):
            tensors += mlp(f"{name}.mlp.experts.{expert}", 2048, 512, nvfp4)
    return config, tensors


# Real models' shapes.


def test_llama_70b_in_nvfp4_reads_what_others_computed(tmp_path: Path) -> None:
    """40.61 GB for a token, 6.72 tokens per second at 273 GB/s (gates.md §2.2); nothing is found that should not be."""
    found = audited(write(tmp_path / "m", *llama_70b(), shards=3))

    assert round(found.weights / 1e9, 2) == 40.61
    assert round(ceiling(found.step, 1, GB10).request, 2) == 6.72
    assert found.findings == ()
    assert {row.scheme for row in found.rows} == {"BF16", "NVFP4 (modelopt)"}
    assert found.token_bytes == 80 * 2 * 8 * 128 * 2
    (head,) = [row for row in found.rows if row.group == "lm_head"]
    assert (head.intention, head.quantised, head.read) == ("ignore", False, 128256 * 8192 * 2)


def test_the_seeds_table_of_unquantised_layers_is_found_again(tmp_path: Path) -> None:
    """
    Seed 003's Qwen 3.6 35B-A3B: 1440, 480, 40 and 970 MiB of BF16 in four kinds of modules, by their shapes.

    With them a token reads 3.9 GB, not the 4.6 GB of gates.md §2.2: the seed's 1.7 GB of NVFP4 takes all 3 billion active weights for
    packed, although those in BF16 are among them. The shapes are transformers' defaults of Qwen3.5-35B-A3B, which give the seed's table.
    """
    found = audited(write(tmp_path / "m", *qwen(40, 256, 8, 248320, rest=nvfp4, joined=True)))
    rows = {row.modules: row for row in found.rows}

    table = {"linear_attn.in_proj_qkvz": (30, 1440), "linear_attn.out_proj": (30, 480), "mlp.gate": (40, 40), "lm_head": (1, 970)}
    assert {name: (rows[name].count, rows[name].bytes >> 20) for name in table} == table
    assert {rows[name].intention for name in table} == {"ignore"}
    assert found.findings == ()
    assert round(found.weights / 1e9, 1) == 3.9
    unquantised = sum(row.read for row in found.rows if not row.quantised)
    assert unquantised / found.weights > 0.75


def test_a_batch_reads_more_experts_and_shares_the_rest(tmp_path: Path) -> None:
    """Experts grow by the expected number of distinct ones, everything else is read once, and contexts are read for each request."""
    folder = write(tmp_path / "m", *qwen(4, 16, 2, 1000, rest=nvfp4, joined=False))
    alone, found = audited(folder, context=1000), audited(folder, batch=8, context=1000)
    one, many = by_group(alone), by_group(found)

    assert many["experts"] == pytest.approx(one["experts"] / 2 * distinct_experts(16, 2, 8))
    assert {group for group in one if many[group] != one[group]} == {"experts", "embeddings"}
    assert many["embeddings"] == 8 * one["embeddings"] == 8 * 2048 * 2
    assert found.cache == 8 * alone.cache
    state = 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert alone.cache == 1000 * 2 * 2 * 256 * 2 + 2 * 3 * state


# How a module is stored.


def small(**quantization: Any) -> dict[str, Any]:
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 256, "tie_word_embeddings": True}
    return {**config, **({"quantization_config": quantization} if quantization else {})}


NAME = "model.layers.0.mlp.up_proj"
SCHEMES: dict[str, tuple[str, list[Told]]] = {
    "NVFP4 of ModelOpt": ("NVFP4 (modelopt)", nvfp4(NAME, 64, 256)),
    "NVFP4 without scales of what is multiplied": ("NVFP4 (modelopt, W4A16)", nvfp4(NAME, 64, 256)[:-1]),
    "NVFP4 of compressed-tensors": (
        "NVFP4 (compressed-tensors)",
        [
            (f"{NAME}.weight_packed", "U8", [64, 128]),
            (f"{NAME}.weight_scale", "F8_E4M3", [64, 16]),
            (f"{NAME}.weight_global_scale", "F32", [1]),
            (f"{NAME}.input_global_scale", "F32", [1]),
        ],
    ),
    "MXFP4 of compressed-tensors": (
        "MXFP4 (compressed-tensors)",
        [(f"{NAME}.weight_packed", "U8", [64, 128]), (f"{NAME}.weight_scale", "U8", [64, 8])],
    ),
    "integers of compressed-tensors": (
        "INT4 (compressed-tensors)",
        [(f"{NAME}.weight_packed", "I32", [64, 32]), (f"{NAME}.weight_scale", "BF16", [64, 2]), (f"{NAME}.weight_shape", "I64", [2])],
    ),
    "AWQ": ("INT4 (awq)", [(f"{NAME}.qweight", "I32", [256, 8]), (f"{NAME}.qzeros", "I32", [2, 8]), (f"{NAME}.scales", "F16", [2, 64])]),
    "GPTQ": (
        "INT4 (gptq)",
        [(f"{NAME}.qweight", "I32", [32, 64]), (f"{NAME}.qzeros", "I32", [2, 8]), (f"{NAME}.scales", "F16", [2, 64])],
    ),
    "INT8": ("INT8", [(f"{NAME}.weight", "I8", [64, 256]), (f"{NAME}.weight_scale", "BF16", [64, 1])]),
    "MXFP8": ("MXFP8", [(f"{NAME}.weight", "F8_E4M3", [64, 256]), (f"{NAME}.weight_scale", "U8", [64, 8])]),
    "FP8": ("FP8", [(f"{NAME}.weight", "F8_E4M3", [64, 256]), (f"{NAME}.weight_scale", "F32", [])]),
    "FP8 by rows": ("FP8", [(f"{NAME}.weight", "F8_E4M3", [64, 256]), (f"{NAME}.weight_scale", "BF16", [64, 1])]),
    "FP8 in blocks": ("FP8 in blocks", [(f"{NAME}.weight", "F8_E4M3", [256, 256]), (f"{NAME}.weight_scale_inv", "F32", [2, 2])]),
    "MXFP4 of gpt-oss": (
        "MXFP4",
        [
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", [4, 64, 8, 16]),
            ("model.layers.0.mlp.experts.gate_up_proj_scales", "U8", [4, 64, 8]),
            ("model.layers.0.mlp.experts.gate_up_proj_bias", "BF16", [4, 64]),
        ],
    ),
    "NVFP4 of experts in one tensor": (
        "NVFP4 (modelopt)",
        [
            ("model.layers.0.mlp.experts.down_proj", "U8", [4, 64, 128]),
            ("model.layers.0.mlp.experts.down_proj_weight_scale", "F8_E4M3", [4, 64, 16]),
            ("model.layers.0.mlp.experts.down_proj_weight_scale_2", "F32", [4]),
            ("model.layers.0.mlp.experts.down_proj_input_scale", "F32", [4]),
        ],
    ),
    "BF16": ("BF16", plain(NAME, 64, 256)),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_each_way_to_store_a_matrix_is_known(tmp_path: Path, name: str) -> None:
    """The scheme is that of the tensors, all bytes belong to one module, and nothing about it is wrong."""
    scheme, tensors = SCHEMES[name]
    config = (
        small(quant_method=scheme.partition("(")[2][:-1] or "any", config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}})
        if scheme != "BF16"
        else small()
    )
    found = audited(write(tmp_path / "m", {**config, "num_experts_per_tok": 1}, tensors))

    (row,) = found.rows
    assert (row.scheme, row.count, row.bytes, found.findings) == (scheme, 1, found.bytes, ())


BROKEN: dict[str, tuple[Any, ...]] = {
    "NVFP4 without scales": (nvfp4(NAME, 64, 256)[:1], "scale-missing"),
    "NVFP4 without the scale of all": (nvfp4(NAME, 64, 256)[:2], "scale-missing"),
    "NVFP4 with a column of scales too few": (
        [*nvfp4(NAME, 64, 256)[:1], (f"{NAME}.weight_scale", "F8_E4M3", [64, 15]), *nvfp4(NAME, 64, 256)[2:]],
        "scale-shape",
    ),
    "FP8 without a scale": ([(f"{NAME}.weight", "F8_E4M3", [64, 256])], "scale-missing"),
    "AWQ without scales": ([(f"{NAME}.qweight", "I32", [256, 8])], "scale-missing"),
    "AWQ with scales of another matrix": ([(f"{NAME}.qweight", "I32", [256, 8]), (f"{NAME}.scales", "F16", [2, 80])], "scale-shape"),
    "AWQ whose config states no bits": (
        [(f"{NAME}.qweight", "I32", [256, 8]), (f"{NAME}.scales", "F16", [2, 80])],
        "scale-shape",
        {"bits": None},
    ),
    "GPTQ with scales of another matrix": (
        [(f"{NAME}.qweight", "I32", [32, 64]), (f"{NAME}.scales", "F16", [2, 80])],
        "scale-shape",
        {"quant_method": "gptq"},
    ),
    "packed integers with scales of other rows": (
        [(f"{NAME}.weight_packed", "I32", [64, 32]), (f"{NAME}.weight_scale", "BF16", [60, 2])],
        "scale-shape",
        {"quant_method": "compressed-tensors"},
    ),
    "integers of an unknown method": (
        [(f"{NAME}.qweight", "I32", [256, 8]), (f"{NAME}.scales", "F16", [2, 64])],
        "format-unknown",
        {"quant_method": "hqq"},
    ),
    "AWQ of three bits": (
        [(f"{NAME}.qweight", "I32", [256, 6]), (f"{NAME}.scales", "F16", [2, 64])],
        "format-unknown",
        {"bits": 3},
    ),
    "bytes with scales of an unknown type": (
        [(f"{NAME}.weight", "U8", [64, 128]), (f"{NAME}.weight_scale", "BF16", [64, 8])],
        "format-unknown",
    ),
    "plain numbers with scales": (
        [(f"{NAME}.weight", "BF16", [64, 128]), (f"{NAME}.weight_scale", "BF16", [64, 8])],
        "format-unknown",
    ),
    "scales without a weight": (
        [(f"{NAME}.weight_scale", "BF16", [64, 8]), *plain("model.layers.0.mlp.gate", 4, 256)],
        "format-unknown",
    ),
    "MXFP8 with a column of scales too few": (
        [(f"{NAME}.weight", "F8_E4M3", [64, 256]), (f"{NAME}.weight_scale", "U8", [64, 7])],
        "scale-shape",
    ),
    "MXFP4 with a column of scales too few": (
        [(f"{NAME}.weight_packed", "U8", [64, 128]), (f"{NAME}.weight_scale", "U8", [64, 7])],
        "scale-shape",
    ),
    "blocks with scales of another matrix": (
        [
            ("model.layers.0.mlp.experts.up_blocks", "U8", [4, 64, 8, 16]),
            ("model.layers.0.mlp.experts.up_scales", "U8", [4, 64, 9]),
        ],
        "scale-shape",
    ),
    "blocks without scales": ([("model.layers.0.mlp.experts.up_blocks", "U8", [4, 64, 8, 16])], "scale-missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_packed_weight_whose_scales_do_not_belong_to_it_is_found(tmp_path: Path, name: str) -> None:
    """Its values would be garbage, and no server can tell."""
    tensors, reference, *method = BROKEN[name]
    config = small(**{"quant_method": "awq", "bits": 4, **(method[0] if method else {})})
    found = audited(write(tmp_path / "m", {**config, "num_experts_per_tok": 1}, tensors))

    assert [one.reference for one in found.findings] == [reference]
    assert reference in modules.REASONS


# What the config says of it.


def test_a_layer_that_nobody_ignored_and_nobody_quantised_is_found(tmp_path: Path) -> None:
    """One plain projection among packed ones is named with its size; the same one, ignored by the config, is only said."""
    tensors = nvfp4("model.layers.0.mlp.up_proj", 64, 256) + plain("model.layers.0.mlp.down_proj", 256, 64)
    folder = write(tmp_path / "m", small(quant_method="modelopt", ignore=[]), tensors)
    (finding,) = audited(folder).findings
    assert (finding.reference, "mlp.down_proj" in finding.message) == ("unquantised-not-ignored", True)
    for number, (config, reference) in enumerate(
        [
            (small(quant_method="modelopt", ignore=["*mlp.down_proj"]), ""),
            (small(quant_method="modelopt", ignore=["*_proj"]), "quantised-though-ignored"),
            (small(), "quantisation-not-declared"),
        ]
    ):
        findings = audited(write(tmp_path / str(number), config, tensors)).findings
        assert [finding.reference for finding in findings] == ([reference] if reference else [])


@pytest.mark.parametrize(
    ("quantization", "ignored"),
    [
        ({"quant_method": "modelopt", "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]}, True),
        ({"quant_method": "modelopt", "ignore": ["self_attn"]}, True),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.up_proj": {}}}, True),
        ({"quant_method": "modelopt", "quantized_layers": {"model.layers.0.self_attn.q_proj": {}}}, False),
        ({"quant_method": "awq", "modules_to_not_convert": ["q_proj"]}, True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["q_proj"]}, False),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]}, True),
        ({"quant_method": "fp8", "ignored_layers": ["model.language_model.layers.0.self_attn"]}, True),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"]}, True),
        ({"quant_method": "compressed-tensors", "ignore": ["re:self_attn.*"]}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*mlp.*"]}}}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}, "ignore": [3, None]}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}, "ignore": "lm_head"}, False),
    ],
)
def test_each_method_says_in_its_own_way_what_it_leaves_out(tmp_path: Path, quantization: dict[str, Any], ignored: bool) -> None:
    """Whole names, parts of names, wildcards, expressions, and lists of what is quantised instead."""
    folder = write(tmp_path / "m", small(**quantization), plain("model.layers.0.self_attn.q_proj", 256, 256))

    (row,) = audited(folder).rows
    assert (row.intention == "ignore") is ignored


def test_the_router_is_never_quantised_and_no_finding(tmp_path: Path) -> None:
    """Servers keep it plain whatever the config says; AWQ and its like also leave the output layer."""
    tensors = plain("model.layers.0.mlp.gate", 4, 256) + plain("lm_head", 256, 256)
    for number in range(4):
        tensors += nvfp4(f"model.layers.0.mlp.experts.{number}.up_proj", 64, 256)
    config = {**small(quant_method="awq"), "num_experts_per_tok": 2, "tie_word_embeddings": False}
    found = audited(write(tmp_path / "m", config, tensors))

    assert found.findings == ()
    assert {row.group: row.intention for row in found.rows} == {
        "router": "left by the method",
        "lm_head": "left by the method",
        "experts": "quantise",
    }


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:(", "re:" + "a" * 1000])
def test_expressions_of_strangers_are_bounded(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs for ever, one that is none, and one that is endless end the audit with a reason."""
    monkeypatch.setattr(quantisation, "REGEX_SECONDS", 3.0)
    folder = write(tmp_path / "m", small(quant_method="any", ignore=[pattern]), plain(f"{'a' * 60}!.q_proj", 256, 256))

    with refusal("checkpoint-invalid", match=r"expressions|patterns"):
        audited(folder)


# What a token does not read.


def test_tied_embeddings_are_read_as_the_output_layer(tmp_path: Path) -> None:
    """The table counts whole; an output layer that is stored nevertheless is not read; untied, a row of the table is."""
    table, head = plain("model.embed_tokens", 1000, 256), plain("lm_head", 1000, 256)
    whole, row = 1000 * 256 * 2, 256 * 2
    for tied, tensors, read in (
        (True, table, whole),
        (True, table + head, whole),
        (False, table + head, whole + row),
        (None, table, whole),
    ):
        found = audited(write(tmp_path / f"{tied}{len(tensors)}", {**small(), "tie_word_embeddings": tied}, tensors))
        assert found.weights == read


def test_parts_that_see_and_layers_that_draft_are_told_apart(tmp_path: Path) -> None:
    """They are stored and not read; drafting layers are those beyond the config's, or of that name."""
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "visual.blocks.0.mlp.fc1"]
    found = audited(write(tmp_path / "m", small(), [tensor for name in names for tensor in plain(name, 64, 256)]))

    assert by_group(found) == {"mlp": 64 * 256 * 2, "mtp": 0, "vision": 0}
    assert by_group(found, "bytes")["mtp"] == 2 * 64 * 256 * 2
    assert [note.partition(":")[0] for note in found.notes if "not read" in note] == ["mtp", "vision"]


@pytest.mark.parametrize(
    ("config", "kept", "read"),
    [
        ({}, 4 * 2 * 2 * 128 * 2, 4 * 2 * 2 * 128 * 2 * 1000),
        ({"num_key_value_heads": 1}, 4 * 2 * 128 * 2, 4 * 2 * 128 * 2 * 1000),
        ({"num_key_value_heads": 1, "head_dim": 64}, 4 * 2 * 64 * 2, 4 * 2 * 64 * 2 * 1000),
        ({"sliding_window": 100}, 4 * 2 * 2 * 128 * 2, 4 * 2 * 2 * 128 * 2 * 100),
        ({"sliding_window": 100, "use_sliding_window": False}, 4 * 2 * 2 * 128 * 2, 4 * 2 * 2 * 128 * 2 * 1000),
        (
            {"sliding_window": 100, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            4 * 2 * 2 * 128 * 2,
            2 * 2 * 128 * 2 * 1300,
        ),
        ({"sliding_window": 100, "sliding_window_pattern": 2}, 4 * 2 * 2 * 128 * 2, 2 * 2 * 2 * 128 * 2 * 1100),
        (
            {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
            4 * 2 * 2 * 128 * 2,
            2 * 2 * 128 * 2 * 3100,
        ),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, 2 * 2 * 128 * 2, 2 * 2 * 128 * 2 * 1000),
        (
            {
                "layers_block_type": ["mamba", "mamba", "mamba", "attention"],
                "mamba_n_heads": 4,
                "mamba_d_head": 8,
                "mamba_d_state": 16,
                "mamba_n_groups": 2,
                "mamba_d_conv": 4,
            },
            2 * 2 * 128 * 2,
            2 * 2 * 128 * 2 * 1000 + 2 * 3 * (4 * 8 * 16 + (4 * 8 + 2 * 2 * 16) * 3) * 2,
        ),
        ({"text_config": {"num_key_value_heads": 1}, "num_key_value_heads": 2}, 4 * 2 * 128 * 2, 4 * 2 * 128 * 2 * 1000),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 4 * 576 * 2, 4 * 576 * 2 * 1000),
        ({"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}, 4 * 2 * 2 * 128, 4 * 2 * 2 * 128 * 1000),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, 4 * 2 * 2 * 128, 4 * 2 * 2 * 128 * 1000),
        (
            {
                "hybrid_override_pattern": "M*-E",
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 16,
                "n_groups": 2,
                "conv_kernel": 4,
                "mamba_ssm_dtype": "float32",
            },
            2 * 2 * 128 * 2,
            2 * 2 * 128 * 2 * 1000 + 2 * (4 * 8 * 16 * 4 + (4 * 8 + 2 * 2 * 16) * 3 * 2),
        ),
    ],
)
def test_what_attention_keeps_follows_the_config(tmp_path: Path, config: dict[str, Any], kept: int, read: int) -> None:
    """Heads, windows, latent vectors, states of Mamba-2, and a cache in FP8: bytes of a token, and bytes that a step moves for 1000."""
    folder = write(tmp_path / "m", {**small(), "num_hidden_layers": 4, **config}, plain("model.embed_tokens", 8, 256))
    found = audited(folder, context=1000)

    assert (found.token_bytes, found.cache) == (kept, read)


def test_context_that_the_config_states_in_an_unknown_way_is_said_to_be_unknown(tmp_path: Path) -> None:
    config = {**small(), "layer_group_size": 4}
    folder = write(tmp_path / "m", config, plain("model.embed_tokens", 8, 256))
    assert "layer_group_size of config.json is not understood" in audited(folder).notes[0]
    assert preflight.checkpoint_size(folder).token == 0
    plain_folder = write(tmp_path / "known", small(), plain("model.embed_tokens", 8, 256))
    assert preflight.checkpoint_size(plain_folder).token == 2 * 2 * 128 * 2


def test_keys_that_are_wider_than_the_config_says_are_believed(tmp_path: Path) -> None:
    """The projection's rows are a fact; the disagreement is said; the caller's type of the cache overrides the checkpoint's."""
    tensors = [tensor for part in "kv" for tensor in plain(f"model.layers.0.self_attn.{part}_proj", 512, 256)]
    folder = write(tmp_path / "m", small(), tensors)

    assert audited(folder).token_bytes == 2 * 512 * 2
    assert audited(folder, number="fp8").token_bytes == 2 * 512
    assert "as wide as their weights" in audited(folder).notes[0]


CONFIGS: dict[str, dict[str, Any]] = {
    "no layers": {"num_hidden_layers": None},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers that are no number": {"num_hidden_layers": "4"},
    "a negative window": {"sliding_window": -1},
    "true heads": {"num_attention_heads": True},
    "more kinds than layers": {"layer_types": ["full_attention"] * 3},
    "an unknown kind": {"layer_types": ["telepathy"]},
    "experts without a number taken": {"num_experts_per_tok": None},
    "more taken than there are": {"num_experts_per_tok": 5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    """Absurd and missing numbers are stated failures, not crashes, endless loops or guesses."""
    tensors = [tensor for number in range(4) for tensor in plain(f"model.layers.0.mlp.experts.{number}.up_proj", 64, 256)]
    with refusal("checkpoint-invalid"):
        audited(write(tmp_path / "m", {**small(), "num_experts_per_tok": 2, **CONFIGS[name]}, tensors))


FIELDS = (
    "num_hidden_layers", "num_experts", "num_experts_per_tok", "tie_word_embeddings", "kv_lora_rank", "qk_rope_head_dim", "head_dim",
    "num_attention_heads", "hidden_size", "num_key_value_heads", "layer_types", "hybrid_override_pattern", "full_attention_interval",
    "sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers", "attn_layer_period", "attn_layer_offset",
    "mamba_n_heads", "mamba_d_state", "layer_group_size",
    "mamba_ssm_dtype", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim", "mamba_num_heads", "conv_kernel", "dtype",
    "model_type", "text_config", "quant_method", "ignore", "exclude_modules", "config_groups", "targets", "weights", "num_bits",
    "bits", "quantized_layers", "kv_cache_scheme", "kv_cache_quant_algo", "modules_to_not_convert",
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["full_attention", "M*", "awq", "*", "", "re", "a.b"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4), max_leaves=8
)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=8), st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_whatever_a_config_says_the_audit_ends_with_an_answer_or_a_reason(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    """Fields of any type, nested anyhow, give figures or one stated failure; never a crash."""
    named = [
        *plain("model.layers.0.self_attn.k_proj", 4, 8), *plain("model.embed_tokens", 4, 8),
        *nvfp4("model.layers.0.mlp.experts.1.up", 4, 16),
        ("model.layers.0.mlp.experts.0.up.qweight", "I32", [8, 4]), ("model.layers.0.mlp.experts.0.up.scales", "F16", [1, 4]),
        ("model.layers.1.x.weight_packed", "I32", [4]), ("model.layers.1.x.weight_scale", "F16", []),
        ("model.layers.1.y_proj.weight", "U8", []), ("model.layers.1.y_proj.weight_scale", "F8_E4M3", []),
    ]  # fmt: skip
    tensors = {name: Tensor(name, dtype, tuple(shape), 16) for name, dtype, shape in named}
    found = checkpoint.Checkpoint({"num_hidden_layers": 2, "num_experts_per_tok": 1, **config}, quantization, tensors, ("x",))
    with allowed("checkpoint-invalid"):
        audit = modules.audit(found, batch=3, context=7)
        assert 0 < audit.weights <= 3 * audit.bytes
        assert msgspec.json.decode(msgspec.json.encode(audit), type=ModuleAudit) == audit


def test_missing_layers_and_experts_are_found(tmp_path: Path) -> None:
    """The config counts three layers of eight experts; the checkpoint has two, and four."""
    tensors = [t for layer in (0, 2) for number in range(4) for t in plain(f"model.layers.{layer}.mlp.experts.{number}.up_proj", 64, 256)]
    config = {**small(), "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
    found = audited(write(tmp_path / "m", config, tensors))

    assert {one.reference: one.message for one in found.findings} == {
        "layers-missing": "1 of 3 layers: 1", "experts-differ": "layers have 4 of 8",
    }  # fmt: skip


# The verb.


def test_the_verb_prints_the_table_and_the_ceilings(mini: Mini, cli: Cli, tmp_path: Path) -> None:
    """A given bandwidth is given, the maker's figure is called nominal, and without one the document says that none was measured."""
    folder = write(tmp_path / "m", *qwen(4, 16, 2, 1000, rest=nvfp4, joined=False))
    done = cli("model", "inspect", *mini.words, "--json", "--batch", "4", "--bandwidth", "100", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["bandwidth"]["origin"] for one in document["ceilings"]] == ["given", "nominal"]
    step = document["audit"]["weights"] + document["audit"]["cache"]
    assert document["ceilings"][0]["together"] == pytest.approx(4 * 100e9 / step)

    done = cli("model", "inspect", *mini.words, folder)
    assert "linear_attn.in_proj_qkv" in done.stdout
    assert "not measured" in done.stdout
    assert json.loads(cli("model", "inspect", *mini.words, "--json", folder).stdout)["bandwidth"] == "not measured"


def test_the_verb_fails_on_a_finding_and_on_a_hostile_file(mini: Mini, cli: Cli, tmp_path: Path) -> None:
    """Exit code 1 with a stable reference, and the audit itself in the document."""
    folder = write(tmp_path / "m", small(quant_method="modelopt", ignore=[]), plain("model.layers.0.mlp.up_proj", 64, 256))
    done = cli("model", "inspect", *mini.words, "--json", folder)
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["reference"]) == (1, "modules-unexpected")
    assert document["audit"]["findings"][0]["reference"] == "unquantised-not-ignored"

    (folder / "model-0.safetensors").write_bytes(b"\xff" * 9)
    done = cli("model", "inspect", *mini.words, "--json", folder)
    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, "checkpoint-invalid")
    assert "Traceback" not in done.stderr
