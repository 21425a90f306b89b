"""Mutants of a wheel's operators: each is wrong in exactly one way, and dies at G2."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.conftest import Kill
from tests.support import fake_gpu

from sparkwright.gates.core.verdict import Check

pytestmark = pytest.mark.mutants

#: Fault of `fake_torch` → the check that it must die of, and the reason.
FAULTS = {
    "output tile unwritten": ("fp4-gemm", "output-unwritten"),
    "odd M: last row skipped": ("fp8-gemm", "output-unwritten"),
    "writes beyond its output": ("fp8-gemm", "guard-written"),
    "scales in plain rows": ("fp4-gemm", "output-wrong"),
    "swapped nibbles in one operand": ("fp4-gemm", "output-wrong"),
    "inverted global scale": ("fp4-gemm", "output-wrong"),
    "global scale of the first expert for all": ("fp4-moe", "output-wrong"),
    "first row of an expert taken for the one before": ("fp4-moe", "output-unwritten"),
    "last block of K dropped": ("fp4-gemm", "output-wrong"),
    "NaN in an output": ("fp8-gemm", "output-nan"),
    "code 1 decodes as 0.25": ("fp4-gemm", "output-wrong"),
    "order of sums left to chance": ("fp8-gemm", "output-varies"),
    "scale of the first channel for all": ("fp8-gemm", "output-wrong"),
    "quantiser inverts the tensor scale": ("fp4-quantise", "output-wrong"),
    "quantiser rounds ties away": ("fp4-quantise", "output-wrong"),
    "FP8 truncated": ("fp8-quantise", "output-wrong"),
    "first expert not summed": ("moe-sum", "output-wrong"),
}

_SOUND: dict[str, Check] = {}


@pytest.mark.parametrize("fault", FAULTS)
def test_g2_kills_every_wrong_operator(
    fault: str, kill: Kill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that is wrong in one way fails its check, for that reason."""
    name, reason = FAULTS[fault]
    fake_gpu.shrink(name, monkeypatch)
    if name not in _SOUND:
        _SOUND[name] = fake_gpu.check(name, tmp_path / "sound")

    check = fake_gpu.check(name, tmp_path / "scratch", fault)

    kill(mutant=fault, gate="G2", sound=[_SOUND[name]], mutant_checks=[check])
    assert check.reason == reason
