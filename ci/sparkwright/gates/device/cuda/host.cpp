// The same source on a host: `host convert IN OUT` (FP32 values to a byte each), `host quantise IN OUT S` (bf16 to codes, then scales),
// `host gemm CASES OUT REPEATS`.
#include "cases.h"

using namespace sparkwright;

template <class T>
static std::vector<T> all_of(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(5);
    fseek(file, 0, SEEK_END);
    std::vector<T> data((size_t)ftell(file) / sizeof(T));
    rewind(file);
    if (fread(data.data(), sizeof(T), data.size(), file) != data.size()) exit(5);
    fclose(file);
    return data;
}

static void write_all(const char *path, const std::vector<uint8_t> &data) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data.data(), 1, data.size(), file) != data.size() || fclose(file)) exit(5);
}

static void eight(const float *from, float inverse, uint8_t *to) {
    float x[8];
    memcpy(x, from, sizeof x);
    const uint32_t codes = e2m1_eight(x, inverse);
    memcpy(to, &codes, 4);
}

static void convert(const char *from, const char *to) {
    const std::vector<float> in = all_of<float>(from);
    std::vector<uint8_t> packed(in.size() / 2), out(in.size());
    for (size_t i = 0; i + 8 <= in.size(); i += 8) eight(&in[i], 1.0f, &packed[i / 2]);
    for (size_t i = 0; i < in.size(); i++) out[i] = (uint8_t)code_at(packed.data(), i);
    write_all(to, out);
}

static void quantise(const char *from, const char *to, float tensor_scale) {
    const std::vector<uint16_t> in = all_of<uint16_t>(from);
    const size_t blocks = in.size() / 16;
    std::vector<uint8_t> out(blocks * 9);
    for (size_t i = 0; i < blocks; i++) {
        const uint16_t *x = &in[16 * i];
        uint32_t most = larger_magnitude(x[0], x[1]);
        float values[16];
        for (int j = 0; j < 16; j++) most = larger_magnitude(most, x[j]), values[j] = float_of((uint32_t)x[j] << 16);
        const uint32_t scale = e4m3_defined(nvfp4_scale(float_of(most << 16 & 0x7fffffffu), tensor_scale));
        const float inverse = nvfp4_inverse(scale, tensor_scale);
        eight(values, inverse, &out[8 * i]);
        eight(values + 8, inverse, &out[8 * i + 4]);
        out[8 * blocks + i] = (uint8_t)scale;
    }
    write_all(to, out);
}

static void gemm(const Read &one, std::vector<uint32_t> &words) {
    const Case c = one.plain();
    uint32_t *out = words.data() + GUARD;
    for (int row = 0; row < covered_rows(c); row++)
        for (int column = 0; column < covered_columns(c); column++) write_output(c, out, row, column, one_output(c, row, column));
}

int main(int count, char **arguments) {
    if (count == 4 && !strcmp(arguments[1], "convert")) return convert(arguments[2], arguments[3]), 0;
    if (count == 5 && !strcmp(arguments[1], "quantise")) return quantise(arguments[2], arguments[3], strtof(arguments[4], nullptr)), 0;
    if (count == 5 && !strcmp(arguments[1], "gemm")) return run_cases(arguments[2], arguments[3], atoi(arguments[4]), gemm), 0;
    fprintf(stderr, "host convert IN OUT | quantise IN OUT SCALE | gemm CASES OUT REPEATS\n");
    return 2;
}
