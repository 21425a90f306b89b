// Compiles where the assembler knows the conversion to E2M1 for the target, and nowhere else.
extern "C" __global__ void native_e2m1(unsigned short *out, const float *in) {
    unsigned short pair;
    asm("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; mov.b16 %0, {t, 0}; }" : "=h"(pair) : "f"(in[1]), "f"(in[0]));
    out[0] = pair;
}
