"""
Time the first calls of FlashAttention 2 on a GPU: what the driver compiles from PTX, and what not.

    first_attention.py LIBRARY [HEAD ...]    needs torch of the library's version, and one GPU

Each row is a process of its own that calls the operator as vLLM does: prefill, then decode from a
paged cache. Where a library has PTX alone for the GPU, the driver compiles a unit at the first call
of one of its kernels, unless its cache holds the result; machine code that the library or the cache
holds is loaded only. So ``no cache`` against ``cached`` is what native code saves at a start whose
cache is empty; on another GPU and CPU it is another number, and once the cache is full it is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

#: Tokens of a prompt and of a page, and heads of queries and of keys.
PROMPT, PAGE, QUERIES, KEYS = 2048, 16, 32, 8
#: Times of a call after the first; the median counts.
REPEATS = 20
#: What the driver is told in each process; the second finds what the first has compiled.
CACHES: dict[str, dict[str, str]] = {
    "cold cache": {},
    "cached": {},
    "no cache": {"CUDA_CACHE_DISABLE": "1"},
}
#: Greatest difference from attention in float32 of outputs in bfloat16, whose values are below 4.
TOLERANCE = 0.02


def child(library: str, sizes: Sequence[int]) -> None:
    """Call the operators of *library* for heads of *sizes*, and print what they took as JSON."""
    import torch

    torch.zeros(1, device="cuda")
    torch.ops.load_library(library)
    rows = [(kind, size, *_call(kind, size)) for size in sizes for kind in ("prefill", "decode")]
    sys.stdout.write(json.dumps(rows))


def _call(kind: str, size: int) -> tuple[float, float, float]:
    """Return milliseconds of the first call, of a later one, and the difference from float32."""
    import torch

    def cuda(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    torch.manual_seed(1)
    rows = PROMPT if kind == "prefill" else 1
    query = cuda(rows, QUERIES, size)
    key, value = cuda(PROMPT, KEYS, size), cuda(PROMPT, KEYS, size)
    pages = PROMPT // PAGE
    table = torch.arange(pages, dtype=torch.int32, device="cuda").reshape(1, pages)
    paged = [tensor.reshape(pages, PAGE, KEYS, size) for tensor in (key, value)]
    starts, lengths = ints(0, rows), ints(PROMPT)

    def attend() -> torch.Tensor:
        # As vLLM calls it: lengths in use instead of starts of keys, which are zeros.
        output: torch.Tensor = torch.ops._vllm_fa2_C.varlen_fwd(
            query, *paged, None, starts, torch.zeros_like(starts), lengths, None, table, None,
            rows, PROMPT, 0.0, size**-0.5, False, True, -1, -1, 0.0, False, 0, None,
        )[0]  # fmt: skip
        torch.cuda.synchronize()
        return output

    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        output = attend()
        times.append((time.perf_counter() - began) * 1e3)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1),
        key.float().transpose(0, 1).repeat_interleave(QUERIES // KEYS, 0),
        value.float().transpose(0, 1).repeat_interleave(QUERIES // KEYS, 0),
        is_causal=kind == "prefill",
    ).transpose(0, 1)
    difference = float((output.float() - exact).abs().max())
    return times[0], sorted(times[1:])[REPEATS // 2], difference


def run(
    words: Sequence[str], variables: Mapping[str, str]
) -> list[tuple[str, int, float, float, float]]:
    """Return what a process with *variables* measured."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words],
        env={**os.environ, "CUDA_MODULE_LOADING": "LAZY", **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [tuple(row) for row in json.loads(done.stdout)]


def main() -> None:
    """Measure the library of the command line."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], [int(size) for size in sys.argv[3:]])
        return
    words = [sys.argv[1], *(sys.argv[2:] or ["128"])]
    write = sys.stdout.write
    write(f"{'':12}{'':>14}{'first call, ms':>18}{'later, ms':>14}{'difference':>14}\n")
    with tempfile.TemporaryDirectory() as cache:
        for name, variables in CACHES.items():
            for kind, size, first, later, difference in run(
                words, {"CUDA_CACHE_PATH": cache, **variables}
            ):
                wrong = "  WRONG" if difference > TOLERANCE else ""
                write(
                    f"{name:12}{kind:>9}{size:5}{first:18.1f}{later:14.3f}{difference:14.4f}{wrong}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
