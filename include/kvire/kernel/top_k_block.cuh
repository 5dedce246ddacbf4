// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/cluster.cuh>
#include <kvire/kernel/top_k_row.cuh>
#include <kvire/kernel/tuning.hpp>

/// What the ways of the tuned top-k kernel share (kernel/top_k.cuh): loads, histograms over the keys' digits, and the exact selection among entries listed in
/// shared memory.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int max_k = 2048;
inline constexpr int bins = 4096;
inline constexpr int digit = 12;
inline constexpr int by_counting = 32;                 // candidates that a warp ranks by comparing each with each

#if KVIRE_CUDA_COMPILER

// The filter of the streaming loop: a 3-instruction map of a float's bits that keeps order_key's order (-0 just below +0), with -inf at 0
// and NaNs of either sign above +inf, so that one unsigned comparison passes what may be selected and all that must be counted.
__device__ inline u32 filter_key(u32 bits) { return ((u32(int(bits) >> 31) & 0x7FFFFFFFU) ^ bits) + 0x7F800001U; }
// Every float with order_key(x) >= key has filter_key(x) >= filter_limit(key).
__device__ inline u32 filter_limit(u32 key) {
  if (key <= 0x00800000U) return 0;
  return key <= sign_bit ? key - 0x00800000U : key - 0x007FFFFFU;
}

__device__ inline u32 candidate_key(u32 bits) { return is_nan_bits(bits) ? 0 : order_key(float_of(bits)); }

__device__ inline float4 load_streaming4(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

struct alignas(16) Found {
  u32 bin, above, count, all;
};

// Small shared state of a block.
struct Scratch {
  u32 warp_sums[32];
  Found found;
  u64 cut;
  u32 listed;    // entries that this block has listed, from the list's front; beyond its capacity they are only counted
  u32 received;  // entries that other blocks have sent, from the list's back
  u32 counted;   // entries to be ranked by counting
  u32 emitted;
  u32 least, most;  // keys
  u32 sample_most, sample_passed;
};

template <int Threads, int Items, bool Clustered, bool Paged>
struct Block : Row<Paged> {
  using Row<Paged>::p, Row<Paged>::row, Row<Paged>::visible, Row<Paged>::on_good_page, Row<Paged>::listed_as, Row<Paged>::out;
  static constexpr int warps = Threads / 32;
  static constexpr int quads = Items / 4;         // 16-byte loads per thread and chunk
  static constexpr int chunk = Threads * Items;
  static constexpr int capacity = 1 << 14;  // a pruned list always takes a whole chunk
  static constexpr int bin_quads = bins / 4 / Threads;
  static constexpr int depth = Items == 4 ? 6 : 4;  // quads of a thread under way
  static constexpr std::size_t shared_bytes = sizeof(u32) * bins * 2 + sizeof(u64) * capacity;
  static_assert(require_tuning<Block, (bins % (4 * Threads) == 0 && by_counting <= 32 && Items <= 8 && capacity >= max_k + 4 * Threads)>());

  Scratch& s;
  u32* hist;
  u32* passing;  // a histogram of what passed the filter, from its least key on
  u64* list;
  u64* candidates;  // over `passing` (the histogram, where there is one), once it has been searched
  const int tid, lane, warp;
  u32 rank = 0, blocks = 1;
  const float* scores;
  int begin = 0, end = 0;
  u32 nans = 0;

  // --- loads; -inf beyond the end ---
  __device__ float4 load4(int position) const {
    if (position + 4 <= end && p.vector_loads) return load_streaming4(scores + position);
    const float none = float_of(0xFF800000U);
    float4 v = {none, none, none, none};
    if (position < end) v.x = scores[position];
    if (position + 1 < end) v.y = scores[position + 1];
    if (position + 2 < end) v.z = scores[position + 2];
    if (position + 3 < end) v.w = scores[position + 3];
    return v;
  }
  // This thread's quad of the block's d-th tile from `base` on. The whole block takes one way: few instructions where the tile is whole.
  __device__ float4 load_tile(int base, int d) const {
    const int first = base + d * Threads * 4;
    if (first + Threads * 4 <= end && p.vector_loads) return load_streaming4(scores + first + tid * 4);
    if (first < end) return load4(first + tid * 4);
    const float none = float_of(0xFF800000U);
    return {none, none, none, none};
  }
  __device__ int place(int base, int q) const { return base + (q * Threads + tid) * 4; }

  // --- histograms ---
  __device__ void clear(u32* counts) {
    for (int i = tid; i < bins / 4; i += Threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
  }
  // Sum over the threads before this one. One barrier inside; the caller puts one before the next use.
  __device__ u32 exclusive_scan(u32 x) {
    const u32 mine = __reduce_add_sync(~0U, x);
    if (lane == 0) s.warp_sums[warp] = mine;
    u32 up = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    __syncthreads();
    return __reduce_add_sync(~0U, lane < warp ? s.warp_sums[lane] : 0) + up - x;
  }
  // The bin, from the top, in which the need-th entry lies. Starts after a barrier, ends with one. Only the warp whose bins hold it scans.
  __device__ Found find(const u32* counts, u32 need) {
    uint4 v[bin_quads];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < bin_quads; ++j) {
      v[j] = reinterpret_cast<const uint4*>(counts)[bins / 4 - 1 - (tid * bin_quads + j)];
      sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
    }
    const u32 mine = __reduce_add_sync(~0U, sum);
    if (lane == 0) s.warp_sums[warp] = mine;
    __syncthreads();
    u32 before = __reduce_add_sync(~0U, lane < warp ? s.warp_sums[lane] : 0);
    if (before < need && need <= before + mine) {
      u32 up = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0U, up, d);
        if (lane >= d) up += other;
      }
      before += up - sum;
      if (before < need && need <= before + sum) {
#pragma unroll
        for (int j = 0; j < bin_quads; ++j) {
          const u32 down[4] = {v[j].w, v[j].z, v[j].y, v[j].x};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (before < need && need <= before + down[i]) s.found = Found{u32(bins - 1 - (tid * bin_quads + j) * 4 - i), before, down[i], 0};
            before += down[i];
          }
        }
      }
    } else if (tid == Threads - 1 && before + mine < need) {
      s.found = Found{0, 0, 0, 1};
    }
    __syncthreads();
    return s.found;
  }

  // --- exact selection -----------------------------------------------------------------------------------------------------------------
  // The need-th best of the `count` candidates, which the caller has put into `candidates` and followed by a barrier. Each warp for itself.
  __device__ u64 rank_candidates(u32 need, u32 count) const {
    const u64 mine = u32(lane) < count ? candidates[lane] : 0;
    u32 better = 0;
    for (u32 j = 0; j < count; ++j) better += candidates[j] > mine ? 1U : 0U;
    const u32 winner = __ballot_sync(~0U, u32(lane) < count && better == need - 1);
    return __shfl_sync(~0U, mine, __ffs(int(winner)) - 1);
  }

  // Entry i of the front and the back of the list.
  __device__ u64 entry(u32 i, u32 front) const { return list[i < front ? i : u32(capacity) - 1 - (i - front)]; }

  // The cut with exactly `need` of the n entries (0 is none) at or above it. More than `need` of them are entries.
  __device__ u64 select(u32 n, u32 front, u32 need) {
    // Bins of equal width between the least and the largest key: few candidates are left where scores are spread at all.
    u32 least = ~0U, most = 0;
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u32 key = key_of(entry(i, front));
      least = min(least, key != 0 ? key : ~0U);
      most = max(most, key);
    }
    least = __reduce_min_sync(~0U, least);
    most = __reduce_max_sync(~0U, most);
    if (tid == 0) {
      s.least = ~0U;
      s.most = 0;
      s.counted = 0;
    }
    clear(hist);
    __syncthreads();
    if (lane == 0) {
      atomicMin(&s.least, least);
      atomicMax(&s.most, most);
    }
    __syncthreads();
    const u64 base = u64(s.least) << position_bits;
    const u64 span = ((u64(s.most) + 1) << position_bits) - base;
    return refine(n, front, base, span, need);
  }
  // The same among the entries in [base, base + span), of which more than `need` are some. The histogram is clear.
  __device__ u64 refine(u32 n, u32 front, u64 base, u64 span, u32 need) {
    int shift = max(0, 64 - __clzll(static_cast<long long>(span - 1)) - digit);
    for (;;) {
      for (u32 i = u32(tid); i < n; i += Threads) {
        const u64 above = entry(i, front) - base;  // beyond any span for what is below the base, or no entry
        if (above < span) atomicAdd(&hist[above >> shift], 1U);
      }
      __syncthreads();
      const Found f = find(hist, need);
      base += u64(f.bin) << shift;
      span = u64(1) << shift;
      need -= f.above;
      if (f.count == need) return base;
      if (f.count <= by_counting) return rank_between(n, front, base, span, need, f.count);
      shift = max(0, shift - digit);
      clear(hist);
      __syncthreads();
    }
  }
  // The need-th best of the `count` entries in [base, base + span); s.counted is 0.
  __device__ u64 rank_between(u32 n, u32 front, u64 base, u64 span, u32 need, u32 count) {
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u64 e = entry(i, front);
      if (e - base < span) candidates[atomicAdd(&s.counted, 1U)] = e;
    }
    __syncthreads();
    return rank_candidates(need, count);
  }

  __device__ void add_keys(const u32 (&keys)[Items]) {
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      if (keys[i] != 0) atomicAdd(&hist[keys[i] >> (32 - digit)], 1U);
    }
  }

  // Lists the s.emitted entries over hist by score.
  __device__ void emit_by_score() {
    __syncthreads();
    Row<Paged>::template emit_by_score<Threads>(reinterpret_cast<u64*>(hist), s.emitted);
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
