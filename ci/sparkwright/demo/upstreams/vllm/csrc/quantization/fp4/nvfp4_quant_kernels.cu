// NVFP4: blocks of 16 values in E2M1, one UE4M3 scale for each block.
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "launch.cuh"

namespace mini_vllm {

constexpr int kBlock = 16;
constexpr float kLargest = 6.0f;

__global__ void quantize_fp4(float const* values, uint8_t* packed, uint8_t* scales, int blocks, float global_scale) {
  int const block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) {
    return;
  }
  float const* in = values + block * kBlock;
  float largest = 0.0f;
  for (int index = 0; index < kBlock; ++index) {
    largest = fmaxf(largest, fabsf(in[index]));
  }
  __nv_fp8_e4m3 const scale(largest / kLargest * global_scale);
  scales[block] = scale.__x;
  float const stored = static_cast<float>(scale);
  float const factor = stored > 0.0f ? global_scale / stored : 0.0f;
  for (int index = 0; index < kBlock; index += 2) {
    float2 const pair = make_float2(in[index] * factor, in[index + 1] * factor);
    packed[(block * kBlock + index) / 2] = __nv_cvt_float2_to_fp4x2(pair, __NV_E2M1, cudaRoundNearest);
  }
}

}  // namespace mini_vllm

extern "C" int mini_vllm_quantize_fp4(float const* values, uint8_t* packed, uint8_t* scales, int count, float global_scale,
                                      cudaStream_t stream) {
  int const blocks = count / mini_vllm::kBlock;
  mini_vllm::quantize_fp4<<<mini_vllm::blocks_for(blocks), mini_vllm::kThreads, 0, stream>>>(values, packed, scales, blocks,
                                                                                             global_scale);
  return cudaGetLastError();
}
