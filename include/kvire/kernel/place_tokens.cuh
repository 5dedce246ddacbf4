// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/kernel/body/place_tokens.hpp>
#include <kvire/kernel/cuda/block_group.cuh>
#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/cuda/plain_kernel.cuh>
#include <kvire/kernel/ptx/barrier.cuh>

/// body::place_tokens with a block for each row of the batch.

KVIRE_NAMESPACE_BEGIN
namespace detail::place {

inline constexpr int threads = 1024;

inline std::int64_t shared_bytes(std::int64_t n) { return body::PlaceScratch::words(n) * 4; }
/// Beside that: what reductions exchange, padded to the strictest alignment of dynamic shared memory that kvire's kernels ask for, since a compiler gives all
/// kernels of a translation unit the same.
inline constexpr std::int64_t static_bytes = 1024;

#if KVIRE_CUDA_COMPILER

template <class Slot>
__global__ __launch_bounds__(threads) void place_tokens_kernel(const __grid_constant__ body::PlaceTokensArgs<Slot> args, HotCounts* counts) {
  extern __shared__ __align__(16) kstd::int32_t place_scratch[];
  __shared__ typename BlockGroup<threads>::Exchange exchange;
  const BlockGroup<threads> group{&exchange};
  const body::PlaceScratch scratch(place_scratch, args.n);
  ptx::launch_dependents();
  body::prepare_places(group, kstd::int64_t(blockIdx.x), args, scratch);
  ptx::wait_for_earlier_grids();
  const HotCounts mine = body::place_prepared(group, kstd::int64_t(blockIdx.x), args, scratch);
  if (counts != nullptr && threadIdx.x == 0) add_counts(counts, mine);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::place

#if KVIRE_CUDA_COMPILER

/// Queues the placement of `args.batch` rows; pointers in device memory, `counts` (or null) is added to. `overlap`, from sm_90 on: programmatic dependent
/// launch; the kernel waits for the stream's earlier one before it reads (but for hints), and lets the next one start. Captures; allocates nothing, waits for nothing. cudaErrorInvalidValue if lists are
/// longer than shared memory has room for (detail::place::shared_bytes).
template <class Slot>
cudaError_t launch_place_tokens(const body::PlaceTokensArgs<Slot>& args, HotCounts* counts, bool overlap, cudaStream_t stream) {
  if (args.batch == 0 || args.n == 0) return cudaSuccess;
  const auto kernel = detail::place::place_tokens_kernel<Slot>;
  const auto bytes = static_cast<std::size_t>(detail::place::shared_bytes(args.n));
  constexpr std::size_t always = 40 * 1024;  // beside the static part
  if (bytes > always) {
    // The same limit for every launch: another thread may be about to launch with longer lists.
    int device = 0;
    int most = 0;
    cudaFuncAttributes code{};
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaFuncGetAttributes(&code, kernel); e != cudaSuccess) return e;
    most -= static_cast<int>(code.sharedSizeBytes);
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most); e != cudaSuccess) return e;
  }
  return detail::launch_kernel(kernel, {args.batch, detail::place::threads, bytes, overlap}, stream, args, counts);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
