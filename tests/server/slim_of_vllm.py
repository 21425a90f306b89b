"""
Load slimmer copies through vLLM's own layers, each of the scheme that its config chooses, and print what they hold.

Runs in the environment of the tests' servers with a release's Python before its own. For each folder of the arguments, prints of each layer of
`tests.unit.test_slim`'s model: the format, and the numbers as vLLM's code has them after loading, without a kernel, which wants a GPU.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.quantization import get_quantization_config, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as nvfp4,
    compressed_tensors_w8a8_fp8 as fp8,
)

KERNEL = SimpleNamespace(process_weights_after_loading=lambda layer: None)
for module in (parameter, linear, vocab_parallel_embedding):
    module.get_tensor_model_parallel_rank = lambda: 0
    module.get_tensor_model_parallel_world_size = lambda: 1
for module in (modelopt, nvfp4, fp8):
    module.expose_input_quant_key = lambda *_: None
modelopt.select_linear_kernel = fp8.init_fp8_linear_kernel = nvfp4.init_nvfp4_linear_kernel = lambda *_, **__: KERNEL
fp8.get_current_vllm_config = lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ATTENTION, STATES = "model.layers.0.self_attn.", "model.layers.1.linear_attn."


def layers(config: Any) -> dict[str, tuple[torch.nn.Module, dict[str, Any]]]:
    """Return each layer by its name, and its parts in the checkpoint with vLLM's names of them."""
    common = {"params_dtype": torch.bfloat16, "quant_config": config}
    made = {
        f"{ATTENTION}qkv_proj": linear.QKVParallelLinear(32, 16, 3, 1, bias=False, prefix=f"{ATTENTION}qkv_proj", **common),
        f"{ATTENTION}o_proj": linear.RowParallelLinear(48, 32, bias=False, prefix=f"{ATTENTION}o_proj", **common),
        f"{STATES}in_proj_qkvz": linear.ColumnParallelLinear(32, 64, bias=False, prefix=f"{STATES}in_proj_qkvz", **common),
        f"{STATES}in_proj_ba": linear.ColumnParallelLinear(32, 16, bias=False, prefix=f"{STATES}in_proj_ba", **common),
        "model.layers.0.mlp.gate": linear.ReplicatedLinear(32, 16, bias=False, prefix="model.layers.0.mlp.gate", **common),
        "language_model.lm_head": vocab_parallel_embedding.ParallelLMHead(64, 32, prefix="language_model.lm_head", **common),
    }
    parts: dict[str, dict[str, str | None]] = {name: {name.removeprefix("language_model."): None} for name in made}
    parts[f"{ATTENTION}qkv_proj"] = {f"{ATTENTION}{part}_proj": part for part in "qkv"}
    return {name: (layer, parts[name]) for name, layer in made.items()}


def values(layer: torch.nn.Module) -> torch.Tensor:
    """Return the numbers that *layer* multiplies with."""
    weight, scale = layer.weight.data, getattr(layer, "weight_scale", None)
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        codes = torch.stack([weight & 15, weight >> 4], -1).reshape(len(weight), -1).int()
        signed = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return signed * scale.float().repeat_interleave(16, 1) * layer.weight_global_scale
    return (weight.float() * scale.reshape(1, -1)).T


def loaded(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = "compressed-tensors" if document["quant_method"] == "compressed-tensors" else "modelopt_mixed"
    config = get_quantization_config(kind).from_config(document)
    config.packed_modules_mapping = MAPPING
    tensors = dict[str, torch.Tensor]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 -- no mapping
    answer = {}
    for name, (layer, parts) in layers(config).items():
        for part, shard_id in parts.items():
            stored = {key.removeprefix(f"{part}."): value for key, value in tensors.items() if key.startswith(f"{part}.")}
            for own, value in stored.items():
                if own != "bias":
                    into = getattr(layer, own)
                    into.weight_loader(into, value, *([shard_id] if shard_id else []))
        layer.quant_method.process_weights_after_loading(layer)
        scheme = type(getattr(layer, "scheme", layer.quant_method)).__name__
        answer[name] = {"scheme": scheme, "values": values(layer).tolist()}
    return answer


sys.stdout.write("\nanswers " + json.dumps([loaded(Path(folder)) for folder in sys.argv[1:]]))
