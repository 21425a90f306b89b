#include "mini_flashinfer/softmax.cuh"

extern "C" __global__ void mini_flashinfer_row_max(float const* rows, float* out, int columns) {
  float best = -INFINITY;
  for (int column = threadIdx.x; column < columns; column += 32) {
    best = fmaxf(best, rows[blockIdx.x * columns + column]);
  }
  best = mini_flashinfer::warp_max(best);
  if (threadIdx.x == 0) {
    out[blockIdx.x] = best;
  }
}
