// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/top_k_row.cuh>
#include <kvire/kernel/tuning.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

/// What the block of a short row has in shared memory.
template <int Threads, int Items>
struct ShortMemory {
  static constexpr int warps = Threads / 32;
  static constexpr int bins = Threads * Items / 4;
  static constexpr int by_counting = 32;  // scores of a bin that are ranked by comparing each with each
  static_assert(require_tuning<ShortMemory, (warps <= 32 && Items % 4 == 0 && Items <= 16 && bins % (4 * 32) == 0 && Threads * Items >= 4 * by_counting)>());

  alignas(16) u32 counts[bins + 4];          // behind the bins: what is in none
  alignas(16) u32 packed[Threads * Items];   // of each warp: the positions that it lists
  alignas(16) u64 members[by_counting];      // entries of the bin that holds the k-th
  FoundBin found;
  u64 cut;                                   // of the members: the last that is selected
  u32 sums[warps], most[warps], least[warps];
  u32 reached[warps], rejected[warps];       // of each warp: scores in the bins up to the k-th's; those of them behind the cut
  u32 joined, emitted;
};

#if KVIRE_CUDA_COMPILER

/// How the block of a short row, which has it in registers, finds the k-th best: bins and the search among them, and the cut among what shares the bin that is
/// found. More than a warp can rank are put into narrower bins, of keys, and those that are equal, of positions.
template <int Threads, int Items, bool Paged>
struct ShortCut : Row<Paged> {
  using Memory = ShortMemory<Threads, Items>;
  static constexpr int warps = Memory::warps, quads = Items / 4, bins = Memory::bins, by_counting = Memory::by_counting;
  static constexpr int part = quads * 128;  // positions of a warp, side by side

  Memory& s;
  const int tid, lane, warp;

  __device__ int place(int q) const { return warp * part + q * 128 + lane * 4; }
  __device__ static float none() { return float_of(nan_bits); }
  __device__ static float get(const float4 (&v)[quads], int i) { return i % 4 == 0 ? v[i / 4].x : i % 4 == 1 ? v[i / 4].y : i % 4 == 2 ? v[i / 4].z : v[i / 4].w; }
  // The same where registers cannot be told by a number.
  __device__ u64 entry_at(const float4 (&v)[quads], int i) const {
    float x = get(v, 0);
#pragma unroll
    for (int j = 1; j < Items; ++j) x = i == j ? get(v, j) : x;
    return entry_of(order_key(x), u32(place(i / 4) + i % 4));
  }
  // --- bins ---
  // A predicate would become a branch: what is in no bin is counted behind them.
  __device__ void count(u32 bin) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(ptx::shared_address(s.counts) + bin * 4) : "memory"); }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < bins / 4; i += Threads) {
      if (i + Threads <= bins / 4 || tid < bins / 4 - i) reinterpret_cast<uint4*>(s.counts)[i + tid] = uint4{0, 0, 0, 0};
    }
  }
  // The bin that holds the need-th of what is counted. Starts behind a barrier, ends with one.
  __device__ FoundBin find(u32 need) {
    constexpr int each = bins / Threads;
    u32 n[each];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      n[j] = s.counts[tid * each + j];
      sum += n[j];
    }
    const u32 mine = __reduce_add_sync(~0U, sum);
    if (lane == 0) s.sums[warp] = mine;
    __syncthreads();
    u32 above = __reduce_add_sync(~0U, lane < warp ? s.sums[lane] : 0);
    if (above < need && need <= above + mine) {
      above += scan_lanes(sum, lane) - sum;
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (above < need && need <= above + n[j]) s.found = {u32(tid * each + j), above, n[j], 0};
        above += n[j];
      }
    } else if (tid == Threads - 1 && above + mine < need) {
      s.found = {u32(bins), above + mine, ~0U, 1};
    }
    __syncthreads();
    return s.found;
  }

  // --- exact selection ---
  // What of this thread's scores is selected, or may be.
  struct Choice {
    u32 reach = 0;     // a bit for each: selected, or in question
    u32 question = 0;  // those in the bin that holds the k-th
    u32 need = 0;      // of all that are in question so many are selected
    u32 count = 0;     // they are so many
  };
  // Takes what is in question to bins that are narrower, until it can be ranked or is selected as a whole. need = count = 0: there are fewer than k in all.
  __device__ void narrow(const float4 (&v)[quads], Choice& c) {
#pragma unroll
    for (int i = 0; i < Items; ++i) s.packed[i * Threads + tid] = order_key(get(v, i));
    const auto each_in_question = [&](auto see) {
#pragma unroll 1
      for (u32 left = c.question; left != 0; left &= left - 1) see(__ffs(int(left)) - 1);
    };
#pragma unroll 1
    do {
      u32 most = 0, least = ~0U;
      each_in_question([&](int i) {
        most = max(most, s.packed[i * Threads + tid]);
        least = min(least, s.packed[i * Threads + tid]);
      });
      most = __reduce_max_sync(~0U, most);
      least = __reduce_min_sync(~0U, least);
      if (lane == 0) s.most[warp] = most, s.least[warp] = least;
      clear();
      __syncthreads();
      most = __reduce_max_sync(~0U, lane < warps ? s.most[lane] : 0);
      least = __reduce_min_sync(~0U, lane < warps ? s.least[lane] : ~0U);
      const bool tied = most <= least;
      const u32 span = tied ? u32(Threads * Items - 1) : most - least;
      int shift = 0;
      while (span >> shift >= u32(bins)) ++shift;
      const auto bin_of = [&](int i) { return (tied ? u32(place(i / 4) + i % 4) : most - s.packed[i * Threads + tid]) >> shift; };
      each_in_question([&](int i) { count(bin_of(i)); });
      __syncthreads();
      const FoundBin f = find(c.need);
      if (f.missing != 0) {
        c.need = c.count = 0;
        break;
      }
      each_in_question([&](int i) {
        const u32 bin = bin_of(i);
        if (bin > f.bin) c.reach &= ~(1U << i);
        if (bin != f.bin) c.question &= ~(1U << i);
      });
      c.need -= f.above;
      c.count = f.count;
    } while (c.count > u32(by_counting) && c.count != c.need);
    __syncthreads();  // of `packed` and what find() leaves nobody reads any more
  }
  // The cut among the members, and how many of each warp are behind it; for one warp.
  __device__ void rank(const Choice& c) {
    const u64 mine = s.members[lane];
    u32 better = 0;
#pragma unroll 1
    for (u32 j = 0; j < c.count; j += 4) {  // 0 from c.count on
#pragma unroll
      for (u32 i = j; i < j + 4; ++i) better += s.members[i] > mine ? 1U : 0U;
    }
    if (mine != 0 && better >= c.need) atomicAdd(&s.rejected[position_of(mine) / u32(part)], 1U);
    if (mine != 0 && better == c.need - 1) s.cut = mine;
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
