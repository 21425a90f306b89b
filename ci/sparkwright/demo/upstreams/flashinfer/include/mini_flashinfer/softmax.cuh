#pragma once

namespace mini_flashinfer {

// One warp's maximum, in every lane.
__device__ __forceinline__ float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

}  // namespace mini_flashinfer
