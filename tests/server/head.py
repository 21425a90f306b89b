"""
Load an output layer in FP8 with a scale for 128 rows, on each of some GPUs, and compare it with what was stored.

Prints, for each pair of a vocabulary and a number of GPUs that the first argument lists, the largest difference; or the error.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.quantization import get_quantization_config, modelopt

COLUMNS = 256
# The kernel wants a GPU; what it gets does not.
modelopt.select_linear_kernel = lambda *_, **__: SimpleNamespace()
modelopt.expose_input_quant_key = lambda *_: None


def place(rank: int, gpus: int) -> None:
    """Have vLLM take this process for the one with that *rank* of *gpus*."""
    for module in (parameter, vocab_parallel_embedding):
        module.get_tensor_model_parallel_rank = lambda: rank
        module.get_tensor_model_parallel_world_size = lambda: gpus


def values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    blocks = scale.reshape(scale.shape[0], -1)
    return weight.float() * blocks.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)


def difference(vocabulary: int, gpus: int) -> float:
    """Return the largest difference between the head that was stored and its parts on *gpus*."""
    torch.manual_seed(vocabulary)
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "FP8_PB_WO"}}}
    config = get_quantization_config("modelopt_mixed").from_config(document)
    weight = torch.randn(vocabulary, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-vocabulary // 128), 1, COLUMNS // 128, 1) + 0.5
    parts = []
    for rank in range(gpus):
        place(rank, gpus)
        head = vocab_parallel_embedding.ParallelLMHead(vocabulary, COLUMNS, params_dtype=torch.bfloat16, quant_config=config, prefix="lm_head")
        for name, tensor in (("weight", weight), ("weight_scale", scale)):
            getattr(head, name).weight_loader(getattr(head, name), tensor)
        parts.append(values(head.weight.data, head.weight_scale.data))
    return float((torch.cat(parts)[:vocabulary] - values(weight, scale)).abs().max())


answers: list[float | str] = []
for vocabulary, gpus in json.loads(sys.argv[1]):
    try:
        answers.append(difference(vocabulary, gpus))
    except AssertionError as error:
        answers.append(f"AssertionError: {error}")
sys.stdout.write("\n" + json.dumps(answers) + "\n")
