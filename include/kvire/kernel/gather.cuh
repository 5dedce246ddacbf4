// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/kernel/body/gather.hpp>

/// The CUDA gather: body::gather with a block for each page. All of a thread's loads of a page are under way before its first store.

KVIRE_NAMESPACE_BEGIN

namespace detail::gather {

inline constexpr int threads = 128;

#if KVIRE_CUDA_COMPILER

// Rows [0, rows) of plane I, in 16-byte vectors where addresses allow, else in words, else in bytes.
template <LayoutPolicy P, int I>
struct Plane {
  static constexpr kstd::int64_t bytes = P::tokens_per_page * P::table.row_bytes[I];
  static constexpr int each = bytes % 16 == 0 ? static_cast<int>(ceil_div(bytes / 16, kstd::int64_t(threads))) : 1;
  static constexpr bool in_registers = bytes % 16 == 0 && each <= 16;
  uint4 v[each];
  bool vector;

  __device__ void load(const kstd::byte* from, const kstd::byte* to, kstd::int64_t rows) {
    if (to == nullptr) return;
    const kstd::int64_t n = rows * P::table.row_bytes[I];
    vector = in_registers && ((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) | std::uintptr_t(n)) & 15U) == 0;
    if (!vector) return;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int i = j * threads + int(threadIdx.x);
      if (i < n / 16) v[j] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
    }
  }
  __device__ void store(const kstd::byte* from, kstd::byte* to, kstd::int64_t rows) const {
    if (to == nullptr) return;
    const kstd::int64_t n = rows * P::table.row_bytes[I];
    if (vector) {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        const int i = j * threads + int(threadIdx.x);
        if (i < n / 16) reinterpret_cast<uint4*>(to)[i] = v[j];
      }
    } else if (((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) | std::uintptr_t(n)) & 3U) == 0) {
      for (kstd::int64_t i = threadIdx.x; i < n / 4; i += threads) reinterpret_cast<unsigned*>(to)[i] = reinterpret_cast<const unsigned*>(from)[i];
    } else {
      for (kstd::int64_t i = threadIdx.x; i < n; i += threads) to[i] = from[i];
    }
  }
};

template <LayoutPolicy P>
__global__ __launch_bounds__(threads) void gather_kernel(const __grid_constant__ body::GatherArgs<P> args, GatherCounts* counts) {
  const kstd::int64_t item = blockIdx.x;
  const kstd::int64_t b = item / args.max_pages;
  const kstd::int64_t first = item % args.max_pages * P::tokens_per_page;
  const kstd::int32_t id = args.page_table[item];
  const kstd::int64_t length = args.lengths[b];
  const kstd::int64_t at = args.start(b) + first;
  if (first >= length) return;
  if (id < 0 || id >= args.page_count) {
    if (counts != nullptr && threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(id < 0 ? &counts->skipped : &counts->bad_pages), 1ULL);
    return;
  }
  if (counts != nullptr && threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counts->pages), 1ULL);
  const kstd::int64_t rows = length - first < P::tokens_per_page ? length - first : kstd::int64_t(P::tokens_per_page);
  const kstd::byte* page = args.pages + args.page_stride * id;
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    const auto from = [&](auto i) { return page + P::template plane_offset<decltype(i)::value>(); };
    const auto to = [&](auto i) {
      kstd::byte* plane = args.planes[decltype(i)::value];
      return plane == nullptr ? plane : plane + at * P::template row_bytes<decltype(i)::value>();
    };
    [&](auto... plane) {
      (plane.load(from(kstd::integral_constant<int, I>{}), to(kstd::integral_constant<int, I>{}), rows), ...);
      (plane.store(from(kstd::integral_constant<int, I>{}), to(kstd::integral_constant<int, I>{}), rows), ...);
    }(Plane<P, I>{}...);
  }(kstd::make_integer_sequence<int, P::plane_count>{});
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::gather

#if KVIRE_CUDA_COMPILER

/// Queues a gather; pointers in device memory, `counts` (or null) is added to. Captures; allocates nothing, waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_gather(const body::GatherArgs<P>& args, GatherCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  const std::int64_t items = std::int64_t(args.batch) * args.max_pages;
  if (items < 0 || items > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (items == 0) return cudaSuccess;
  detail::gather::gather_kernel<P><<<static_cast<unsigned>(items), detail::gather::threads, 0, stream>>>(args, counts);
  return cudaGetLastError();
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
