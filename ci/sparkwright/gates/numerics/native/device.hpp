// What device code takes for granted and a host compiler does not know. Names that CUDA's headers already give to the host are left alone.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <variant>

#include "ptx.hpp"

#ifndef __CUDACC__

#ifndef __device__
#define __device__
#define __host__
#define __global__
#endif
#ifndef __forceinline__
#define __forceinline__ inline
#endif

namespace sparkwright {
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
}  // namespace sparkwright

// One lane, the first of the first block.
inline constexpr sparkwright::Index threadIdx{}, blockIdx{};

using std::max;
using std::min;

template <class T>
T __ldg(T const* from) {
  return *from;
}

template <class To, class From>
To sparkwright_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline unsigned __float_as_uint(float value) { return sparkwright_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return sparkwright_bits<float>(bits); }
inline int __float_as_int(float value) { return sparkwright_bits<int>(value); }
inline float __int_as_float(int bits) { return sparkwright_bits<float>(bits); }

// Rounded correctly; the fast ones of a GPU are within 2 ulp.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }

// Functions that headers name beside their converters and that are nothing on a host: calling one ends the program.
#define SPARKWRIGHT_ABSENT(name)              \
  template <class First, class... Others>     \
  First name(First const&, Others const&...) { \
    sparkwright::ptx::unreadable(#name);      \
  }

SPARKWRIGHT_ABSENT(__byte_perm)
SPARKWRIGHT_ABSENT(__dp4a)
SPARKWRIGHT_ABSENT(__hfma)
SPARKWRIGHT_ABSENT(__hfma2)
SPARKWRIGHT_ABSENT(h2exp)

#undef SPARKWRIGHT_ABSENT

inline std::size_t __cvta_generic_to_shared(void const*) { sparkwright::ptx::unreadable("__cvta_generic_to_shared"); }

template <class T>
T __shfl_xor_sync(unsigned, T const&, int, int = 32) {
  sparkwright::ptx::unreadable("a shuffle between lanes");
}

#endif
