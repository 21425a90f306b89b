"""G2's probe on a GPU: ``python -m pytest tests/device -m gpu -n0``. The rest of it is ``sparkwright gate WHEEL --only G2``."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkwright.builder import host_info
from sparkwright.builder.wheel.gpu_target import parsed
from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device import gate as device
from sparkwright.gates.device.gate import Capability

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

#: The thresholds of E2M1 as bits of FP32, in the order of the codes, for a converter by integers.
_THRESHOLDS = (
    ("gt", 0x3E800000), ("ge", 0x3F400000), ("gt", 0x3FA00000), ("ge", 0x3FE00000),
    ("gt", 0x40200000), ("ge", 0x40600000), ("gt", 0x40A00000),
)  # fmt: skip
_NATIVE = (
    "  cvt.rn.satfinite.e2m1x2.f32 byte, zero, x;\n  mov.b32 code, {byte, none, none, none};\n"
)


@pytest.fixture(name="gpu", scope="module")
def _gpu() -> Capability:
    """Return the capability of the first GPU; without one the tests are skipped."""
    if not (gpus := host_info.gpus()):
        pytest.skip("needs a CUDA GPU")
    major, minor, _ = parsed(f"sm_{gpus[0].capability.replace('.', '')}")
    return major, minor


def swept(gpu: Capability, folder: Path, first: str = "gt", nan: int = 7) -> Check:
    """Return the probe's check of a converter by integers, with another threshold or NaN."""
    lines = ["and.b32 sign, input, 0x7FFFFFFF;", "mov.u32 code, 0;"]
    for comparison, bits in ((first, _THRESHOLDS[0][1]), *_THRESHOLDS[1:]):
        lines.append(f"setp.{comparison}.u32 above, sign, {bits:#x};")
        lines += ["selp.u32 one, 1, 0, above;", "add.u32 code, code, one;"]
    lines += ["shr.u32 one, input, 31;", "shl.b32 one, one, 3;", "or.b32 code, code, one;"]
    lines += ["setp.gt.u32 above, sign, 0x7F800000;", f"selp.u32 code, {nan}, code, above;"]
    text = device.PTX.read_text("utf-8")
    assert _NATIVE in text
    text = text.replace(_NATIVE, "\n".join(lines) + "\n")
    text = text.replace("  cvt.rn.satfinite.e2m1x2.f32 none, zero, zero;\n", "")
    (folder / "software.ptx").write_text(text, "utf-8")
    return device.conversion_check(gpu, 120, folder, folder / "software.ptx")


def test_the_probe_counts_every_mismatch(gpu: Capability, tmp_path: Path) -> None:
    """A converter by integers is right for all inputs; one wrong tie is two inputs of 2^32."""
    assert swept(gpu, tmp_path).state == "pass"
    check = swept(gpu, tmp_path, first="ge")
    assert (check.reason, check.figures[0].value, check.figures[1].value) == (
        "conversion-wrong",
        2,
        0,
    )
    check = swept(gpu, tmp_path, nan=6)
    assert (check.reason, check.figures[1].value) == ("nan-differs", 2 * (2**23 - 1))
