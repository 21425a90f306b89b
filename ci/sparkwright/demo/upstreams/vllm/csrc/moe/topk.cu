#include "launch.cuh"

namespace mini_vllm {

// The expert with the highest score of each token; the first of equals.
__global__ void topk_one(float const* scores, int* expert, int tokens, int experts) {
  int const token = blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= tokens) {
    return;
  }
  int best = 0;
  for (int index = 1; index < experts; ++index) {
    if (scores[token * experts + index] > scores[token * experts + best]) {
      best = index;
    }
  }
  expert[token] = best;
}

}  // namespace mini_vllm

extern "C" int mini_vllm_moe_topk_one(float const* scores, int* expert, int tokens, int experts, cudaStream_t stream) {
  mini_vllm::topk_one<<<mini_vllm::blocks_for(tokens), mini_vllm::kThreads, 0, stream>>>(scores, expert, tokens, experts);
  return cudaGetLastError();
}
