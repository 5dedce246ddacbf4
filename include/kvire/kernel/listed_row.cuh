// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/row_groups.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/tuning.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int grouped_blocks = 8;  // of a row, at most: of a cluster that every device takes

#if KVIRE_CUDA_COMPILER

/// What a block that selects among listed entries has in shared memory. Positions: that a row may have.
template <int Threads, int Capacity, int Positions>
struct ListMemory {
  static constexpr int threads = Threads, warps = Threads / 32;
  static constexpr int capacity = Capacity;                             // entries that are ranked in shared memory
  static constexpr int by_counting = 32;                                // entries that are ranked by comparing each with each
  static constexpr int pairs = ceil_div(Positions, 64 * Threads);       // of words of a thread: a bit for each position
  static_assert(require_tuning<ListMemory, (warps <= 32 && warps % 4 == 0 && Positions <= 1 << 18)>());

  alignas(16) u64 list[capacity];  // in equal parts, one a block of the row
  u64 members[by_counting];
  alignas(16) u32 hist[key_bins];
  u32 last[key_bins];
  alignas(16) u32 selected[pairs * 2 * Threads];          // a bit for each position
  alignas(16) unsigned short before[pairs * 2 * Threads];  // how many are selected in the words before
  u32 scan[warps];
  FindMemory find;
  alignas(16) u32 found[grouped_blocks * warps];  // entries of each warp of the row; beyond their block's part of the list they are only counted
  u32 listed, ranked;
  alignas(8) u64 joined;  // mbarrier: all warps of the row have sent their entries
};

/// What a block does with the entries of a row that it has in a list, in no order: the exact selection among them, and its output in order. Memory: a
/// ListMemory, with a function by_score() for room for k entries.
template <class Memory, bool Paged>
struct ListedRow : Row<Paged> {
  using Row<Paged>::p, Row<Paged>::listed_as, Row<Paged>::out;
  static constexpr int threads = Memory::threads, warps = Memory::warps, pairs = Memory::pairs;
  static constexpr u32 capacity = Memory::capacity, by_counting = Memory::by_counting;
  static constexpr int held = 2;  // entries that a thread has in registers while it selects

  Memory& s;
  const int tid, lane, warp;
  const u32 rank, blocks;  // of the row

  template <int N>
  __device__ void clear(u32 (&counts)[N]) {
    for (int i = tid; i < N / 4; i += threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
  }

  // Entries that the list takes of each block of the row.
  __device__ u32 part() const { return capacity >> p.block_shift; }
  // The threads that look after the entries of one block, and of them the calling one's number. Each has some entries in registers, further ones in the list.
  __device__ u32 step() const { return u32(threads) >> p.block_shift; }
  __device__ u32 turn() const { return u32(tid) & (step() - 1); }
  __device__ u32 block_of() const { return u32(tid) / u32(threads >> 3) >> (3 - p.block_shift); }
  __device__ const u64* list_of() const { return s.list + block_of() * part(); }

  // Entries of a thread: their bins in s.last (none: key_bins), and what they are listed as, so that a slot's page is on its way early.
  struct Own {
    u64 e[held];
    u32 bin[held];
    std::int32_t as[held];
  };
  // Bins of 2^shift keys, from `most` down; in the first one is what is more, in the last one what is less.
  __device__ static u32 bin_of(u32 key, u32 most, int shift) { return min((most - min(most, key)) >> shift, u32(key_bins - 1)); }
  __device__ void hold(Own& mine, u32 own, u32 most, int shift) const {
#pragma unroll
    for (int j = 0; j < held; ++j) {
      const u32 i = turn() + u32(j) * step();
      mine.e[j] = i < min(own, part()) ? list_of()[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < held; ++j) {
      mine.bin[j] = mine.e[j] != 0 ? bin_of(key_of(mine.e[j]), most, shift) : u32(key_bins);
      mine.as[j] = mine.e[j] != 0 ? listed_as(int(position_of(mine.e[j]))) : 0;
    }
  }
  template <class See>
  __device__ void each_further(u32 own, See see) const {
#pragma unroll 1
    for (u32 i = turn() + u32(held) * step(); i < min(own, part()); i += step()) see(list_of()[i]);
  }

  // An entry is selected: until the cut is known of all, a bit says so.
  __device__ void select(u64 e) { atomicOr(&s.selected[position_of(e) / 32], 1U << (position_of(e) % 32)); }

  // Lists what is selected in order of position. `each(f)` calls f(entry, as) for every selected entry of the calling thread; `as`: what it is listed as, if
  // that is known, or -1.
  template <class Each>
  __device__ void emit(Each each) {
    const bool by_score = p.args.order == TopKOrder::by_score;
    u64* ranked = s.by_score();
    std::int32_t* const to = out();
    __syncthreads();
    uint2 bits[pairs];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
      bits[j] = reinterpret_cast<const uint2*>(s.selected)[tid * pairs + j];
      sum += u32(__popc(bits[j].x) + __popc(bits[j].y));
    }
    u32 up = scan_lanes(sum);
    if (lane == 31) s.scan[warp] = up;
    __syncthreads();
    const u32 x = lane < warps ? s.scan[lane] : 0;
    const u32 all = __reduce_add_sync(~0U, x);
    up += __reduce_add_sync(~0U, lane < warp ? x : 0) - sum;
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
      const u32 y = up + u32(__popc(bits[j].x));
      reinterpret_cast<u32*>(s.before)[tid * pairs + j] = up | y << 16;
      up = y + u32(__popc(bits[j].y));
    }
    __syncthreads();
    each([&](u64 e, std::int32_t as) {
      const u32 position = position_of(e);
      const u32 slot = s.before[position / 32] + u32(__popc(s.selected[position / 32] & ((1U << (position % 32)) - 1)));
      if (by_score) {
        ranked[slot] = e;
      } else {
        to[slot] = as >= 0 ? as : listed_as(int(position));
      }
    });
    if (by_score) {
      Row<Paged>::template emit_by_score<threads>(ranked, all);
    } else {
      for (int j = int(all) + tid; j < p.args.k; j += threads) to[j] = -1;
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

  // Where the selection ends: it has all of the bins before `bin`, of that bin the entries from `entry` on. `key`: no selected one's is less.
  struct Cut {
    u32 bin = key_bins;
    u64 entry = ~u64(0);
    u32 key = 1;
  };
  __device__ static bool selected(const Cut& cut, u64 e, u32 bin) { return bin < cut.bin || (bin == cut.bin && e >= cut.entry); }

  // The cut behind the k best of the listed entries; all of them if there are fewer. The keys of all are counted in s.last.
  __device__ Cut find_cut(const Own& mine, u32 own, u32 listed, u32 most, int shift) {
    Cut cut;
    const u32 k = u32(p.args.k);
    if (listed < k) return cut;
    const auto each_of_bin = [&](auto see) {
#pragma unroll
      for (int j = 0; j < held; ++j) {
        if (mine.bin[j] == cut.bin) see(mine.e[j]);
      }
      each_further(own, [&](u64 e) {
        if (bin_of(key_of(e), most, shift) == cut.bin) see(e);
      });
    };
    FoundBin f = find_bin<threads>(s.last, k, s.find, tid, BlockBarrier{});
    cut.bin = f.bin;
    cut.entry = 0;
    if (f.bin + 1 < u32(key_bins)) cut.key = max(1U, most - min(most, ((f.bin + 1) << shift) - 1));
    u32 wanted = k - f.above;
    if (f.count == wanted) return cut;
    if (f.count > by_counting) {  // digit after digit of what is in the bin
      const bool open = f.bin == 0 || f.bin + 1 == u32(key_bins);
      u64 top = open ? (u64(1) << (32 + position_bits)) - 1 : ((u64(most - (f.bin << shift)) + 1) << position_bits) - 1;
      int digit = (open ? 32 : shift) + position_bits - key_digit;
#pragma unroll 1
      do {
        clear(s.hist);
        __syncthreads();
        each_of_bin([&](u64 e) {
          if (e <= top && (top - e) >> digit < u64(key_bins)) atomicAdd(&s.hist[u32((top - e) >> digit)], 1U);
        });
        __syncthreads();
        f = find_bin<threads>(s.hist, wanted, s.find, tid, BlockBarrier{});
        wanted -= f.above;
        top -= u64(f.bin) << digit;
        cut.entry = top - ((u64(1) << digit) - 1);
        digit = max(0, digit - key_digit);
      } while (f.count > by_counting && f.count != wanted);
      cut.key = max(1U, key_of(cut.entry));
      if (f.count == wanted) return cut;
      each_of_bin([&](u64 e) {
        if (e <= top && e >= cut.entry) s.members[add_member()] = e;
      });
    } else {
      each_of_bin([&](u64 e) { s.members[add_member()] = e; });
    }
    __syncthreads();
    cut.entry = rank_members(wanted, f.count);
    cut.key = key_of(cut.entry);
    return cut;
  }
  __device__ u32 add_member() { return ptx::add_shared(ptx::shared_address(&s.ranked), 1); }

  // Lists those before the cut.
  __device__ void emit_own(const Own& mine, u32 own, u32 most, int shift, const Cut& cut) {
    const auto each = [&](auto see) {
#pragma unroll
      for (int j = 0; j < held; ++j) {
        if (selected(cut, mine.e[j], mine.bin[j])) see(mine.e[j], mine.as[j]);
      }
      each_further(own, [&](u64 e) {
        if (selected(cut, e, bin_of(key_of(e), most, shift))) see(e, -1);
      });
    };
    each([&](u64 e, std::int32_t) { select(e); });
    emit(each);
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
