// Converters against a copy, in one run on one GPU. One JSON document a contestant and line.
// Usage: bench LOG2_OF_VALUES ROUNDS
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "contestants.cuh"
#include "cuda_check.h"

using namespace sparkwright;

// Values around zero; every row of 512 words has another size.
__global__ void fill(uint32_t *words, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t word = 0;
        for (int half = 0; half < 2; half++) {
            const uint64_t r = scrambled(2 * i + half);
            float x = 0;
            for (int j = 0; j < 4; j++) x += (float)(r >> 16 * j & 0xffffu) - 32767.5f;
            x = ldexpf(x, -19 + (int)(scrambled(~(uint64_t)(i / 512)) % 9));
            word |= (__float_as_uint(x) + 0x8000u) >> 16 << 16 * half;
        }
        words[i] = word;
    }
}

// All 2^32 inputs, eight a thread, against the software path of CUDA's header.
template <class Converter>
__global__ void sweep(float inverse, unsigned long long *wrong) {
    const uint32_t at = (blockIdx.x * blockDim.x + threadIdx.x) * 8u;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __uint_as_float(at + i);
    const uint32_t got = Converter::eight(x, inverse);
    unsigned numbers = 0, nans = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const bool differs = (got >> 4 * i & 15u) != (uint32_t)__nv_cvt_double_to_fp4((double)x[i], __NV_E2M1, cudaRoundNearest);
        numbers += differs && x[i] == x[i];
        nans += differs && x[i] != x[i];
    }
    if (numbers) atomicAdd(wrong, (unsigned long long)numbers);
    if (nans) atomicAdd(wrong + 1, (unsigned long long)nans);
}

__global__ void compare(const uint32_t *a, const uint32_t *b, size_t words, unsigned long long *wrong) {
    unsigned long long bad = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x) bad += a[i] != b[i];
    if (bad) atomicAdd(wrong, bad);
}

constexpr float TENSOR_SCALE = 37.25f;

struct Room {
    size_t values;
    uint4 *in;
    uint2 *codes, *wanted;
    uint8_t *scales, *wanted_scales;
    unsigned long long *wrong;

    uint32_t blocks() const { return (uint32_t)(values / 16); }
};

struct Contestant {
    std::string name;
    double bytes;
    std::function<void()> work, check;
    std::vector<double> taken;
};

static unsigned long long counted(const Room &room, int which) {
    unsigned long long n[2];
    CHECK(cudaMemcpy(n, room.wrong, sizeof n, cudaMemcpyDeviceToHost));
    return n[which];
}

template <class Converter>
Contestant contestant(const char *name, const Room &room) {
    const auto work = [&room] { start_quantise<Converter>(room.in, room.codes, room.scales, TENSOR_SCALE, room.blocks()); };
    const auto check = [&room, work] {
        CHECK(cudaMemset(room.codes, 0xa5, room.values / 2));
        CHECK(cudaMemset(room.scales, 0xa5, room.values / 16));
        CHECK(cudaMemset(room.wrong, 0, 16));
        work();
        compare<<<1024, 256>>>((uint32_t *)room.codes, (uint32_t *)room.wanted, room.values / 8, room.wrong);
        compare<<<1024, 256>>>((uint32_t *)room.scales, (uint32_t *)room.wanted_scales, room.values / 64, room.wrong);
        const unsigned long long words = counted(room, 0);
        sweep<Converter><<<1u << 21, 256>>>(1.0f, room.wrong);
        CHECK(cudaMemset(room.wrong, 0, 16));
        const double ms = milliseconds([&] { sweep<Converter><<<1u << 21, 256>>>(1.0f, room.wrong); });
        printf(", \"words_wrong\": %llu, \"wrong\": %llu, \"wrong_nan\": %llu, \"sweep_ms\": %.3f", words, counted(room, 0), counted(room, 1), ms);
    };
    return {name, room.values * (2 + 0.5 + 1.0 / 16), work, check, {}};
}

int main(int count, char **arguments) {
    const int log2 = count > 1 ? atoi(arguments[1]) : 31, rounds = count > 2 ? atoi(arguments[2]) : 20;
    Room room{(size_t)1 << log2, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    uint8_t *copied;
    CHECK(cudaMalloc(&room.in, room.values * 2));
    CHECK(cudaMalloc(&copied, room.values * 2));
    CHECK(cudaMalloc(&room.codes, room.values / 2));
    CHECK(cudaMalloc(&room.wanted, room.values / 2));
    CHECK(cudaMalloc(&room.scales, room.values / 16));
    CHECK(cudaMalloc(&room.wanted_scales, room.values / 16));
    CHECK(cudaMalloc(&room.wrong, 16));
    cudaDeviceProp facts;
    CHECK(cudaGetDeviceProperties(&facts, 0));
    printf("{\"gpu\": \"%s\", \"sm\": %d, \"values\": %zu, \"rounds\": %d}\n", facts.name, facts.major * 10 + facts.minor, room.values, rounds);
    fill<<<4096, 256>>>((uint32_t *)room.in, room.values / 2);
    quantise_defined<<<(room.blocks() + 255) / 256, 256>>>((uint16_t *)room.in, (uint8_t *)room.wanted, room.wanted_scales, TENSOR_SCALE, room.blocks());
    CHECK(cudaDeviceSynchronize());
    const auto copy = [&] { CHECK(cudaMemcpyAsync(copied, room.in, room.values * 2, cudaMemcpyDeviceToDevice)); };
    std::vector<Contestant> all = {
        {"copy", room.values * 4.0, copy, [] {}, {}},
        contestant<Ours>("ours", room),
        contestant<Chain>("comparison chain", room),
        contestant<Header>("CUDA header", room),
        contestant<BitString>("bit string", room),
    };
    for (Contestant &one : all) one.work();
    // In turns, so that a clock that changes during the run changes for all.
    for (int round = 0; round < rounds; round++)
        for (Contestant &one : all) one.taken.push_back(milliseconds(one.work));
    for (Contestant &one : all) {
        std::sort(one.taken.begin(), one.taken.end());
        const double ms = one.taken[one.taken.size() / 2];
        printf("{\"name\": \"%s\", \"ms\": %.4f, \"fastest_ms\": %.4f, \"slowest_ms\": %.4f, \"gb_s\": %.1f", one.name.c_str(), ms, one.taken.front(), one.taken.back(), one.bytes / ms / 1e6);
        one.check();
        printf("}\n");
        fflush(stdout);
    }
    return 0;
}
