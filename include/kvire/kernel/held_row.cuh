// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/held_scores.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// One row, held in the registers of all blocks of a cluster.
template <int Quads>
struct HeldRow : HeldScores<Quads> {
  using Base = HeldScores<Quads>;
  using Base::block_of, Base::blocks, Base::clear, Base::each_further, Base::emit, Base::emit_own, Base::find_cut, Base::held, Base::hold, Base::lane, Base::p, Base::page_of;
  using Base::load_candidates, Base::part, Base::place, Base::rank, Base::s, Base::scores, Base::select, Base::threads, Base::tid, Base::v, Base::visible, Base::warp, Base::warps;
  static constexpr int groups = Quads < 4 ? Quads : Quads / 8 * 4;  // of a thread: each has one best score
  static constexpr u32 done = ~0U;

  __device__ static u32 key_of_score(float x) { return is_nan(x) ? 0 : order_key(x); }

  // The largest key of the block, and a key that `share` or somewhat more of its scores reach: that of the best of as many groups, so that there are
  // fewer to count. 1 where there are not as many scores.
  __device__ u32 find_least(u32 share, u32& most) {
    u32 keys[groups];
    most = 0;
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      float best = float_of(nan_bits);
#pragma unroll
      for (int q = g * (Quads / groups); q < (g + 1) * (Quads / groups); ++q) best = larger(best, larger(larger(v[q].x, v[q].y), larger(v[q].z, v[q].w)));
      keys[g] = key_of_score(best);
      most = max(most, keys[g]);
    }
    most = __reduce_max_sync(~0U, most);
    if (lane == 0) s.most[warp] = most;
    __syncthreads();
    most = __reduce_max_sync(~0U, lane < warps ? s.most[lane] : 0);
    const u32 allowed = share + share / 4 + 32;
    if (share * 2 <= u32(groups) * threads) {
      constexpr int shift = 17;  // 8 binades below the largest
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        const u32 bin = (most - keys[g]) >> shift;
        if (bin < u32(key_bins) && keys[g] != 0) atomicAdd(&s.hist[bin], 1U);
      }
      __syncthreads();
      const FoundBin f = find_bin<threads>(s.hist, share, s.find, tid, BlockBarrier{});
      const u32 reach = (f.bin + 1) << shift;
      if (f.missing == 0 && f.above + f.count <= allowed) return reach > most ? 1 : most - reach + 1;
      clear(s.hist);
      __syncthreads();
    }
    // A narrow or a wide row, a short one, or one of few pages: by the scores themselves.
    return find_floor<threads>(s.hist, s.find, most, share, allowed, tid, BlockBarrier{}, [&](auto see) {
#pragma unroll 1
      for (int q = 0; q < Quads; ++q) {
        const float4 x = s.scores[q][tid];
        see(key_of_score(x.x));
        see(key_of_score(x.y));
        see(key_of_score(x.z));
        see(key_of_score(x.w));
      }
    }).key;
  }

  // Sends the scores that reach the key `reached`, but not `end` unless that is 0, to the list of the first block.
  __device__ void list_entries(u32 reached, u32 end, u32 listed_at) {
    const float least = float_of_key(reached);
    u32 mask = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const float x[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}" : "+r"(mask) : "f"(x[i]), "f"(least), "r"(1U << (q * 4 + i)));
      }
    }
    const float* mine = reinterpret_cast<const float*>(&s.scores[0][tid]);
    if (end != 0) {
      const float most = float_of_key(end);
#pragma unroll 1
      for (int i = 0; i < Quads * 4; ++i) {
        if (reaches(mine[i / 4 * threads * 4 + i % 4], most)) mask &= ~(1U << i);
      }
    }
    const u32 n = u32(__popc(mask)), all = __reduce_add_sync(~0U, n);
    if (all == 0) return;
    u32 front = lane == 0 ? ptx::add_shared(listed_at, all) : 0;
    const u32 before = scan_lanes(n, lane) - n;
    front = __shfl_sync(~0U, front, 0);
    u32 slot = front + before;
    const u32 list = ptx::peer_address(&s.list[rank * part()], 0), joined = ptx::peer_address(&s.joined, 0);
#pragma unroll 1
    while (mask != 0) {
      const int i = __ffs(int(mask)) - 1;
      mask &= mask - 1;
      const u64 e = entry_of(order_key(mine[i / 4 * threads * 4 + i % 4]), u32(place(i / 4) + i % 4));
      if (slot < part()) ptx::peer_store_async(list + slot * 8, e, joined);
      ++slot;
    }
  }

  // The row again, from memory: the cut digit by digit among the entries from `floor` on.
  __device__ void select_again(u32 floor, int length, int pages) {
    const auto each = [&](auto see) {
#pragma unroll 4
      for (int i = tid; i < length; i += threads) {
        const float x = scores()[i];
        if (is_nan(x) || order_key(x) < floor || (p.args.page_table != nullptr && u32(this->entry_of_page(page_of(i))) >= u32(pages))) continue;
        see(entry_of(order_key(x), u32(i)));
      }
    };
    u64 top = (u64(1) << (32 + position_bits)) - 1, cut = u64(floor) << position_bits;
    u32 need = u32(p.args.k);
    int shift = max(0, 64 - __clzll(static_cast<long long>(top - cut)) - key_digit);
#pragma unroll 1
    for (;;) {
      __syncthreads();
      clear(s.hist);
      __syncthreads();
      each([&](u64 e) {
        if (e <= top && (top - e) >> shift < u64(key_bins)) atomicAdd(&s.hist[u32((top - e) >> shift)], 1U);
      });
      __syncthreads();
      const FoundBin f = find_bin<threads>(s.hist, need, s.find, tid, BlockBarrier{});
      if (f.missing != 0) break;  // fewer than k in all
      need -= f.above;
      top -= u64(f.bin) << shift;
      if (f.count == need || shift == 0) {
        cut = max(cut, top - ((u64(1) << shift) - 1));
        break;
      }
      shift = max(0, shift - key_digit);
    }
    const auto each_selected = [&](auto see) {
      each([&](u64 e) {
        if (e >= cut) see(e, -1);
      });
    };
    each_selected([&](u64 e, int) { select(e); });
    emit(each_selected);
  }

  __device__ void run(const HeldParams& params) {
    const int first_length = visible();
    if (tid == 0) {
      s.listed = s.ranked = 0;
      ptx::mbarrier_init(ptx::shared_address(&s.joined), blocks);
      ptx::mbarrier_init(ptx::shared_address(&s.answer), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();  // the mbarriers are there; nothing else has to be before something is sent
    clear(s.hist);
    clear(s.last);
    clear(s.selected);
    const int length = load_candidates(first_length, params.pages);
#pragma unroll
    for (int q = 0; q < Quads; ++q) s.scores[q][tid] = v[q];
    u32 most;
    u32 least = find_least(u32(params.share), most), end = 0;
    const int shift = max(0, 32 - __clz(int(most - min(least, most))) - key_digit);
    const u32 k = u32(p.args.k);
    u32 sent = 0;
    // Not known to be the same in all lanes: no code is made for lanes that add together.
    const u32 listed_at = __shfl_sync(~0U, ptx::shared_address(&s.listed), lane);
#pragma unroll 1
    for (u32 round = 0;; ++round) {
      list_entries(least, end, listed_at);
      __syncthreads();
      const u32 there = min(s.listed, part());
      if (tid == 0) {
        const u32 joined = ptx::peer_address(&s.joined, 0);
        ptx::peer_store_async(ptx::peer_address(&s.found[rank], 0), s.listed, joined);
        ptx::peer_store_async(ptx::peer_address(&s.least[rank], 0), least, joined);
        ptx::peer_arrive_expect(joined, (there - sent) * 8 + 8);
      }
      sent = there;
      if (rank != 0) {
        if (round != 0) return;
        ptx::mbarrier_wait(ptx::shared_address(&s.answer), 0);
        if (s.further == done) return;
        end = least;
        least = min(least, s.further);
        continue;
      }
      // Tells the others, who wait for that after the first round alone, what to do next.
      const bool tells = round == 0 && warp == 0 && lane != 0 && u32(lane) < blocks;
      const u32 further_at = ptx::peer_address(&s.further, tells ? u32(lane) : 0), answer_at = ptx::peer_address(&s.answer, tells ? u32(lane) : 0);
      const auto answer = [&](u32 further) {
        if (!tells) return;
        ptx::peer_arrive_expect(answer_at, 4);
        ptx::peer_store_async(further_at, further, answer_at);
      };
      ptx::mbarrier_wait(ptx::shared_address(&s.joined), round & 1U);
      const u32 own = s.found[block_of()];
      const bool one = u32(lane) < blocks;
      const u32 found = one ? s.found[lane] : 0, bound = one ? s.least[lane] : 1;
      typename Base::Own mine;
      hold(mine, own, most, shift);
#pragma unroll
      for (int j = 0; j < held; ++j) {
        if (mine.bin[j] < u32(key_bins)) atomicAdd(&s.last[mine.bin[j]], 1U);
      }
      each_further(own, [&](u64 e) { atomicAdd(&s.last[Base::bin_of(key_of(e), most, shift)], 1U); });
      const u32 listed = __reduce_add_sync(~0U, found), unlisted = __reduce_max_sync(~0U, bound);
      if (__reduce_max_sync(~0U, found) > part()) {
        answer(done);
        // All that reach the least of these keys have been counted.
        select_again(listed >= k ? __reduce_min_sync(~0U, one ? bound : ~0U) : 1, length, params.pages);
        break;
      }
      __syncthreads();
      const auto cut = find_cut(mine, own, listed, most, shift);
      // Nothing that a block has not listed reaches its least key.
      if (unlisted <= 1 || (listed >= k && cut.key >= unlisted) || round != 0) {
        answer(done);
        emit_own(mine, own, most, shift, cut);
        break;
      }
      end = least;
      const u32 further = listed >= k ? cut.key : 1;
      answer(further);
      least = min(least, further);
      __syncthreads();
      clear(s.last);
      if (tid == 0) s.ranked = 0;
      __syncthreads();
    }
    if (p.counts != nullptr && p.args.page_table != nullptr) this->count_pages(length);
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
