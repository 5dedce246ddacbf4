// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/listed_row.cuh>
#include <kvire/kernel/ptx/cluster.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

template <class Source>
struct GroupedParams {
  Params base;
  Source source;
  bool early_lengths = false;  // ragged sources: lengths may be read before the wait for earlier kernels
};

#if KVIRE_CUDA_COMPILER

// 16 bytes to shared memory, of which the first `bytes` are read and the others are 0.
__device__ inline void copy_async(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx::shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// What a block of them has in shared memory: of Items groups a thread.
template <int Threads, int Items, class Source, bool Clustered>
struct GroupedMemory : ListMemory<Threads, Source::listed, Items * Threads * group_size> {
  using Base = ListMemory<Threads, Source::listed, Items * Threads * group_size>;
  static constexpr int batch = Clustered ? 32 : 48;  // groups of a warp under way
  static_assert(require_tuning<GroupedMemory, (Items * Threads <= 0xFFFF && Base::warps * batch * group_size * 4 >= 1024 * 8)>());

  alignas(16) float scores[Base::warps][batch * group_size];
  alignas(16) u32 best[Items * Threads + Items * Threads / 32];
  unsigned short hits[Base::warps][batch * group_size];  // which of the scores reach the floor
  u32 place[Base::warps][batch];
  unsigned short group[Base::warps][batch];
  u32 most[Base::warps];

  __device__ u64* by_score() { return reinterpret_cast<u64*>(&scores); }  // which nobody needs any more
};

/// One row. Threads of a block, groups of a thread if the row has one block. Clustered: the blocks of a cluster look at the best of all groups each, and so
/// agree on a floor; each reads the scores of a part of the groups, and the first one selects among what they send it.
template <int Threads, int Items, class Source, bool Paged, bool Clustered>
struct GroupedBlock : ListedRow<GroupedMemory<Threads, Items, Source, Clustered>, Paged> {
  using Memory = GroupedMemory<Threads, Items, Source, Clustered>;
  using Base = ListedRow<Memory, Paged>;
  using Base::blocks, Base::clear, Base::each_further, Base::emit, Base::emit_own, Base::find_cut, Base::held, Base::hold, Base::lane, Base::p, Base::part;
  using Base::rank, Base::row, Base::s, Base::select, Base::tid, Base::visible, Base::warp, Base::warps;
  static constexpr int batch = Memory::batch;
  static constexpr u32 slack = 128;  // groups beyond k that are rather read than told apart

  // Largest key of all. One barrier.
  __device__ u32 most_of(u32 mine) {
    mine = __reduce_max_sync(~0U, mine);
    if (lane == 0) s.most[warp] = mine;
    __syncthreads();
    return __reduce_max_sync(~0U, lane < warps ? s.most[lane] : 0);
  }

  // Brings the scores of the warp's first `n` chosen groups to shared memory, and notes which reach `least`; how many.
  template <class View>
  __device__ u32 find_hits(const View& view, u32 n, float least) {
    float* scores = s.scores[warp];
#pragma unroll 2
    for (u32 i = u32(lane); i < n * 4; i += 32) {
      const int there = view.filled(s.group[warp][i / 4]) - int(i % 4) * 4;
      copy_async(scores + i * 4, view.scores_of(s.place[warp][i / 4]) + i % 4 * 4, u32(min(max(there, 0), 4)) * 4);
    }
    copies_arrived();
    __syncwarp();
    // Only a row's last group may be filled in part.
    const u32 end = (n - 1) * group_size + u32(view.filled(s.group[warp][n - 1]));
    u32 hits = 0;
#pragma unroll 4
    for (u32 i = 0; i < n * group_size; i += 32) {
      const bool hit = i + u32(lane) < end && reaches(scores[i + u32(lane)], least);
      const u32 all = __ballot_sync(~0U, hit);
      if (hit) s.hits[warp][hits + u32(__popc(all & ((1U << lane) - 1)))] = static_cast<unsigned short>(i + u32(lane));
      hits += u32(__popc(all));
    }
    __syncwarp();
    return hits;
  }
  // Lists the entries of the warp's first `n` chosen groups that reach the floor, at the first block; how many go there. `found` grows by how many there are.
  // With one block, counts them by key.
  template <class View>
  __device__ u32 list_entries(const View& view, u32 n, u32 floor, u32 most, int shift, u32& found) {
    const u32 hits = find_hits(view, n, float_of_key(floor));
    u32 to = lane == 0 ? atomicAdd(&s.listed, hits) : 0;
    to = __shfl_sync(~0U, to, 0);
#pragma unroll 1
    for (u32 i = u32(lane); i < hits; i += 32) {
      const u32 hit = s.hits[warp][i];
      const u32 group = hit / group_size;
      const u32 key = order_key(s.scores[warp][hit]);
      const int position = view.position(int(s.group[warp][group]), s.place[warp][group], int(hit % group_size));
      if (to + i < part()) {
        const u64 e = entry_of(key, u32(position));
        if constexpr (Clustered) {
          ptx::peer_store_async(ptx::peer_address(&s.list[rank * part() + to + i], 0), e, ptx::peer_address(&s.joined, 0));
        } else {
          s.list[to + i] = e;
        }
      }
      if constexpr (!Clustered) atomicAdd(&s.last[Base::bin_of(key, most, shift)], 1U);
    }
    found += hits;
    __syncwarp();
    return to < part() ? min(hits, part() - to) : 0;
  }
  // The row again, from memory: the cut digit by digit among the entries from `floor` on.
  template <class View>
  __device__ void select_again(const View& view, u32 floor, u32 most) {
    const auto entry = [&](u32 i) {  // 0 for none
      const int group = int(i / group_size), at = int(i % group_size);
      const u32 place = view.place(group);
      if (at >= view.filled(group) || view.best_of(place) < floor) return u64(0);
      const float x = view.scores_of(place)[at];
      return is_nan(x) || order_key(x) < floor ? 0 : entry_of(order_key(x), u32(view.position(group, place, at)));
    };
    const u32 all_entries = u32(view.groups()) * group_size;
    const auto each = [&](auto see) {
#pragma unroll 4
      for (u32 i = u32(tid); i < all_entries; i += Threads) {
        const u64 e = entry(i);
        if (e != 0) see(e);
      }
    };
    u64 top = ((u64(most) + 1) << position_bits) - 1;
    u64 cut = u64(floor) << position_bits;
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
      const FoundBin f = find_bin<Threads>(s.hist, need, s.find, tid, BlockBarrier{});
      if (f.missing != 0) break;  // fewer than k in all
      const u64 reach = u64(f.bin + 1) << shift;
      if (f.count == need - f.above) {
        cut = max(cut, top - min(top, reach - 1));
        break;
      }
      need -= f.above;
      top -= u64(f.bin) << shift;
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

  __device__ void run(const GroupedParams<Source>& params) {
    using View = typename Source::View;
    if (tid == 0) {
      s.listed = s.ranked = 0;
      if constexpr (Clustered) {
        ptx::mbarrier_init(ptx::shared_address(&s.joined), blocks * u32(warps));
        ptx::fence_mbarrier_init();
      }
    }
    if constexpr (Clustered) ptx::cluster_arrive_relaxed();  // the mbarrier is there; nothing else has to be before something is sent
    clear(s.hist);
    clear(s.last);
    clear(s.selected);
    const bool early = !Source::ragged || params.early_lengths;
    if (!early) ptx::wait_for_earlier_grids();
    int length = Source::ragged ? visible() : 0;
    View view(params.source, p, row, length);
    if (early) ptx::wait_for_earlier_grids();
    u32 keys[Items];
    int groups;
    if constexpr (Source::ragged) {
      groups = view.groups();
#pragma unroll
      for (int i = 0; i < Items; ++i) keys[i] = i * Threads + tid < groups ? view.best_of(view.place(i * Threads + tid)) : 0;
    } else {
      // What lies beyond the length is read too, so that nothing waits for the length.
      const int all = (p.most + group_size - 1) / group_size;
#pragma unroll
      for (int i = 0; i < Items; ++i) keys[i] = i * Threads + tid < all ? view.best_of(u32(i * Threads + tid)) : 0;
      length = visible();
      view.length = length;
      groups = view.groups();
#pragma unroll
      for (int i = 0; i < Items; ++i) keys[i] = i * Threads + tid < groups ? keys[i] : 0;
    }
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const int group = i * Threads + tid;
      s.best[group + group / 32] = keys[i];
      most = max(most, keys[i]);
    }
    most = most_of(most);
    const u32 k = u32(p.args.k);
    const u32 floor = find_floor<Threads>(s.hist, s.find, most, k, k + slack, tid, BlockBarrier{}, [&](auto see) {
#pragma unroll
      for (int i = 0; i < Items; ++i) see(keys[i]);
    }).key;
    const int shift = min(17, max(0, 32 - __clz(int(most - min(floor, most))) - key_digit));  // 8 binades at most
    if constexpr (Clustered) ptx::cluster_wait();
    // Neighbouring groups go to different blocks, then to different warps: where the best are together, they still share the work.
    u32 n = 0, sent = 0, found = 0;
#pragma unroll 1
    for (int i = lane; (i - lane) * warps * int(blocks) < groups; i += 32) {
      const int group = (i * warps + warp) * int(blocks) + int(rank);
      const bool yes = group < groups && s.best[group + group / 32] >= floor;
      const u32 all = __ballot_sync(~0U, yes);
      if (yes) {
        const u32 to = n + u32(__popc(all & ((1U << lane) - 1)));
        s.place[warp][to] = view.place(group);
        s.group[warp][to] = static_cast<unsigned short>(group);
      }
      n += u32(__popc(all));
      if (n > u32(batch - 32)) {
        __syncwarp();
        sent += list_entries(view, n, floor, most, shift, found);
        n = 0;
      }
    }
    __syncwarp();
    if (n != 0) sent += list_entries(view, n, floor, most, shift, found);
    u32 listed, fullest, own;  // entries of the row, of the block that has most, of the one whose entries this thread looks after
    typename Base::Own mine;
    if constexpr (Clustered) {
      if (lane == 0) {
        const u32 joined = ptx::peer_address(&s.joined, 0);
        ptx::peer_store_async(ptx::peer_address(&s.found[rank * warps + u32(warp)], 0), found, joined);
        ptx::peer_arrive_expect(joined, sent * 8 + 4);
      }
      if (rank != 0) return;
      ptx::mbarrier_wait(ptx::shared_address(&s.joined), 0);
      // Four warps a lane, then those of a block together.
      u32 n4 = 0;
      if (u32(lane) * 4 < blocks * warps) {
        const uint4 v = reinterpret_cast<const uint4*>(s.found)[lane];
        n4 = (v.x + v.y) + (v.z + v.w);
      }
      listed = __reduce_add_sync(~0U, n4);
#pragma unroll
      for (int d = 1; d < warps / 4; d *= 2) n4 += __shfl_xor_sync(~0U, n4, d);
      fullest = __reduce_max_sync(~0U, n4);
      own = __shfl_sync(~0U, n4, this->block_of() * (warps / 4));
      hold(mine, own, most, shift);
#pragma unroll
      for (int j = 0; j < held; ++j) {
        if (mine.bin[j] < u32(key_bins)) atomicAdd(&s.last[mine.bin[j]], 1U);
      }
      each_further(own, [&](u64 e) { atomicAdd(&s.last[Base::bin_of(key_of(e), most, shift)], 1U); });
      __syncthreads();
    } else {
      __syncthreads();
      listed = fullest = own = s.listed;
      hold(mine, own, most, shift);
    }

    if (fullest > part()) {
      select_again(view, floor, most);
    } else {
      emit_own(mine, own, most, shift, find_cut(mine, own, listed, most, shift));
    }
    if (p.counts != nullptr) this->count_pages(length);
  }

};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END