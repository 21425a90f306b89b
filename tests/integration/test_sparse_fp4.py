"""The kernel of the experiment with zero tiles, on the CPU, which adds in the same order as the GPU."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
benchmark = SimpleNamespace(**runpy.run_path(str(ROOT / "ci" / "bench" / "sparse_fp4.py")))


@pytest.fixture(scope="module", name="product")
def _product(cuda_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the compiled function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{cuda_bin}:{os.environ['PATH']}")
        patch.setenv("LIBRARY_PATH", str(cuda_bin.parent / "lib"))
        return benchmark.compiled(tmp_path_factory.mktemp("kernel"), "sm_90a")


@pytest.mark.toolchain
def test_masked_products_have_the_bits_of_dense_ones(product: Any) -> None:
    """For shares of zeros from 0 to 1, batches of 1 to 4, −0, zero and NaN scales; against float64 within the bound."""
    assert benchmark.check(benchmark.Kernel(product)) == []


@pytest.mark.toolchain
def test_a_kernel_that_ignores_its_mask_is_seen(product: Any) -> None:
    def dense(*arguments: Any) -> Any:
        return product(*arguments[:9], 0, *arguments[10:])

    assert "can be skipped" in " ".join(benchmark.check(benchmark.Kernel(dense)))


def test_only_a_tile_of_zeros_counts_as_one() -> None:
    """The scale of a block is its largest magnitude, so these weights have no zero block; few groups of four fit 2:4."""
    packed, scales = benchmark.gaussian()
    shares = benchmark.shares(packed, scales)
    assert 0.05 < shares["weights"] < 0.1
    assert shares["blocks"] == shares["tiles of 32 bytes"] == 0
    counted = json.loads((ROOT / "docs" / "experiments" / "sparse-fp4-zeros.json").read_text())["counted"]
    assert counted[0]["sha256"] == hashlib.sha256(packed.tobytes() + scales.tobytes()).hexdigest()
    assert counted[0]["zeros"] == shares
    assert len(counted) == 15
    groups = "groups of 4 with 2 zeros or more"
    assert {row["zeros"][kind] for row in counted for kind in shares if kind not in ("weights", groups)} == {0.0}
    assert all(0.02 < row["zeros"][groups] < 0.035 for row in counted)
    assert all(0.063 <= row["zeros"]["weights"] < 0.0715 for row in counted)
    pairs = np.full((4, 64), 0x11, np.uint8)
    pairs[0, :3] = 0, 0x10, 0x80
    assert benchmark.shares(pairs, np.full((4, 8), 1, np.uint8))[groups] == 2 / 128
    # −0 in four rows of 16 values; a scale of NaN is no zero.
    packed[:4, :16] = 0x88
    scales[0, 1] = 0x7F
    assert benchmark.shares(packed, scales)["tiles of 32 bytes"] == pytest.approx(1 / (1024 * 256))
