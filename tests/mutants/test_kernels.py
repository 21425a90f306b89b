"""
Mutants of converters and operators, each wrong in exactly one way.

A tree of converters is compiled, and dies at G1; a wheel's operator dies at G2.
"""

from pathlib import Path

import pytest
from tests.mutants.conftest import Kill
from tests.support import converters, fake_gpu

from sparkwright.gates import numerics
from sparkwright.gates.core.verdict import Check

pytestmark = pytest.mark.mutants

#: The end of the loop that looks for the nearest value.
_BREAK = "if (size < middle || (size == middle && code % 2 == 0)) break;"

#: What is wrong → the file, what stands there, what stands there instead, and a check that must be among those that notice.
MUTANTS = {
    "code 1 decodes as 0.25": ("csrc/values.cuh", "0.5f", "0.25f", "mini-value-table"),
    "code 1 decodes as 0.25 in Python": (converters.PYTHON, "0.5,", "0.25,", "mini-python-table"),
    "ties away from zero": (converters.HEADER, _BREAK, "if (size < middle) break;", "mini-sweep"),
    "ties towards zero": (converters.HEADER, _BREAK, "if (size <= middle) break;", "mini-sweep"),
    "rounds twice, in a multiplication and in its bits": (
        converters.HEADER,
        "  return sign | code;",
        "  float const small = size * 0x1p-126f;\n  std::uint32_t bits;\n  std::memcpy(&bits, &small, 4);\n"
        "  bits = (bits + 0x1fffff + (bits >> 22 & 1)) >> 22;\n  return sign | (bits > 7 ? 7 : bits);",
        "mini-sweep",
    ),
    "saturation missing": (converters.HEADER, "return sign | code;", "return sign | (size >= 7 ? (code + 1) & 7 : code);", "mini-sweep"),
    "negative zero dropped where kept is claimed": (
        converters.HEADER, "return sign | code;", "return code ? sign | code : 0;", "mini-sweep",
    ),
    "NaN keeps its sign where +6 is claimed": (converters.HEADER, "if (x != x) return 7;", "if (x != x) return std::signbit(x) ? 15 : 7;", "mini-sweep"),
    "NaN becomes 4": (converters.HEADER, "if (x != x) return 7;", "if (x != x) return 6;", "mini-sweep"),
    "nibbles swapped": (converters.HEADER, "b1, %4, %3;", "b1, %3, %4;", "mini-vec8-sweep"),
    "nibbles swapped in Python": (converters.PYTHON, "byte0, $2, $1;", "byte0, $1, $2;", "mini-dsl-sweep"),
    "bytes in reverse": (converters.HEADER, "{b0, b1, b2, b3}", "{b3, b2, b1, b0}", "mini-vec8-sweep"),
    "one value is read twice": (converters.HEADER, "b3, %8, %7;", "b3, %8, %8;", "mini-vec8-sweep"),
    "tensor scale inverted in the block scale alone": (
        converters.HEADER, "scale_code(tensor_scale * (largest", "scale_code(reciprocal(tensor_scale) * (largest", "mini-block-blocks",
    ),
    "tensor scale inverted throughout": (
        converters.HEADER, "  float largest = 0;", "  tensor_scale = reciprocal(tensor_scale);\n  float largest = 0;", "mini-block-blocks",
    ),
    "tensor scale not taken out again": (
        converters.HEADER, "scale_value(scale) * reciprocal(tensor_scale)", "scale_value(scale)", "mini-block-blocks",
    ),
    "scale cast without a clamp gives NaN": (converters.HEADER, "x = std::fmin(x, 448.0f);", "", "mini-block-blocks"),
    "scale truncated": (converters.HEADER, "if (x < middle || (x == middle && code % 2 == 0)) break;", "if (x < scale_value(code + 1)) break;",
                        "mini-scale-scale-cast"),
    "largest value of a block without its last": (converters.HEADER, "for (int i = 0; i < 16; ++i) largest", "for (int i = 0; i < 15; ++i) largest",
                                                  "mini-block-blocks"),
    "largest value of a block without its sign": (converters.HEADER, "std::fmax(largest, std::fabs(x[i]))", "std::fmax(largest, x[i])",
                                                  "mini-block-blocks"),
    "rows and columns of the layout exchanged": (converters.HEADER, "(row % 32) * 16 + (row / 32 % 4) * 4 + column % 4",
                                                 "(column % 4) * 128 + row % 128", "mini-layout-swizzle"),
    "tiles of scales counted without the part of one": (converters.HEADER, "((columns + 3) / 4)", "(columns / 4)", "mini-layout-swizzle"),
    "a converter is gone": (converters.HEADER, "float value(unsigned code)", "float other_value(unsigned code)", "mini-value-table"),
}  # fmt: skip


@pytest.fixture(scope="module", name="sound")
def _sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, ...]:
    """Return the checks of the tree that is right."""
    folder = tmp_path_factory.mktemp("sound")
    return numerics.run({"mini": converters.tree(folder / "tree")}, converters.POLICY, (), folder / "scratch")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_g1_kills_every_wrong_converter(mutant: str, sound: tuple[Check, ...], kill: Kill, tmp_path: Path) -> None:
    """A converter that is wrong in one way fails G1, in the check that is about just that."""
    file, right, wrong, named = MUTANTS[mutant]
    text = converters.FILES[file]
    assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in {file}"
    tree = converters.tree(tmp_path / "tree", {file: text.replace(right, wrong)})

    checks = numerics.run({"mini": tree}, converters.POLICY, (), tmp_path / "scratch")

    kill(mutant=mutant, gate="G1", sound=sound, mutant_checks=checks)
    assert named in [check.name for check in checks if check.state == "fail"]


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
    "tensor scale of the first expert for all": ("fp4-experts-quantise", "output-wrong"),
    "scales of an expert a row too early": ("fp4-experts-quantise", "output-wrong"),
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
