"""Warm packs for tests: the files that a start leaves, and packs of them."""

from pathlib import Path
from typing import Any

import msgspec
import zstandard
from tests.support import tars

from sparkwright.bench.server import warm_pack
from sparkwright.client.environment import PACKS
from sparkwright.client.records import PackKey, WarmPack
from sparkwright.core import files, process, store

KEY = PackKey(
    recipe="toy-cpu", model="d" * 64, settings=("--dtype=float32",), wheels={"vllm": "a" * 64}, python="3.11",
    gpu="NVIDIA GB10 (SM 12.1)", driver="580.95.05",
)  # fmt: skip
#: Below the caches: a graph, a kernel, a tuned table; then what no pack holds.
GRAPH, KERNEL, TABLE = "vllm/torch_compile_cache/torch_aot_compile/ab/rank_0_0/model", "triton/AB/kernel.cubin", ".cache/flashinfer/autotune/v2/x.json"
LEFT_OUT = ("vllm/startup_plan/plan.json", "vllm/a.lock", "vllm/gpu_p2p_access_cache_for_0.json", ".cache/flashinfer/0.7/121f/cached_ops/x/x.so")


def start(root: Path, *names: str) -> Path:
    """Leave what a start leaves below the caches of *root*, and return that."""
    for name in names or (GRAPH, KERNEL, TABLE, *LEFT_OUT):
        path = root / process.CACHES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    return root


def record(archive: Path, unpacked: int, **changes: Any) -> WarmPack:
    """Return the record of *archive*."""
    fields = {"key": KEY, "tables": 1, "cold_s": 279.0, "warm_s": 63.0, "compiled": 0, "tuned": 0, **changes}
    return WarmPack(name=archive.name, size=archive.stat().st_size, sha256=files.sha256_file(archive), unpacked=unpacked, **fields)


def pack(folder: Path, **changes: Any) -> tuple[Path, WarmPack]:
    """Return an archive of a start in *folder*, and its record."""
    archive = folder / "toy.pack.tar.zst"
    size, tables = warm_pack.collect(start(folder / "cold"), archive)
    return archive, record(archive, size, **{"tables": tables, **changes})


def install(environment: Path, archive: Path, pack: WarmPack) -> WarmPack:
    """Put a pack where `install --warm` does."""
    folder = environment / process.CACHES / PACKS
    store.write_file(folder / pack.sha256, archive.read_bytes())
    store.write_file(folder / f"{pack.sha256}.json", msgspec.json.encode(pack))
    return pack


def archive(path: Path, *members: tars.Member) -> Path:
    """Write an archive of any *members*."""
    path.write_bytes(zstandard.ZstdCompressor().compress(tars.packed(*members)))
    return path
