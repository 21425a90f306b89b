#include <cstdint>

#include "launch.cuh"

namespace mini_vllm {

// Eight four-bit weights of a word, even ones first: the order in which a pair of half floats is made of them.
__global__ void marlin_repack(uint32_t const* words, uint32_t* out, int count) {
  int const index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= count) {
    return;
  }
  uint32_t result = 0;
  for (int nibble = 0; nibble < 8; ++nibble) {
    result |= (words[index] >> 4 * nibble & 15) << 4 * (nibble / 2 + nibble % 2 * 4);
  }
  out[index] = result;
}

}  // namespace mini_vllm

extern "C" int mini_vllm_marlin_repack(uint32_t const* words, uint32_t* out, int count, cudaStream_t stream) {
  mini_vllm::marlin_repack<<<mini_vllm::blocks_for(count), mini_vllm::kThreads, 0, stream>>>(words, out, count);
  return cudaGetLastError();
}
