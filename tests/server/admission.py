"""
Let vLLM's own functions decide which servers start, and print what each says against one; empty if it starts.

Only the readings of the memory are stand-ins. The argument is a list of servers: bytes in all and free now, the share of the flag, bytes of the
cache, and tokens of the longest request of a model whose ten layers attend to everything, of so many bytes a token.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import request_memory

try:  # since 0.33
    from vllm.v1.core.kv_cache_planning import check_enough_kv_cache_memory
except ImportError:
    from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory

LAYERS, SIZE = 10, 128


def refusal(server: dict[str, float]) -> str:
    """Return what vLLM says when it starts *server*."""
    snapshot = MemorySnapshot(free_memory=int(server["free"]), total_memory=int(server["total"]), device="cpu", auto_measure=False)
    cache = CacheConfig(block_size=16, gpu_memory_utilization=server["share"])
    cache.kv_cache_layout = "NHD"
    config = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(max_model_len=int(server["length"])),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        kv_transfer_config=None, kv_events_config=None, speculative_config=None,
    )  # fmt: skip
    heads = int(server["token"]) // (2 * LAYERS * SIZE)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=SIZE, dtype=torch.uint8)
    try:
        request_memory(snapshot, cache)
        if heads:
            check_enough_kv_cache_memory(config, {f"layer.{layer}": spec for layer in range(LAYERS)}, int(server["cache"]))
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps([refusal(server) for server in json.loads(sys.argv[1])]))
