"""
Whether a recipe fits into the memory of its machine.

A Spark has one memory for processors and GPU, and nothing polices it: what does not fit takes the whole machine down (vllm #46307, #56824).
So a plan counts everything that lies in it, and leaves a floor free. All sizes are GiB, as in vLLM's flags and log. That a Spark has
119.7 GiB, and not GB, follows from a seed report's own log: 44.2 GiB of weights and 62.2 GiB of cache at 0.90 of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sparkwright.bench.model import config, cost
from sparkwright.bench.model.checkpoint import read
from sparkwright.bench.recipes.cells import Cell

#: Memory of a DGX Spark, in GiB (seed reports 000 and 001) and in MB, as `psutil` tells it.
SPARK_GIB = 119.7
SPARK_MB = round(SPARK_GIB * 2**30 / 1e6)
#: The share by which a checkpoint may differ from what the plan says before the plan is called wrong.
TOLERANCE = 0.05

Weight = Literal["error", "advice"]

REASONS = {
    "memory-short": "The plan needs more than the machine has, and a Spark without memory stops answering. Plan less cache.",
    "memory-utilization": "By --gpu-memory-utilization vLLM takes what must stay free, or wants more at its start than is free. Lower it.",
    "memory-unpinned": "vLLM sizes the cache by an estimate that was seen below zero on a Spark (vllm #44740). Plan the cache and pin it.",
    "cache-short": "The cache does not hold one request of the longest length, so the server does not start. Plan more cache, or shorter.",
    "cache-crowded": "The cache does not hold all requests of a cell at once; some wait or are computed twice, which measures that.",
    "token-differs": "A token takes more or less of the cache than the plan says, so the cache holds more or fewer. Correct `token`.",
    "weights-differ": "The checkpoint on disk is not as large as the plan says: another quantization or revision, or an old estimate.",
}


class Finding(msgspec.Struct, frozen=True):
    """
    Something that is wrong with a recipe, or could be better.

    Attributes:
        reference: Stable, in kebab-case; see the module's ``REASONS``.
        says: What was found, in a sentence.
        weight: ``error`` keeps a recipe from being used; ``advice`` is shown.
    """

    reference: str
    says: str
    weight: Weight = "error"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a server may hold on each node.

    Attributes:
        weights: GiB of the checkpoint on one node; 0 for one that the user brings. *weights_from*: where that is known from.
        cache: GiB for keys and values; None leaves it to vLLM.
        pinned: Whether the cache is given as ``--kv-cache-memory-bytes``; not where a variable does that, as on a CPU.
        max_model_len, max_num_seqs: Tokens of the longest request, and requests at a time.
        gpu_memory_utilization: The share of the memory that must be free at the start; None leaves vLLM's default.
        token: Bytes that one token takes in the cache of one node; 0 where nobody counted.
        reserve: GiB for activations, CUDA graphs, the libraries and the server's own processes.
        floor: GiB that stay free; below that the server is ended.
    """

    weights: Annotated[float, Meta(ge=0, le=4096)]
    weights_from: str
    cache: Annotated[float, Meta(gt=0, le=4096)] | None
    max_model_len: Annotated[int, Meta(ge=16, le=1 << 24)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)]
    reserve: Annotated[float, Meta(ge=0, le=1024)]
    pinned: bool = True
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    token: Annotated[int, Meta(ge=0)] = 0
    floor: Annotated[float, Meta(ge=0, le=1024)] = 12.0

    def __post_init__(self) -> None:
        if self.pinned and self.cache is None:
            raise ValueError("a pinned cache needs its size")

    def flags(self) -> tuple[str, ...]:
        """Return the arguments of ``vllm serve`` that say the plan."""
        found = [f"--max-model-len={self.max_model_len}", f"--max-num-seqs={self.max_num_seqs}"]
        if self.gpu_memory_utilization is not None:
            found.append(f"--gpu-memory-utilization={self.gpu_memory_utilization:g}")
        if self.pinned and self.cache is not None:
            found.append(f"--kv-cache-memory-bytes={round(self.cache * 2**30)}")
        return tuple(found)


class Held(msgspec.Struct, frozen=True):
    """
    What a checkpoint on disk takes.

    Attributes:
        weights: Bytes of all its tensors.
        token: Bytes of a token in the cache, at two bytes a number; with fp8 half of it.
        drafts: Whether vLLM can draft with it (MTP).
    """

    weights: int
    token: float
    drafts: bool


def held(folder: Path) -> Held:
    """
    Return what the model in *folder* takes.

    Raises:
        not-provided: There is no such folder, or no model in it.
        checkpoint-invalid: A file is not what it should be.
    """
    checkpoint = read(folder)
    shape = config.of(checkpoint.config, checkpoint.quantization)
    modules = list(cost.modules(checkpoint, shape.layers))
    drafts = any(module.name.group == "mtp" for module in modules)
    # vLLM 0.20 to 0.33 drafts with this family only where the config says so (vllm/config/speculative.py), and quantizers drop the field.
    if shape.model == "nemotron_h" and not checkpoint.config.get("num_nextn_predict_layers"):
        drafts = False
    tokens = sum(cost.kept(modules, shape, 2).layers.values())
    return Held(sum(tensor.bytes for tensor in checkpoint.tensors.values()), tokens, drafts)


def check(
    plan: Plan, total: int = SPARK_MB, checkpoint: int | None = None, *, nodes: int = 1, servers: int = 1, cells: Iterable[Cell] = ()
) -> tuple[Finding, ...]:
    """
    Return in what *plan* does not fit.

    Args:
        total: Megabytes of the memory of one node, shared by processors and GPU.
        checkpoint: Bytes of the checkpoint on disk, over all nodes; None where it is not at hand, and the plan's figure is taken.
        servers: How many of them run at a time on each node, as baseline and candidate may.
        cells: What will be measured.
    """
    machine = total * 1e6 / 2**30
    weights = plan.weights if checkpoint is None else checkpoint / 2**30 / nodes
    return (*_whole(plan, machine, weights, servers), *_weights(plan, weights), *_cache(plan, cells))


def _whole(plan: Plan, machine: float, weights: float, servers: int) -> list[Finding]:
    found = []
    needed = servers * (weights + (plan.cache or 0) + plan.reserve) + plan.floor
    if needed > machine:
        parts = f"{weights:.1f} of weights, {plan.cache or 0:g} of cache and {plan.reserve:g} in reserve"
        says = f"{parts}{f', {servers} times,' if servers > 1 else ''} and {plan.floor:g} that stay free are {needed:.1f} GiB"
        found.append(Finding("memory-short", f"{says}; the machine has {machine:.1f}"))
    share = plan.gpu_memory_utilization
    if share is not None and share * machine + plan.floor > machine:
        says = f"{share:g} of {machine:.1f} GiB leaves {(1 - share) * machine:.1f} GiB, and {plan.floor:g} must stay free"
        found.append(Finding("memory-utilization", says))
    if plan.cache is None:
        found.append(Finding("memory-unpinned", "the plan does not say how large the cache is", "advice"))
    return found


def _weights(plan: Plan, weights: float) -> list[Finding]:
    if not plan.weights or abs(weights - plan.weights) <= TOLERANCE * plan.weights:
        return []
    return [Finding("weights-differ", f"the checkpoint has {weights:.1f} GiB for each node, the plan says {plan.weights:g}", "advice")]


def _cache(plan: Plan, cells: Iterable[Cell]) -> list[Finding]:
    if plan.cache is None or not plan.token:
        return []
    tokens, found = int(plan.cache * 2**30 / plan.token), []
    if tokens < plan.max_model_len:
        found.append(Finding("cache-short", f"the cache holds {tokens:,} tokens, and a request may have {plan.max_model_len:,}"))
    for cell in cells:
        if cell.length * cell.concurrency > tokens:
            says = f"{cell.name} holds {cell.length * cell.concurrency:,} tokens at once, the cache {tokens:,}"
            found.append(Finding("cache-crowded", says, "advice"))
    return found
