// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/base/ints.hpp>
#include <kvire/kernel/cuda/warp_group.cuh>

KVIRE_NAMESPACE_BEGIN
namespace detail {

/// Warps of a block of the plain kernels.
inline constexpr int plain_warps = 4;

#if KVIRE_CUDA_COMPILER

/// Adds counts, a struct of 64-bit integers and nothing else, to those in device memory.
template <class Counts>
__device__ void add_counts(Counts* to, const Counts& mine) {
  constexpr int n = sizeof(Counts) / sizeof(unsigned long long);
  unsigned long long values[n];
  __builtin_memcpy(values, &mine, sizeof values);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (values[i] != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to) + i, values[i]);
  }
}

/// The shell of every body: each warp runs `item(WarpGroup, i)` for its share of the items, in any number of blocks. `Item` is a struct of
/// plain values with an alias `counts`, what a call returns.
template <class Item>
__global__ __launch_bounds__(plain_warps * 32) void plain_kernel(const __grid_constant__ Item item, kstd::int64_t n, typename Item::counts* counts) {
  typename Item::counts mine;
  for (kstd::int64_t i = kstd::int64_t(blockIdx.x) * plain_warps + WarpGroup::warp(); i < n; i += kstd::int64_t(gridDim.x) * plain_warps) {
    mine += item(WarpGroup{}, i);
  }
  if (counts != nullptr && WarpGroup::lane() == 0) add_counts(counts, mine);
}

/// Queues `item` for [0, n); `counts` (device memory, or null) is added to. Captures; allocates nothing, waits for nothing.
template <class Item>
cudaError_t launch_plain(const Item& item, std::int64_t n, typename Item::counts* counts, cudaStream_t stream) {
  if (n <= 0) return n == 0 ? cudaSuccess : cudaErrorInvalidValue;
  constexpr std::int64_t most_blocks = 1 << 22;  // the rest is a loop in the kernel
  const std::int64_t blocks = ceil_div(n, std::int64_t(plain_warps));
  plain_kernel<Item><<<static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks), plain_warps * 32, 0, stream>>>(item, n, counts);
  return cudaGetLastError();
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail
KVIRE_NAMESPACE_END
