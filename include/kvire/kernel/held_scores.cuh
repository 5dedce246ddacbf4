// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/listed_row.cuh>
#include <kvire/kernel/ptx/cluster.cuh>
#include <kvire/kernel/top_k_block.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

struct HeldParams {
  Params base;
  int share = 0;  // scores that a block of the row lists at least
  int pages = 0;  // ids from here on are bad
};

#if KVIRE_CUDA_COMPILER

inline constexpr int held_threads = 512;

/// What a block has in shared memory. Quads: of scores that each thread holds.
template <int Quads>
struct HeldMemory : ListMemory<held_threads, 8192, Quads == 2 ? 1 << 15 : 1 << 17> {
  alignas(16) float4 scores[Quads][held_threads];  // those of a thread, for itself: where registers cannot be told by a number
  u64 ranked_entries[max_k];
  u32 most[held_threads / 32];
  u32 least[grouped_blocks];  // of each block of the row: the key that all that it has listed reach, 1 if that is all it has
  u32 further;                // what the first block says: list what reaches this key, too
  alignas(8) u64 answer;      // mbarrier: it has come

  __device__ u64* by_score() { return ranked_entries; }
};

/// The scores of a row that a thread of the blocks of a cluster has in registers.
template <int Quads>
struct HeldScores : ListedRow<HeldMemory<Quads>, true> {
  using Base = ListedRow<HeldMemory<Quads>, true>;
  using Base::lane, Base::p, Base::page_of, Base::rank, Base::row, Base::warp, Base::warps;

  // Runs of 16 positions go to the blocks in turn, so that neighbours, which are often selected together, are not one block's alone.
  const int first = (((warp * 8 + lane / 4) << p.block_shift) + int(rank)) * 16 + lane % 4 * 4;  // position of the first quad
  // Computed before the wait, where the assembler would not leave it.
  const float* from = anew(p.args.scores + std::int64_t(row) * p.args.stride + first);
  const std::int32_t* length = anew(p.args.lengths + this->length_at());
  float4 v[Quads];

  __device__ int step_of_quads() const { return warps * 128 << p.block_shift; }
  __device__ int place(int q) const { return first + q * step_of_quads(); }
  __device__ const float* scores() const { return p.args.scores + std::int64_t(row) * p.args.stride; }

  // The same pointer, of which the assembler does not know that.
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
    for (int q = 0; q < Quads; ++q) {
      const int at = place(q);
      v[q] = at + 4 <= bound ? load_streaming4(from + q * step_of_quads()) : none();
    }
    if (p.args.page_table != nullptr) {
#pragma unroll
      for (int q = 0; q < Quads; ++q) id[q] = place(q) < bound ? this->entry_of_page(page_of(place(q))) : 0;
    }
    if (bound % 4 == 0) return;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int at = place(q);
      if (at != (bound & ~3)) continue;
      v[q].x = scores()[at];
      if (bound % 4 > 1) v[q].y = scores()[at + 1];
      if (bound % 4 > 2) v[q].z = scores()[at + 2];
    }
  }
  // What may be selected: NaN for all else. Returns the length. Waits for earlier kernels; the length that stood there before says how much is read, so that
  // nothing waits for the one that holds, which it mostly is.
  __device__ int load_candidates(int bound, int pages) {
    std::int32_t id[Quads];
    bool met = false;
    ptx::wait_for_earlier_grids();
#pragma unroll 1
    for (;;) {
      int now = p.most;
      if (p.args.lengths != nullptr) asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(length) : "memory");  // not what L1 has
      load(bound, id);
      if (!met) ptx::cluster_wait();  // while they are on their way
      met = true;
      now = this->visible_of(now);
      if (now == bound) break;
      bound = now;
    }
    if (p.counts != nullptr) count_nans(bound);
    if (p.args.page_table != nullptr) {
#pragma unroll
      for (int q = 0; q < Quads; ++q) {
        if (u32(id[q]) >= u32(pages)) v[q] = none();
      }
    }
    return bound;
  }
  __device__ void count_nans(int length) const {
    u32 n = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int left = length - place(q);
      n += (left > 0 && is_nan(v[q].x) ? 1U : 0U) + (left > 1 && is_nan(v[q].y) ? 1U : 0U) + (left > 2 && is_nan(v[q].z) ? 1U : 0U) + (left > 3 && is_nan(v[q].w) ? 1U : 0U);
    }
    n = __reduce_add_sync(~0U, n);
    if (lane == 0 && n != 0) atomicAdd(p.counts, u64(n));
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
