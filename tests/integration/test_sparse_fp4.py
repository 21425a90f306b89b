"""The kernel of the experiment with zero tiles, on the CPU, which adds in the same order as the GPU."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

benchmark = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "ci" / "bench" / "sparse_fp4.py")))


@pytest.mark.toolchain
def test_masked_products_have_the_bits_of_dense_ones(cuda_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For shares of zeros from 0 to 1, batches of 1 to 4, −0, zero and NaN scales; a kernel that ignores its mask is seen."""
    monkeypatch.setenv("PATH", f"{cuda_bin}:{os.environ['PATH']}")
    monkeypatch.setenv("LIBRARY_PATH", str(cuda_bin.parent / "lib"))
    product = benchmark.compiled(tmp_path, "sm_90a")

    def dense(*arguments: Any) -> Any:
        return product(*arguments[:9], 0, *arguments[10:])

    assert benchmark.check(benchmark.Kernel(product)) == []
    assert "can be skipped" in " ".join(benchmark.check(benchmark.Kernel(dense)))


def test_only_a_tile_of_zeros_counts_as_one() -> None:
    """Of two tiles of −0, one has a scale of NaN, which is no zero; a group of four fits 2:4 with two zeros or more."""
    packed, scales = np.full((8, 256), 0x11, np.uint8), np.full((8, 32), 0x38, np.uint8)
    packed[:4, :16], scales[0, 1] = 0x88, 0x7F
    packed[7, :3] = 0, 0x10, 0x80
    shares = benchmark.shares(packed, scales)
    assert (shares["blocks"], shares["tiles of 32 bytes"]) == (7 / 256, 1 / 64)
    assert shares["groups of 4 with 2 zeros or more"] == (4 * 32 // 4 + 2) / (8 * 512 // 4)
