"""A small source tree whose converters are right, in the forms that real trees have, and the policy that names them."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core.process import Limits
from sparkwright.gates.numerics import Converter, NumericsPolicy, Unit

HEADER = "csrc/converters.cuh"
PYTHON = "kernels.py"

CPP = """
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include "values.cuh"

namespace mini {

// To the nearest value, ties to the even code, saturating.
__device__ __forceinline__ unsigned encode(float x) {
  if (x != x) return 7;
  float const size = std::fabs(x);
  unsigned const sign = std::signbit(x) ? 8 : 0;
  unsigned code = 0;
  while (code < 7) {
    float const middle = (VALUES[code] + VALUES[code + 1]) / 2;
    if (size < middle || (size == middle && code % 2 == 0)) break;
    ++code;
  }
  return sign | code;
}

// As device code has it: four conversions of two values each, and a move that puts their bytes together.
__device__ __forceinline__ std::uint32_t encode8(float (&x)[8]) {
  std::uint32_t made;
  asm volatile(
      "{\\n"
      ".reg .b8 b0, b1;\\n.reg .b8 b2;\\n.reg .b8 b3;\\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\\n"
      "mov.b32 %0, {b0, b1, b2, b3};\\n"
      "}"
      : "=r"(made)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return made;
}

__device__ __forceinline__ float value(unsigned code) { return code & 8 ? -VALUES[code & 7] : VALUES[code]; }

__device__ __forceinline__ float reciprocal(float x) {
  float made;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}

__device__ __forceinline__ float scale_value(unsigned code) {
  int const exponent = code >> 3, mantissa = code & 7;
  return exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(float(mantissa), -9);
}

__device__ __forceinline__ std::uint8_t scale_code(float x) {
  x = std::fmin(x, 448.0f);
  if (!(x <= 464.0f)) return 0x7f;
  unsigned code = 0;
  while (code < 126) {
    float const middle = (scale_value(code) + scale_value(code + 1)) / 2;
    if (x < middle || (x == middle && code % 2 == 0)) break;
    ++code;
  }
  return code;
}

__device__ __forceinline__ std::uint64_t quantise(float (&x)[16], float tensor_scale, std::uint8_t& scale) {
  float largest = 0;
  for (int i = 0; i < 16; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  scale = scale_code(tensor_scale * (largest * reciprocal(6.0f)));
  float const by = scale ? reciprocal(scale_value(scale) * reciprocal(tensor_scale)) : 0.0f;
  std::uint64_t codes = 0;
  for (int i = 0; i < 16; ++i) codes |= std::uint64_t{encode(x[i] * by)} << (4 * i);
  return codes;
}

// Tiles of 128 rows and 4 columns.
__device__ __forceinline__ std::int64_t offset(int row, int column, int columns) {
  std::int64_t const tile = std::int64_t{row / 128} * ((columns + 3) / 4) + column / 4;
  return tile * 512 + (row % 32) * 16 + (row / 32 % 4) * 4 + column % 4;
}

}  // namespace mini
"""

VALUES = """
#pragma once
namespace mini {
constexpr float VALUES[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
}
"""

PY = '''
VALUES = holder(
    value=tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], kind=float)
)

def convert(values):
    """Eight values in a word."""
    return inline(
        values,
        """
        {
            .reg .b8 byte0, byte1, byte2, byte3;
            cvt.rn.satfinite.e2m1x2.f32 byte0, $2, $1;
            cvt.rn.satfinite.e2m1x2.f32 byte1, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 byte2, $6, $5;
            cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $7;
            mov.b32 $0, {byte0, byte1, byte2, byte3};
        }
        """,
        "=r,f,f,f,f,f,f,f,f",
    )
'''

FILES: Mapping[str, str] = {HEADER: CPP, "csrc/values.cuh": VALUES, PYTHON: PY}

UNIT = Unit(
    "mini",
    (HEADER,),
    (
        Converter("mini", "encode", "return mini::encode(x[0]);"),
        Converter("mini-vec8", "encode", "return mini::encode8(x);", lanes=8),
        Converter("mini-value", "decode", "return mini::value(code);"),
        Converter("mini-scale", "scale", "return mini::scale_code(x);"),
        Converter("mini-block", "quantise", "return mini::quantise(x, tensor_scale, scale);"),
        Converter("mini-layout", "offset", "return mini::offset(row, column, columns);"),
    ),
    defines={"__CUDA_ARCH__": "1210"},
)

_SIGNED = "return code & 8 ? -table[code & 7] : table[code & 7];"
TABLE = Unit(
    "mini",
    (PYTHON,),
    (Converter("mini-python", "decode", _SIGNED),),
    python=r"^VALUES\b[^=\n]*=[^\[\n]*(?:\n[^\[\n]*)?\[([-+.\d,\s]+)\]",
    header="constexpr float table[] = {@};",
)
TEMPLATE = Unit(
    "mini",
    (PYTHON,),
    (Converter("mini-dsl", "encode", "return convert(x);", lanes=8),),
    python=r'^def convert\((?:(?!^def ).)*?"""([^"]*\$0[^"]*)"""',
    header="#include <cstdint>\ninline std::uint32_t convert(float (&x)[8]) {\nstd::uint32_t y;\n"
    'asm volatile("@" : "=r"(y) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]),'
    ' "f"(x[6]), "f"(x[7]));\nreturn y;\n}',
)
LIMITS = Limits(seconds=240, memory=4096, written=64)
POLICY = NumericsPolicy(LIMITS, (UNIT, TABLE, TEMPLATE))


def tree(folder: Path, changed: Mapping[str, str] | None = None) -> Path:
    """Write the tree into *folder*, some files with other text, and return it."""
    for name, text in {**FILES, **(changed or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def only(*names: str) -> NumericsPolicy:
    """Return the policy with the converters *names* of the header alone."""
    kept = tuple(one for one in UNIT.converters if one.name in names)
    return NumericsPolicy(LIMITS, (msgspec.structs.replace(UNIT, converters=kept),))
