// One warp multiplies one 16x8 tile of two NVFP4 matrices, 64 columns at a time.
#include <cstdint>

#include "cutlass/arch/mma_sm120.h"
#include "launch.cuh"

namespace mini_vllm {

// The operands are stored in the order in which the lanes hold them.
__global__ void nvfp4_scaled_mm(uint32_t const* a, uint32_t const* b, uint32_t const* scale_a, uint32_t const* scale_b, float* out,
                                int steps) {
  float d[4] = {};
  for (int step = 0; step < steps; ++step) {
    int const lane = step * 32 + threadIdx.x;
    uint32_t const rows[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    uint32_t const columns[2] = {b[2 * lane], b[2 * lane + 1]};
    cutlass::arch::mma_16x8x64_nvf4(d, rows, columns, scale_a[lane], scale_b[lane]);
  }
  for (int index = 0; index < 4; ++index) {
    out[4 * threadIdx.x + index] = d[index];
  }
}

}  // namespace mini_vllm

extern "C" int mini_vllm_nvfp4_scaled_mm(uint32_t const* a, uint32_t const* b, uint32_t const* scale_a, uint32_t const* scale_b,
                                         float* out, int steps, cudaStream_t stream) {
  mini_vllm::nvfp4_scaled_mm<<<1, 32, 0, stream>>>(a, b, scale_a, scale_b, out, steps);
  return cudaGetLastError();
}
