// What Python calls; plain C, so that ctypes can load the library where there is no GPU.
#include <cstdint>

#include "cutlass/float_e2m1.h"
#include "cutlass/util/packed_stride.h"

extern "C" int mini_vllm_version() { return CUTLASS_VERSION; }

// The conversion of nvfp4_quant_kernels.cu with a scale of one, on the host.
extern "C" void mini_vllm_quantize_fp4_reference(float const* values, uint8_t* packed, int count) {
  for (int index = 0; index < cutlass::util::packed_row_bytes(count); ++index) {
    uint8_t const low = cutlass::float_to_e2m1(values[2 * index]);
    uint8_t const high = 2 * index + 1 < count ? cutlass::float_to_e2m1(values[2 * index + 1]) : 0;
    packed[index] = static_cast<uint8_t>(low | high << 4);
  }
}
