"""
Print which kernels vLLM chooses for each recipe on a Spark: oracle.py STACK PYTHON [RECIPE…].

PYTHON has the stack's vLLM, whose own code chooses, on a CPU (`sparkwright.serving.selection`). As
the hub need not be reachable, the model is not the checkpoint: it has the dimensions of
transformers' own config of the architecture with few layers, and the quantization of the recipe as
one format for all layers but the head and the gates. So a row says what the flags and the format
lead to, and not which layers a checkpoint leaves plain. `sparkwright model check RECIPE` reads the
checkpoint's. The length of requests is left out, as it belongs to the checkpoint. It fails where
vLLM chooses another class of kernels than a recipe states.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from sparkwright.bench.recipes import recipe
from sparkwright.bench.server import flags
from sparkwright.core import process, strict_yaml
from sparkwright.core.errors import SparkwrightError
from sparkwright.serving import environment as environments
from sparkwright.serving.selection import Selection, select

ROOT = Path(__file__).parents[2]
#: Recipe, or its class → an architecture of ci/rehearsal/starts.py.
CLASSES = {
    "qwen3-next": "qwen3-next", "qwen3.5-dense": "qwen3.5-dense", "nemotron-h": "nemotron-h",
    "gpt-oss": "gpt-oss", "gemma-4": "gemma-4", "moe": "moe", "mla": "mla (GLM-4.7-Flash)",
    "kda": "kda (GLM-5.3)", "deepseek-v4": "deepseek-v4",
    "minimax-m2.7-nvfp4": "moe (MiniMax-M2)", "mistral-small-4-119b-nvfp4": "mla (Mistral 4)",
    "qwen3.5-122b-a10b-nvfp4-mtp3": "qwen3-next (Qwen3.5)",
    "qwen3.6-35b-a3b-fp8-mtp2": "qwen3-next (Qwen3.5)",
    "qwen3.6-35b-a3b-nvfp4-b12x": "qwen3-next (Qwen3.5)",
    "qwen3.6-35b-a3b-nvfp4-mtp3": "qwen3-next (Qwen3.5)",
}  # fmt: skip
PLAIN = ["lm_head", "*gate", "*router*"]
INT4 = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
    "dynamic": False,
}  # fmt: skip
FP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "symmetric": True, "dynamic": False,
}  # fmt: skip
#: Beginning of a recipe's quantization → the config of it.
FORMATS: dict[str, dict[str, Any]] = {
    "NVFP4 (W4A16)": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*gate$", "re:.*router.*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": FP4, "input_activations": None},
        },
    },
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": PLAIN},
    "MXFP4": {"quant_method": "mxfp4", "modules_to_not_convert": ["*self_attn", *PLAIN]},
    "AWQ": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    },
    "FP8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
#: Part of the name of a kernel → its class in recipes; the first that matches. FP4 kernels of
#: W4A16 are weight-only whatever they are called.
KERNELS = {
    "emulation": "emulated", "marlin": "weight-only", "w4a16": "weight-only",
    "humming": "weight-only", "wna16": "weight-only", "unquantized": "bf16", "nvfp4": "native-fp4",
    "mxfp4": "native-mxfp4", "fp8": "native-fp8",
}  # fmt: skip
SCRIPT = """\
import json, sys
from transformers import AutoConfig
kind, fields = json.loads(sys.argv[1])
print(json.dumps(AutoConfig.for_model(kind, **fields).to_dict()))
"""


def architectures() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return the architectures of ci/rehearsal/starts.py, which needs another environment."""
    text = (ROOT / "ci" / "rehearsal" / "starts.py").read_text("utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARCHITECTURES":
            assert node.value is not None
            table: dict[str, tuple[str, str, dict[str, Any]]] = ast.literal_eval(node.value)
            return table
    raise LookupError("starts.py has no ARCHITECTURES")


def config(spec: recipe.Recipe, inherits: str, python: Path) -> dict[str, Any]:
    """Return a config.json for *spec*."""
    name = CLASSES.get(spec.name) or CLASSES[inherits]
    kind, architecture, changes = architectures()[name]
    fields = {**({} if "hybrid_override_pattern" in changes else {"num_hidden_layers": 4}), **changes}
    if "512" in spec.title:
        fields["num_experts"] = 512
    words = [str(python), "-I", "-c", SCRIPT, json.dumps([kind, fields])]
    document: dict[str, Any] = json.loads(process.ask_python("transformers", words, seconds=300))
    if "first_k_dense_replace" in changes:
        document.pop("mlp_layer_types", None)
    named = next(form for form in FORMATS if spec.model.quantization.startswith(form))
    extra = {"architectures": [architecture], "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    return {**document, **extra, "quantization_config": {"group_size": 16, **FORMATS[named]}}


def kernel_class(kind: str, kernel: str, quantization: str) -> str:
    """Return the class, as recipes name it, of *kernel* for layers of *kind*."""
    lower = kernel.lower()
    for part, name in KERNELS.items():
        if part in lower:
            return "weight-only" if name == "native-fp4" and "W4A16" in quantization else name
    if kind != "moe":
        return "bf16"
    if "W4A16" in quantization:
        return "weight-only"
    form = quantization.partition(" ")[0]
    return {"NVFP4": "native-fp4", "MXFP4": "native-mxfp4", "FP8": "native-fp8"}.get(form, "?")


def agreement(spec: recipe.Recipe, version: str, selection: Selection) -> str:
    """Return how the classes that the recipe states differ from those of *selection*."""
    wrong = []
    for kind, stated in spec.contract_for(version).serves.items():
        kernels = selection.rows.get(kind)
        if not kernels or kind in ("attention", "gdn", "mamba", "sampling"):
            continue  # one class each, which no choice changes
        chosen = {kernel_class(kind, kernel, spec.model.quantization) for kernel in kernels}
        sets = [set(choice.split("+")) for choice in stated.split("|")]
        if not any(chosen <= choice for choice in sets):
            wrong.append(f"{kind}: {'+'.join(sorted(chosen))}, not {stated}")
    return "; ".join(wrong) or "agrees"


def row(name: str, environment: environments.ServingEnvironment, python: Path) -> str:
    """Return the row of the recipe *name*."""
    spec = recipe.load(ROOT, name)
    fields = strict_yaml.load(recipe.files(ROOT)[name], dict[str, Any])
    variant = spec.find_variant(environment.vllm)
    if variant is None:
        return f"| {name} | not of this release | |"
    # Its layers that draft have another architecture, which the config here does not state.
    left_out = ("--max-model-len", "--speculative-config", "--tokenizer-mode")
    try:
        listed = flags.parse(spec.flags(environment.vllm))
        words = [word for each in listed if each.name not in left_out for word in each.words]
        document = config(spec, str(fields.get("inherits")), python)
        selection = select(environment, document, words, variant.variables)
    except SparkwrightError as error:
        return f"| {name} | unresolved: {error.what} {' '.join(error.details[-1:]):.200} | |"
    if selection.refused or selection.unresolved:
        state = "refused" if selection.refused else "unresolved"
        text = (selection.refused or selection.unresolved).replace("\n", " ").replace("|", "/")
        return f"| {name} | {state} at {selection.line}: {text:.240} | |"
    kinds = []
    for kind, kernels in selection.rows.items():
        other = ", ".join(selection.otherwise.get(kind, {})) or "a refusal"
        mark = (
            f" (unresolved: {other}, if compiled libraries say no)"
            if kind in selection.otherwise
            else ""
        )
        kinds.append(f"{kind}: {', '.join(f'{k} {n}' for k, n in kernels.items())}{mark}")
    return f"| {name} | {'; '.join(kinds)} | {agreement(spec, environment.vllm, selection)} |"


def main() -> None:
    """Print the table."""
    stack, python, only = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    environment = environments.examine(python)
    print(f"Stack {stack}, vLLM {environment.vllm}\n")  # noqa: T201
    print("| recipe | layers: what serves them, and how many | class |\n|---|---|---|", flush=True)  # noqa: T201
    differing = False
    for name in only or recipe.names(ROOT):
        line = row(name, environment, python)
        print(line, flush=True)  # noqa: T201
        differing |= not line.endswith(("| agrees |", "| |"))
    if differing:
        raise SystemExit("a recipe states another class of kernels than vLLM chooses")


if __name__ == "__main__":
    main()
