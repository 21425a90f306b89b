#pragma once

#include <cuda_runtime.h>

namespace mini_vllm {

constexpr int kThreads = 256;

// Enough blocks of kThreads for `count` items.
inline int blocks_for(int count) { return (count + kThreads - 1) / kThreads; }

}  // namespace mini_vllm
