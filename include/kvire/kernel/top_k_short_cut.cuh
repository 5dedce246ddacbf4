// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/top_k_block.cuh>
#include <kvire/kernel/tuning.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

/// What the block of a short row has in shared memory.
template <int Threads, int Items>
struct ShortMemory {
  static constexpr int warps = Threads / 32;
  static constexpr int bin_bits = 11, bins = 1 << bin_bits;
  static constexpr int by_counting = 32;  // scores of a bin that are ranked by comparing each with each
  static_assert(require_tuning<ShortMemory, (warps <= 32 && Items % 4 == 0 && Items <= 16 && bins % Threads == 0 && Threads * Items >= 4 * by_counting)>());

  // Zero at the beginning, as far as `sums`.
  alignas(16) u32 counts[bins + 4];      // behind the bins: what is in none
  alignas(16) u64 members[by_counting];  // entries of the bin that holds the k-th
  u32 joined, emitted;
  alignas(16) u32 sums[warps];
  u32 reached[warps];  // of each warp: scores in the bins up to the k-th's
  u32 most[warps], least[warps];
  FoundBin found;
  u64 ranked[max_k];  // by score: what is selected
};

#if KVIRE_CUDA_COMPILER

/// How the block of a short row, which has it in registers, finds the k-th best: bins and the search among them. More than a warp can rank are put into
/// narrower bins, of keys, and those that are equal, of positions.
template <int Threads, int Items, bool Paged>
struct ShortCut : Row<Paged> {
  using Memory = ShortMemory<Threads, Items>;
  using Row<Paged>::p;
  static constexpr int warps = Memory::warps, quads = Items / 4, bins = Memory::bins, by_counting = Memory::by_counting;
  static constexpr int part = quads * 128;  // positions of a warp, side by side
  // Bins have numbers from here on, those that Scale computes: the bits of 2^23 and more.
  static constexpr u32 first_bin = 0x4B000000, no_bin = first_bin + bins;

  Memory& s;
  const int tid, lane, warp;

  __device__ int place(int q) const { return warp * part + q * 128 + lane * 4; }
  __device__ static float none() { return float_of(nan_bits); }
  __device__ static float get(const float4 (&v)[quads], int i) { return i % 4 == 0 ? v[i / 4].x : i % 4 == 1 ? v[i / 4].y : i % 4 == 2 ? v[i / 4].z : v[i / 4].w; }

  // No predicate, which would become a branch: what is in no bin is counted behind them.
  __device__ void count(u32 bin) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(ptx::shared_address(s.counts) - first_bin * 4 + bin * 4) : "memory"); }
  // The first `Bytes` of the memory, a multiple of 16.
  template <std::size_t Bytes>
  __device__ void clear() {
    constexpr int n = int(Bytes / 16);
#pragma unroll
    for (int i = 0; i < n; i += Threads) {
      if (i + Threads <= n || tid < n - i) reinterpret_cast<uint4*>(&s)[i + tid] = uint4{0, 0, 0, 0};
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
      above += scan_lanes(sum) - sum;
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (above < need && need <= above + n[j]) s.found = {first_bin + u32(tid * each + j), above, n[j], 0};
        above += n[j];
      }
    } else if (tid == Threads - 1 && above + mine < need) {
      s.found = {no_bin, above + mine, ~0U, 1};
    }
    __syncthreads();
    return s.found;
  }

  // Where the scores of a thread stand: what is in bins before `last` is selected, and of all that is in it `need` of `count`.
  struct Choice {
    u32 bin[Items];
    u32 last = no_bin, need = 0, count = 0;
  };
  // Looks for the bin of the k-th among those that have been counted. Where one warp cannot rank what is in it, that goes to narrower bins until it can, or
  // is selected as a whole; need = count = 0: there are fewer than k.
  __device__ void cut(const float4 (&v)[quads], Choice& c) {
    const FoundBin f = find(u32(p.args.k));
    c.last = f.bin;
    c.need = u32(p.args.k) - f.above;
    c.count = f.count;
    if (__builtin_expect(c.count <= u32(by_counting) || c.count == c.need, 1)) return;
    if (f.missing != 0) {  // NaN looks as if it were below all bins
#pragma unroll
      for (int i = 0; i < Items; ++i) c.bin[i] = is_nan(get(v, i)) ? ~0U : c.bin[i];
    }
#pragma unroll 1
    do narrow(v, c);
    while (c.count > u32(by_counting) && c.count != c.need);
  }
  // Takes what is in bin `last` to bins of keys or, where these are equal, of positions. What is before it gets 0, what is behind it all ones.
  __device__ void narrow(const float4 (&v)[quads], Choice& c) {
    float high = none(), low = none();
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const float x = c.bin[i] == c.last ? get(v, i) : none();
      high = larger(high, x);
      low = smaller(low, x);
    }
    u32 most = __reduce_max_sync(~0U, is_nan(high) ? 0 : order_key(high)), least = __reduce_min_sync(~0U, is_nan(low) ? ~0U : order_key(low));
    if (lane == 0) s.most[warp] = most, s.least[warp] = least;
    clear<sizeof(s.counts)>();
    __syncthreads();
    most = __reduce_max_sync(~0U, lane < warps ? s.most[lane] : 0);
    least = __reduce_min_sync(~0U, lane < warps ? s.least[lane] : ~0U);
    const bool tied = most <= least;
    const u32 span = tied ? u32(Threads * Items - 1) : most - least;
    const int shift = max(0, 32 - __clz(int(span)) - Memory::bin_bits);
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const u32 behind = tied ? u32(place(i / 4) + i % 4) : most - order_key(get(v, i));
      const bool in = c.bin[i] == c.last;
      const u32 to = first_bin + (behind >> shift);
      count(in ? to : no_bin);
      c.bin[i] = in ? to : c.bin[i] < c.last ? 0 : ~0U;
    }
    __syncthreads();
    const FoundBin f = find(c.need);
    c.last = f.bin;
    c.need = f.missing != 0 ? 0 : c.need - f.above;
    c.count = f.missing != 0 ? 0 : f.count;
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
