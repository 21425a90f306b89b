// Reads inputs from a file, calls a converter for each, and writes the results to another file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace sparkwright {

// A quantised block: sixteen codes, and its scale.
struct Block {
  std::uint64_t codes = 0;
  std::uint8_t scale = 0xFF;
  std::uint8_t padding[7] = {};
};

template <class T>
std::vector<T> read_all(char const* path) {
  std::vector<T> made;
  std::FILE* const file = std::fopen(path, "rb");
  if (!file) std::exit(3);
  T block[512];
  for (std::size_t count; (count = std::fread(block, sizeof(T), 512, file)) > 0;) made.insert(made.end(), block, block + count);
  std::fclose(file);
  return made;
}

template <class T>
void write_all(char const* path, std::vector<T> const& values) {
  std::FILE* const file = std::fopen(path, "wb");
  if (!file || std::fwrite(values.data(), sizeof(T), values.size(), file) != values.size() || std::fclose(file)) std::exit(3);
}

// Calls `converter(in, out)` for every `In` of the file.
template <class In, class Out, class Converter>
int sweep(char const* from, char const* to, Converter converter) {
  auto inputs = read_all<In>(from);
  std::vector<Out> outputs(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) converter(inputs[i], outputs[i]);
  write_all(to, outputs);
  return 0;
}

// The kinds of converters, by their signatures.

template <class T, std::size_t N>
struct Values {
  alignas(T) unsigned char bytes[N * sizeof(T)];
  T (&get())[N] { return *reinterpret_cast<T(*)[N]>(bytes); }
};

template <class Code, class T, std::size_t N>
int run(Code (*encode)(T (&)[N]), char const* from, char const* to) {
  return sweep<Values<T, N>, std::uint64_t>(from, to, [&](auto& in, auto& out) { out = encode(in.get()); });
}

inline int run(float (*decode)(unsigned), char const* from, char const* to) {
  return sweep<std::uint32_t, float>(from, to, [&](auto& in, auto& out) { out = decode(in); });
}

template <class Code>
int run(Code (*scale)(float), char const* from, char const* to) {
  return sweep<float, std::uint8_t>(from, to, [&](auto& in, auto& out) { out = scale(in); });
}

template <class Offset>
int run(Offset (*offset)(int, int, int), char const* from, char const* to) {
  struct In {
    std::int32_t row, column, columns;
  };
  return sweep<In, std::int64_t>(from, to, [&](auto& in, auto& out) { out = offset(in.row, in.column, in.columns); });
}

template <class Codes, class T>
int run(Codes (*quantise)(T (&)[16], float, std::uint8_t&), char const* from, char const* to) {
  struct In {
    float tensor_scale;
    Values<T, 16> values;
  };
  return sweep<In, Block>(from, to, [&](auto& in, auto& out) { out.codes = quantise(in.values.get(), in.tensor_scale, out.scale); });
}

}  // namespace sparkwright
