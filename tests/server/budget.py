"""
Let vLLM's worker decide how much memory the KV cache gets on a machine whose CPU and GPU share it, and print what becomes of the machine.

Only the readings of the memory, the model's runs and FlashInfer's tuning are stand-ins: each takes a stated number of GiB and gives it back.
The argument is a list of scenarios: GiB of reserve, and the flag that sets the cache's size (share or bytes). Run with the patched package on
the path; with the stock one, the reserve has no effect.
"""

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.warmup import kernel_warmup
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

GIB = 2**30
DEVICE = torch.device("cuda:0")
#: GiB: of a Spark, of what runs beside vLLM, of the weights, of activations, and of tuning.
TOTAL, HOST, WEIGHTS, ACTIVATIONS, TUNING = 120, 8, 40, 4, 10


class UnifiedMemory:
    """A memory of `TOTAL` GiB, of which torch keeps what its tensors have left."""

    def __init__(self) -> None:
        self.allocated = self.cached = self.peak = 0
        self.least = TOTAL * GIB

    @property
    def available(self) -> int:
        return (TOTAL - HOST) * GIB - self.allocated - self.cached

    def take(self, size: int) -> None:
        """Allocate *size* bytes, and none of those that torch has kept, whose blocks are too small."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.least = min(self.least, self.available)

    def use(self, size: int) -> None:
        """Allocate *size* bytes, those first that torch has kept, and free them, so that torch keeps them."""
        self.cached -= min(size, self.cached)
        self.take(size)
        self.allocated -= size
        self.cached += size

    def stand_in(self) -> None:
        """Give vLLM the readings of this memory instead of those of the machine."""
        accelerator = torch.accelerator
        accelerator.memory_stats = lambda device: {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.allocated}
        accelerator.get_memory_info = lambda device: (self.available, TOTAL * GIB)
        accelerator.memory_reserved = lambda device: self.allocated + self.cached
        accelerator.empty_cache = lambda: setattr(self, "cached", 0)
        accelerator.reset_peak_memory_stats = lambda device: setattr(self, "peak", self.allocated)
        readings: Any = psutil
        readings.virtual_memory = lambda: SimpleNamespace(available=self.available)


def start(reserve: float, share: float | None, size: int | None) -> dict[str, float]:
    """Return GiB of the cache, and the least that was free for the host from then on, tuning included."""
    os.environ["VLLM_MEMORY_RESERVE_GIB"] = str(reserve)
    memory = UnifiedMemory()
    tuned: list[bool] = []
    memory.stand_in()

    def autotune(runner: object, *, skip_attn: bool = False) -> None:
        if not tuned:
            memory.use(TUNING * GIB)
        tuned.append(skip_attn)

    kernel_warmup.flashinfer_autotune = autotune
    cache = SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=size and size * GIB, use_replayssm=False)
    settings = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, cudagraph_mm_encoder=False),
        kernel_config=SimpleNamespace(enable_flashinfer_autotune=True),
    )
    runner = SimpleNamespace(model_memory_usage=WEIGHTS * GIB, profile_run=lambda randomize_inputs: memory.use(ACTIVATIONS * GIB))
    worker = SimpleNamespace(
        cache_config=cache, vllm_config=settings, model_runner=runner, device=DEVICE, use_v2_model_runner=True, randomize_dummy_inputs=False,
        model_config=SimpleNamespace(multimodal_config=None), parallel_config=SimpleNamespace(), init_snapshot=MemorySnapshot(device=DEVICE),
        _scoped_allocator_max_split=lambda **_: contextlib.nullcontext(),
    )  # fmt: skip
    worker.requested_memory = request_memory(worker.init_snapshot, cache) if share else 0
    memory.take(WEIGHTS * GIB)
    granted = gpu_worker.Worker.determine_available_memory(worker)
    memory.least = TOTAL * GIB
    memory.take(max(granted, 0))
    autotune(runner)
    memory.use(ACTIVATIONS * GIB)
    return {"cache": granted / GIB, "free": memory.least / GIB}


if __name__ == "__main__":
    current_platform.__class__.is_integrated_gpu = classmethod(lambda cls, device=0: True)
    current_platform.__class__.has_device_capability = classmethod(lambda cls, *_: True)
    kernel_warmup.has_flashinfer = lambda: True
    gpu_worker.set_current_vllm_config = lambda settings: contextlib.nullcontext()
    json.dump([start(**scenario) for scenario in json.loads(sys.argv[1])], sys.stdout)
