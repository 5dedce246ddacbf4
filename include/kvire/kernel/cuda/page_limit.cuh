// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include <kvire/base/ids.hpp>
#include <kvire/kernel/cuda/plain_kernel.cuh>
#include <kvire/sync/cuda/lease.hpp>

KVIRE_NAMESPACE_BEGIN
namespace detail {

/// Some of the pages that a write lease is limited to, ascending, small enough to be an argument of a kernel.
struct PageLimit {
  static constexpr int most = 960;
  std::int32_t count = 0;
  bool first = true;  // of the parts of one limit
  std::int32_t pages[most];
};

#if KVIRE_CUDA_COMPILER

/// out[i] is id i (a page, or a slot of `tokens` a page), or one beyond every pool if it is of a page that the lease does not cover. Ids that are
/// dropped anyway stay as they are.
template <class T>
__global__ void limit_kernel(const T* ids, T* out, kstd::int64_t n, kstd::int64_t tokens, kstd::int32_t pool_pages, const __grid_constant__ PageLimit limit) {
  for (kstd::int64_t i = kstd::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += kstd::int64_t(gridDim.x) * blockDim.x) {
    const T id = ids[i];
    const kstd::int64_t page = id / tokens;
    bool keep = id < 0 || page <= null_page || page >= pool_pages;
    kstd::int32_t begin = 0;
    kstd::int32_t end = limit.count;
    while (begin < end) {
      const kstd::int32_t middle = (begin + end) / 2;
      if (limit.pages[middle] < page) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    keep = keep || (begin < limit.count && limit.pages[begin] == page);
    if (keep) {
      out[i] = id;
    } else if (limit.first) {
      out[i] = static_cast<T>((kstd::uint64_t(1) << (sizeof(T) * 8 - 1)) - 1);
    }
  }
}

/// The ids that a kernel writes to, those outside the lease made bad ones; in memory of the stream until `end`.
template <class T>
class LimitedIds {
 public:
  LimitedIds() = default;
  LimitedIds(const LimitedIds&) = delete;
  LimitedIds& operator=(const LimitedIds&) = delete;

  /// Where the ids are to be read. `tokens`: slots of a page, 1 for pages.
  template <class P>
  cudaError_t begin(const T*& ids, std::int64_t n, std::int64_t tokens, const WriteLease<P, Cuda>& lease, std::int32_t pool_pages, cudaStream_t stream) {
    const auto* pages = kernel_access::limit(lease);
    if (pages == nullptr || n == 0) return cudaSuccess;
    void* memory = nullptr;
    if (const cudaError_t e = cudaMallocAsync(&memory, static_cast<std::size_t>(n) * sizeof(T), stream); e != cudaSuccess) return e;
    memory_ = static_cast<T*>(memory);
    constexpr std::int64_t threads = 128;
    const std::int64_t blocks = ceil_div(n, threads);
    for (std::size_t at = 0; at == 0 || at < pages->size(); at += PageLimit::most) {
      PageLimit limit;
      limit.first = at == 0;
      for (; limit.count < PageLimit::most && at + static_cast<std::size_t>(limit.count) < pages->size(); ++limit.count) {
        limit.pages[limit.count] = (*pages)[at + static_cast<std::size_t>(limit.count)];
      }
      limit_kernel<T><<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), threads, 0, stream>>>(ids, memory_, n, tokens, pool_pages, limit);
      if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    }
    ids = memory_;
    return cudaSuccess;
  }

  /// After the kernels that read them are queued; also after an error.
  cudaError_t end(cudaStream_t stream) {
    if (memory_ == nullptr) return cudaSuccess;
    const cudaError_t e = cudaFreeAsync(memory_, stream);
    memory_ = nullptr;
    return e;
  }

 private:
  T* memory_ = nullptr;
};

/// Runs `queue(ids)`, which queues a kernel, with the ids that the lease covers; the first error.
template <class T, class P, class F>
cudaError_t with_limit(const T* ids, std::int64_t n, std::int64_t tokens, const WriteLease<P, Cuda>& lease, std::int32_t pool_pages, cudaStream_t stream, F&& queue) {
  LimitedIds<T> limited;
  cudaError_t error = limited.begin(ids, n, tokens, lease, pool_pages, stream);
  if (error == cudaSuccess) error = queue(ids);
  const cudaError_t freed = limited.end(stream);
  return error != cudaSuccess ? error : freed;
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail
KVIRE_NAMESPACE_END
