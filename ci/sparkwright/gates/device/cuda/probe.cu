// What the GPU at hand does: `probe rows` prints a JSON line for each thing that was executed, `probe gemm CASES OUT REPEATS KIND` runs the
// cases of `fuzz.py`. Compiled with SPARKWRIGHT_NATIVE where the assembler knows cvt.rn.satfinite.e2m1x2.f32 for the target, and with
// SPARKWRIGHT_FP4_MMA where it knows the block-scaled FP4 instruction.
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "cases.h"
#include "cuda_check.h"
#include "mma.cuh"
#include "nvfp4.cuh"

using namespace sparkwright;

constexpr int KEPT = 8;

struct Tally {
    unsigned long long wrong, wrong_nan;
    unsigned kept;
    uint32_t input[KEPT], expected[KEPT], found[KEPT];
};

__device__ void note(Tally *tally, uint32_t input, uint32_t expected, uint32_t found, bool nan) {
    atomicAdd(nan ? &tally->wrong_nan : &tally->wrong, 1ull);
    const unsigned at = atomicAdd(&tally->kept, 1u);
    if (at < KEPT) tally->input[at] = input, tally->expected[at] = expected, tally->found[at] = found;
}

// Each of these converts eight values and says what they should give; `sweep` asks all of them about all 2^32 inputs.
struct Defined {
    static constexpr const char *name = "e2m1-software";
    static __device__ uint32_t expected(float x) { return e2m1_defined(x); }
    static __device__ void found(const float (&x)[8], float one, uint32_t (&codes)[8]) {
        const uint32_t packed = e2m1_eight(x, one);
        for (int i = 0; i < 8; i++) codes[i] = packed >> 4 * i & 15u;
    }
};

struct HeaderSoftware {
    static constexpr const char *name = "e2m1-header";
    static __device__ uint32_t expected(float x) { return __nv_cvt_double_to_fp4((double)x, __NV_E2M1, cudaRoundNearest); }
    static __device__ void found(const float (&x)[8], float one, uint32_t (&codes)[8]) { Defined::found(x, one, codes); }
};

#ifdef SPARKWRIGHT_NATIVE
struct Native {
    static constexpr const char *name = "e2m1-native";
    static __device__ uint32_t expected(float x) { return e2m1_defined(x); }
    static __device__ void found(const float (&x)[8], float, uint32_t (&codes)[8]) {
        for (int i = 0; i < 8; i += 2) {
            uint16_t pair;
            asm("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; mov.b16 %0, {t, 0}; }" : "=h"(pair) : "f"(x[i + 1]), "f"(x[i]));
            codes[i] = pair & 15u, codes[i + 1] = pair >> 4 & 15u;
        }
    }
};
#endif

struct Fp8 {
    static constexpr const char *name = "e4m3-native";
    static __device__ uint32_t expected(float x) { return e4m3_defined(x); }
    static __device__ void found(const float (&x)[8], float, uint32_t (&codes)[8]) {
        for (int i = 0; i < 8; i += 2) {
            uint16_t pair = 0;
#if __CUDA_ARCH__ >= 890
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(x[i + 1]), "f"(x[i]));
#endif
            codes[i] = pair & 0xffu, codes[i + 1] = pair >> 8;
        }
    }
};

template <class Way>
__global__ void sweep(float one, Tally *tally) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) * 8u;
    float x[8];
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __uint_as_float(at + i);
    Way::found(x, one, codes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t expected = Way::expected(x[i]);
        if (codes[i] != expected) note(tally, at + i, expected, codes[i], x[i] != x[i]);
    }
}

static void say(const char *name, const char *inputs, double ms, Tally *tally) {
    Tally t;
    CHECK(cudaMemcpy(&t, tally, sizeof t, cudaMemcpyDeviceToHost));
    printf("{\"row\": \"%s\", \"inputs\": %s, \"wrong\": %llu, \"wrong_nan\": %llu, \"ms\": %.3f, \"samples\": [", name, inputs, t.wrong, t.wrong_nan, ms);
    for (unsigned i = 0; i < t.kept && i < KEPT; i++) printf("%s[%u, %u, %u]", i ? ", " : "", t.input[i], t.expected[i], t.found[i]);
    printf("]}\n");
    fflush(stdout);
}

template <class Way>
void swept(Tally *tally) {
    sweep<Way><<<1u << 21, 256>>>(1.0f, tally);
    CHECK(cudaMemset(tally, 0, sizeof(Tally)));
    const double ms = milliseconds([&] { sweep<Way><<<1u << 21, 256>>>(1.0f, tally); });
    say(Way::name, "4294967296", ms, tally);
}

// Blocks whose first value walks through all bf16 patterns while the others are smaller, larger, or anything.
__global__ void fill_blocks(uint16_t *values, uint32_t blocks, uint64_t seed) {
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= blocks) return;
    for (int i = 0; i < 16; i++) {
        const uint64_t r = scrambled(seed + 16 * (uint64_t)at + i);
        const uint32_t first = at & 0xffffu, exponent = first & 0x7f80u, kind = at >> 16 & 3u;
        const uint32_t near = exponent > 0x300u ? exponent - (uint32_t)(r >> 32 & 7u) * 0x80u : exponent;
        const uint32_t other = kind == 3 ? (uint32_t)r & 0xffffu : ((uint32_t)r & 0x807fu) | near;
        values[16 * (size_t)at + i] = (uint16_t)(i == (at >> 18 & 15u) ? first : other);
    }
}

__global__ void compare(const uint8_t *codes, const uint8_t *wanted, size_t bytes, Tally *tally) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += (size_t)gridDim.x * blockDim.x)
        if (codes[i] != wanted[i]) note(tally, (uint32_t)i, wanted[i], codes[i], false);
}

static void quantised(Tally *tally) {
    const uint32_t blocks = 1u << 24;
    uint8_t *in, *out, *wanted;
    CHECK(cudaMalloc(&in, 32 * (size_t)blocks));
    CHECK(cudaMalloc(&out, 9 * (size_t)blocks));
    CHECK(cudaMalloc(&wanted, 9 * (size_t)blocks));
    CHECK(cudaMemset(tally, 0, sizeof(Tally)));
    double ms = 0;
    const float tensor_scales[] = {1.0f, 37.25f, 2688.0f / 0.0173f, 0.0003f};
    for (float tensor_scale : tensor_scales) {
        fill_blocks<<<blocks / 256, 256>>>((uint16_t *)in, blocks, (uint64_t)bits_of(tensor_scale) << 32);
        CHECK(cudaMemset(out, 0xa5, 9 * (size_t)blocks));
        CHECK(cudaMemset(wanted, 0x5a, 9 * (size_t)blocks));
        ms += milliseconds([&] { start_quantise<Ours>((uint4 *)in, (uint2 *)out, out + 8 * (size_t)blocks, tensor_scale, blocks); });
        quantise_defined<<<blocks / 256, 256>>>((uint16_t *)in, wanted, wanted + 8 * (size_t)blocks, tensor_scale, blocks);
        compare<<<4096, 256>>>(out, wanted, 9 * (size_t)blocks, tally);
        CHECK(cudaDeviceSynchronize());
    }
    say("nvfp4-quantiser", "1073741824", ms, tally);
    CHECK(cudaFree(in));
    CHECK(cudaFree(out));
    CHECK(cudaFree(wanted));
}

// Copies a case to the device, runs it into words of POISON, and brings these back.
static void on_device(Kind kind, const Read &one, std::vector<uint32_t> &words) {
    std::vector<void *> held;
    const auto put = [&held](const void *from, size_t bytes) {
        void *to;
        CHECK(cudaMalloc(&to, bytes));
        CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
        held.push_back(to);
        return to;
    };
    Case c = one.plain();
    c.offsets = (const int *)put(one.offsets.data(), one.offsets.size() * 4);
    c.alpha = (const float *)put(one.alpha.data(), one.alpha.size() * 4);
    c.a = (const uint8_t *)put(one.a.data(), one.a.size());
    c.a_scales = (const uint8_t *)put(one.a_scales.data(), one.a_scales.size());
    c.b = (const uint8_t *)put(one.b.data(), one.b.size());
    c.b_scales = (const uint8_t *)put(one.b_scales.data(), one.b_scales.size());
    uint32_t *all = (uint32_t *)put(words.data(), words.size() * 4), *out = all + GUARD;
    const dim3 tiles((c.n + 7) / 8, (c.m + 15) / 16, c.groups);
    if (kind == Kind::plain) gemm_plain<<<dim3((c.n + 31) / 32, (c.m + 7) / 8), 256>>>(c, out);
    if (kind == Kind::e4m3) gemm_tiles<Kind::e4m3><<<tiles, 32>>>(c, out);
    if (kind == Kind::e2m1) gemm_tiles<Kind::e2m1><<<tiles, 32>>>(c, out);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(words.data(), all, words.size() * 4, cudaMemcpyDeviceToHost));
    for (void *one_held : held) CHECK(cudaFree(one_held));
}

static int rows() {
    Tally *tally;
    CHECK(cudaMalloc(&tally, sizeof(Tally)));
    cudaDeviceProp facts;
    CHECK(cudaGetDeviceProperties(&facts, 0));
    swept<Defined>(tally);
    swept<HeaderSoftware>(tally);
#ifdef SPARKWRIGHT_NATIVE
    swept<Native>(tally);
#endif
    if (facts.major * 10 + facts.minor >= 89) swept<Fp8>(tally);
    quantised(tally);
    CHECK(cudaFree(tally));
    return 0;
}

int main(int count, char **arguments) {
    if (count == 2 && !strcmp(arguments[1], "rows")) return rows();
    if (count == 6 && !strcmp(arguments[1], "gemm")) {
        const Kind kind = !strcmp(arguments[5], "e2m1") ? Kind::e2m1 : !strcmp(arguments[5], "e4m3") ? Kind::e4m3 : Kind::plain;
        run_cases(arguments[2], arguments[3], atoi(arguments[4]), [kind](const Read &one, std::vector<uint32_t> &words) { on_device(kind, one, words); });
        return 0;
    }
    fprintf(stderr, "probe rows | probe gemm CASES OUT REPEATS plain|e4m3|e2m1\n");
    return 2;
}
