"""
Preflight of a recipe: its flags, its memory and its checkpoint, before a server is started.

A Spark has one memory for processors and GPU, and nothing polices it: what does not fit takes the
whole machine down (vllm #46307, #56824). So a plan counts everything that lies in it, and leaves a
floor free. That a Spark has 119.7 GiB, and not GB, follows from a seed report's own log: 44.2 GiB
of weights and 62.2 GiB of cache at 0.90 of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from sparkwright.bench.model import modules
from sparkwright.bench.model.checkpoint import read
from sparkwright.bench.model.modules import ModuleAudit
from sparkwright.bench.recipes.recipe import UNRESOLVED, Recipe, RecipeError
from sparkwright.bench.recipes.workloads import Workloads
from sparkwright.bench.records import Reason

#: Share by which a checkpoint may differ from the plan before it is another one; some plans are
#: estimates.
OTHER_MODEL = 0.3
#: How vLLM quantises the lm_head that drafts share (draft_lm_head_quantization) → its part of the
#: bytes in bfloat16: a byte, or half of one and an 8-bit scale for 16 weights.
DRAFT_HEADS = {"fp8": 0.5, "nvfp4": 0.28125}
#: Formats of weights by the names that people give them, where the two differ.
FORMATS = {"AWQ": "INT", "none": ""}

#: The release of vLLM whose torch brings Triton 3.8.0.
TRITON_3_8 = "0.33.0"
#: Experts of a layer with which FlashInfer's b12x kernels read memory that is not theirs.
B12X_EXPERTS = 512

REASONS: Mapping[str, str] = {
    "mxfp4-triton": "Leave --moe-backend out, or set it to marlin.",
    "b12x-experts": "Set --moe-backend to another one, such as marlin or flashinfer_cutlass.",
    "memory-short": "The plan needs more than the machine has, and a Spark without memory stops "
    "answering. Plan less cache.",
    "memory-utilization": (
        "With --gpu-memory-utilization, vLLM uses memory that must stay "
        "free, or needs more at its start than is free. Lower it."
    ),
    "cache-short": (
        "The cache does not hold one request of the longest length, so the server "
        "does not start. Plan more cache, or a shorter length."
    ),
    "checkpoint-other": (
        "The checkpoint on disk has another architecture, format or size "
        "than the recipe's model, so no result would count for the recipe. "
        "Name the recipe's checkpoint."
    ),
    "speculation-headless": "The checkpoint has no layers that draft, as quantizers often drop "
    "them; vLLM refuses it (seed report 003).",
    "cell-too-long": "The cell's prompt and answer are longer than the server takes. Raise "
    "max_model_len, or measure with something else.",
    "cell-too-wide": "The cell asks for more requests at a time than the server takes. Raise "
    "max_num_seqs, or measure with something else.",
}


def check(
    recipe: Recipe, workloads: Workloads | None, model: Path, total: int | None = None
) -> None:
    """
    Check that *recipe* can be served here, and measured with its workloads.

    Args:
        workloads, total: As of `findings`.
        model: Folder of the checkpoint; not read for a recipe that takes any.

    Raises:
        recipe-unfit: The recipe is wrong, or the machine or the checkpoint is not as it plans.
        model-missing, checkpoint-invalid: As `checkpoint.read`.
    """
    audit = None if recipe.model.repository == "any" else modules.audit(read(model))
    results = findings(recipe, workloads, total=total, checkpoint=audit)
    variant = recipe.find_variant(TRITON_3_8)
    for flag in variant.flags if variant else ():
        name, _, backend = flag.partition("=")
        results += kernel_faults(backend, TRITON_3_8, audit) if name == "--moe-backend" else []
    errors = [
        f"{finding.reference}: {finding.message}. {REASONS[finding.reference]}"
        for finding in results
    ]
    if errors:
        raise RecipeError(
            "recipe-unfit", f"{recipe.name} cannot be served here as it is.", details=errors
        )


def both_fit(recipe: Recipe, model: Path, total: int | None = None) -> bool:
    """
    Return whether two servers of *recipe* fit into memory by its plan; arguments as of `check`.
    """
    audit = modules.audit(read(model))
    return not findings(recipe, None, total=total, checkpoint=audit, servers=2)


def draft_head(settings: Mapping[str, Any], checkpoint: ModuleAudit | None) -> float:
    """
    Return the bytes of the lm_head that vLLM copies for drafts with *settings*; 0 if they share
    that of the model, or the *checkpoint* is not at hand. A reduced vocabulary counts as a whole
    one, of which it has a part.
    """
    quantization = str(settings.get("draft_lm_head_quantization", ""))
    share = DRAFT_HEADS.get(quantization, 1.0 if settings.get("draft_vocabulary") else 0.0)
    return share * checkpoint.head if checkpoint else 0.0


def findings(
    recipe: Recipe,
    workloads: Workloads | None,
    *,
    total: int | None = None,
    checkpoint: ModuleAudit | None = None,
    servers: int = 1,
) -> list[Reason]:
    """
    Return what is wrong with *recipe*.

    Args:
        workloads: What may be measured; None if the recipe only serves.
        total: Megabytes of the memory of a node; None for this machine's, which on a Spark is also
            its GPU's.
        checkpoint: The checkpoint on disk, over all nodes; None if it is not at hand.
        servers: How many run on a node at a time.
    """
    memory = psutil.virtual_memory().total if total is None else total * 1e6
    results = [
        *_memory(recipe, memory / 2**30, checkpoint, servers),
        *_cells(recipe, workloads),
    ]
    if checkpoint and recipe.model.repository != "any":
        results += _other_model(recipe, checkpoint)
    drafts = checkpoint.drafts if checkpoint else recipe.model.drafts
    if "mtp" in recipe.speculation and drafts is False:
        message = f"{recipe.model.repository} has no layers that draft, or its config names none"
        results.append(Reason("speculation-headless", message))
    return list(dict.fromkeys(results))


def kernel_faults(backend: str, vllm: str, checkpoint: ModuleAudit | None) -> Iterator[Reason]:
    """Yield why vLLM's ``--moe-backend`` of that name computes wrongly with *checkpoint*."""
    if not checkpoint:
        return
    mxfp4 = checkpoint.scheme.startswith("MXFP4") and backend.startswith("triton")
    if mxfp4 and vllm.startswith(TRITON_3_8):
        yield Reason(
            "mxfp4-triton", "Triton 3.8.0 multiplies MXFP4 wrongly on SM 12.x (triton #11733)"
        )
    if "b12x" in backend and checkpoint.experts[0] >= B12X_EXPERTS:
        yield Reason(
            "b12x-experts",
            f"b12x ends with {checkpoint.experts[0]} experts (flashinfer #5446, #3170)",
        )


def _other_model(recipe: Recipe, checkpoint: ModuleAudit) -> Iterator[Reason]:
    """Yield what shows that *checkpoint* is not the one of *recipe*."""
    model, plan = recipe.model, recipe.plan
    if model.architecture not in (UNRESOLVED, checkpoint.model):
        yield Reason(
            "checkpoint-other", f"its architecture is {checkpoint.model}, not {model.architecture}"
        )
    name = model.quantization.partition(" ")[0]
    weights_alone = "W4A4" in model.quantization and "W4A16" in checkpoint.scheme
    if not checkpoint.scheme.startswith(FORMATS.get(name, name)) or weights_alone:
        scheme = checkpoint.scheme or "not quantised"
        yield Reason(
            "checkpoint-other", f"it is {scheme}, and the recipe's model is {model.quantization}"
        )
    size = checkpoint.bytes / 2**30 / recipe.nodes
    if plan.weights and abs(size - plan.weights) > OTHER_MODEL * plan.weights:
        yield Reason(
            "checkpoint-other",
            f"a node's part of it has {size:.1f} GiB, and the recipe's {plan.weights:g}",
        )


def _memory(
    recipe: Recipe, machine: float, checkpoint: ModuleAudit | None, servers: int
) -> Iterator[Reason]:
    """Yield what is wrong with the memory plan on a *machine* with so many GiB."""
    plan, share = recipe.plan, recipe.plan.gpu_memory_utilization or 0.0
    weights = plan.weights
    if checkpoint:
        copies = [draft_head(recipe.drafting(each), checkpoint) for each in recipe.versions]
        weights = (checkpoint.bytes + max(copies)) / 2**30 / recipe.nodes
    needed = servers * (weights + plan.cache + plan.reserve) + plan.floor
    if needed > machine:
        yield Reason(
            "memory-short",
            f"{servers} × ({weights:.1f} of weights, {plan.cache:g} of cache, {plan.reserve:g} in "
            f"reserve) and {plan.floor:g} that stay free are {needed:.1f} GiB; the machine has "
            f"{machine:.1f}",
        )
    if share * machine + plan.floor > machine and share:
        left = (1 - share) * machine
        yield Reason(
            "memory-utilization",
            f"{share:g} of {machine:.1f} GiB leaves {left:.1f}; {plan.floor:g} must stay free",
        )
    tokens = int(plan.cache * 2**30 / plan.token) if plan.token else plan.max_model_len
    if tokens < plan.max_model_len:
        yield Reason(
            "cache-short",
            f"the cache holds {tokens:,} tokens, and a request may have {plan.max_model_len:,}",
        )


def _cells(recipe: Recipe, workloads: Workloads | None) -> Iterator[Reason]:
    """Yield what the recipe's server cannot be measured with."""
    plan = recipe.plan
    cells = workloads.cells(*recipe.workloads, *recipe.decides) if workloads else ()
    for cell in cells:
        if cell.prompt + cell.answer > plan.max_model_len:
            yield Reason(
                "cell-too-long",
                f"{cell.name} is longer than max_model_len, {plan.max_model_len:,} tokens",
            )
        if cell.concurrency > plan.max_num_seqs:
            yield Reason(
                "cell-too-wide",
                f"{cell.name} has more requests than max_num_seqs, {plan.max_num_seqs}",
            )
