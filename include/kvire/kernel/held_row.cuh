// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/held_scores.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// Calls f(i) for every bit i of `bits`.
template <class F>
__device__ inline void each_bit(u32 bits, F f) {
#pragma unroll 1
  while (bits != 0) {
    f(u32(__ffs(int(bits)) - 1));
    bits &= bits - 1;
  }
}

/// One row, held in the registers of all blocks of a cluster. All of them search together and come to the same end; each lists what it has.
template <int Quads>
struct HeldRow : HeldScores<Quads> {
  using Base = HeldScores<Quads>;
  using Base::blocks, Base::entry_at, Base::lane, Base::load_candidates, Base::out, Base::p, Base::part, Base::position_at, Base::rank;
  using Base::reaching, Base::s, Base::score_of, Base::tid, Base::v, Base::visible, Base::warp;

  static constexpr bool direct = Quads <= 2;  // few scores are looked at all, of many those that may be selected

  u32 need = u32(p.args.k);  // that are still to be found
  u32 before = 0;            // selected ones of the blocks before this one
  u32 chosen = 0;            // bits: of the thread's scores, those that are selected
  u32 open = 0;              // those that may be

  __device__ void clear() {
    if (tid < held_bins / 4) reinterpret_cast<uint4*>(s.counts)[tid] = uint4{0, 0, 0, 0};
  }

  // Sends every block the largest key of this warp, and one that about as many of its scores reach as are its share of what is selected, and some more: the
  // least among the best of groups of lanes.
  __device__ void send_range(int group_shift) {
    float best = float_of(nan_bits);
#pragma unroll
    for (int q = 0; q < Quads; ++q) best = larger(best, larger(larger(v[q].x, v[q].y), larger(v[q].z, v[q].w)));
    u32 key = is_nan(best) ? 0 : order_key(best), of_group = key;
#pragma unroll 1
    for (int d = 1; d < 1 << group_shift; d *= 2) of_group = max(of_group, __shfl_xor_sync(~0U, of_group, d));
    key = __reduce_max_sync(~0U, key);
    of_group = part < 128 || key == 0 ? 0 : __reduce_min_sync(~0U, of_group != 0 ? of_group : ~0U);
    if (u32(lane) < blocks) {
      const u32 to = ptx::peer_address(&s.ranges[rank * held_warps + u32(warp)], u32(lane));
      ptx::peer_store_async(to, u64(key) | u64(of_group) << 32, ptx::peer_address(&s.ranges_here, u32(lane)));
    }
  }
  // The largest key of the row, and the mean of the warps' guesses; 0 where there is none.
  __device__ uint2 find_range() const {
    ptx::mbarrier_wait(ptx::shared_address(&s.ranges_here), 0);
    u32 most = 0, sum = 0, n = 0;
    const int shift = p.block_shift + 4;  // of the row's warps
#pragma unroll
    for (int i = 0; i < held_blocks * held_warps / 32; ++i) {
      if (i << 5 >= 1 << shift) break;
      const uint2 x = s.ranges[i * 32 + lane];
      most = max(most, x.x);
      sum += x.y >> shift;
      n += x.x != 0 ? 1U : 0U;
    }
    most = __reduce_max_sync(~0U, most);
    sum = __reduce_add_sync(~0U, sum);
    n = __reduce_add_sync(~0U, n);
    if (n != 1U << shift && n != 0) sum = min(most, u32(__fdividef(float(sum) * float(1 << shift), float(n))));  // of the warps that have any
    return {most, sum};
  }

  // Sends peer number `warp` how many of this block's open entries are counted up to each bin; no more than 4,095, which is more than k.
  __device__ void send_through(int turn) {
    constexpr int each = held_bins / 32;
    static_assert(require_tuning<HeldRow, (each == 8 && max_k < 4095 && held_blocks * 4095 < 1 << 16 && held_blocks <= held_warps)>());
    const uint4 x = reinterpret_cast<const uint4*>(s.counts)[lane * 2], y = reinterpret_cast<const uint4*>(s.counts)[lane * 2 + 1];
    u32 n[each] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 1; j < each; ++j) n[j] += n[j - 1];
    const u32 up = scan_lanes(n[each - 1]) - n[each - 1];
#pragma unroll
    for (int j = 0; j < each; ++j) n[j] = min(n[j] + up, 4095U);
    ptx::peer_store_async(ptx::peer_address(&s.through[turn][rank][lane * each], u32(warp)), ptx::Words4{n[0] | n[1] << 16, n[2] | n[3] << 16, n[4] | n[5] << 16, n[6] | n[7] << 16},
                          ptx::peer_address(&s.through_here[turn], u32(warp)));
  }

  // Counts the keys of the thread from `least` on, in bins of 2^shift from `most` down.
  __device__ void count_keys(u32 least, u32 most, int shift) {
    const float from = float_of_key(least);
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const float x[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (reaches(x[i], from)) atomicAdd(&s.counts[(most - order_key(x[i])) >> shift], 1U);
      }
    }
  }

  // The need-th best of the `count` entries that are open in all blocks. `mine`: how many of them the blocks before this one have; `before` becomes final.
  __device__ u64 find_member(u32 count, u32 mine) {
    const u32 here = ptx::shared_address(&s.members_here);
    if (tid == 0) ptx::mbarrier_arrive_expect(here, count * 8);
    // Not known to be the same in all lanes: no code is made for lanes that add together.
    const u32 sent_at = __shfl_sync(~0U, ptx::shared_address(&s.sent), lane);
    each_bit(open, [&](u32 i) {
      const u64 e = entry_at(i);
      const u32 slot = mine + ptx::add_shared(sent_at, 1);
      const auto send = [&](u32 b) { ptx::peer_store_async(ptx::peer_address(&s.members[slot], b), e, ptx::peer_address(&s.members_here, b)); };
      send(0), send(1);
      if (blocks > 2) send(2), send(3);
      if (blocks > 4) send(4), send(5), send(6), send(7);
    });
    ptx::mbarrier_wait(here, 0);
    u64 of_lane[held_members / 32];
#pragma unroll
    for (int j = 0; j < held_members / 32; ++j) of_lane[j] = s.members[lane + 32 * j];
#pragma unroll 1
    for (u32 m = u32(warp); m < count; m += held_warps) {
      const u64 e = s.members[m];
      u32 better = 0;
#pragma unroll
      for (int j = 0; j < held_members / 32; ++j) {
        if (u32(32 * j) < count) better += u32(__popc(__ballot_sync(~0U, of_lane[j] > e)));
      }
      if (better == need - 1 && lane == 0) s.cut = e;
    }
    __syncthreads();
    const u64 cut = s.cut;
#pragma unroll
    for (int j = 0; j < held_members / 32; ++j) {
      if (u32(32 * j) < mine) before += u32(__popc(__ballot_sync(~0U, u32(lane + 32 * j) < mine && of_lane[j] >= cut)));
    }
    return cut;
  }

  // Finds what is selected: `chosen`, `before`, and in `need` how many there are too few. Each turn counts the open entries of all blocks in bins of 2^shift,
  // from `top` down, and leaves those of the bin that has the k-th open.
  __device__ void search(uint2 range, int length) {
    constexpr u32 reach = 8U << 23;  // binades
    const u32 most = max(range.x, 1U);
    u32 least = 1;  // key: what is less is not open yet
    if (length > p.args.k) least = max(max(range.y, 1U), most > reach ? most - reach : 0U);
    u64 top = ((u64(most) + 1) << held_positions) - 1;
    int shift = max(0, 32 - __clz(int(most - least)) - held_digit) + held_positions;
    open = reaching(least);
#pragma unroll 1
    for (u32 round = 0;; ++round) {
      const int turn = int(round & 1U);
      if (direct && round == 0) {
        count_keys(least, most, shift - held_positions);
      } else {
        each_bit(open, [&](u32 i) { atomicAdd(&s.counts[u32((top - entry_at(i)) >> shift)], 1U); });
      }
      __syncthreads();
      if (u32(warp) < blocks) send_through(turn);
      const u32 here = ptx::shared_address(&s.through_here[turn]);
      ptx::mbarrier_wait(here, round >> 1 & 1U);
      if (tid == 0) ptx::mbarrier_arrive_expect(here, blocks * held_bins * 2);
      u32 sum = 0;
      const bool counts = tid < held_bins, one = u32(lane) < blocks;
#pragma unroll
      for (u32 b = 0; b < u32(held_blocks); ++b) {
        if (b < blocks && counts) sum += s.through[turn][b][tid];
      }
      const u32 bin = u32(__syncthreads_count(counts && sum < need)), last = min(bin, u32(held_bins) - 1);
      const bool missing = bin == u32(held_bins);  // fewer are open than are needed: all of them are selected
      // Entries before the bin, and, in the upper half, with it: of all blocks, and of those before this one.
      const u32 end = one ? s.through[turn][lane][last] : 0, begin = missing ? end : one && last > 0 ? s.through[turn][lane][last - 1] : 0;
      const u32 both = begin | end << 16;
      const u32 all = __reduce_add_sync(~0U, both), mine = __reduce_add_sync(~0U, u32(lane) < rank ? both : 0);
      need -= all & 0xFFFFU;
      before += mine & 0xFFFFU;
      if (missing) {
        chosen |= open;
        if (least == 1) return;
        open = reaching(1) & ~chosen;
        top = (u64(least) << held_positions) - 1;
        least = 1;
        shift = max(0, 64 - __clzll(static_cast<long long>(top)) - held_digit);
      } else {
        const u32 count = (all >> 16) - (all & 0xFFFFU), count_before = (mine >> 16) - (mine & 0xFFFFU);
        top -= u64(bin) << shift;
        const u64 bottom = top - min(top, (u64(1) << shift) - 1);
        if (direct && round == 0) {  // bins are of whole keys
          const u32 above = reaching(u32(top >> held_positions) + 1);
          chosen |= above;
          open &= reaching(u32(bottom >> held_positions)) & ~above;
        } else {
          u32 still = 0;
          each_bit(open, [&](u32 i) {
            const u64 e = entry_at(i);
            if (e > top) chosen |= 1U << i;
            if (e <= top && e >= bottom) still |= 1U << i;
          });
          open = still;
        }
        if (count == need || count <= u32(held_members)) {
          u64 cut = bottom;
          if (count == need) {
            before += count_before;
          } else {
            cut = find_member(count, count_before);
          }
          each_bit(open, [&](u32 i) {
            if (entry_at(i) >= cut) chosen |= 1U << i;
          });
          need = 0;
          return;
        }
        shift = max(0, shift - held_digit);
      }
      clear();
      __syncthreads();
    }
  }

  // Lists what is selected, in order of position behind what the warps before have; or by score, by way of the first block.
  __device__ void emit() {
    // Of each quad a byte: chosen scores of the lanes before, and of all lanes.
    constexpr int words = Quads > 4 ? 2 : 1;
    u64 lanes_before = 0, all_lanes = 0;
    const u32 of_warp = __reduce_add_sync(~0U, u32(__popc(chosen)));
    if (lane == 0) s.selected[warp] = of_warp;
#pragma unroll
    for (int j = 0; j < words; ++j) {
      u32 own = 0;
#pragma unroll
      for (int q = j * 4; q < Quads && q < j * 4 + 4; ++q) own += u32(__popc(chosen >> (q * 4) & 15U)) << (q % 4 * 8);
      const u32 up = scan_lanes(own);
      lanes_before |= u64(up - own) << (j * 32);
      all_lanes |= u64(__shfl_sync(~0U, up, 31)) << (j * 32);
    }
    __syncthreads();
    const u32 before_warp = before + __reduce_add_sync(~0U, lane < warp ? s.selected[lane] : 0);
    const bool by_score = p.args.order == TopKOrder::by_score;
    const u32 found = u32(p.args.k) - need;
    const u32 ranked_here = ptx::shared_address(&s.ranked_here);
    if (by_score && rank == 0 && tid == 0) ptx::mbarrier_arrive_expect(ranked_here, found * 8);
    each_bit(chosen, [&](u32 i) {
      const u32 q = i / 4;
      const u64 quads_before = all_lanes & ((u64(1) << (q * 8)) - 1);
      u32 to = before_warp + (u32(lanes_before >> (q * 8)) & 0xFFU) + u32(__popc(chosen >> (q * 4) & ((1U << (i % 4)) - 1)));
      to = __dp4a(u32(quads_before), 0x01010101U, to);  // plus its bytes
      if constexpr (words > 1) to = __dp4a(u32(quads_before >> 32), 0x01010101U, to);
      if (by_score) {
        ptx::peer_store_async(ptx::peer_address(&s.ranked[to], 0), entry_of(order_key(score_of(i)), u32(position_at(i))), ptx::peer_address(&s.ranked_here, 0));
      } else {
        out()[to] = position_at(i) + (p.args.page_table != nullptr ? s.slots[q][tid] : 0);
      }
    });
    if (rank != 0) return;
    if (by_score) {
      ptx::mbarrier_wait(ranked_here, 0);
      Row<true>::template emit_by_score<held_threads>(s.ranked, found);
    } else {
      for (int j = int(found) + tid; j < p.args.k; j += held_threads) out()[j] = -1;
    }
  }

  __device__ void run(const HeldParams& params) {
    const int first_length = visible();
    if (tid == 0) {
      s.sent = 0;
      const auto init = [](u64& barrier) { ptx::mbarrier_init(ptx::shared_address(&barrier), 1); };
      init(s.ranges_here);
      init(s.through_here[0]);
      init(s.through_here[1]);
      init(s.members_here);
      init(s.ranked_here);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect(ptx::shared_address(&s.ranges_here), blocks * held_warps * 8);
      for (u64& barrier : s.through_here) ptx::mbarrier_arrive_expect(ptx::shared_address(&barrier), blocks * held_bins * 2);
    }
    ptx::cluster_arrive_relaxed();  // the mbarriers are there; nothing else has to be before something is sent
    clear();
    if (tid < held_members) s.members[tid] = 0;
    const int length = load_candidates(first_length);
    send_range(params.group_shift);
    __syncthreads();  // counts are clear
    search(find_range(), length);
    emit();
    if (rank == 0 && p.counts != nullptr && p.args.page_table != nullptr) this->count_pages(length);
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
