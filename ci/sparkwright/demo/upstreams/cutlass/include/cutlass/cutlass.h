#pragma once

#include "cutlass/version.h"

#if defined(__CUDACC__)
#define CUTLASS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUTLASS_HOST_DEVICE inline
#endif
