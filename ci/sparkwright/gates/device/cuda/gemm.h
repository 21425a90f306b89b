// FP4 matrix products on snapped grids, one source for the GPU and for a host compiler: out = alpha * A x B^T, grouped by expert.
//
// Operands are E2M1 codes, two to the byte, the first in the low four bits; every 16 along K share a UE4M3 scale, laid out in tiles of
// 128 x 4 as tensor cores want them. The kernels are plain on purpose: what is under test is the device, and the judge.
#pragma once
#include <stddef.h>

#include "e2m1.h"

namespace sparkwright {

// One case, as `fuzz.py` writes it. Rows of A belong to groups: those of group g begin at row offsets[g].
struct Case {
    int m, n, k, groups;
    const int *offsets;
    const float *alpha;
    const uint8_t *a, *a_scales, *b, *b_scales;
};

BOTH uint32_t code_at(const uint8_t *codes, size_t index) { return codes[index / 2] >> 4 * (index % 2) & 15u; }

// Bytes of the scales of `rows` x `columns`, filled up to whole tiles.
BOTH size_t scale_bytes(size_t rows, size_t columns) { return (rows + 127) / 128 * ((columns + 3) / 4) * 512; }

BOTH size_t scale_offset(size_t row, size_t column, size_t columns) {
    const size_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
    return tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

BOTH int group_of(const Case &c, int row) {
    int group = 0;
    while (group + 1 < c.groups && c.offsets[group + 1] <= row) group++;
    return group;
}

// Where a sum over K begins. Always at the same place, so that two runs agree in every bit.
BOTH int first_block(int) { return 0; }

BOTH float one_output(const Case &c, int row, int column) {
    const int group = group_of(c, row), blocks = c.k / 16;
    const size_t expert = group;
    const uint8_t *b = c.b + expert * c.n * c.k / 2, *b_scales = c.b_scales + expert * scale_bytes(c.n, blocks);
    float sum = 0;
    for (int i = 0, block = first_block(blocks); i < blocks; i++, block = (block + 1) % blocks) {
        const float a_scale = e4m3_value(c.a_scales[scale_offset(row, block, blocks)]);
        const float b_scale = e4m3_value(b_scales[scale_offset(column, block, blocks)]);
        float products = 0;
        for (int j = 16 * block; j < 16 * block + 16; j++) {
            const uint32_t left = code_at(c.a, (size_t)row * c.k + j);
            const uint32_t right = code_at(b, (size_t)column * c.k + j);
            products += e2m1_value(left) * e2m1_value(right);
        }
        sum += products * (a_scale * b_scale);
    }
    return c.alpha[group] * sum;
}

// The rows and columns that a launch covers: all of them, also where they fill no whole tile.
BOTH int covered_rows(const Case &c) { return c.m; }
BOTH int covered_columns(const Case &c) { return c.n; }

BOTH void write_output(const Case &c, uint32_t *out, int row, int column, float value) { out[(size_t)row * c.n + column] = bits_of(value); }

}  // namespace sparkwright
