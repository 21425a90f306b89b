"""
Print vLLM's key of compiled graphs for each model folder that is named, and for the first one again while logits that are no numbers are
counted. Run with the patched package on the path.
"""

import json
import os
import sys

from vllm import envs
from vllm.config import ModelConfig
from vllm.config.utils import hash_factors


def key(folder: str) -> str:
    """Return the parts of the key that come from the environment and from the model in *folder*."""
    return f"{hash_factors(envs.compile_factors())} {ModelConfig(model=folder, max_model_len=64).compute_hash()}"


keys = [key(folder) for folder in sys.argv[1:]]
os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
sys.stdout.write(json.dumps([*keys, key(sys.argv[1])]))
