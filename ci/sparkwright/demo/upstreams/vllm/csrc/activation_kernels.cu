#include "launch.cuh"

namespace mini_vllm {

// gate * sigmoid(gate) * up, the two halves of each row side by side.
__global__ void silu_and_mul(float const* input, float* out, int rows, int columns) {
  int const index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= rows * columns) {
    return;
  }
  float const* row = input + 2 * (index / columns) * columns;
  float const gate = row[index % columns];
  out[index] = gate / (1.0f + __expf(-gate)) * row[columns + index % columns];
}

}  // namespace mini_vllm

extern "C" int mini_vllm_silu_and_mul(float const* input, float* out, int rows, int columns, cudaStream_t stream) {
  mini_vllm::silu_and_mul<<<mini_vllm::blocks_for(rows * columns), mini_vllm::kThreads, 0, stream>>>(input, out, rows, columns);
  return cudaGetLastError();
}
