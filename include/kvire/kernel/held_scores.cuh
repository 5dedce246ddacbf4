// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/cluster.cuh>
#include <kvire/kernel/top_k_block.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

struct HeldParams {
  Params base;
  int group_shift = 0;  // log2 of the lanes whose best score together is one guess
};

inline constexpr int held_threads = 512;
inline constexpr int held_warps = held_threads / 32;
inline constexpr int held_blocks = 8;       // of a row, at most: of a cluster that every device takes
inline constexpr int held_digit = 8;        // bits that a turn of the search tells apart
inline constexpr int held_bins = 1 << held_digit;
inline constexpr int held_members = 128;    // entries that are ranked by comparing each with each
inline constexpr int held_positions = 17;   // bits of a position

#if KVIRE_CUDA_COMPILER

/// What a block has in shared memory. Quads: of scores that each thread holds.
template <int Quads>
struct HeldMemory {
  static_assert(require_tuning<HeldMemory, (held_blocks * held_threads * Quads * 4 <= 1 << held_positions && held_bins <= held_threads)>());

  alignas(16) float4 scores[Quads][held_threads];  // those of a thread, for itself: where registers cannot be told by a number
  std::int32_t slots[Quads][held_threads];         // what is added to the positions of a quad where they are listed
  alignas(16) u32 counts[held_bins];
  alignas(16) unsigned short through[2][held_blocks][held_bins];  // of each block of the row: entries up to the end of a bin; for turns of the search in turn
  alignas(16) uint2 ranges[held_blocks * held_warps];             // of each warp of the row: its largest key, and a guess
  u64 members[held_members];                                      // entries of all blocks that are ranked, then 0
  u64 ranked[max_k];                                              // by score: what is selected, in the first block
  u64 cut;
  u32 selected[held_warps];  // of each warp
  u32 sent;
  alignas(8) u64 ranges_here, through_here[2], members_here, ranked_here;  // mbarriers
};

/// The scores of a row that a thread of the blocks of a cluster has in registers. Each warp of the cluster has an equal part of the row.
template <int Quads>
struct HeldScores : Row<true> {
  HeldMemory<Quads>& s;
  const int tid, lane, warp;
  const u32 rank, blocks;  // of the row

  const std::int32_t* length = anew(p.args.lengths + length_at());
  int part = 0;   // positions of a warp
  int first = 0;  // of the thread's first quad
  const float* from = nullptr;
  float4 v[Quads];

  __device__ const float* scores() const { return p.args.scores + std::int64_t(row) * p.args.stride; }
  // Where the warps' parts are, in a row of that length.
  __device__ void split(int bound) {
    const int shift = p.block_shift + 6;  // of four positions for each warp
    part = (bound + (1 << shift) - 1) >> shift << 2;
    first = (int(rank) * held_warps + warp) * part + lane * 4;
    from = anew(scores() + first);
  }
  // Position of a quad, and whether any of it is in the thread's part of a row of `bound` positions.
  __device__ int place(int q) const { return first + q * 128; }
  __device__ bool there(int q, int bound) const { return q * 128 + lane * 4 < part && place(q) < bound; }

  // The same pointer, of which the assembler does not know that: else it would compute it behind the wait.
  template <class T>
  __device__ const T* anew(const T* x) const {
    return reinterpret_cast<const T*>(__shfl_sync(~0U, reinterpret_cast<unsigned long long>(x), lane));
  }
  __device__ static float4 none() {
    const float x = float_of(nan_bits);
    return {x, x, x, x};
  }
  // Scores before `bound`, NaN beyond it, and the ids of their pages.
  __device__ void load(int bound, std::int32_t (&id)[Quads]) {
#pragma unroll
    for (int q = 0; q < Quads; ++q) v[q] = there(q, bound) && place(q) + 4 <= bound ? load_streaming4(from + q * 128) : none();
    if (p.args.page_table != nullptr) {
#pragma unroll
      for (int q = 0; q < Quads; ++q) id[q] = there(q, bound) ? entry_of_page(page_of(place(q))) : 0;
    }
    if (bound % 4 == 0) return;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int at = place(q);
      if (!there(q, bound) || at + 4 <= bound) continue;
      v[q].x = scores()[at];
      if (bound % 4 > 1) v[q].y = scores()[at + 1];
      if (bound % 4 > 2) v[q].z = scores()[at + 2];
    }
  }
  // What may be selected: NaN for all else; in shared memory too, with what makes slots of positions. Returns the length. Waits for earlier kernels; the
  // length that stood there before says how much is read, so that nothing waits for the one that holds, which it mostly is.
  __device__ int load_candidates(int bound) {
    std::int32_t id[Quads];
    bool met = false;
    split(bound);
    ptx::wait_for_earlier_grids();
#pragma unroll 1
    for (;;) {
      int now = p.most;
      if (p.args.lengths != nullptr) asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(length) : "memory");  // not what L1 has
      load(bound, id);
      if (!met) ptx::cluster_wait();  // while they are on their way
      met = true;
      now = visible_of(now);
      if (now == bound) break;
      split(bound = now);
    }
    if (p.counts != nullptr) count_nans(bound);
    if (p.args.page_table != nullptr) {
#pragma unroll
      for (int q = 0; q < Quads; ++q) {
        if (!good(id[q])) v[q] = none();
        s.slots[q][tid] = p.args.translate ? std::int32_t(u32(id[q] - page_of(place(q))) * u32(p.args.tokens_per_page)) : 0;
      }
    }
#pragma unroll
    for (int q = 0; q < Quads; ++q) s.scores[q][tid] = v[q];
    return bound;
  }
  __device__ void count_nans(int bound) const {
    u32 n = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int left = there(q, bound) ? bound - place(q) : 0;
      n += (left > 0 && is_nan(v[q].x) ? 1U : 0U) + (left > 1 && is_nan(v[q].y) ? 1U : 0U) + (left > 2 && is_nan(v[q].z) ? 1U : 0U) + (left > 3 && is_nan(v[q].w) ? 1U : 0U);
    }
    n = __reduce_add_sync(~0U, n);
    if (lane == 0 && n != 0) atomicAdd(p.counts, u64(n));
  }

  // Score i of the thread. Its entry: larger is better, unique within the row.
  __device__ float score_of(u32 i) const { return reinterpret_cast<const float*>(&s.scores[0][tid])[i / 4 * held_threads * 4 + i % 4]; }
  __device__ int position_at(u32 i) const { return place(int(i / 4)) + int(i % 4); }
  __device__ u64 entry_at(u32 i) const { return u64(order_key(score_of(i))) << held_positions | ((1U << held_positions) - 1 - u32(position_at(i))); }
  // Those of the thread's scores whose key is `key` or more, a bit each.
  __device__ u32 reaching(u32 key) const {
    const float least = float_of_key(key);
    u32 mask = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const float x[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}" : "+r"(mask) : "f"(x[i]), "f"(least), "r"(1U << (q * 4 + i)));
      }
    }
    return mask;
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
