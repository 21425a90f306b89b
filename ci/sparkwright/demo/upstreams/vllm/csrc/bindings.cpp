// What Python calls; plain C, so that ctypes can load the library where there is no GPU.
#include <cmath>
#include <cstdint>
#include <limits>

#include "cutlass/float_e2m1.h"
#include "cutlass/util/packed_stride.h"

namespace {

// E4M3 has no infinities: four exponent bits with bias 7, three mantissa bits, and all ones for NaN.
float e4m3_to_float(uint8_t code) {
  int const exponent = code >> 3 & 15;
  int const mantissa = code & 7;
  if ((code & 127) == 127) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  float const value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
  return code & 128 ? -value : value;
}

}  // namespace

extern "C" int mini_vllm_version() { return CUTLASS_VERSION; }

// The conversion of nvfp4_quant_kernels.cu with a scale of one, on the host.
extern "C" void mini_vllm_quantize_fp4_reference(float const* values, uint8_t* packed, int count) {
  for (int index = 0; index < cutlass::util::packed_row_bytes(count); ++index) {
    uint8_t const low = cutlass::float_to_e2m1(values[2 * index]);
    uint8_t const high = 2 * index + 1 < count ? cutlass::float_to_e2m1(values[2 * index + 1]) : 0;
    packed[index] = static_cast<uint8_t>(low | high << 4);
  }
}

// Adds a row of NVFP4 blocks to `out`: E2M1 codes, two in each byte, the first one low, with a scale for every 16 of them.
extern "C" void mini_vllm_nvfp4_add_row(uint8_t const* packed, uint8_t const* scales, float factor, int columns, float* out) {
  for (int column = 0; column < columns; ++column) {
    uint8_t const code = packed[column / 2] >> 4 * (column % 2) & 15;
    out[column] += cutlass::e2m1_to_float(code) * e4m3_to_float(scales[column / 16]) * factor;
  }
}
