// Reads the cases that `fuzz.py` writes, and writes what a kernel left in its output, guard zones included.
//
// A case: six 32-bit integers (magic, m, n, k, groups, 0), groups + 1 offsets, groups factors, then A, its scales, B, its scales. The
// result of each run: GUARD words, m x n words, GUARD words, all filled with POISON before the kernel runs.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "gemm.h"

namespace sparkwright {

constexpr uint32_t MAGIC = 0x66757a7au, POISON = 0x7fedbeefu;
constexpr int GUARD = 1024;

struct Read {
    std::vector<int> offsets;
    std::vector<float> alpha;
    std::vector<uint8_t> a, a_scales, b, b_scales;
    Case shape{};

    Case plain() const { return {shape.m, shape.n, shape.k, shape.groups, offsets.data(), alpha.data(), a.data(), a_scales.data(), b.data(), b_scales.data()}; }
};

template <class T>
void fill_from(FILE *file, std::vector<T> &to, size_t count) {
    to.resize(count);
    if (fread(to.data(), sizeof(T), count, file) != count) {
        fprintf(stderr, "the file of cases ends early\n");
        exit(5);
    }
}

inline bool read_case(FILE *file, Read &one) {
    int32_t head[6];
    if (fread(head, 4, 6, file) != 6) return false;
    const size_t m = head[1], n = head[2], k = head[3], groups = head[4], blocks = k / 16;
    if ((uint32_t)head[0] != MAGIC || m < 1 || n < 1 || k < 16 || k % 16 || groups < 1 || m > 65536 || n > 65536 || k > 65536 || groups > 1024) {
        fprintf(stderr, "this is no file of cases\n");
        exit(5);
    }
    one.shape.m = head[1], one.shape.n = head[2], one.shape.k = head[3], one.shape.groups = head[4];
    fill_from(file, one.offsets, groups + 1);
    fill_from(file, one.alpha, groups);
    fill_from(file, one.a, m * k / 2);
    fill_from(file, one.a_scales, scale_bytes(m, blocks));
    fill_from(file, one.b, groups * n * k / 2);
    fill_from(file, one.b_scales, groups * scale_bytes(n, blocks));
    return true;
}

// Runs `kernel` on every case of the file `from`, `repeats` times, each into words that begin as POISON.
inline void run_cases(const char *from, const char *to, int repeats, const std::function<void(const Read &, std::vector<uint32_t> &)> &kernel) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    if (!in || !out) {
        fprintf(stderr, "%s or %s cannot be opened\n", from, to);
        exit(5);
    }
    Read one;
    while (read_case(in, one)) {
        for (int i = 0; i < repeats; i++) {
            std::vector<uint32_t> words((size_t)one.shape.m * one.shape.n + 2 * GUARD, POISON);
            kernel(one, words);
            if (fwrite(words.data(), 4, words.size(), out) != words.size()) exit(5);
        }
    }
    fclose(in);
    if (fclose(out)) exit(5);
}

}  // namespace sparkwright
