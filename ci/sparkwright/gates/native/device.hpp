// CUDA names that host compilers lack, and the PTX instructions of inline asm statements, which the
// gate rewrites to calls. They mean what the PTX ISA says.
// Names that CUDA's headers already give to the host are left alone.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <variant>

namespace sparkwright {

// Registers.
using b8 = std::uint8_t;
using b16 = std::uint16_t;
using b32 = std::uint32_t;

// Ends the program at a name or instruction that is not defined here.
[[noreturn]] inline void unreadable(char const* name) {
  std::fprintf(stderr, "%s\n", name);
  std::exit(42);
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// To the nearest E2M1 value, ties to the even code, beyond 6 to 6, NaN to +6 (cvt with .satfinite).
inline std::uint8_t e2m1(float value) {
  if (std::isnan(value)) return 7;
  float const size = std::fabs(value);
  int const code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                   (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return code | (std::signbit(value) ? 8 : 0);
}

// The first source goes to the upper four bits.
inline void cvt_rn_satfinite_e2m1x2_f32(std::uint8_t& to, float high, float low) {
  to = e2m1(high) << 4 | e2m1(low);
}

inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// Rounded correctly; rcp.approx is within 1 ulp of it.
inline void rcp_approx_ftz_f32(float& to, float from) { to = flushed(1.0f / flushed(from)); }

// The first part is the least significant.
template <class To, class... Parts>
void pack(To& to, Parts... parts) {
  static_assert(sizeof(To) == (sizeof(Parts) + ...), "mov between operands of different sizes");
  auto* bytes = reinterpret_cast<unsigned char*>(&to);
  ((std::memcpy(bytes, &parts, sizeof(parts)), bytes += sizeof(parts)), ...);
}

template <class... Operands>
void mov_b32(Operands&&... operands) {
  pack(operands...);
}

template <class... Operands>
void mov_b64(Operands&&... operands) {
  pack(operands...);
}

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

}  // namespace sparkwright

#ifndef __CUDACC__

#ifndef __device__
#define __device__
#define __host__
#define __global__
#endif
#ifndef __forceinline__
#define __forceinline__ inline
#endif

// One lane, the first of the first block.
inline constexpr sparkwright::Index threadIdx{}, blockIdx{};

using std::max;
using std::min;

template <class T>
T __ldg(T const* from) {
  return *from;
}

inline unsigned __float_as_uint(float value) { return sparkwright::bits_as<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return sparkwright::bits_as<float>(bits); }
inline int __float_as_int(float value) { return sparkwright::bits_as<int>(value); }
inline float __int_as_float(int bits) { return sparkwright::bits_as<float>(bits); }

// Rounded correctly; the fast ones of a GPU are within 2 ulp.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }

// Functions beside the converters that a host does not have.
#define SPARKWRIGHT_ABSENT(name)              \
  template <class First, class... Others>     \
  First name(First const&, Others const&...) { \
    sparkwright::unreadable(#name);           \
  }

SPARKWRIGHT_ABSENT(__byte_perm)
SPARKWRIGHT_ABSENT(__dp4a)
SPARKWRIGHT_ABSENT(__hfma)
SPARKWRIGHT_ABSENT(__hfma2)
SPARKWRIGHT_ABSENT(h2exp)

#undef SPARKWRIGHT_ABSENT

inline std::size_t __cvta_generic_to_shared(void const*) {
  sparkwright::unreadable("__cvta_generic_to_shared");
}

template <class T>
T __shfl_xor_sync(unsigned, T const&, int, int = 32) {
  sparkwright::unreadable("__shfl_xor_sync");
}

#endif
