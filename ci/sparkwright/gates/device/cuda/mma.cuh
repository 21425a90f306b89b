// The matrix instructions of a GPU on E2M1 operands: FP8 (SM 8.9 and later), where every E2M1 value is also an E4M3 value, and the
// block-scaled FP4 instruction (SM 12.x with a family or exact target). Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k32"
// and "… mma.m16n8k64"; scales: "Block scaling for mma.sync", selectors 0.
#pragma once
#include "gemm.h"

namespace sparkwright {

#if __CUDA_ARCH__ >= 890
#define SPARKWRIGHT_FP8_MMA 1
#endif

// The E4M3 code of an E2M1 code.
__device__ __forceinline__ uint32_t e4m3_of(uint32_t code) {
    return (uint32_t)(0x4c4844403c383000ull >> 8 * (code & 7u)) & 0xffu | (code & 8u) << 4;
}

__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef SPARKWRIGHT_FP8_MMA
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#ifdef SPARKWRIGHT_FP4_MMA
__device__ __forceinline__ void mma_e2m1(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scale, uint32_t b_scale) {
    asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12, %12}, {%11}, {%12, %12};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scale), "r"(b_scale), "h"((uint16_t)0));
}
#endif

// Operands of one 16 x 8 tile. A row of A that belongs to another group than the tile's, or lies outside, counts as zeros.
struct Tile {
    const Case &c;
    const uint8_t *b, *b_scales;
    int group, row, column;

    __device__ bool has_row(int r) const { return r < c.m && group_of(c, r) == group; }
    __device__ uint32_t a_code(int r, int k) const { return k < c.k && has_row(r) ? code_at(c.a, (size_t)r * c.k + k) : 0; }
    __device__ uint32_t b_code(int n, int k) const { return k < c.k && n < c.n ? code_at(b, (size_t)n * c.k + k) : 0; }
    __device__ uint32_t a_scale(int r, int block) const {
        return block < c.k / 16 && r < c.m ? c.a_scales[scale_offset(r, block, c.k / 16)] : 0;
    }
    __device__ uint32_t b_scale(int n, int block) const {
        return block < c.k / 16 && n < c.n ? b_scales[scale_offset(n, block, c.k / 16)] : 0;
    }
};

// The sums of one warp's tile by the FP8 instruction: one block of 16 an instruction, as each has its own scale.
static __device__ void tile_e4m3(const Tile &t, float (&sum)[4]) {
    const int lane = threadIdx.x % 32, quad = lane / 4, k = lane % 4 * 4;
    // A zero that the assembler cannot know: for sm_90, where this instruction is made of others, ptxas 13.0.88 takes the upper half of a
    // constant operand 0 for 8 (F2FP.F16.E4M3.UNPACK_B of 0x8 in its output), so that every product is too large by some 2^-9.
    const uint32_t zero = (uint32_t)t.c.k >> 31;
    for (int block = 0; block < t.c.k / 16; block++) {
        uint32_t a[4] = {zero, zero, zero, zero}, b[2] = {zero, zero};
        for (int i = 0; i < 4; i++) {
            a[0] |= e4m3_of(t.a_code(t.row + quad, 16 * block + k + i)) << 8 * i;
            a[1] |= e4m3_of(t.a_code(t.row + quad + 8, 16 * block + k + i)) << 8 * i;
            b[0] |= e4m3_of(t.b_code(t.column + quad, 16 * block + k + i)) << 8 * i;
        }
        float d[4] = {0, 0, 0, 0};
        mma_e4m3(d, a, b);
        for (int i = 0; i < 4; i++)
            sum[i] += d[i] * (e4m3_value(t.a_scale(t.row + quad + i / 2 * 8, block)) * e4m3_value(t.b_scale(t.column + lane % 4 * 2 + i % 2, block)));
    }
}

#ifdef SPARKWRIGHT_FP4_MMA
// The same by the FP4 instruction: 64 along K and four scales a row at a time.
static __device__ void tile_e2m1(const Tile &t, float (&sum)[4]) {
    const int lane = threadIdx.x % 32, quad = lane / 4, k = lane % 4 * 8, scale_row = t.row + quad + lane % 2 * 8;
    for (int from = 0; from < t.c.k; from += 64) {
        uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0}, a_scale = 0, b_scale = 0;
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 4; j++) a[j] |= t.a_code(t.row + quad + j % 2 * 8, from + k + j / 2 * 32 + i) << 4 * i;
            for (int j = 0; j < 2; j++) b[j] |= t.b_code(t.column + quad, from + k + j * 32 + i) << 4 * i;
        }
        for (int i = 0; i < 4; i++) {
            a_scale |= t.a_scale(scale_row, from / 16 + i) << 8 * i;
            b_scale |= t.b_scale(t.column + quad, from / 16 + i) << 8 * i;
        }
        mma_e2m1(sum, a, b, a_scale, b_scale);
    }
}
#endif

enum class Kind { plain, e4m3, e2m1 };

// A warp for each tile of 16 x 8 and each group; a tile writes the rows of its own group alone.
template <Kind KIND>
__global__ void gemm_tiles(Case c, uint32_t *out) {
    const int group = blockIdx.z, lane = threadIdx.x % 32;
    const size_t blocks = c.k / 16;
    const Tile t{c, c.b + (size_t)group * c.n * c.k / 2, c.b_scales + group * scale_bytes(c.n, blocks), group, (int)blockIdx.y * 16, (int)blockIdx.x * 8};
    float sum[4] = {0, 0, 0, 0};
    if (KIND == Kind::e4m3) tile_e4m3(t, sum);
#ifdef SPARKWRIGHT_FP4_MMA
    if (KIND == Kind::e2m1) tile_e2m1(t, sum);
#endif
    for (int i = 0; i < 4; i++) {
        const int row = t.row + lane / 4 + i / 2 * 8, column = t.column + lane % 4 * 2 + i % 2;
        if (row < covered_rows(c) && column < covered_columns(c) && t.has_row(row)) write_output(c, out, row, column, c.alpha[group] * sum[i]);
    }
}

static __global__ void gemm_plain(Case c, uint32_t *out) {
    const int column = blockIdx.x * 32 + threadIdx.x % 32, row = blockIdx.y * 8 + threadIdx.x / 32;
    if (row < covered_rows(c) && column < covered_columns(c)) write_output(c, out, row, column, one_output(c, row, column));
}

}  // namespace sparkwright
