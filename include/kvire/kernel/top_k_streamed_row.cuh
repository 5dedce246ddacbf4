// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_filter.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// A longer row: the blocks of a cluster, or one, stream it through a filter, the lists of what passed meet in the first block, which selects among them.
template <int Threads, int Items, bool Clustered, bool Paged>
struct StreamedRow : FilteredRow<Threads, Items, Clustered, Paged> {
  using Base = FilteredRow<Threads, Items, Clustered, Paged>;
  using typename Base::Filter;
  using Base::begin, Base::capacity, Base::clear, Base::depth, Base::emit_by_score, Base::end, Base::entry, Base::exclusive_scan, Base::find, Base::guess, Base::hist;
  using Base::list, Base::listed_as, Base::load4, Base::load_tile, Base::out, Base::p, Base::passing, Base::passing_bin, Base::place, Base::quads, Base::rank;
  using Base::rank_between, Base::refine, Base::s, Base::sample_place, Base::scores, Base::select, Base::tid;

  // Without guessing: the threshold is the k-th best so far.
  __device__ void stream_alone(int length) {
    begin = 0;
    end = length;
    if (tid == 0) s.listed = 0;
    __syncthreads();
    Filter f;
    float4 next = load4(place(0, 0));
    for (int base = 0; base < length; base += Threads * 4) {
      const float4 v = next;
      next = load4(place(base, 1));
      const bool overflow = Base::template list_passing<false, false>(v, place(base, 0), f, false);
      if (__syncthreads_or(overflow) != 0) {
        f.limit = filter_limit(prune(base));
        Base::template list_passing<false, false>(v, place(base, 0), f, false);
        __syncthreads();
      }
    }
  }
  // Keeps the exact top k of the listed entries before position `from`; returns the least key that later positions must have.
  __device__ u32 prune(int from) {
    for (int i = tid; i < capacity; i += Threads) {
      if (position_of(list[i]) >= u32(from)) list[i] = 0;
    }
    __syncthreads();
    const u64 cut = select(capacity, capacity, u32(p.args.k));
    if (tid == 0) s.listed = 0;
    __syncthreads();
    u64* kept = reinterpret_cast<u64*>(hist);  // as large as the largest k
    for (u32 i = u32(tid); i < u32(capacity); i += Threads) {
      if (list[i] >= cut) kept[atomicAdd(&s.listed, 1U)] = list[i];
    }
    __syncthreads();
    for (u32 i = u32(tid); i < s.listed; i += Threads) list[i] = kept[i];
    __syncthreads();
    return key_of(cut) + 1;  // a later position loses a tie
  }

  // The least of the n listed entries that is selected; where the filter let too few pass or more than the list holds, after the row has been listed anew.
  __device__ u64 cut_of(u32& n, u32& front, const Filter& f, int length) {
    const u32 k = u32(p.args.k);
    u64 cut = u64(1) << position_bits;
    if (n < k || n > u32(capacity)) {
      __syncthreads();
      stream_alone(length);
      n = front = s.listed;
      if (n > k) cut = select(n, front, k);
      __syncthreads();
      clear(hist);
    } else if (n > k) {
      const Found last = find(passing, k);
      if (last.bin == u32(bins - 1)) {
        cut = select(n, front, k);  // the last bin has no upper end
        __syncthreads();
        clear(hist);
      } else {
        const u64 base = u64(f.least + (last.bin << f.shift)) << position_bits;
        const u64 span = u64(1) << (f.shift + position_bits);
        if (last.count == k - last.above) {
          cut = base;
        } else if (last.count <= by_counting) {
          cut = rank_between(n, front, base, span, k - last.above, last.count);
        } else {
          cut = refine(n, front, base, span, k - last.above);
          __syncthreads();
          clear(hist);
        }
      }
    }
    return cut;
  }

  __device__ void row_in_stream(int length) {
    const int part = Clustered ? ((length + p.blocks - 1) >> p.block_shift) + 31 & ~31 : length;
    begin = min(int(rank) * part, length);
    end = min(begin + part, length);
    // The sample is asked for first: everything waits for it.
    float4 v[quads];
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int at = sample_place(length, q);
      v[q] = p.vector_loads ? load_streaming4(scores + at) : float4{scores[at], scores[at + 1], scores[at + 2], scores[at + 3]};
    }
    float4 ring[depth];
#pragma unroll
    for (int d = 0; d < depth; ++d) ring[d] = load_tile(begin, d);
    clear(hist);
    clear(passing);
    if (tid == 0) {
      s.listed = 0;
      s.received = 0;
      s.emitted = 0;
      s.counted = 0;
      s.most = 0;
      s.sample_most = 0;
      s.sample_passed = 0;
    }
    __syncthreads();
    if constexpr (Clustered) ptx::cluster_arrive();  // the first block's counters are set
    const Filter f = guess(v, length);
    clear(hist);
    if constexpr (Clustered) ptx::cluster_wait();
    if (p.counts == nullptr && f.limit > 0x7F800001U) {
      Base::template list_part<true>(ring, f);
    } else {
      Base::template list_part<false>(ring, f);
    }
    __syncthreads();
    u32 n = s.listed;
    u32 front = n;
    if constexpr (Clustered) {
      if (rank != 0) {
        if (tid == 0) s.counted = ptx::peer_add(ptx::peer_address(&s.received, 0), n);
        __syncthreads();
        const u32 slot = s.counted;
        for (u32 i = u32(tid); i < min(n, u32(capacity)); i += Threads) {
          if (slot + i < u32(capacity)) ptx::peer_store(ptx::peer_address(list + (capacity - 1 - (slot + i)), 0), list[i]);
        }
        ptx::cluster_arrive();
        return;
      }
      ptx::cluster_arrive();
      ptx::cluster_wait();
      n += s.received;
      if (n <= u32(capacity)) {
        for (u32 i = u32(tid); i < n; i += Threads) atomicAdd(passing_bin(key_of(entry(i, front)), f), 1U);
      }
      __syncthreads();
    }
    const u64 cut = cut_of(n, front, f, length);
    begin = 0;
    end = length;
    if (p.args.order == TopKOrder::by_score) {
      __syncthreads();
      u64* ranked = reinterpret_cast<u64*>(hist);
      for (u32 i = u32(tid); i < n; i += Threads) {
        const u64 e = entry(i, front);
        if (e >= cut) ranked[atomicAdd(&s.emitted, 1U)] = e;
      }
      emit_by_score();
    } else {
      emit_list(n, front, cut, length);
    }
  }

  // Lists in position order what the list holds at or above the cut: a counting sort over up to 4096 runs of positions, and within a run
  // (about one entry; never more than its positions) each entry counts those before it. Counts are halves of words, two runs in each.
  // The histogram is clear.
  __device__ void emit_list(u32 n, u32 front, u64 cut, int length) {
    u32* run_end = hist;
    u32* placed = hist + bins / 2;
    const int run_shift = max(0, 32 - __clz(length - 1) - digit);
    const auto run_of = [&](u32 position) { return position >> run_shift; };
    const auto end_of = [&](u32 run) { return run_end[run >> 1] >> ((run & 1U) * 16) & 0xFFFFU; };
    __syncthreads();
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u64 e = entry(i, front);
      const u32 run = run_of(position_of(e));
      if (e >= cut) atomicAdd(&run_end[run >> 1], 1U << ((run & 1U) * 16));
    }
    __syncthreads();
    constexpr int words = bins / 2 / Threads;
    u32 v[words];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < words; ++j) {
      v[j] = run_end[tid * words + j];
      sum += (v[j] & 0xFFFFU) + (v[j] >> 16);
    }
    u32 start = exclusive_scan(sum);
    if (tid == Threads - 1) s.emitted = start + sum;
#pragma unroll
    for (int j = 0; j < words; ++j) {
      const u32 middle = start + (v[j] & 0xFFFFU);
      run_end[tid * words + j] = start | middle << 16;
      start = middle + (v[j] >> 16);
    }
    __syncthreads();
    const u32 all = s.emitted;
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u64 e = entry(i, front);
      if (e >= cut) {
        const u32 run = run_of(position_of(e));
        const u32 half = (run & 1U) * 16;
        placed[atomicAdd(&run_end[run >> 1], 1U << half) >> half & 0xFFFFU] = position_of(e);
      }
    }
    __syncthreads();
    for (u32 i = u32(tid); i < all; i += Threads) {
      const u32 position = placed[i];
      const u32 run = run_of(position);
      const u32 first = run == 0 ? 0 : end_of(run - 1);
      const u32 stop = end_of(run);
      u32 slot = first;
      for (u32 j = first; j < stop; ++j) slot += placed[j] < position ? 1U : 0U;
      out()[slot] = listed_as(int(position));
    }
    for (int j = int(all) + tid; j < p.args.k; j += Threads) out()[j] = -1;
  }
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
