// Compiles where the assembler knows the block-scaled FP4 matrix instruction for the target, and nowhere else.
#define SPARKWRIGHT_FP4_MMA
#include "mma.cuh"

extern "C" __global__ void fp4_mma(float *out, const unsigned *in) {
    const unsigned *x = in + 8 * threadIdx.x;
    float d[4] = {0, 0, 0, 0};
    const uint32_t a[4] = {x[0], x[1], x[2], x[3]}, b[2] = {x[4], x[5]};
    sparkwright::mma_e2m1(d, a, b, x[6], x[7]);
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = d[i];
}
