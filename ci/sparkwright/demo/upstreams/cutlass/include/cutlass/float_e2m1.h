// E2M1, the four-bit float of NVFP4: one sign bit, two exponent bits, one mantissa bit.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass {

// The eight magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
CUTLASS_HOST_DEVICE float e2m1_to_float(uint8_t code) {
  uint8_t const magnitude = code & 7;
  float const value = magnitude < 4 ? 0.5f * magnitude : magnitude == 7 ? 6.0f : magnitude - 2.0f;
  return (code & 8) ? -value : value;
}

// Nearest value, ties to the even code, too large saturates at 6, and NaN becomes +6: what cvt.rn.satfinite does.
CUTLASS_HOST_DEVICE uint8_t float_to_e2m1(float x) {
  if (x != x) {
    return 7;
  }
  float const a = x < 0.0f ? -x : x;
  uint8_t const code = static_cast<uint8_t>(
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f));
  bool const negative = x < 0.0f || (x == 0.0f && 1.0f / x < 0.0f);
  return static_cast<uint8_t>(code | (negative ? 8 : 0));
}

}  // namespace cutlass
