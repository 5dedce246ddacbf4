// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/body/top_k.hpp>
#include <kvire/kernel/key_bins.cuh>

/// What every tuned top-k kernel has of a row: its entries, how long it is, how a position is listed, and the order by score.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int position_bits = 28;  // rows up to 2^28

/// Division by a number that is known before the launch, of numbers below 2^31, without the instructions of one.
struct Divisor {
  u64 factor = u64(1) << 32;  // rounded up, of 2^bits
  int bits = 32;

  static Divisor of(std::int64_t d) {
    Divisor by;
    while (std::int64_t(1) << (by.bits - 32) < d) ++by.bits;
    by.factor = (u64(1) << by.bits) / u64(d) + 1;
    return by;
  }
  KVIRE_HD u32 operator()(u32 n) const { return u32(n * factor >> bits); }
};

struct Params {
  body::TopKArgs args;
  u64* counts = nullptr;  // nan_scores, bad_pages; added to
  int most = 0;           // positions that a row may have: those of the stride and of the page table
  int pages = 0;          // ids from here on are bad
  Divisor per_page;       // by tokens_per_page
  Divisor per_request;    // by next_n
  int blocks = 1;         // blocks per row
  int block_shift = 0;    // its log2
  bool vector_loads = false;
  bool overlap = false;  // programmatic dependent launch
};

inline Params make_params(const body::TopKArgs& args, TopKCounts* counts, bool overlap) {
  Params p;
  p.args = args;
  p.counts = reinterpret_cast<u64*>(counts);
  p.overlap = overlap;
  p.vector_loads = reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && args.stride % 4 == 0;
  const std::int64_t table = args.page_table != nullptr ? args.max_pages * args.tokens_per_page : args.stride;
  p.most = static_cast<int>(table < args.stride ? table : args.stride);
  p.pages = args.translate ? std::min(args.page_count, 0x7FFFFFFF / args.tokens_per_page) : args.page_count;
  p.per_page = Divisor::of(args.tokens_per_page);
  p.per_request = Divisor::of(args.next_n);
  return p;
}

#if KVIRE_CUDA_COMPILER

// Larger is better; unique within a row. 0 is no candidate.
__device__ inline u64 entry_of(u32 key, u32 position) {
  return (u64(key) << position_bits) | (((1U << position_bits) - 1) - position);
}
__device__ inline u32 position_of(u64 entry) { return ((1U << position_bits) - 1) - (u32(entry) & ((1U << position_bits) - 1)); }
__device__ inline u32 key_of(u64 entry) { return u32(entry >> position_bits); }

template <bool Paged>
struct Row {
  const Params& p;
  u32 row;

  __device__ int page_of(int position) const { return int(p.per_page(u32(position))); }
  __device__ std::int32_t entry_of_page(int page) const { return p.args.page_table[std::int64_t(request()) * p.args.max_pages + page]; }
  __device__ u32 request() const { return p.per_request(row); }
  // body::TopKArgs::visible without its 64-bit divisions, which would be the longest thing a short row waits for.
  __device__ int visible() const { return visible_of(p.args.lengths == nullptr ? p.most : p.args.lengths[length_at()]); }
  __device__ bool causal() const { return p.args.next_n != 1 && !p.args.lengths_per_query; }
  __device__ u32 length_at() const { return causal() ? request() : row; }
  // Of that length.
  __device__ int visible_of(int length) const {
    if (p.args.lengths != nullptr && causal()) length -= min(max(length, 0), p.args.next_n - 1 - int(row - request() * u32(p.args.next_n)));
    return max(0, min(length, p.most));
  }
  // body::TopKArgs::good_page without its division.
  __device__ bool good(std::int32_t page) const { return page >= 0 && page < p.pages; }
  __device__ bool on_good_page(int position) const {
    if constexpr (!Paged) return true;
    return good(entry_of_page(page_of(position)));
  }
  __device__ int listed_as(int position) const {
    if constexpr (Paged) {
      if (p.args.translate) {
        const int page = page_of(position);
        return entry_of_page(page) * p.args.tokens_per_page + (position - page * p.args.tokens_per_page);
      }
    }
    return position;
  }
  __device__ std::int32_t* out() const { return p.args.selected + std::int64_t(row) * p.args.k; }

  // Adds the bad pages of a row to the counts; all threads of the block.
  __device__ void count_pages(int length) const {
    if constexpr (Paged) {
      u32 bad = 0;
      for (int page = int(threadIdx.x); page < ceil_div(length, p.args.tokens_per_page); page += int(blockDim.x)) {
        const std::int32_t id = entry_of_page(page);
        bad += id >= 0 && !good(id) ? 1U : 0U;
      }
      bad = __reduce_add_sync(~0U, bad);
      if (threadIdx.x % 32 == 0 && bad != 0) atomicAdd(p.counts + 1, u64(bad));
    }
  }

  // Lists the `all` entries in `ranked`, which has room for the next power of two, by score. All threads of the block; starts with a barrier.
  template <int Threads>
  __device__ void emit_by_score(u64* ranked, u32 all) const {
    u32 width = 1;
    while (width < all) width *= 2;
    __syncthreads();
    for (u32 i = all + threadIdx.x; i < width; i += Threads) ranked[i] = 0;
    __syncthreads();
    for (u32 size = 2; size <= width; size *= 2) {
      for (u32 stride = size / 2; stride != 0; stride /= 2) {
        for (u32 i = threadIdx.x; i < width / 2; i += Threads) {
          const u32 at = 2 * i - (i & (stride - 1));
          const u64 u = ranked[at];
          const u64 v = ranked[at + stride];
          if (u != v && ((at & size) == 0) == (u < v)) {
            ranked[at] = v;
            ranked[at + stride] = u;
          }
        }
        __syncthreads();
      }
    }
    for (u32 i = threadIdx.x; i < u32(p.args.k); i += Threads) out()[i] = i < all ? listed_as(int(position_of(ranked[i]))) : -1;
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
