// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/candidate_slots.cuh>
#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/top_k_row.cuh>
#include <kvire/kernel/tuning.hpp>

/// Top-k of rows whose best score of each 16 is known already: what the logits kernel leaves on its way. The same selection as body::top_k, bit for
/// bit.
///
/// Order groups by (best score down, position up) and take k of them: no entry of another group can be selected, for each of the k holds an entry
/// that comes before it. So a floor that k groups or more reach is a floor of the k-th score, and only those groups' scores are read: 16 k
/// of them at most beside ties, whatever the distribution, and mostly little more than k that reach the floor themselves. Among those the cut is
/// found exactly.
///
/// What counts here is the number of steps that wait for each other. Groups are dealt to warps in runs, so that the entries of a warp are in order of
/// position by themselves; histograms are small; code is short, for what runs once pays for its way from memory. Where a row does not fit (many equal scores) its
/// entries are read again, digit after digit.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int group_size = 16;

/// Where the groups of a row are: in rows of scores as the caller sees them. `best`: order_key of the best of 16 neighbours that may be selected, 0 where
/// there is none.
struct RowGroups {
  const float* scores = nullptr;  // [rows][stride]
  const u32* best = nullptr;      // [rows][group_stride]
  std::int64_t stride = 0;
  std::int64_t group_stride = 0;  // ceil(stride / 16)

  static constexpr int listed = 4096;

#if KVIRE_CUDA_COMPILER
  // A row's groups, in order of position. `place`: where a group is, in groups from the first.
  struct View {
    const float* scores;
    const u32* best;
    int length;

    __device__ View(const RowGroups& g, const Params&, u32 row, int l)
        : scores(g.scores + std::int64_t(row) * g.stride), best(g.best + std::int64_t(row) * g.group_stride), length(l) {}
    __device__ int groups() const { return (length + group_size - 1) / group_size; }
    __device__ u32 place(int group) const { return u32(group); }
    __device__ u32 best_of(u32 place) const { return best[place]; }
    // The scores of a group, 16-byte aligned, and how many of them there are; NaN among them may not be selected.
    __device__ const float* scores_of(u32 place) const { return scores + place * group_size; }
    __device__ int filled(int group) const { return min(length - group * group_size, group_size); }
    __device__ int position(int group, u32, int i) const { return group * group_size + i; }
  };
#endif
};

/// In the slots that the logits kernel has left (candidate_slots.cuh).
struct SlotGroups {
  sm90::CandidateSlots slots;
  int ctas = 0;  // of that kernel

  static constexpr int listed = 8192;  // parts that a few CTAs have pruned are fewer groups than k: all of them are read

#if KVIRE_CUDA_COMPILER
  struct View {
    sm90::CandidateSlots slots;
    int next_n, batch_row, query;
    int each, more;         // tiles of a CTA; CTAs that have one more
    int first_tile, tiles;  // of the row, among those of all rows
    int length;
    bool whole;

    __device__ View(const SlotGroups& g, const Params& p, u32 row, int l) : slots(g.slots), next_n(p.args.next_n), length(l) {
      const int lane = int(threadIdx.x & 31U);
      batch_row = next_n == 1 ? int(row) : int(row / u32(next_n));
      query = int(row) - batch_row * next_n;
      int before = 0, own = 0, all = 0;
      for (int b = lane; b < p.args.batch; b += 32) {
        int tokens = 0;
        if (p.args.lengths == nullptr) {
          tokens = p.most;
        } else if (!p.args.lengths_per_query) {
          tokens = p.args.lengths[b];
        } else {
          for (int q = 0; q < next_n; ++q) tokens = max(tokens, p.args.lengths[b * next_n + q]);
        }
        const int n = (min(max(tokens, 0), p.most) + 63) / 64;
        all += n;
        before += b < batch_row ? n : 0;
        own += b == batch_row ? n : 0;
      }
      first_tile = __reduce_add_sync(~0U, before);
      tiles = __reduce_add_sync(~0U, own);
      all = __reduce_add_sync(~0U, all);
      each = all / g.ctas;
      more = all - each * g.ctas;
      whole = slots.whole(each);
    }
    __device__ int cta_of(int tile) const { return tile < more * (each + 1) ? tile / (each + 1) : more + (tile - more * (each + 1)) / max(each, 1); }
    __device__ int begin_of(int cta) const { return each * cta + min(cta, more); }
    __device__ int slot_groups() const { return slots.capacity / group_size; }
    __device__ u32 slot_place(int cta) const { return u32((cta + batch_row) * next_n + query) * u32(slot_groups()); }
    __device__ int groups() const {
      if (tiles == 0) return 0;
      return whole ? (length + group_size - 1) / group_size : (cta_of(first_tile + tiles - 1) - cta_of(first_tile) + 1) * slot_groups();
    }
    __device__ u32 place(int group) const {
      if (whole) {
        const int tile = first_tile + group / 4;
        const int cta = cta_of(tile);
        return slot_place(cta) + u32((tile - max(begin_of(cta), first_tile)) * 4 + group % 4);
      }
      const int part = group / slot_groups();
      return slot_place(cta_of(first_tile) + part) + u32(group - part * slot_groups());
    }
    __device__ u32 best_of(u32 place) const { return slots.best[place]; }
    __device__ const float* scores_of(u32 place) const { return slots.scores + std::int64_t(place) * group_size; }
    __device__ int filled(int) const { return group_size; }
    __device__ int position(int group, u32 place, int i) const { return whole ? group * group_size + i : slots.positions[std::int64_t(place) * group_size + i]; }
  };
#endif
};

template <class Source>
struct GroupedParams {
  Params base;
  Source source;
  bool early_lengths = false;  // lengths and page table may be read before the wait for earlier kernels
};

#if KVIRE_CUDA_COMPILER

// 16 bytes to shared memory, of which the first `bytes` are read and the others are 0.
__device__ inline void copy_async(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx::shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// One row. Threads of a block, groups of a thread.
template <int Threads, int Items, class Source, bool Paged>
struct GroupedBlock : Row<Paged> {
  using Row<Paged>::p, Row<Paged>::row, Row<Paged>::listed_as, Row<Paged>::out;
  static constexpr int warps = Threads / 32;
  static constexpr int capacity = Source::listed;  // entries that are ranked in shared memory
  static constexpr int most_k = 1024;
  static constexpr int batch = 96 * 8 / warps;      // groups of a warp under way
  static constexpr u32 slack = 128;                // groups beyond k that are rather read than told apart
  static constexpr u32 by_counting = 32;
  static_assert(require_tuning<GroupedBlock, (warps <= 32 && Items * Threads <= 0xFFFF)>());

  struct Shared {
    u64 list[capacity];
    u64 ranked[most_k];
    u64 members[by_counting];
    u32 hist[key_words];
    u32 last[key_words];
    float scores[warps][batch * group_size];
    unsigned short hits[warps][batch * group_size];  // which of these reach the floor
    u32 place[warps][32 * Items];
    unsigned short group[warps][32 * Items];
    unsigned char owner[by_counting];
    u32 most[warps];
    u32 sure[warps];
    u32 scan[warps];
    FoundBin told;
    u32 listed, counted;
  };

  Shared& s;
  const int tid, lane, warp;

  __device__ void clear(u32* counts) {
    for (int i = tid; i < key_words / 4; i += Threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
  }

  // Largest key of all. One barrier.
  __device__ u32 most_of(u32 mine) {
    mine = __reduce_max_sync(~0U, mine);
    if (lane == 0) s.most[warp] = mine;
    __syncthreads();
    return __reduce_max_sync(~0U, lane < warps ? s.most[lane] : 0);
  }

  // Brings the scores of `n` chosen groups from `first` on to shared memory, and notes which reach `least`, in order of position; how many.
  template <class View>
  __device__ u32 find_hits(const View& view, u32 first, u32 n, float least) {
    float* scores = s.scores[warp];
#pragma unroll 4
    for (u32 i = u32(lane); i < n * 4; i += 32) {
      const int there = view.filled(s.group[warp][first + i / 4]) - int(i % 4) * 4;
      copy_async(scores + i * 4, view.scores_of(s.place[warp][first + i / 4]) + i % 4 * 4, u32(min(max(there, 0), 4)) * 4);
    }
    copies_arrived();
    __syncwarp();
    // Only a row's last group may be filled in part.
    const u32 end = (n - 1) * group_size + u32(view.filled(s.group[warp][first + n - 1]));
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
  __device__ u32 reserve(u32 n) {
    u32 begin = 0;
    if (lane == 0 && n != 0) begin = atomicAdd(&s.listed, n);
    return __shfl_sync(~0U, begin, 0);
  }
  // Lists a warp's entries that reach the floor in order of position, and counts them by key. Where they begin; `n`: how many.
  template <class View>
  __device__ u32 list_entries(const View& view, u32 groups, u32 floor, u32 most, int shift, u32& n) {
    const float least = float_of_key(floor);
    const bool once = groups <= u32(batch);
    u32 begin = 0;
    n = 0;
#pragma unroll 1
    for (int pass = once ? 1 : 0; pass < 2; ++pass) {
      if (pass == 1 && !once) begin = reserve(n);
      u32 to = begin;
#pragma unroll 1
      for (u32 first = 0; first < groups; first += u32(batch)) {
        const u32 hits = find_hits(view, first, min(groups - first, u32(batch)), least);
        if (once || pass == 0) n += hits;
        if (pass == 0) continue;
        if (once) to = begin = reserve(n);
#pragma unroll 1
        for (u32 i = u32(lane); i < hits; i += 32) {
          const u32 hit = s.hits[warp][i];
          const u32 group = first + hit / group_size;
          const u32 key = order_key(s.scores[warp][hit]);
          const int position = view.position(int(s.group[warp][group]), s.place[warp][group], int(hit % group_size));
          if (to + i < u32(capacity)) s.list[to + i] = entry_of(key, u32(position));
          atomicAdd(&s.last[bin_at(min((most - key) >> shift, u32(key_bins - 1)))], 1U);
        }
        to += hits;
        __syncwarp();
      }
    }
    return begin;
  }

  // Sum over the warps before this one of what each gives, and of all. One barrier; the caller puts one before the next use.
  __device__ u32 warps_before(u32* shared, u32 mine, u32& all) const {
    if (lane == 0) shared[warp] = mine;
    __syncthreads();
    const u32 x = lane < warps ? shared[lane] : 0;
    all = __reduce_add_sync(~0U, x);
    return __reduce_add_sync(~0U, lane < warp ? x : 0);
  }

  __device__ void put(u64 e, u64 cut, u32 slot) {
    if (e < cut) return;
    if (p.args.order == TopKOrder::by_score) {
      s.ranked[slot] = e;
    } else {
      out()[slot] = listed_as(int(position_of(e)));
    }
  }
  // Lists or ranks a warp's n entries from `begin` on that are not below the cut; `slot`: where its first one goes.
  __device__ void emit(u32 begin, u32 n, u64 cut, u32 slot) {
#pragma unroll 1
    for (u32 i = 0; i < n; i += 32) {
      const u64 e = i + u32(lane) < n ? s.list[begin + i + u32(lane)] : 0;
      const u32 taken = __ballot_sync(~0U, e >= cut);
      const u32 to = slot + u32(__popc(taken & ((1U << lane) - 1)));
      put(e, cut, to);
      slot += u32(__popc(taken));
    }
  }
  __device__ void finish(u32 all) {
    if (p.args.order == TopKOrder::by_score) {
      Row<Paged>::template emit_by_score<Threads>(s.ranked, all);
    } else {
      for (int j = int(all) + tid; j < p.args.k; j += Threads) out()[j] = -1;
    }
  }

  // The row again, from memory: the cut digit by digit among the entries from `floor` on, then those above it in order.
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
    u64 top = ((u64(most) + 1) << position_bits) - 1;
    u64 cut = u64(floor) << position_bits;
    u32 need = u32(p.args.k);
    int shift = max(0, 64 - __clzll(static_cast<long long>(top - cut)) - key_digit);
#pragma unroll 1
    for (;;) {
      __syncthreads();
      clear(s.hist);
      __syncthreads();
#pragma unroll 4
      for (u32 i = u32(tid); i < all_entries; i += Threads) {
        const u64 e = entry(i);
        if (e != 0 && e <= top && (top - e) >> shift < u64(key_bins)) atomicAdd(&s.hist[bin_at(u32((top - e) >> shift))], 1U);
      }
      __syncthreads();
      const FoundBin f = find_bin(s.hist, need, s.told, tid, BlockBarrier{});
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
    u32 slot = 0;
#pragma unroll 1
    for (u32 first = 0; first < all_entries; first += Threads) {
      const u64 e = first + u32(tid) < all_entries ? entry(first + u32(tid)) : 0;
      const u32 taken = __ballot_sync(~0U, e >= cut);
      u32 all;
      __syncthreads();
      put(e, cut, slot + warps_before(s.scan, u32(__popc(taken)), all) + u32(__popc(taken & ((1U << lane) - 1))));
      slot += all;
    }
    finish(slot);
  }

  // The need-th best of the entries in s.members. Each warp for itself.
  __device__ u64 rank_members(u32 need, u32 count) const {
    const u64 mine = u32(lane) < count ? s.members[lane] : 0;
    u32 better = 0;
    for (u32 j = 0; j < count; ++j) better += s.members[j] > mine ? 1U : 0U;
    const u32 winner = __ballot_sync(~0U, u32(lane) < count && better == need - 1);
    return __shfl_sync(~0U, mine, __ffs(int(winner)) - 1);
  }

  __device__ void run(const GroupedParams<Source>& params) {
    using View = typename Source::View;
    if (!params.early_lengths) wait();
    const int length = this->visible();
    clear(s.hist);
    clear(s.last);
    if (tid == 0) {
      s.listed = 0;
      s.counted = 0;
    }
    const View view(params.source, p, row, length);
    const int groups = view.groups();
    const int per = (groups + Threads - 1) / Threads;
    const int first = warp * 32 * per + lane;
    u32 place[Items], keys[Items];
#pragma unroll
    for (int i = 0; i < Items; ++i) place[i] = i < per && first + i * 32 < groups ? view.place(first + i * 32) : ~0U;
    if (params.early_lengths) wait();
#pragma unroll
    for (int i = 0; i < Items; ++i) keys[i] = place[i] != ~0U ? view.best_of(place[i]) : 0;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) most = max(most, keys[i]);
    most = most_of(most);
    const u32 k = u32(p.args.k);
    const u32 floor = find_floor(s.hist, s.told, most, k, k + slack, tid, Threads, BlockBarrier{}, [&](auto see) {
#pragma unroll
      for (int i = 0; i < Items; ++i) see(keys[i]);
    }).key;

    u32 chosen = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const u32 yes = __ballot_sync(~0U, keys[i] >= floor);
      if (keys[i] >= floor) {
        const u32 to = chosen + u32(__popc(yes & ((1U << lane) - 1)));
        s.place[warp][to] = place[i];
        s.group[warp][to] = static_cast<unsigned short>(first + i * 32);
      }
      chosen += u32(__popc(yes));
    }
    __syncwarp();
    const int shift = min(17, max(0, 32 - __clz(int(most - min(floor, most))) - key_digit));  // 8 binades at most
    u32 n;
    const u32 begin = list_entries(view, chosen, floor, most, shift, n);
    __syncthreads();

    if (s.listed > u32(capacity)) {
      select_again(view, floor, most);
    } else {
      select_listed(begin, n, most, shift);
    }
    if (p.counts != nullptr) this->count_pages(length);
  }

  // Selects among the listed entries, of which `n` from `begin` on are this warp's. The keys of all are counted in s.last, `shift` bits a bin from the best
  // on, all further ones in the last bin.
  __device__ void select_listed(u32 begin, u32 n, u32 most, int shift) {
    const u32 k = u32(p.args.k);
    u64 top = 0, cut = 1;  // of the entries that are not told apart yet
    u32 wanted = 0, count = 0;
    if (s.listed > k) {
      FoundBin f = find_bin(s.last, k, s.told, tid, BlockBarrier{});
      const u32 key = most - (f.bin << shift);
      top = ((u64(key) + 1) << position_bits) - 1;
      if (f.bin + 1 < u32(key_bins)) cut = ((u64(key) + 1) << position_bits) - min(u64(key) << position_bits, u64(1) << (shift + position_bits));
      wanted = k - f.above;
      count = f.count;
#pragma unroll 1
      while (count > by_counting && count != wanted) {
        const int digit = max(0, 64 - __clzll(static_cast<long long>(top - cut)) - key_digit);
        clear(s.hist);
        __syncthreads();
#pragma unroll 1
        for (u32 i = u32(tid); i < s.listed; i += Threads) {
          const u64 e = s.list[i];
          if (e <= top && e >= cut) atomicAdd(&s.hist[bin_at(u32((top - e) >> digit))], 1U);
        }
        __syncthreads();
        f = find_bin(s.hist, wanted, s.told, tid, BlockBarrier{});
        top -= u64(f.bin) << digit;
        cut = max(cut, top - ((u64(1) << digit) - 1));
        wanted -= f.above;
        count = f.count;
      }
    }
    // What is better than those is selected, and of those the best.
    u32 sure = 0;
#pragma unroll 1
    for (u32 i = 0; i < n; i += 32) {
      const u64 e = i + u32(lane) < n ? s.list[begin + i + u32(lane)] : 0;
      const bool member = e <= top && e >= cut;
      sure += u32(__popc(__ballot_sync(~0U, e > top || (member && count > by_counting))));
      if (member && count <= by_counting) {
        const u32 to = atomicAdd(&s.counted, 1U);
        s.members[to] = e;
        s.owner[to] = static_cast<unsigned char>(warp);
      }
    }
    u32 all;
    u32 slot = warps_before(s.sure, sure, all);
    if (count != 0 && count <= by_counting) {
      if (count != wanted) cut = rank_members(wanted, count);
      slot += u32(__popc(__ballot_sync(~0U, u32(lane) < count && s.members[lane] >= cut && s.owner[lane] < warp)));
    }
    emit(begin, n, cut, slot);
    finish(min(s.listed, k));
  }

  __device__ static void wait() {
#if KVIRE_DEVICE_ARCH >= 900
    ptx::wait_for_earlier_grids();
#endif
  }
};

template <int Threads, int Items, class Source, bool Paged>
__global__ __launch_bounds__(Threads, 1) void grouped_top_k_kernel(const __grid_constant__ GroupedParams<Source> p) {
#if KVIRE_DEVICE_ARCH >= 900
  ptx::launch_dependents();
#endif
  extern __shared__ __align__(16) unsigned char dynamic[];
  using B = GroupedBlock<Threads, Items, Source, Paged>;
  B block{{p.base, blockIdx.x}, *reinterpret_cast<typename B::Shared*>(dynamic), int(threadIdx.x), int(threadIdx.x & 31U), int(threadIdx.x >> 5)};
  block.run(p);
}

template <int Threads, int Items, class Source, bool Paged>
cudaError_t launch_grouped(const GroupedParams<Source>& p, std::int64_t rows, cudaStream_t stream) {
  constexpr int bytes = sizeof(typename GroupedBlock<Threads, Items, Source, Paged>::Shared);
  auto* kernel = grouped_top_k_kernel<Threads, Items, Source, Paged>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, {rows, Threads, bytes, p.base.overlap}, stream, p);
}

/// `groups`: the most that a row may have.
template <int Threads, class Source>
cudaError_t launch_grouped_for(const GroupedParams<Source>& p, std::int64_t groups, std::int64_t rows, cudaStream_t stream) {
  constexpr int few = 2560 / Threads, many = 8704 / Threads;
  const bool paged = p.base.args.page_table != nullptr;
  if (groups > many * Threads) return cudaErrorInvalidValue;
  if (groups <= few * Threads) return paged ? launch_grouped<Threads, few, Source, true>(p, rows, stream) : launch_grouped<Threads, few, Source, false>(p, rows, stream);
  return paged ? launch_grouped<Threads, many, Source, true>(p, rows, stream) : launch_grouped<Threads, many, Source, false>(p, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

#if KVIRE_CUDA_COMPILER

/// Whether launch_grouped_top_k serves a selection: k up to 1,024, rows of up to 128 Ki positions that start on 16 bytes, and 16 positions or a
/// multiple a page.
inline bool grouped_top_k_serves(const body::TopKArgs& args) {
  const bool whole = args.page_table == nullptr || (args.tokens_per_page % detail::topk::group_size == 0 &&
                                                    (!args.translate || args.page_count <= 0x7FFFFFFF / args.tokens_per_page));
  return args.k >= 1 && args.k <= 1024 && args.stride <= 8192 * detail::topk::group_size && args.stride % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && whole;
}

/// Exact, deterministic top-k by the best of each 16 scores: `best` is [rows][ceil(stride / 16)], order_key of the best score that may be selected of
/// positions 16 i to 16 i + 15 (those that are seen and lie on a page), 0 where there is none; what it holds beyond a row's length is not used.
/// NaN scores must be none of these. `counts` (device memory, or null): bad pages are added to it. `overlap`: programmatic dependent launch; the
/// kernel waits for the stream's earlier one before it reads, lengths and page table excepted if `early_lengths` says that the earlier one does not
/// write them and lets this kernel start only when all before it have ended. Captures into graphs; allocates nothing, waits for nothing.
template <int Threads = 512>
cudaError_t launch_grouped_top_k(const body::TopKArgs& args, const kstd::uint32_t* best, TopKCounts* counts, cudaStream_t stream, bool overlap,
                                 bool early_lengths = false) {
  using detail::topk::RowGroups;
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (!grouped_top_k_serves(args)) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  detail::topk::GroupedParams<RowGroups> p;
  p.base = detail::topk::make_params(args, counts, overlap);
  p.source = {args.scores, best, args.stride, (args.stride + detail::topk::group_size - 1) / detail::topk::group_size};
  p.early_lengths = early_lengths;
  return detail::topk::launch_grouped_for<Threads>(p, p.source.group_stride, rows, stream);
}

/// Whether launch_slot_top_k serves a selection from what a logits kernel of `ctas` CTAs leaves: k up to 1,024, next_n of 1 or 2, rows of up to 128 Ki
/// positions, and parts of them that a CTA scores of less than 64 Ki.
inline bool slot_top_k_serves(const body::TopKArgs& args, std::int64_t ctas) {
  const bool whole = !args.translate || args.page_count <= 0x7FFFFFFF / args.tokens_per_page;
  return args.k >= 1 && args.k <= sm90::CandidateSlots::most_k && args.next_n <= 2 && args.stride <= 8192 * detail::topk::group_size && ctas > 0 &&
         args.batch * args.stride < ctas * 0xF000 && whole;
}

/// The same by what a logits kernel of `ctas` CTAs has left in `slots`: of `args`, the scores are not looked at, and stride is the positions that a row may
/// have. Next_n of 1 or 2.
template <int Threads = 512>
cudaError_t launch_slot_top_k(const body::TopKArgs& args, const sm90::CandidateSlots& slots, int ctas, TopKCounts* counts, cudaStream_t stream, bool overlap,
                              bool early_lengths = false) {
  using detail::topk::SlotGroups;
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (rows == 0) return cudaSuccess;
  detail::topk::GroupedParams<SlotGroups> p;
  p.base = detail::topk::make_params(args, counts, overlap);
  p.source = {slots, ctas};
  p.early_lengths = early_lengths;
  // Parts are longer than a slot where they are pruned, all but a row's first and last.
  const std::int64_t most = (args.stride + detail::topk::group_size - 1) / detail::topk::group_size + 2 * (slots.capacity / detail::topk::group_size);
  return detail::topk::launch_grouped_for<Threads>(p, most, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
