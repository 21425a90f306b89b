// What a user would use instead of our converter, each in the same quantiser: for the benchmark alone.
#pragma once
#include <cuda_fp4.h>

#include "nvfp4.cuh"

namespace sparkwright {

// Seven comparisons a value, as published patches for this chip have it. The sign of a NaN stays.
struct Chain {
    static __device__ __forceinline__ uint32_t one(float x) {
        const uint32_t sign = __float_as_uint(x) >> 31 << 3;
        const float y = fabsf(x);
        if (y <= 0.25f) return sign;
        if (y < 0.75f) return sign | 1;
        if (y <= 1.25f) return sign | 2;
        if (y < 1.75f) return sign | 3;
        if (y <= 2.5f) return sign | 4;
        if (y < 3.5f) return sign | 5;
        if (y <= 5.0f) return sign | 6;
        return sign | 7;
    }
    static __device__ __forceinline__ uint32_t eight(const float (&x)[8], float inverse) {
        uint32_t out = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) out |= one(x[i] * inverse) << 4 * i;
        return out;
    }
};

// CUDA's own header. On an architecture with the instruction it uses that, elsewhere its software path.
struct Header {
    static __device__ __forceinline__ uint32_t one(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
    static __device__ __forceinline__ uint32_t eight(const float (&x)[8], float inverse) {
        uint32_t out = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) out |= one(x[i] * inverse) << 4 * i;
        return out;
    }
};

// Exponents aligned by one multiplication, then the bit string rounded to even; below 1 the multiplication rounds once more.
struct BitString {
    static __device__ __forceinline__ uint32_t one(float x) {
        const uint32_t y = __float_as_uint(fminf(fabsf(x), 6.0f) * __uint_as_float(0x00800000u));
        return (y + 0x1fffffu + (y >> 22 & 1u)) >> 22 | __float_as_uint(x) >> 31 << 3;
    }
    static __device__ __forceinline__ uint32_t eight(const float (&x)[8], float inverse) {
        uint32_t out = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) out |= one(x[i] * inverse) << 4 * i;
        return out;
    }
};

}  // namespace sparkwright
