// The block-scaled FP4 matrix instruction of the SM 12 family.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass::arch {

#if defined(__CUDACC__)
// D = A * B + D for one 16x8x64 tile of E2M1 values, one UE4M3 scale for each 16 of them.
__device__ __forceinline__ void mma_16x8x64_nvf4(float (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2],
                                                 uint32_t scale_a, uint32_t scale_b) {
  uint16_t const none = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "h"(none));
}
#endif

}  // namespace cutlass::arch
