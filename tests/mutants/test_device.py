"""
Mutants of kernels: each differs from the probe's own in one line, is compiled, and dies at G2.

The products are the same source for the host and for the GPU, so most mutants are shown on both; those of GPU code alone need one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.conftest import Kill
from tests.support import devicehost
from tests.support.devicehost import POLICY

from sparkwright.gates.core.verdict import Check
from sparkwright.gates.device import gate as device
from sparkwright.gates.device import gpu, probe
from sparkwright.gates.device.gate import Backend
from sparkwright.gates.device.gpu import Absent, Gpu
from sparkwright.gates.device.probe import Toolkit

pytestmark = pytest.mark.mutants

_CHANCE = """
#ifndef __CUDA_ARCH__
#include <random>
#endif
namespace sparkwright {
BOTH int first_block(int blocks) {
#ifdef __CUDA_ARCH__
    return (int)(clock64() / 7 % blocks);
#else
    return (int)(std::random_device{}() % (unsigned)blocks);
#endif
}
"""

#: What is wrong → file, what stands there, what stands there instead, and the reference that it must die of.
PRODUCTS = {
    "output tile unwritten": (
        "gemm.h", "float value) { out[", "float value) { if (row / 16 != 1 || column / 8 != 1) out[", "output-unwritten",
    ),
    "odd M: last row skipped": ("gemm.h", "{ return c.m; }", "{ return c.m / 2 * 2; }", "output-unwritten"),
    "edge of N skipped": ("gemm.h", "{ return c.n; }", "{ return c.n / 8 * 8; }", "output-unwritten"),
    "writes beyond its output": (
        "gemm.h", "float value) { out[", "float value) { if (row + 1 == c.m && column + 1 == c.n) out[(size_t)c.m * c.n] = 0; out[",
        "guard-written",
    ),
    "scale column stale": (
        "gemm.h", "scale_offset(column, block, blocks)", "scale_offset(column ? column - 1 : 0, block, blocks)", "output-wrong",
    ),
    "scale of the row above": ("gemm.h", "scale_offset(row, block, blocks)", "scale_offset(row / 2 * 2, block, blocks)", "output-wrong"),
    "scales in plain rows": ("gemm.h", "row % 32 * 16 + row / 32 % 4 * 4", "row % 128 * 4", "output-wrong"),
    "swapped nibbles in one operand": (
        "gemm.h", "code_at(b, (size_t)column * c.k + j)", "code_at(b, (size_t)column * c.k + (j ^ 1))", "output-wrong",
    ),
    "inverted global scale": ("gemm.h", "return c.alpha[group] * sum;", "return sum / c.alpha[group];", "output-wrong"),
    "global scale of the first expert for all": ("gemm.h", "return c.alpha[group] * sum;", "return c.alpha[0] * sum;", "output-wrong"),
    "first row of an expert taken for the one before": (
        "gemm.h", "c.offsets[group + 1] <= row", "c.offsets[group + 1] < row", "output-wrong",
    ),
    "K no multiple of 32: last block dropped": ("gemm.h", "i < blocks; i++", "i < blocks / 2 * 2; i++", "output-wrong"),
    "NaN logit": ("gemm.h", "= bits_of(value);", "= row == 0 && column == 0 ? 0x7fc00000u : bits_of(value);", "output-nan"),
    "code 1 decodes as 0.25": ("e2m1.h", "0.5f * (float)m", "0.25f * (float)m", "output-wrong"),
    "codes lose their sign": ("e2m1.h", "return code & 8u ? -y : y;", "return y;", "output-wrong"),
    "sums kept in bfloat16": (
        "gemm.h", "sum += products * (a_scale * b_scale);", "sum = float_of(bits_of(sum + products * (a_scale * b_scale)) & 0xffff0000u);",
        "output-wrong",
    ),
    "order of summing left to chance": (
        "gemm.h", "BOTH int first_block(int) { return 0; }", f"}}{_CHANCE}", "output-varies",
    ),
}  # fmt: skip

#: The same for converters and matrix instructions, which only a GPU can show.
CONVERSIONS = {
    "converter rounds twice": ("e2m1.h", " | at_most_one(tails(a, b));", ";", "conversion-wrong"),
    "converter does not saturate": ("e2m1.h", "= smaller(odd, 0x40c040c0u);", "= odd;", "conversion-wrong"),
    "converter rounds ties up": ("e2m1.h", "0x42864286u, y)", "0x42864286u, y + 0x00010001u)", "conversion-wrong"),
    "converter takes the sign of its neighbour": ("e2m1.h", "code, cut);", "code, cut >> 16 | cut << 16);", "conversion-wrong"),
    "a block's NaN is passed over": ("e2m1.h", "max.NaN.xorsign.abs.bf16x2", "max.xorsign.abs.bf16x2", "conversion-wrong"),
    "quantiser's tensor scale inverted": (
        "e2m1.h", "product(e4m3_value(scale), 1.0f / tensor_scale)", "product(e4m3_value(scale), tensor_scale)", "conversion-wrong",
    ),
    "quantiser drops the last block": (
        "nvfp4.cuh", "if (at >= blocks) return;\n        const uint32_t w", "if (at + 1 >= blocks) return;\n        const uint32_t w",
        "conversion-wrong",
    ),
    "matrix instruction: scale column stale": (
        "mma.cuh", "b_scales[scale_offset(n, block", "b_scales[scale_offset(n ? n - 1 : 0, block", "output-wrong",
    ),
    "matrix instruction: upper rows twice": (
        "mma.cuh", "a[1] |= e4m3_of(t.a_code(t.row + quad + 8,", "a[1] |= e4m3_of(t.a_code(t.row + quad,", "output-wrong",
    ),
    "matrix instruction: code 1 as 0.25": ("mma.cuh", "0x4c4844403c383000ull", "0x4c4844403c382800ull", "output-wrong"),
}  # fmt: skip


@pytest.fixture(scope="module", name="sound")
def _sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return the checks of the product that is right."""
    folder = tmp_path_factory.mktemp("sound")
    return tuple(devicehost.checks(devicehost.compiled(devicehost.sources(folder / "sources")), folder / "scratch"))


@pytest.mark.parametrize("mutant", PRODUCTS)
def test_g2_kills_every_wrong_product(mutant: str, sound: tuple[Check, ...], kill: Kill, tmp_path: Path) -> None:
    """A product that is wrong in one way fails G2, for just that reason, on every kind of hardware that computes it."""
    file, right, wrong, reference = PRODUCTS[mutant]
    program = devicehost.compiled(devicehost.sources(tmp_path / "sources", {file: (right, wrong)}))

    checks = tuple(devicehost.checks(program, tmp_path / "scratch"))

    kill(mutant=mutant, gate="G2", sound=sound, mutant_checks=checks)
    assert reference in {check.reason for check in checks}


@pytest.fixture(scope="module", name="at_hand")
def _at_hand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gpu, Toolkit] | None:
    """Return the GPU and a toolkit; None where one of them is missing."""
    import shutil

    found = gpu.ask(tmp_path_factory.mktemp("gpu"))
    nvcc = shutil.which("nvcc")
    return None if isinstance(found, Absent) or nvcc is None else (found, Toolkit(Path(nvcc).resolve().parents[1]))


def _on_gpu(at_hand: tuple[Gpu, Toolkit], sources: Path, scratch: Path) -> tuple[Check, ...]:
    found, toolkit = at_hand
    scratch.mkdir()
    made = probe.compile_probe(toolkit, found.target, POLICY.compile, scratch, sources)
    checks = list(probe.row_checks(made, found, POLICY.seconds, scratch))
    for kind in ("plain", "e4m3"):
        command = lambda cases, out, repeats, kind=kind: [str(made.program), "gemm", str(cases), str(out), str(repeats), kind]  # noqa: E731
        checks += device.fuzzed(Backend(kind, kind, command), devicehost.FUZZ, POLICY.seconds, scratch)
    return tuple(checks)


@pytest.fixture(scope="module", name="sound_on_gpu")
def _sound_on_gpu(at_hand: tuple[Gpu, Toolkit] | None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return the checks of the probe that is right, on the GPU; none without one."""
    folder = tmp_path_factory.mktemp("sound-gpu")
    return _on_gpu(at_hand, devicehost.sources(folder / "sources"), folder / "scratch") if at_hand else ()


@pytest.mark.parametrize("mutant", [*CONVERSIONS, *PRODUCTS])
def test_g2_kills_every_wrong_kernel_on_a_gpu(
    mutant: str, at_hand: tuple[Gpu, Toolkit] | None, sound_on_gpu: tuple[Check, ...], kill: Kill, tmp_path: Path
) -> None:
    """A converter, a quantiser, a matrix instruction or a product that is wrong in one way fails G2 on a GPU."""
    if at_hand is None:
        if mutant in PRODUCTS:
            pytest.skip("shown on the host; needs a CUDA GPU and nvcc to be shown there, too")
        kill.not_run(mutant, "G2", "needs a CUDA GPU and nvcc")
    assert at_hand
    file, right, wrong, reference = {**CONVERSIONS, **PRODUCTS}[mutant]

    checks = _on_gpu(at_hand, devicehost.sources(tmp_path / "sources", {file: (right, wrong)}), tmp_path / "scratch")

    kill(mutant=f"{mutant} (on the GPU)", gate="G2", sound=sound_on_gpu, mutant_checks=checks)
    assert reference in {check.reason for check in checks}
