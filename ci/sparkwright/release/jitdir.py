"""
Where programs keep what they compile on the user's machine: a folder per build, so that none meets what another left.

FlashInfer, Triton, torch and vLLM each have a cache that outlives an upgrade, and each has its own idea of what tells entries apart:
a version, a time, a hash of some sources. What none of them looks at is taken for unchanged (FlashInfer #4489: objects of two builds in one
library, by the times of files; vllm #41871: kernels of an older torch and Triton). Here the folder itself is named after everything
that is installed, so a rollback finds its own entries again and an upgrade finds none.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError
from sparkwright.core.files import content_key, sha256_file
from sparkwright.release.environment import Environment, access_guard

#: How much of the key names the folder, in hex digits.
DIGITS = 16


class Cache(msgspec.Struct, frozen=True):
    """
    A cache that outlives its program.

    Attributes:
        variable: The environment variable that says where it is.
        folder: Its place below the build's folder; FlashInfer adds ``.cache/flashinfer`` itself.
        holds: What is in it.
        keyed: What the program itself tells entries apart by (vLLM 0.33.0, FlashInfer 0.7.2.post1, torch 2.14, Triton 3.8).
    """

    variable: str
    folder: str
    holds: str
    keyed: str


CACHES = (
    Cache(
        "FLASHINFER_WORKSPACE_BASE", "", "nvcc modules, tuning results", "FlashInfer's version with its label, arch; then times of files"
    ),
    Cache(
        "VLLM_CACHE_ROOT",
        "vllm",
        "torch.compile and AOT graphs, model facts",
        "vLLM's version, configuration, traced files, VLLM_* variables",
    ),
    Cache("TRITON_CACHE_DIR", "triton", "kernels, autotuning results", "source, options, Triton's own files, version of ptxas"),
    Cache("TORCHINDUCTOR_CACHE_DIR", "inductor", "generated code", "torch's own files, graph, device"),
    Cache("CUTE_DSL_CACHE_DIR", "cute_dsl", "CuTe DSL kernels", "sources, versions of the DSL; not what was edited in it"),
    Cache("B12X_COMPILE_CACHE_DIR", "b12x", "b12x kernels", "source, DSL, environment"),
)


def key(environment: Environment) -> str:
    """
    Return the address of what decides the code that is compiled at run time: every installed distribution by its RECORD, Python, and nvcc.

    Two installers write RECORDs that differ in their own files, so reinstalling by another one gives a new address; that costs compiling
    once more, and never a stale entry.

    Raises:
        environment-unusable: A RECORD cannot be read.
    """
    with access_guard(environment.site):
        installed = {info.name: _described(info) for info in sorted(environment.site.glob("*.dist-info"))}
    return content_key("caches", {"installed": installed, "python": [*environment.version, environment.abi], "nvcc": nvcc_version()})


def _described(info: Path) -> str:
    """Return the hash of RECORD; a distribution without one (Debian's own, say) is told by its METADATA."""
    for name in ("RECORD", "METADATA"):
        if (info / name).is_file():
            return sha256_file(info / name)
    return ""


def nvcc_version() -> str:
    """Return what the nvcc that FlashInfer would run says of itself; empty without one."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    found = str(Path(homes[0], "bin", "nvcc")) if homes else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        return process.output([found, "--version"], timeout=60)
    except (CommandError, OSError):
        return ""


def folder(base: Path, environment: Environment) -> Path:
    """Return the folder below *base* for what is compiled with *environment*."""
    return base.absolute() / key(environment)[:DIGITS]


def variables(base: Path, environment: Environment, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which programs keep their caches in `folder`, less those that the user has *given* a place."""
    place = folder(base, environment)
    return {cache.variable: str(place / cache.folder) for cache in CACHES if not given.get(cache.variable)}


def others(base: Path, environment: Environment) -> list[Path]:
    """Return the folders below *base* of other builds, which a rollback would use and nothing else does."""
    mine = folder(base, environment)
    name = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
    return sorted(path for path in base.absolute().glob("*") if name.fullmatch(path.name) and path != mine and path.is_dir())
