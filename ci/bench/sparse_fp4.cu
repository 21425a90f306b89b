// y = W x for NVFP4 weights and one to four vectors in bfloat16, with a mask of zero tiles.
//
// Order of accumulation. A warp computes four rows. Lane l takes the eight values from 256 s + 8 l
// of each step s: their products are added in ascending order, the sum is multiplied by the scale
// of their block and added to the lane's accumulator, by ascending s. The lanes are added by a
// butterfly over 16, 8, 4, 2, 1, and the sum is multiplied by the global scale. A mask only deletes
// terms from this order. Products of E2M1 and bfloat16 are exact in float, an accumulator that
// begins with +0 never becomes -0, and adding a zero of either sign to anything else changes no
// bit; so with finite x, a mask whose tiles are zero changes no bit of y.
//
// Layout, for each group of four rows: 32-bit words of eight codes, [step][lane][row], and scales,
// [step][block][row]. A step of a warp is 512 contiguous bytes of codes, and each lane has 16 of
// them. Magnitudes keep their nibble; the sign of value i is the highest bit of nibble 2 i + 1, or
// 2 (i - 4) for the upper four, so that four signs are in their bytes after at most one shift.
//
// Mask: a tile is the codes of LANES neighbouring lanes: 32, 64 or 128 bytes, four rows of 16, 32
// or 64 values. Words of 32 bits, [32 / LANES tiles of a step][32 steps]; a set bit is a tile that
// is read. LANES is 0 without a mask.

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace {

constexpr int ROWS = 4, STEP = 256, WARPS = 8, AHEAD = 4;

struct Matrices {
  const uint4* codes;
  const uint32_t* scales;
  const uint32_t* mask;
  const uint4* x;
  float* y;
  float global_scale;
  int groups;
  int steps;
};

__host__ __device__ inline uint32_t permuted(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return result;
#endif
}

__host__ __device__ inline int lowest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

// Weights are read once: they do not displace x in the L1 cache.
__host__ __device__ inline uint4 streamed(const uint4* address) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
#else
  return *address;
#endif
}

__host__ __device__ inline float upper_half(uint32_t word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

__host__ __device__ inline float lower_half(uint32_t word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
}

__host__ __device__ inline float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// The upper byte of a half is enough for a magnitude of E2M1, and a table of eight bytes for all.
__host__ __device__ inline void decode(uint32_t word, float values[8]) {
  constexpr uint32_t LOW = 0x3E3C3800, HIGH = 0x46444240;
  const uint32_t magnitudes = word & 0x77777777;
  const uint32_t first = permuted(LOW, HIGH, magnitudes) | (word & 0x80808080);
  const uint32_t second = permuted(LOW, HIGH, magnitudes >> 16) | (word << 4 & 0x80808080);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bytes = half ? second : first;
    const uint32_t low = permuted(bytes, 0, 0x1404), high = permuted(bytes, 0, 0x3424);
    values[4 * half] = lower_half(low), values[4 * half + 1] = upper_half(low);
    values[4 * half + 2] = lower_half(high), values[4 * half + 3] = upper_half(high);
  }
}

__host__ __device__ inline void decode_scales(uint32_t word, float values[ROWS]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(word >> 16 * pair);
    const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    values[2 * pair] = __low2float(halves), values[2 * pair + 1] = __high2float(halves);
  }
}

// Add the sums of one lane in the rows of *group* to *sums*.
template <int BATCH, int LANES>
__host__ __device__ inline void accumulate(const Matrices& m, size_t group, int lane,
                                           float sums[ROWS][BATCH]) {
  const uint4* codes = m.codes + group * m.steps * 32 + lane;
  const uint32_t* scales = m.scales + group * m.steps * 16 + lane / 2;
  const uint32_t* mask = m.mask;
  if constexpr (LANES != 0) {
    mask += (group * (32 / LANES) + lane / LANES) * ((m.steps + 31) / 32);
  }
  for (int begin = 0; begin < m.steps; begin += 32) {
    const int left = m.steps - begin;
    uint32_t bits = left < 32 ? (1U << left) - 1 : ~0U;
    if constexpr (LANES != 0) bits = mask[begin / 32];
    while (bits) {
      int steps[AHEAD];
      uint4 words[AHEAD];
      uint32_t packed_scales[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        steps[i] = -1;
        if (bits) {
          steps[i] = begin + lowest_bit(bits);
          bits &= bits - 1;
          words[i] = streamed(codes + steps[i] * 32);
          packed_scales[i] = scales[steps[i] * 16];
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (steps[i] < 0) continue;
        float x[BATCH][8], block_scales[ROWS];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          const uint4 v = m.x[(b * m.steps + steps[i]) * 32 + lane];
          const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[b][2 * j] = float_of(pairs[j] << 16);
            x[b][2 * j + 1] = float_of(pairs[j] & 0xFFFF0000);
          }
        }
        decode_scales(packed_scales[i], block_scales);
        const uint32_t rows[ROWS] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          float weights[8];
          decode(rows[r], weights);
#pragma unroll
          for (int b = 0; b < BATCH; ++b) {
            float sum = weights[0] * x[b][0];
#pragma unroll
            for (int j = 1; j < 8; ++j) sum = fmaf(weights[j], x[b][j], sum);
            sums[r][b] = fmaf(block_scales[r], sum, sums[r][b]);
          }
        }
      }
    }
  }
}

template <int BATCH, int LANES>
__global__ void __launch_bounds__(32 * WARPS, BATCH == 1 ? 4 : BATCH == 2 ? 3 : 2) gemv(Matrices m) {
  const int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32;
  if (group >= m.groups) return;
  float sums[ROWS][BATCH] = {};
  const size_t matrix = blockIdx.y;
  accumulate<BATCH, LANES>(m, matrix * m.groups + group, lane, sums);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float sum = sums[r][b];
#pragma unroll
      for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
      if (lane == 0) m.y[((matrix * BATCH + b) * m.groups + group) * ROWS + r] = sum * m.global_scale;
    }
  }
}

// The same on the CPU, for a test of the arithmetic and of its order.
template <int BATCH, int LANES>
void gemv_cpu(const Matrices& m, int count) {
  for (size_t group = 0; group < size_t(m.groups) * count; ++group) {
    float sums[32][ROWS][BATCH] = {};
    for (int lane = 0; lane < 32; ++lane) accumulate<BATCH, LANES>(m, group, lane, sums[lane]);
    const size_t matrix = group / m.groups, row = group % m.groups * ROWS;
    for (int r = 0; r < ROWS; ++r) {
      for (int b = 0; b < BATCH; ++b) {
        for (int offset = 16; offset; offset /= 2) {
          for (int lane = 0; lane < offset; ++lane) sums[lane][r][b] += sums[lane + offset][r][b];
        }
        m.y[(matrix * BATCH + b) * m.groups * ROWS + row + r] = sums[0][r][b] * m.global_scale;
      }
    }
  }
}

template <int BATCH, int LANES>
int run(const Matrices& m, int count, bool cpu, cudaStream_t stream) {
  if (cpu) {
    gemv_cpu<BATCH, LANES>(m, count);
    return 0;
  }
  const dim3 grid((m.groups + WARPS - 1) / WARPS, count);
  gemv<BATCH, LANES><<<grid, 32 * WARPS, 0, stream>>>(m);
  return cudaGetLastError();
}

template <int BATCH>
int run_with_mask(const Matrices& m, int lanes, int count, bool cpu, cudaStream_t stream) {
  switch (lanes) {
    case 0: return run<BATCH, 0>(m, count, cpu, stream);
    case 2: return run<BATCH, 2>(m, count, cpu, stream);
    case 4: return run<BATCH, 4>(m, count, cpu, stream);
    case 8: return run<BATCH, 8>(m, count, cpu, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

// Compute *count* products of matrices of *rows* x *columns*; return CUDA's error code.
extern "C" int sparse_fp4_gemv(const void* codes, const void* scales, const void* mask,
                               const void* x, void* y, float global_scale, int rows, int columns,
                               int batch, int lanes, int count, int cpu, void* stream) {
  if (rows <= 0 || columns <= 0 || count <= 0 || rows % ROWS || columns % STEP) {
    return cudaErrorInvalidValue;
  }
  const Matrices m{static_cast<const uint4*>(codes),
                   static_cast<const uint32_t*>(scales),
                   static_cast<const uint32_t*>(mask),
                   static_cast<const uint4*>(x),
                   static_cast<float*>(y),
                   global_scale,
                   rows / ROWS,
                   columns / STEP};
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (batch) {
    case 1: return run_with_mask<1>(m, lanes, count, cpu, queue);
    case 2: return run_with_mask<2>(m, lanes, count, cpu, queue);
    case 3: return run_with_mask<3>(m, lanes, count, cpu, queue);
    case 4: return run_with_mask<4>(m, lanes, count, cpu, queue);
    default: return cudaErrorInvalidValue;
  }
}
