"""
Make models of random numbers with the architecture of today's: architectures.py NAME TOKENIZER OUT.

Each has the dimensions of the published model, with fewer layers and experts, and the tokenizer of
the folder TOKENIZER. They say what a wheel computes, and nothing of what a model knows. Needs torch
and transformers, whose classes state the dimensions that are not written here.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 1
#: Factor of the head's weights, as random layers give nearly equal logits. With 8, rounding alone
#: moved the official wheel's distributions by 0.02 nat on an H200 [measured].
HEAD = 2.0
#: Name → the model that it stands for, model type of transformers, and what differs from it.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen3-Next-80B-A3B: gated delta nets beside attention, and a layer that drafts (MTP).
    "qwen3-next": ("qwen3_next", {"num_hidden_layers": 4, "num_experts": 32}),
    # Nemotron 3 Nano 30B-A3B: Mamba-2, experts and attention in layers of their own.
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe"] * 2 + ["full_attention", "moe"],
            "hidden_size": 2688,
            "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
            "n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        },
    ),
    # gpt-oss-20b: attention sinks, sliding windows, and experts in MXFP4.
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 4, "num_local_experts": 32}),
    # Gemma 4: sliding windows beside full attention with larger heads.
    "gemma-4": ("gemma4_text", {"num_hidden_layers": 6}),
}  # fmt: skip
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def drafts(tensors: dict[str, torch.Tensor], layer: int, hidden: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an MTP layer of Qwen3-Next whose own layer is a copy of *layer*."""
    prefix = f"model.layers.{layer}."
    copied = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": weight.clone()
        for name, weight in tensors.items()
        if name.startswith(prefix)
    }
    norms = ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    projection = torch.randn(hidden, 2 * hidden, dtype=torch.bfloat16) / (2 * hidden) ** 0.5
    return {
        **copied,
        **{f"{name}.weight": torch.zeros(hidden, dtype=torch.bfloat16) for name in norms},
        "mtp.fc.weight": projection,
    }


def mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return *tensors* of gpt-oss with random experts in MXFP4: 32 codes in 16 bytes, a scale."""
    result = {}
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        result[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        # E8M0: a scale of 2^-7 to 2^-6.
        result[f"{name}_scales"] = torch.randint(120, 122, shape, dtype=torch.uint8)
    return result


def main() -> None:
    """Make the model that the command line names."""
    name, tokenizer, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    words = json.loads((tokenizer / "config.json").read_text("utf-8"))
    kind, changes = ARCHITECTURES[name]
    same = ("vocab_size", "bos_token_id", "eos_token_id")
    fields = {field: words[field] for field in same}
    # Gemma 4 has a second table of words; the other classes keep the field and do not use it.
    fields["vocab_size_per_layer_input"] = words["vocab_size"]
    config = AutoConfig.for_model(kind, **changes, **fields)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight *= HEAD
    model.save_pretrained(output, max_shard_size="50GB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, output / file)
    stated = json.loads((output / "config.json").read_text("utf-8"))
    tensors = load_file(output / "model.safetensors")
    if name == "qwen3-next":
        stated["num_nextn_predict_layers"] = 1
        tensors |= drafts(tensors, config.num_hidden_layers - 1, config.hidden_size)
    if name == "gpt-oss":
        stated["quantization_config"] = MXFP4
        tensors = mxfp4(tensors)
    (output / "config.json").write_text(json.dumps(stated, indent=1), "utf-8")
    save_file(tensors, output / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
