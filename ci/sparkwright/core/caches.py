"""
Where the programs of an environment keep what they compile at run time: in the environment.

Each has its own idea of what tells the entries of a cache apart, and none looks at everything
(FlashInfer #4489, vLLM #41871), so no two environments share a cache.
"""

from __future__ import annotations

from pathlib import Path

#: The folder in an environment.
CACHES = "caches"

#: Variable → the folder below `CACHES`. FlashInfer adds ``.cache/flashinfer`` itself.
VARIABLES = {
    "B12X_COMPILE_CACHE_DIR": "b12x",
    "CUDA_CACHE_PATH": "cuda",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}


def cache_variables(environment: Path) -> dict[str, str]:
    """Return the variables by which compiled kernels are cached in the folder *environment*."""
    caches = environment / CACHES
    return {name: str(caches / part) for name, part in VARIABLES.items()}
