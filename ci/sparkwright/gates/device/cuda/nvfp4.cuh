// Quantising bf16 to NVFP4 with a converter in software, as fast as memory allows: a thread takes whole blocks of 16 values.
#pragma once
#include "e2m1.h"

namespace sparkwright {

constexpr int THREADS = 256;

// The largest magnitude of a block, as bfloat16; NaN where the block holds one.
__device__ __forceinline__ uint32_t block_amax(const uint32_t (&w)[8]) {
    uint32_t most = larger_magnitude(w[0], w[1]);
#pragma unroll
    for (int i = 2; i < 8; i++) most = larger_magnitude(most, w[i]);
    return larger_magnitude(most, most >> 16) & 0x7fffu;
}

__device__ __forceinline__ void widen(const uint32_t *w, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(w[i] << 16);
        x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint32_t scale_code(float scale) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(scale));
    return pair & 0xffu;
#else
    return e4m3_defined(scale);
#endif
}

struct Ours {
    static __device__ __forceinline__ uint32_t eight(const float (&x)[8], float inverse) { return e2m1_eight(x, inverse); }
};

// BLOCKS blocks a thread, whose loads are all under way before the first is used; neighbours in a warp take neighbouring blocks. The
// loads are plain ones: each fetches half of its sectors' bytes, the next one the other half, and a hint to drop the line early would
// make that half come from L2 again (94 % of the copy's bandwidth in place of 103 %, on an H200).
// Each workgroup makes a table of the 128 inverses, which saves two divisions a block.
template <class Converter, int BLOCKS = 2>
__global__ void __launch_bounds__(THREADS) quantise(const uint4 *__restrict__ in, uint2 *__restrict__ codes, uint8_t *__restrict__ scales,
                                                    float tensor_scale, uint32_t blocks) {
    __shared__ float inverses[128];
    const uint32_t first = blockIdx.x * (THREADS * BLOCKS) + threadIdx.x;
    uint4 a[BLOCKS], b[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        const uint32_t at = first + i * THREADS;
        if (at < blocks) a[i] = in[2 * (size_t)at], b[i] = in[2 * (size_t)at + 1];
    }
    if (threadIdx.x < 128) inverses[threadIdx.x] = nvfp4_inverse(threadIdx.x, tensor_scale);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        const uint32_t at = first + i * THREADS;
        if (at >= blocks) return;
        const uint32_t w[8] = {a[i].x, a[i].y, a[i].z, a[i].w, b[i].x, b[i].y, b[i].z, b[i].w};
        const uint32_t code = scale_code(nvfp4_scale(__uint_as_float(block_amax(w) << 16), tensor_scale));
        const float inverse = inverses[code];
        float x[8];
        uint2 out;
        widen(w, x);
        out.x = Converter::eight(x, inverse);
        widen(w + 4, x);
        out.y = Converter::eight(x, inverse);
        __stcs(codes + at, out);
        __stcs(scales + at, (uint8_t)code);
    }
}

// The same by definition, one thread for a block, one comparison for each place where a code changes.
static __global__ void quantise_defined(const uint16_t *in, uint8_t *codes, uint8_t *scales, float tensor_scale, uint32_t blocks) {
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= blocks) return;
    const uint16_t *x = in + 16 * (size_t)at;
    float amax = 0;
    for (int i = 0; i < 16; i++) {
        const float y = __uint_as_float((uint32_t)(x[i] & 0x7fffu) << 16);
        amax = y != y || amax != amax ? __uint_as_float(0x7fffffffu) : y > amax ? y : amax;
    }
    // Written out a second time, so that an error in one of them is seen.
    const uint32_t scale = e4m3_defined(__fmul_rn(tensor_scale, __fmul_rn(amax, __uint_as_float(0x3e2aaaabu))));
    const float inverse = scale == 0 ? 0.0f : __frcp_rn(__fmul_rn(e4m3_value(scale), __frcp_rn(tensor_scale)));
    for (int i = 0; i < 8; i++) {
        const uint32_t low = e2m1_defined(product(__uint_as_float((uint32_t)x[2 * i] << 16), inverse));
        const uint32_t high = e2m1_defined(product(__uint_as_float((uint32_t)x[2 * i + 1] << 16), inverse));
        codes[8 * (size_t)at + i] = (uint8_t)(low | high << 4);
    }
    scales[at] = (uint8_t)scale;
}

template <class Converter, int BLOCKS = 2>
void start_quantise(const uint4 *in, uint2 *codes, uint8_t *scales, float tensor_scale, uint32_t blocks) {
    quantise<Converter, BLOCKS><<<(blocks + THREADS * BLOCKS - 1) / (THREADS * BLOCKS), THREADS>>>(in, codes, scales, tensor_scale, blocks);
}

// 64 random bits from a counter (splitmix64).
BOTH uint64_t scrambled(uint64_t n) {
    n += 0x9e3779b97f4a7c15ull;
    n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9ull;
    n = (n ^ n >> 27) * 0x94d049bb133111ebull;
    return n ^ n >> 31;
}

}  // namespace sparkwright
