"""
Make the models of the rehearsal, in an environment with torch and safetensors.

    models.py nvfp4 FOLDER OUTPUT    the model in FOLDER with its linear weights in NVFP4
    models.py moe FOLDER OUTPUT      the same with eight experts, all of its MLP, in NVFP4
    models.py dense FOLDER OUTPUT    8 GB of random bfloat16, and the tokenizer of FOLDER
    models.py large FOLDER OUTPUT    the same with 22 GB, which an H200 reads in 5 ms
    models.py wide FOLDER OUTPUT     the hybrid in FOLDER with a head of 8.1 GB, of 248,320 words
    models.py heavy FOLDER OUTPUT    the model in FOLDER with 20 to 30 GB that add nothing to it
    models.py head FOLDER OUTPUT     24 GB of random bfloat16, a third of it a head of so many words
    models.py head-fp8 FOLDER OUTPUT the same, which is in FOLDER, with its head in FP8 by blocks

NVFP4 is stored as compressed-tensors does ("nvfp4-pack-quantized", weights only): two E2M1 codes in
a byte with the first in the low bits, an E4M3 scale for 16 weights, and the divisor of a tensor.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

# Run as a program in another environment, from a checkout or what was packed of it.
sys.path.append(str(Path(__file__).parents[1] / "bench"))
draft_vocabulary: Any = importlib.import_module("draft_vocabulary")

#: Values of E2M1 by their codes without a sign, and the largest values of E2M1 and E4M3.
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MAX, E4M3_MAX, BLOCK = 6.0, 448.0, 16

#: Layers whose weights have one divisor, because vLLM joins them.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK,
                "symmetric": True, "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 20,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
#: A step of vLLM takes its processor 2 to 3 ms [measured], one with drafts more, so that a shorter
#: one of the GPU says nothing of it.
LARGE = {
    "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 16,
    "num_attention_heads": 64,
}  # fmt: skip
#: Experts of a layer, and how many serve a token.
EXPERTS, SELECTED = 8, 2
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "num_local_experts": EXPERTS, "num_experts_per_tok": SELECTED,
    "router_aux_loss_coef": 0.0, "sliding_window": None,
}  # fmt: skip
#: Words of Qwen3.6-35B-A3B, with states eight times as long. An H200 reads this head in 2 ms; that
#: model's own, which a Spark reads in 4 ms, took it 0.2 ms, of which nothing was seen beside steps
#: of 4 ms that spread by a fifth.
WIDTH, WORDS, DRAFTED, PROMPTS = 16384, 248_320, 32_768, 256
#: A class whose head vLLM quantises, which that of Qwen3-Next does not.
HEAD = {
    "hidden_size": WIDTH, "intermediate_size": 22016, "num_hidden_layers": 3,
    "num_attention_heads": 64, "vocab_size": WORDS,
}  # fmt: skip
#: Largest value of FP8, and rows and columns of a block that has a scale, as ModelOpt names it.
FP8_MAX, SQUARE = 448.0, 128
FP8 = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"lm_head": {"quant_algo": "FP8_PB_WO"}},
}  # fmt: skip
#: Weights of the trained models that read a state, and those that write one or have its length.
READING = (
    "q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "in_proj", "gate_proj", "up_proj",
    "gate_up_proj", "gate", "shared_expert_gate", "lm_head", "fc",
)  # fmt: skip
WRITING = (
    "o_proj", "out_proj", "down_proj", "fc", "input_layernorm", "post_attention_layernorm",
    "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm_f",
)  # fmt: skip
#: Norms of states, beside those of the same name within a mixer.
NORMS = re.compile(r"(model|mtp|backbone\.layers\.\d+)\.norm\.weight")
#: By model: the field with the neurons of what each token goes through, and as many as take an
#: H200 milliseconds, of 33 to 98 KB each.
NEURONS = {
    "llama": ("intermediate_size", 106_496),
    "qwen3_next": ("shared_expert_intermediate_size", 61_440),
    "nemotron_h": ("moe_shared_expert_intermediate_size", 159_744),
}
SHARED = re.compile(r"(mlp|shared_experts?)\.(gate|up|down)_proj\.weight$")
#: Where Mixtral has the projections of a Llama's MLP.
PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def divisor(weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the divisor that brings the scales of *weights* into the range of E4M3."""
    largest = max(float(weight.abs().max()) for weight in weights)
    return torch.tensor([E2M1_MAX * E4M3_MAX / largest], dtype=torch.float32)


def nvfp4(weight: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed codes and the scales of *weight*, for the divisor *by* of its tensor."""
    blocks = weight.float().reshape(weight.shape[0], -1, BLOCK)
    scales = blocks.abs().amax(-1) / E2M1_MAX * by
    scales = scales.clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() / by)[..., None]
    distances = (scaled.abs()[..., None] - LEVELS).abs()
    codes = distances.argmin(-1).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    codes = codes.reshape(weight.shape)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scales


def quantised(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return *tensors* with the projections of their layers in NVFP4."""
    result = {}
    for name, weight in tensors.items():
        layer, dot, kind = name.removesuffix(".weight").rpartition(".")
        if not kind.endswith("_proj") and kind not in PROJECTIONS.values():
            result[name] = weight
            continue
        joined = next((group for group in JOINED if kind in group), (kind,))
        by = divisor([tensors[f"{layer}{dot}{part}.weight"] for part in joined])
        packed, scales = nvfp4(weight, by)
        prefix = f"{layer}{dot}{kind}"
        result[f"{prefix}.weight_packed"], result[f"{prefix}.weight_scale"] = packed, scales
        result[f"{prefix}.weight_global_scale"] = by
    return result


def experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Return *tensors* of a Llama as those of a Mixtral that computes the same.

    Each expert is the MLP with its neurons in an order of its own, and the weights of the selected
    experts add up to one. Parts of two experts together compute nothing of use.
    """
    generator = torch.Generator().manual_seed(1)
    result = {name: weight for name, weight in tensors.items() if ".mlp." not in name}
    for name, gate in tensors.items():
        layer, mlp, end = name.partition(".mlp.gate_proj.weight")
        if not mlp or end:
            continue
        block = f"{layer}.block_sparse_moe"
        router = torch.randn(EXPERTS, gate.shape[1], generator=generator)
        result[f"{block}.gate.weight"] = router.to(gate.dtype)
        for number in range(EXPERTS):
            order = torch.randperm(gate.shape[0], generator=generator)
            for projection, own in PROJECTIONS.items():
                weight = tensors[f"{layer}.mlp.{projection}.weight"]
                ordered = weight[:, order] if projection == "down_proj" else weight[order]
                result[f"{block}.experts.{number}.{own}.weight"] = ordered.contiguous()
    return result


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a Llama of that *config*, by name."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (keys * head, hidden),
        "self_attn.v_proj": (keys * head, hidden), "self_attn.o_proj": (hidden, heads * head),
    }  # fmt: skip
    inner = config["intermediate_size"]
    layer |= {f"mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
    layer["mlp.down_proj"] = (hidden, inner)
    words = (config["vocab_size"], hidden)
    ends = {"model.embed_tokens": words, "model.norm": (hidden,), "lm_head": words}
    layers = range(config["num_hidden_layers"])
    named = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | named).items()}


def drawn(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return random tensors for *config*, the same each time on a machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, shape in shapes(config).items():
        if "norm" in name:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator, device=device)
            weight *= 1.5 / shape[-1] ** 0.5
        tensors[name] = weight.to(torch.bfloat16).cpu()
    return tensors


def widened(tensors: Mapping[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    """
    Return *tensors* of a trained model whose states are *times* as long, a power of two, and which
    computes the same: each state is repeated, and what reads it divides by *times*, which is exact.
    """
    return {name: _wider(name, weight, times).contiguous() for name, weight in tensors.items()}


def _wider(name: str, weight: torch.Tensor, times: int) -> torch.Tensor:
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind in ("embed_tokens", "embeddings"):
        return torch.cat([weight] * times, 1)
    if kind in READING:
        # The projection before a draft reads two states, one behind the other.
        states = weight.chunk(2, -1) if kind == "fc" else (weight,)
        weight = torch.cat([state / times for state in states for _ in range(times)], -1)
    if kind in WRITING or NORMS.fullmatch(name):
        # Experts may be stored as one tensor.
        weight = torch.cat([weight] * times, 1 if weight.dim() == 3 else 0)
    return weight


def worded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return *tensors* with `WORDS` words: those that the model does not have get a logit of 0."""
    result = dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = WORDS - tensors[name].shape[0]
        result[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, rows))
    return result


def padded(tensors: Mapping[str, torch.Tensor], neurons: int) -> dict[str, torch.Tensor]:
    """Return *tensors* with as many *neurons* where each token goes; the new ones give nothing."""
    result = dict(tensors)
    for name, weight in tensors.items():
        if match := SHARED.search(name):
            column = match[2] == "down"
            more = neurons - weight.shape[1 if column else 0]
            sides = (0, more) if column else (0, 0, 0, more)
            result[name] = torch.nn.functional.pad(weight, sides)
    return result


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return *weight* in FP8, and what its blocks are to be multiplied by."""
    device, values, scales = "cuda" if torch.cuda.is_available() else "cpu", [], []
    for rows in weight.split(SQUARE):
        squares = rows.to(device).float().reshape(SQUARE, -1, SQUARE)
        largest = squares.abs().amax((0, 2)).clamp(min=1e-12) / FP8_MAX
        squares = squares / largest[None, :, None]
        values.append(squares.reshape(rows.shape).to(torch.float8_e4m3fn).cpu())
        scales.append(largest.cpu()[None, None, :, None])
    return torch.cat(values), torch.cat(scales)


def write_drafted(folder: Path, root: Path) -> None:
    """
    Write to *folder* the prompts of G4, of the checkout *root*, and a draft vocabulary.

    It has as many words as one of a real model would, so that as much is read.
    """
    import yaml

    asked = yaml.safe_load((root / "ci" / "gates" / "generation.yaml").read_text("utf-8"))
    prompts = [prompt["text"] for prompt in asked["prompts"].values()]
    lines = [json.dumps({"prompt": prompts[number % len(prompts)]}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    words = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    drafted = {**draft_vocabulary.identity(words), "token_ids": list(range(DRAFTED))}
    (folder / "draft_vocabulary.json").write_text(json.dumps(drafted), "utf-8")


def main() -> None:
    """Make the model that the command line names."""
    kind, folder, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    output.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, output / name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    head: dict[str, torch.Tensor] = {}
    if kind in ("dense", "large", "head"):
        same = ("vocab_size", "bos_token_id", "eos_token_id", "dtype", "max_position_embeddings")
        known = config["vocab_size"]
        config = {**LLAMA, **{name: config[name] for name in same}}
        config |= {"large": LARGE, "head": HEAD}.get(kind, {})
        tensors = drawn(config)
        if kind == "head":
            # In a file of its own, so that `head-fp8` shares the rest; no other word is said.
            head = {"lm_head.weight": tensors.pop("lm_head.weight")}
            head["lm_head.weight"][known:] = 0
            write_drafted(output, Path(__file__).parents[2])
    elif kind in ("wide", "heavy"):
        tensors = widened(load_file(folder / "model.safetensors"), WIDTH // config["hidden_size"])
        config["hidden_size"] = WIDTH
        if kind == "wide":
            tensors, config["vocab_size"] = worded(tensors), WORDS
            write_drafted(output, Path(__file__).parents[2])
        else:
            field, neurons = NEURONS[config["model_type"]]
            tensors, config[field] = padded(tensors, neurons), neurons
    elif kind == "head-fp8":
        (weight,) = load_file(folder / "head.safetensors").values()
        head["lm_head.weight"], head["lm_head.weight_scale"] = blocks(weight)
        config["quantization_config"], tensors = FP8, {}
        for name in ("model.safetensors", "prompts.jsonl"):
            os.link(folder / name, output / name)
    else:
        tensors = load_file(folder / "model.safetensors")
        if kind == "moe":
            config, tensors = {**config, **MIXTRAL}, experts(tensors)
        routers = [
            name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")
        ]
        config["quantization_config"] = {**NVFP4, "ignore": [*NVFP4["ignore"], *routers]}
        tensors = quantised(tensors)
    (output / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    for name, named in (("model", tensors), ("head", head)):
        if named:
            save_file(named, output / f"{name}.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
