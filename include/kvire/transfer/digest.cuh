// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/transfer/cuda/engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

inline constexpr int digest_threads = 128;

/// Digest of the rows of a plan, one row a thread at a time; row i is token i of the listed pages, or the token slot ids[i]. Each block leaves
/// its part, parts add up in any order. Ids are trusted, as those of the host's digest are.
template <class P, class Id>
__global__ void __launch_bounds__(digest_threads) digest_kernel(const std::byte* base, kstd::int64_t page_stride, const Id* ids, kstd::int64_t rows, kstd::uint64_t key, Digest* parts) {
  constexpr kstd::int64_t tokens = P::tokens_per_page;
  constexpr bool whole_pages = sizeof(Id) == sizeof(kstd::int32_t);
  Digest sum;
  for (kstd::int64_t i = kstd::int64_t(blockIdx.x) * digest_threads + threadIdx.x; i < rows; i += kstd::int64_t(gridDim.x) * digest_threads) {
    const kstd::int64_t slot = whole_pages ? kstd::int64_t(ids[i / tokens]) * tokens + i % tokens : kstd::int64_t(ids[i]);
    sum += digest_row<P>(key, i, base + page_stride * (slot / tokens), static_cast<int>(slot % tokens));
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    Digest other;
    other.low = __shfl_down_sync(~0U, sum.low, distance);
    other.high = __shfl_down_sync(~0U, sum.high, distance);
    sum += other;
  }
  __shared__ kstd::uint64_t low[digest_threads / 32];
  __shared__ kstd::uint64_t high[digest_threads / 32];
  if (threadIdx.x % 32 == 0) {
    low[threadIdx.x / 32] = sum.low;
    high[threadIdx.x / 32] = sum.high;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < digest_threads / 32; ++warp) {
    sum.low += low[warp];
    sum.high += high[warp];
  }
  parts[blockIdx.x] = sum;
}

template <class P>
Status DigestLauncher<P>::launch(Stream<Cuda>& stream, const DigestRows& rows, Digest* parts) {
  if (rows.slots != nullptr) {
    digest_kernel<P><<<digest_parts, digest_threads, 0, stream.native()>>>(rows.base, rows.page_stride, rows.slots, rows.rows, rows.key, parts);
  } else {
    digest_kernel<P><<<digest_parts, digest_threads, 0, stream.native()>>>(rows.base, rows.page_stride, rows.pages, rows.rows, rows.key, parts);
  }
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return stream.error(e, "launching a digest");
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
