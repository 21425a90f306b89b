"""
Ask vLLM's own class of ModelOpt's mixed checkpoints for the format of each joined layer.

Runs in the environment of the tests' servers with a release's Python before its own. Reads a list of mixtures as JSON from standard input
(their quantization_config and the names of their parts), and prints for each a list: joined layer, its parts, and the format or the error.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

MODELS = Path(vllm.__file__).parent / "model_executor" / "models"
FORMATS = {"FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8", "FP8_BLOCK_SCALES": "FP8", "NVFP4": "NVFP4"}
EXPERTS = ("FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4")


def packed(name: str) -> dict[str, list[str]]:
    """Return the longest ``packed_modules_mapping`` of the model in the file *name*, without an import of what the model needs."""
    tree = ast.parse((MODELS / name).read_text("utf-8"))
    values = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "packed_modules_mapping" in ast.unparse(node.targets[0]) and isinstance(node.value, ast.Dict)
    ]  # fmt: skip
    mapping: dict[str, list[str]] = ast.literal_eval(max(values, key=lambda value: len(ast.unparse(value))))
    return mapping


def format_of(config: Any, joined: str) -> str:
    """Return the format in which vLLM loads the layer *joined*; empty if it is not quantised."""
    if joined.endswith(".experts"):
        # Its method wants a GPU; the choice before it does not.
        if config.is_layer_excluded(joined):
            return ""
        chosen = config._resolve_quant_algo(joined) if config.get_name() == "modelopt_mixed" else config.quant_method
        return FORMATS.get(chosen, "") if chosen in EXPERTS else ""
    layer = object.__new__(ParallelLMHead if joined.endswith("lm_head") else LinearBase)
    torch.nn.Module.__init__(layer)
    method = config.get_quant_method(layer, joined)
    spec = getattr(method, "spec", None)
    if spec is None:
        return ""
    static = "static" if spec.activation is not None and spec.activation.scale.static else ""
    return "NVFP4" if spec.weight.dtype == torch.uint8 else f"{static} FP8".strip()


def main() -> None:
    mapping = packed("qwen3_5.py")
    joined_of = {part: joined for joined, parts in mapping.items() for part in parts}
    answers = []
    for quantization, names in json.load(sys.stdin):
        kind = "modelopt_mixed" if quantization["quant_algo"] == "MIXED_PRECISION" else "modelopt_fp4"
        config = get_quantization_config(kind).from_config(quantization)
        mapper = WeightsMapper(orig_to_new_prefix={"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model."})
        config.apply_vllm_mapper(mapper)
        config.packed_modules_mapping = mapping
        layers: dict[str, list[str]] = {}
        for name in names:
            parent, _, own = mapper._map_name(f"{name}.weight").removesuffix(".weight").rpartition(".")
            joined = parent.partition(".experts.")[0] + ".experts" if ".experts." in parent else f"{parent}.{joined_of.get(own, own)}".strip(".")
            layers.setdefault(joined, []).append(name)
        answer = []
        for joined, parts in layers.items():
            try:
                answer.append((joined, parts, format_of(config, joined)))
            except ValueError as error:
                answer.append((joined, parts, f"refused: {error}"))
        answers.append(answer)
    sys.stdout.write("answers " + json.dumps(answers))


main()
