"""
Loads a model as vLLM would, in the Python that vLLM is installed in, and writes down what its modules became.

    listmodules.py MODEL ANSWER

ANSWER is a JSON object: vLLM's version, and for each module with weights its class, its quantisation method and its tensors. Weights are
repacked and some are converted while a model is loaded, so this can differ from the checkpoint; it is what a step really reads.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

#: The engine in this process, so that its modules can be looked at; a small cache is enough for that.
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def modules(model: Any) -> list[dict[str, Any]]:
    """Return the modules of *model* that hold tensors or have a quantisation method; a tensor that two share counts once."""
    found, seen = [], set()
    for name, module in model.named_modules():
        tensors = []
        for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            shared = tensor.numel() > 0 and tensor.data_ptr() in seen
            seen.add(tensor.data_ptr())
            size = 0 if shared else tensor.numel() * tensor.element_size()
            tensors.append({"name": own, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": size})
        method = getattr(module, "quant_method", None)
        if tensors or method is not None:
            kind = "" if method is None else type(method).__name__
            found.append({"name": name, "kind": type(module).__name__, "method": kind, "tensors": tensors})
    return found


def main() -> None:
    """Load, look, write."""
    os.environ.update(VARIABLES)
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(model=sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=1)
    (found,) = llm.apply_model(modules)
    Path(sys.argv[2]).write_text(json.dumps({"version": vllm.__version__, "modules": found}), "utf-8")
    # Without the engine's own farewell, which may wait for threads.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
