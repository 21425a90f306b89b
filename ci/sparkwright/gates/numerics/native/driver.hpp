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
  auto const inputs = read_all<In>(from);
  std::vector<Out> outputs(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) converter(inputs[i], outputs[i]);
  write_all(to, outputs);
  return 0;
}

// Bits of 16 or 32 as the type that the converter takes.
template <class T, class Bits>
void as_values(Bits const* bits, T* values, std::size_t count) {
  static_assert(sizeof(T) == sizeof(Bits), "the policy names a format of another size than the type has");
  std::memcpy(static_cast<void*>(values), bits, count * sizeof(T));
}

}  // namespace sparkwright
