#include "launch.cuh"

namespace mini_vllm {

// The Walsh-Hadamard transform of each row of 32 values, one lane for each.
__global__ void hadamard_transform(float* rows) {
  float value = rows[blockIdx.x * 32 + threadIdx.x];
  for (int distance = 1; distance < 32; distance *= 2) {
    float const other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = threadIdx.x & distance ? other - value : other + value;
  }
  rows[blockIdx.x * 32 + threadIdx.x] = value;
}

}  // namespace mini_vllm

extern "C" int mini_vllm_hadamard_transform(float* rows, int count, cudaStream_t stream) {
  mini_vllm::hadamard_transform<<<count, 32, 0, stream>>>(rows);
  return cudaGetLastError();
}
