"""The module audit, on checkpoints of real models' shapes: sparse files with true headers, of which no weight is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import allowed, refusal
from tests.support.checkpoints import Told, write
from tests.unit.conftest import Cli, Mini

from sparkwright.bench.model import checkpoint, modules
from sparkwright.bench.model.checkpoint import Tensor
from sparkwright.bench.model.decode_bytes import distinct_experts
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes import preflight


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


def by_group(found: ModuleAudit, what: str = "read") -> dict[str, float]:
    groups: dict[str, float] = {}
    for row in found.rows:
        groups[row.group] = groups.get(row.group, 0.0) + getattr(row, what)
    return groups


def mlp(name: str, hidden: int, inner: int) -> list[Told]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [tensor for part, (rows, columns) in shapes.items() for tensor in nvfp4(f"{name}.{part}", rows, columns)]


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
        if (layer + 1) % 4:
            for part, rows in (("in_proj_qkvz", 12288), ("in_proj_ba", 64)):
                tensors += plain(f"{name}.linear_attn.{part}", rows, 2048)
            tensors += plain(f"{name}.linear_attn.out_proj", 2048, 4096)
            tensors += [(f"{name}.linear_attn.conv1d.weight", "BF16", [8192, 1, 4]), (f"{name}.linear_attn.A_log", "F32", [32])]
        else:
            for part, rows, columns in (("q", 8192, 2048), ("k", 512, 2048), ("v", 512, 2048), ("o", 2048, 4096)):
                tensors += nvfp4(f"{name}.self_attn.{part}_proj", rows, columns)
        tensors += plain(f"{name}.mlp.gate", experts, 2048) + plain(f"{name}.mlp.shared_expert_gate", 1, 2048)
        tensors += mlp(f"{name}.mlp.shared_expert", 2048, 512)
        for expert in range(experts):
            tensors += mlp(f"{name}.mlp.experts.{expert}", 2048, 512)
    return config, tensors


# Real models' shapes.


def test_unquantised_layers_of_a_seed_report_are_in_the_table(tmp_path: Path) -> None:
    """
    Seed 003's Qwen 3.6 35B-A3B: 1440, 480, 40 and 970 MiB of BF16 in four kinds of modules, by their shapes.

    With them a token reads 3.9 GB. The shapes are transformers' defaults of Qwen3.5-35B-A3B, which give the seed's table.
    """
    found = audited(write(tmp_path / "m", *qwen(40, 256, 8, 248320)))
    rows = {row.modules: row for row in found.rows}

    table = {"linear_attn.in_proj_qkvz": (30, 1440), "linear_attn.out_proj": (30, 480), "mlp.gate": (40, 40), "lm_head": (1, 970)}
    assert {name: (rows[name].count, rows[name].bytes >> 20) for name in table} == table
    assert found.findings == ()
    assert found.notes == ("the states of 30 layers of linear attention are not counted",)
    assert round(found.weights / 1e9, 1) == 3.9
    unquantised = sum(row.read for row in found.rows if not row.quantised)
    assert unquantised / found.weights > 0.75


def test_a_batch_reads_more_experts_and_shares_the_rest(tmp_path: Path) -> None:
    """Experts grow by the expected number of distinct ones, everything else is read once, and contexts are read for each request."""
    folder = write(tmp_path / "m", *qwen(4, 16, 2, 1000))
    alone, found = audited(folder, context=1000), audited(folder, batch=8, context=1000)
    one, many = by_group(alone), by_group(found)

    assert many["experts"] == pytest.approx(one["experts"] / 2 * distinct_experts(16, 2, 8))
    assert {group for group in one if many[group] != one[group]} == {"experts", "embeddings"}
    assert many["embeddings"] == 8 * one["embeddings"] == 8 * 2048 * 2
    assert found.cache == 8 * alone.cache
    assert alone.cache == 1000 * 2 * 2 * 256 * 2


def test_distinct_experts_follow_the_formula() -> None:
    """For 8 of 256 experts and 32 tokens, and exhaustively for two tokens that take 1 of 3."""
    assert math.isclose(distinct_experts(256, 8, 32), 256 * (1 - (1 - 8 / 256) ** 32))
    assert math.isclose(distinct_experts(3, 1, 2), sum(len({a, b}) for a in range(3) for b in range(3)) / 9)
    assert distinct_experts(4, 4, 9) == 4


# How a module is stored.


def small(**quantization: Any) -> dict[str, Any]:
    config = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True, "num_experts_per_tok": 1}
    return {**config, **({"quantization_config": quantization} if quantization else {})}


NAME = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"


def stored(weight: str, kind: str, *shape: int, **scales: tuple[str, list[int]]) -> list[Told]:
    """Return a matrix whose tensors, by parameter, have these types and shapes."""
    return [(f"{NAME}.{weight}", kind, [*shape]), *((f"{NAME}.{name}", *scale) for name, scale in scales.items())]


GLOBAL = {"weight_global_scale": ("F32", [1]), "input_global_scale": ("F32", [1])}
#: Tensors → their scheme, and the fault.
SCHEMES: dict[str, tuple[list[Told], str, str]] = {
    "NVFP4 of ModelOpt": (nvfp4(NAME, 64, 256), "NVFP4 (modelopt)", ""),
    "NVFP4 with weights alone": (nvfp4(NAME, 64, 256)[:-1], "NVFP4 (modelopt, W4A16)", ""),
    "NVFP4 of compressed-tensors": (
        stored("weight_packed", "U8", 64, 128, weight_scale=("F8_E4M3", [64, 16]), **GLOBAL), "NVFP4 (compressed-tensors)", "",
    ),
    "MXFP4": (stored("weight_packed", "U8", 64, 128, weight_scale=("U8", [64, 8])), "MXFP4 (compressed-tensors)", ""),
    "packed integers": (stored("weight_packed", "I32", 64, 32, weight_scale=("BF16", [64, 2])), "INT4 (any)", ""),
    "AWQ": (stored("qweight", "I32", 256, 8, qzeros=("I32", [2, 8]), scales=("F16", [2, 64])), "INT4 (any)", ""),
    "INT8": (stored("weight", "I8", 64, 256, weight_scale=("BF16", [64, 1])), "INT8", ""),
    "MXFP8": (stored("weight", "F8_E4M3", 64, 256, weight_scale=("U8", [64, 8])), "MXFP8 (modelopt)", ""),
    "FP8": (stored("weight", "F8_E4M3", 64, 256, weight_scale=("F32", [])), "FP8", ""),
    "FP8 in blocks": (stored("weight", "F8_E4M3", 256, 256, weight_scale_inv=("F32", [2, 2])), "FP8", ""),
    "MXFP4 of gpt-oss": (
        [(f"{EXPERTS}.up_blocks", "U8", [4, 64, 8, 16]), (f"{EXPERTS}.up_scales", "U8", [4, 64, 8]), (f"{EXPERTS}.up_bias", "BF16", [4, 64])],
        "MXFP4", "",
    ),
    "NVFP4 of experts in one tensor": (
        [(f"{EXPERTS}.down_proj", "U8", [4, 64, 128]), (f"{EXPERTS}.down_proj_weight_scale", "F8_E4M3", [4, 64, 16]),
         (f"{EXPERTS}.down_proj_weight_scale_2", "F32", [4]), (f"{EXPERTS}.down_proj_input_scale", "F32", [4])],
        "NVFP4 (modelopt)", "",
    ),
    "BF16": (plain(NAME, 64, 256), "BF16", ""),
    "NVFP4 without scales": (nvfp4(NAME, 64, 256)[:1], "packed", "scale-missing"),
    "NVFP4 without the scale of all": (nvfp4(NAME, 64, 256)[:2], "NVFP4 (modelopt, W4A16)", "scale-missing"),
    "NVFP4 with other scales": (
        stored("weight_packed", "U8", 64, 128, weight_scale=("F8_E4M3", [64, 15]), **GLOBAL), "NVFP4 (compressed-tensors)", "scale-shape",
    ),
    "FP8 without a scale": (stored("weight", "F8_E4M3", 64, 256), "packed", "scale-missing"),
    "MXFP8 with other scales": (stored("weight", "F8_E4M3", 64, 256, weight_scale=("U8", [64, 7])), "MXFP8 (modelopt)", "scale-shape"),
    "blocks with other scales": (
        [(f"{EXPERTS}.up_blocks", "U8", [4, 64, 8, 16]), (f"{EXPERTS}.up_scales", "U8", [4, 64, 9])], "MXFP4", "scale-shape",
    ),
    "scales of an unknown type": (stored("weight", "U8", 64, 128, weight_scale=("BF16", [64, 8])), "packed", "format-unknown"),
    "plain numbers with scales": (stored("weight", "BF16", 64, 128, weight_scale=("BF16", [64, 8])), "packed", "format-unknown"),
    "scales without a weight": (stored("weight_scale", "BF16", 64, 8), "packed", "format-unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_the_tensors_of_a_matrix_tell_its_format_and_faults(tmp_path: Path, name: str) -> None:
    """All bytes belong to one module; a packed weight whose scales do not belong to it would be garbage that no server notices."""
    tensors, scheme, fault = SCHEMES[name]
    found = audited(write(tmp_path / "m", small(quant_method="any", bits=4), tensors))

    (row,) = found.rows
    assert (row.scheme, row.count, row.bytes) == (scheme, 1, found.bytes)
    assert [finding.reference for finding in found.findings] == ([fault] if fault else [])
    assert {fault} - {""} <= set(modules.REASONS)


def test_contradictions_of_checkpoint_and_config_are_found(tmp_path: Path) -> None:
    """Packed weights that no config declares, and layers and experts that are not there."""
    undeclared = audited(write(tmp_path / "a", small(), nvfp4(NAME, 64, 256)))
    assert [finding.reference for finding in undeclared.findings] == ["quantisation-not-declared"]
    eight = small(quant_method="x", config_groups={"g": {"weights": {"num_bits": 8}}})
    assert audited(write(tmp_path / "c", eight, SCHEMES["packed integers"][0])).scheme == "INT8 (x)"
    tensors = [t for layer in (0, 2) for number in range(4) for t in plain(f"model.layers.{layer}.mlp.experts.{number}.up_proj", 64, 256)]
    found = audited(write(tmp_path / "b", {**small(), "num_hidden_layers": 3, "num_experts": 8}, tensors))
    messages = {finding.reference: finding.message for finding in found.findings}
    assert messages == {"layers-missing": "1 of 3 layers: 1", "experts-differ": "layers have 4 of 8"}
    lost = [tensor for tensor in tensors if tensor[0] != "model.layers.2.mlp.experts.1.up_proj.weight"]
    (finding,) = audited(write(tmp_path / "d", {**small(), "num_hidden_layers": 3, "num_experts": 4}, lost)).findings[1:]
    assert (finding.reference, finding.message) == ("experts-differ", "layers have 3 of 4")


# What a token does not read.


def test_tied_embeddings_are_read_as_the_output_layer(tmp_path: Path) -> None:
    """The table counts whole; an output layer that is stored nevertheless is not read; untied, a row of the table is."""
    table, head = plain("model.embed_tokens", 1000, 256), plain("lm_head", 1000, 256)
    whole, row = 1000 * 256 * 2, 256 * 2
    for number, (tied, tensors, read) in enumerate([(True, table + head, whole), (False, table + head, whole + row), (None, table, whole)]):
        config = {name: value for name, value in {**small(), "tie_word_embeddings": tied}.items() if value is not None}
        assert audited(write(tmp_path / str(number), config, tensors)).weights == read


def test_parts_that_see_and_layers_that_draft_are_told_apart(tmp_path: Path) -> None:
    """They are stored and not read; drafting layers are those beyond the config's, or of that name."""
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "visual.blocks.0.mlp.fc1"]
    folder = write(tmp_path / "m", small(), [tensor for name in names for tensor in plain(name, 64, 256)])
    found = audited(folder)

    assert by_group(found) == {"layers": 64 * 256 * 2, "mtp": 0, "vision": 0}
    assert by_group(found, "bytes")["mtp"] == 2 * 64 * 256 * 2
    assert preflight.checkpoint_size(folder).drafts


FULL = 4 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("config", "kept", "read"),
    [
        ({}, FULL, FULL * 1000),
        ({"sliding_window": 100}, FULL, FULL * 100),
        ({"sliding_window": 100, "use_sliding_window": False}, FULL, FULL * 1000),
        ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, FULL, FULL / 4 * 1300),
        ({"text_config": {"num_hidden_layers": 2}}, FULL / 2, FULL / 2 * 1000),
        ({"quantization_config": {"quant_method": "x", "kv_cache_scheme": {"type": "float", "num_bits": 8}}}, FULL / 2, FULL / 2 * 1000),
        ({"quantization_config": {"quant_method": "x", "kv_cache_quant_algo": "FP8"}}, FULL / 2, FULL / 2 * 1000),
        ({"layer_group_size": 4}, 0, 0),
    ],
)
def test_what_attention_keeps_follows_its_projections(tmp_path: Path, config: dict[str, Any], kept: int, read: int) -> None:
    """Rows of keys and values, windows, and a cache in FP8: bytes of a token, and bytes that a step reads for 1000."""
    tensors = [t for layer in range(4) for part in "kv" for t in plain(f"model.layers.{layer}.self_attn.{part}_proj", 256, 64)]
    folder = write(tmp_path / "m", {**small(), "num_hidden_layers": 4, **config}, tensors)
    found = audited(folder, context=1000)

    assert (found.token_numbers * found.number_bytes, found.cache) == (kept, read)
    assert preflight.checkpoint_size(folder).token == 2 * found.token_numbers
    assert bool(kept) or "unknown" in found.notes[0]


@pytest.mark.parametrize(
    ("tensors", "kept"),
    [
        (plain("model.layers.0.self_attn.kv_a_proj_with_mqa", 576, 64), 576 * 2),
        ([("model.layers.0.self_attn.k_proj.qweight", "I32", [64, 32]), ("model.layers.0.self_attn.k_proj.scales", "F16", [2, 256])], 256 * 2),
        (plain("model.layers.0.self_attn.qkv_proj", 768, 64), 0),
    ],
)
def test_latent_packed_and_fused_projections_tell_what_they_can(tmp_path: Path, tensors: list[Told], kept: int) -> None:
    assert audited(write(tmp_path / "m", small(quant_method="any"), tensors)).token_numbers * 2 == kept


CONFIGS: dict[str, dict[str, Any]] = {
    "no layers": {"num_hidden_layers": None},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers that are no number": {"num_hidden_layers": "4"},
    "a negative window": {"sliding_window": -1},
    "kinds that are no list": {"layer_types": 3},
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
    "num_hidden_layers", "num_experts", "num_experts_per_tok", "tie_word_embeddings", "layer_types", "sliding_window",
    "use_sliding_window", "layer_group_size", "model_type", "text_config", "quant_method", "kv_cache_scheme", "kv_cache_quant_algo",
    "config_groups", "weights", "num_bits", "bits",
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["full_attention", "M*", "awq", "", "a.b"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4), max_leaves=8
)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=8), st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_any_config_gives_an_audit_or_a_reason(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    """Fields of any type, nested anyhow, give figures or one stated failure; never a crash."""
    named = [
        *plain("model.layers.0.self_attn.k_proj", 4, 8), *plain("model.embed_tokens", 4, 8),
        *nvfp4("model.layers.0.mlp.experts.1.up", 4, 16), ("model.layers.0.self_attn.v_proj.weight", "BF16", []),
        ("model.layers.0.mlp.experts.0.up.qweight", "I32", [8, 4]), ("model.layers.0.mlp.experts.0.up.scales", "F16", [1, 4]),
        ("model.layers.1.x.weight_packed", "I32", [4]), ("model.layers.1.x.weight_scale", "F16", []),
        ("model.layers.1.self_attn.k_proj.qweight", "I32", []), ("model.layers.1.self_attn.k_proj.scales", "F16", []),
        ("model.layers.0.mlp.experts.scale", "F32", []), ("model.layers.0.mlp.experts.down_proj", "BF16", [0, 8]),
        ("model.layers.1.y_proj.weight", "U8", []), ("model.layers.1.y_proj.weight_scale", "F8_E4M3", []),
    ]  # fmt: skip
    tensors = {name: Tensor(dtype, tuple(shape), 16) for name, dtype, shape in named}
    found = checkpoint.Checkpoint({"num_hidden_layers": 2, "num_experts_per_tok": 1, **config}, quantization, tensors)
    with allowed("checkpoint-invalid"):
        audit = modules.audit(found, batch=3, context=7)
        assert 0 < audit.weights <= 3 * audit.bytes
        assert msgspec.json.decode(msgspec.json.encode(audit), type=ModuleAudit) == audit


# The verb.


def test_the_verb_prints_the_table_and_the_ceilings(mini: Mini, cli: Cli, tmp_path: Path) -> None:
    """A given bandwidth is given, the maker's figure is called nominal, and without one the document says that none was measured."""
    folder = write(tmp_path / "m", *qwen(4, 16, 2, 1000))
    done = cli("model", "inspect", *mini.words, "--json", "--batch", "4", "--bandwidth", "100", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [one["bandwidth"]["origin"] for one in document["ceilings"]] == ["given", "nominal"]
    step = document["audit"]["weights"] + document["audit"]["cache"]
    assert document["ceilings"][0]["together"] == pytest.approx(4 * 100e9 / step)

    done = cli("model", "inspect", *mini.words, folder)
    assert "linear_attn.in_proj_qkvz" in done.stdout
    assert "not measured" in done.stdout


def test_the_verb_fails_on_a_finding_and_on_a_hostile_file(mini: Mini, cli: Cli, tmp_path: Path) -> None:
    """Exit code 1 with a stable reference, and the audit itself in the document."""
    folder = write(tmp_path / "m", small(), nvfp4(NAME, 64, 256))
    done = cli("model", "inspect", *mini.words, "--json", folder)
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["reference"]) == (1, "modules-unexpected")
    assert document["audit"]["findings"][0]["reference"] == "quantisation-not-declared"

    (folder / "model.safetensors").write_bytes(b"\xff" * 9)
    done = cli("model", "inspect", *mini.words, "--json", folder)
    assert (done.returncode, json.loads(done.stdout)["error"]["reference"]) == (1, "checkpoint-invalid")
    assert "Traceback" not in done.stderr
