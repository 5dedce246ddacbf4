// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/row_groups.cuh>
#include <kvire/kernel/tuning.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int grouped_blocks = 8;  // of a row, at most: of a cluster that every device takes

#if KVIRE_CUDA_COMPILER

/// What a block does with the entries of a row that it has in a list, in no order: the exact selection among them, and its output in order. And what it has
/// in shared memory.
template <int Threads, int Items, class Source, bool Paged, bool Clustered>
struct ListedRow : Row<Paged> {
  using Row<Paged>::p, Row<Paged>::listed_as, Row<Paged>::out;
  static constexpr int warps = Threads / 32;
  static constexpr int capacity = Source::listed;    // entries that are ranked in shared memory
  static constexpr int most_k = 1024;
  static constexpr int batch = Clustered ? 32 : 48;  // groups of a warp under way
  static constexpr u32 by_counting = 32;             // entries that are ranked by comparing each with each
  static constexpr int quads = (Items + 7) / 8;      // of words of a thread: a bit for each position
  static constexpr int held = 2;                     // entries that a thread has in registers while it selects
  static_assert(require_tuning<ListedRow, (warps <= 32 && Items * Threads <= 0xFFFF && warps * batch * group_size * 4 >= most_k * 8 && warps % 4 == 0)>());

  struct Shared {
    u64 list[capacity];  // in equal parts, one a block of the row
    u64 members[by_counting];
    alignas(16) u32 hist[key_bins];
    u32 last[key_bins];
    alignas(16) float scores[warps][batch * group_size];
    alignas(16) u32 best[Items * Threads + Items * Threads / 32];
    alignas(16) u32 selected[quads * 4 * Threads];  // a bit for each position
    alignas(8) unsigned short before[quads * 4 * Threads];  // how many are selected in the words before
    unsigned short hits[warps][batch * group_size];  // which of the scores reach the floor
    u32 place[warps][batch];
    unsigned short group[warps][batch];
    u32 most[warps];
    u32 scan[warps];
    FindMemory find;
    alignas(16) u32 found[grouped_blocks * warps];  // entries of each warp of the row; beyond their block's part of the list they are only counted
    u32 listed, ranked;
    alignas(8) u64 joined;  // mbarrier: all warps of the row have sent their entries
  };

  Shared& s;
  const int tid, lane, warp;
  const u32 rank, blocks;  // of the row

  template <int N>
  __device__ void clear(u32 (&counts)[N]) {
    for (int i = tid; i < N / 4; i += Threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
  }

  // Entries that the list takes of each block of the row.
  __device__ u32 part() const { return u32(capacity) / blocks; }
  // The entries that the calling thread looks after, of the `own` of one block: some in registers (0: none), further ones in the list.
  __device__ u32 step() const { return u32(Threads) / blocks; }
  __device__ const u64* list_of() const { return s.list + u32(tid) / step() * part(); }
  __device__ void hold(u64 (&mine)[held], u32 own) const {
#pragma unroll
    for (int j = 0; j < held; ++j) {
      const u32 i = u32(tid) % step() + u32(j) * step();
      if (i < min(own, part())) mine[j] = list_of()[i];
    }
  }
  template <class See>
  __device__ void each_further(u32 own, See see) const {
#pragma unroll 1
    for (u32 i = u32(tid) % step() + u32(held) * step(); i < min(own, part()); i += step()) see(list_of()[i]);
  }

  // An entry is selected: until the cut is known of all, a bit says so.
  __device__ void select(u64 e) { atomicOr(&s.selected[position_of(e) / 32], 1U << (position_of(e) % 32)); }

  // Lists what is selected in order of position. `each(f)` calls f(entry) for every entry of the calling thread, of which those from `cut` on are selected.
  template <class Each>
  __device__ void emit(u64 cut, Each each) {
    const bool by_score = p.args.order == TopKOrder::by_score;
    u64* ranked = reinterpret_cast<u64*>(&s.scores);
    __syncthreads();
    uint4 bits[quads];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < quads; ++j) {
      bits[j] = reinterpret_cast<const uint4*>(s.selected)[tid * quads + j];
      sum += u32(__popc(bits[j].x) + __popc(bits[j].y) + (__popc(bits[j].z) + __popc(bits[j].w)));
    }
    u32 up = scan_lanes(sum, lane);
    if (lane == 31) s.scan[warp] = up;
    __syncthreads();
    const u32 x = lane < warps ? s.scan[lane] : 0;
    const u32 all = __reduce_add_sync(~0U, x);
    up += __reduce_add_sync(~0U, lane < warp ? x : 0) - sum;
#pragma unroll
    for (int j = 0; j < quads; ++j) {
      const u32 y = up + u32(__popc(bits[j].x)), z = y + u32(__popc(bits[j].y)), w = z + u32(__popc(bits[j].z));
      reinterpret_cast<uint2*>(s.before)[tid * quads + j] = uint2{up | y << 16, z | w << 16};
      up = w + u32(__popc(bits[j].w));
    }
    __syncthreads();
    each([&](u64 e) {
      if (e < cut) return;
      const u32 position = position_of(e);
      const u32 slot = s.before[position / 32] + u32(__popc(s.selected[position / 32] & ((1U << (position % 32)) - 1)));
      if (by_score) {
        ranked[slot] = e;
      } else {
        out()[slot] = listed_as(int(position));
      }
    });
    if (by_score) {
      Row<Paged>::template emit_by_score<Threads>(ranked, all);
    } else {
      for (int j = int(all) + tid; j < p.args.k; j += Threads) out()[j] = -1;
    }
  }

  // The need-th best of the entries in s.members. Each warp for itself.
  __device__ u64 rank_members(u32 need, u32 count) const {
    const u64 mine = u32(lane) < count ? s.members[lane] : 0;
    u32 better = 0;
#pragma unroll 4
    for (u32 j = 0; j < count; ++j) better += s.members[j] > mine ? 1U : 0U;
    const u32 winner = __ballot_sync(~0U, u32(lane) < count && better == need - 1);
    return __shfl_sync(~0U, mine, __ffs(int(winner)) - 1);
  }

  // Selects among the listed entries. The keys of all are counted in s.last, `shift` bits a bin from the best on, all further ones in the last bin.
  __device__ void select_listed(const u64 (&mine)[held], u32 own, u32 listed, u32 most, int shift) {
    const auto each = [&](auto see) {
#pragma unroll
      for (int j = 0; j < held; ++j) see(mine[j]);
      each_further(own, see);
    };
    const u32 k = u32(p.args.k);
    u64 top = 0, cut = 1;  // of the entries that are not told apart yet
    if (listed > k) {
      FoundBin f = find_bin<Threads>(s.last, k, s.find, tid, BlockBarrier{});
      const u32 key = most - (f.bin << shift);
      top = ((u64(key) + 1) << position_bits) - 1;
      if (f.bin + 1 < u32(key_bins)) cut = ((u64(key) + 1) << position_bits) - min(u64(key) << position_bits, u64(1) << (shift + position_bits));
      u32 wanted = k - f.above;
#pragma unroll 1
      while (f.count > by_counting && f.count != wanted) {
        const int digit = max(0, 64 - __clzll(static_cast<long long>(top - cut)) - key_digit);
        clear(s.hist);
        __syncthreads();
        each([&](u64 e) {
          if (e <= top && e >= cut) atomicAdd(&s.hist[u32((top - e) >> digit)], 1U);
        });
        __syncthreads();
        f = find_bin<Threads>(s.hist, wanted, s.find, tid, BlockBarrier{});
        top -= u64(f.bin) << digit;
        cut = max(cut, top - ((u64(1) << digit) - 1));
        wanted -= f.above;
      }
      if (f.count != wanted) {
        each([&](u64 e) {
          if (e <= top && e >= cut) s.members[atomicAdd(&s.ranked, 1U)] = e;
        });
        __syncthreads();
        cut = rank_members(wanted, f.count);
      }
    }
    each([&](u64 e) {
      if (e >= cut) select(e);
    });
    emit(cut, each);
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
