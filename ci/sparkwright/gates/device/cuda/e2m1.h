// E2M1 and UE4M3 in software, one source for the GPU and for a host compiler: what the probe holds a device's own instructions against.
//
// The converter gives what PTX calls cvt.rn.satfinite.e2m1: nearest, ties to the even code, beyond 6 to +-6, NaN to +6, and -0 stays -0.
// It works on two values at once in 16-bit lanes, in four steps, each of which is exact:
//
//  1. Multiplied by `inverse` in FP32 (one rounding, the only one before E2M1's own; a factor of 1 changes nothing but a NaN).
//  2. Rounded to odd from 24 to 8 significant bits: cut off, and the last bit set where anything was cut. Whoever rounds next to 3 bits or
//     fewer sees every tie, and every value beside a tie, as what it was. Rounding to nearest here is the error of converters that are
//     wrong at a handful of inputs beside ties.
//  3. |y| + 67 m in bfloat16, m = max(2^floor(log2 |y|), 1): the sum's last place is E2M1's spacing at |y| (0.5 m), so that the adder's own
//     round-to-nearest-even is the conversion. The low bits hold 6 + |y| / (0.5 m), the exponent field holds 133 + log2 m.
//  4. One multiplication by 64 * 65 adds twice the exponent to the low bits, which is the code, modulo 8, and shifts it beside the sign.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define BOTH __host__ __device__ __forceinline__
#else
#include <math.h>
#include <string.h>
#define BOTH inline
#endif

namespace sparkwright {

BOTH uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
#endif
}

BOTH float float_of(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x;
    memcpy(&x, &u, 4);
    return x;
#endif
}

// A GPU's product that is NaN has one bit pattern, whatever NaN went in (PTX ISA, "Floating Point Instructions": canonical 0x7fffffff).
BOTH float product(float x, float by) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(x, by);
#else
    volatile float y = x * by;
    return y != y ? float_of(0x7fffffffu) : y;
#endif
}

// The operations on two 16-bit lanes. On the host they are what PTX says they are, lane by lane.
#ifndef __CUDA_ARCH__
inline float lane(uint32_t v, int i) { return float_of((i ? v & 0xffff0000u : v << 16)); }
inline uint32_t lanes(uint32_t low, uint32_t high) { return (low & 0xffffu) | high << 16; }
inline uint32_t to_bfloat16(double x) {
    // From a double, not by way of float: a second rounding would be the error that this file avoids.
    float cut = (float)x;
    uint32_t u = bits_of(cut);
    if (cut != cut) return 0x7fffu;
    if ((double)cut > x && x > 0) u -= 1;
    u = (u & 0xffffff00u) | (u & 0xffu ? 1u : 0u) | ((double)float_of(u) != x ? 1u : 0u);
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
#endif

BOTH uint32_t tops(uint32_t low, uint32_t high) {
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, 0x7632);
#else
    return low >> 16 | (high & 0xffff0000u);
#endif
}

BOTH uint32_t tails(uint32_t low, uint32_t high) {
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, 0x5410);
#else
    return (low & 0xffffu) | high << 16;
#endif
}

BOTH uint32_t at_most_one(uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t d;
    asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(v), "r"(0x00010001u));
    return d;
#else
    return (v & 0xffffu ? 1u : 0u) | (v >> 16 ? 0x10000u : 0u);
#endif
}

BOTH uint32_t smaller(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    uint32_t d[2];
    for (int i = 0; i < 2; i++) {
        float x = lane(a, i), y = lane(b, i);
        d[i] = bits_of(x != x || y < x ? y : x) >> 16;
    }
    return lanes(d[0], d[1]);
#endif
}

BOTH uint32_t larger(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    uint32_t d[2];
    for (int i = 0; i < 2; i++) {
        float x = lane(a, i), y = lane(b, i);
        d[i] = bits_of(x != x || y > x ? y : x) >> 16;
    }
    return lanes(d[0], d[1]);
#endif
}

// The larger magnitudes, with signs of no meaning. NaN wins: a block that holds one gets NaN as its scale, so that nobody takes its
// values for numbers.
BOTH uint32_t larger_magnitude(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    uint32_t d[2];
    for (int i = 0; i < 2; i++) {
        float x = fabsf(lane(a, i)), y = fabsf(lane(b, i));
        d[i] = x != x || y != y ? 0x7fffu : bits_of(y > x ? y : x) >> 16;
    }
    return lanes(d[0], d[1]);
#endif
}

// The bits of `a` where `mask` has ones, of `b` elsewhere. The compiler would take it apart and join the parts at more cost.
BOTH uint32_t chosen(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
#else
    return (a & mask) | (b & ~mask);
#endif
}

BOTH uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    uint32_t d[2];
    for (int i = 0; i < 2; i++) d[i] = to_bfloat16((double)lane(a, i) * lane(b, i) + lane(c, i));
    return lanes(d[0], d[1]);
#endif
}

// The codes of two values: `low` in bits 12 to 15, `high` in bits 28 to 31; the other bits are of no meaning.
BOTH uint32_t e2m1_pair(float low, float high) {
    const uint32_t a = bits_of(low), b = bits_of(high);
    const uint32_t cut = tops(a, b);
    const uint32_t odd = (cut & 0x7fff7fffu) | at_most_one(tails(a, b));
    const uint32_t y = smaller(odd, 0x40c040c0u);                        // 6.0; NaN becomes 6.0, too
    const uint32_t m = larger(y & 0x7f807f80u, 0x3f803f80u);             // 1.0
    const uint32_t code = multiply_add(m, 0x42864286u, y) * 4160u;       // 67.0
    return chosen(0x70007000u, code, cut);
}

// The codes of eight products, the first in the lowest four bits.
BOTH uint32_t e2m1_eight(const float (&x)[8], float inverse) {
    const uint32_t p = e2m1_pair(product(x[0], inverse), product(x[2], inverse));
    const uint32_t q = e2m1_pair(product(x[1], inverse), product(x[3], inverse));
    const uint32_t r = e2m1_pair(product(x[4], inverse), product(x[6], inverse));
    const uint32_t s = e2m1_pair(product(x[5], inverse), product(x[7], inverse));
    const uint32_t low = chosen(0xf000f000u, q, p >> 4), high = chosen(0xf000f000u, s, r >> 4);
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, 0x7531);
#else
    return (low >> 8 & 0xffu) | (low >> 16 & 0xff00u) | (high << 8 & 0xff0000u) | (high & 0xff000000u);
#endif
}

// The same as a definition, one comparison for each place where the code changes; slow, and there to be obviously right.
BOTH uint32_t e2m1_defined(float x) {
    if (x != x) return 7;
    const float y = float_of(bits_of(x) & 0x7fffffffu);
    const uint32_t code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5.0f);
    return code | (bits_of(x) >> 31) << 3;
}

BOTH float e2m1_value(uint32_t code) {
    const uint32_t e = code >> 1 & 3u, m = code & 1u;
    const float y = e ? (float)((2u + m) << (e - 1)) * 0.5f : 0.5f * (float)m;
    return code & 8u ? -y : y;
}

// UE4M3 and E4M3, as cvt.rn.satfinite.e4m3x2.f32: nearest even, beyond 448 to +-448, NaN to 0x7f.
BOTH uint32_t e4m3_defined(float x) {
    const uint32_t u = bits_of(x), sign = u >> 24 & 0x80u, y = u & 0x7fffffffu;
    if (y > 0x7f800000u) return 0x7fu;
    if (y >= bits_of(448.0f)) return sign | 0x7eu;
    if (y >= bits_of(0.015625f)) {  // 2^-6, the smallest normal value: the bit string is rounded to three bits of mantissa
        const uint32_t r = (y + 0x7ffffu + (y >> 20 & 1u)) >> 20;
        return sign | (r - (120u << 3));
    }
    // Below it the spacing is 2^-9. The sum has that as its last place and rounds to it, once.
    return sign | (bits_of(float_of(y) + 16384.0f) - bits_of(16384.0f));
}

BOTH float e4m3_value(uint32_t code) {
    const uint32_t e = code >> 3 & 15u, m = code & 7u;
    if ((code & 0x7fu) == 0x7fu) return float_of(0x7fffffffu);
    const float y = e ? float_of((e + 120u) << 23 | m << 20) : (float)m * 0.001953125f;
    return code & 0x80u ? -y : y;
}

// NVFP4 as vLLM's kernels have it: scale = UE4M3(S * (amax * (1/6))), code = E2M1(x * (1 / (scale * (1/S)))), S the tensor scale, every
// step rounded to FP32. Their reciprocals are approximate; these are rounded correctly.
BOTH float nvfp4_scale(float amax, float tensor_scale) { return product(tensor_scale, product(amax, 1.0f / 6.0f)); }

BOTH float nvfp4_inverse(uint32_t scale, float tensor_scale) {
    return scale ? 1.0f / product(e4m3_value(scale), 1.0f / tensor_scale) : 0.0f;
}

}  // namespace sparkwright
