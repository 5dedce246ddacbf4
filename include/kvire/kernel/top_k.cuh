// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/body/top_k.hpp>

/// The tuned top-k kernel: the same selection as body::top_k, bit for bit, from one launch without workspace.
///
/// A row is cut into as many parts as a thread-block cluster has blocks (one block where there are no clusters). A block keeps the first
/// chunk of its part in registers. A histogram of the leading 12 bits of the order-preserving key, summed over the cluster through
/// distributed shared memory, gives the bin that holds the k-th key.
///   - If the chunk is the whole part, the candidates of that bin are refined, 12 bits at a time or by counting, to the exact cut, and what
///     lies above is written in position order by a scan.
///   - If the part is longer, the bin's lower edge is a filter for the rest of the part, which is read once; survivors go to a list in
///     shared memory. A list that runs over is pruned to its exact top k, which raises the filter, and the step is repeated from registers.
/// The cut is a pair of key and position, unique in the row, so ties need no path of their own and nothing depends on the order in which
/// threads arrive. No candidate is ever dropped that could be selected; a filter only decides how much work is left.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int max_k = 2048;
inline constexpr int bins = 4096;
inline constexpr int digit = 12;
inline constexpr int position_bits = 28;               // rows up to 2^28
inline constexpr int first_shift = 32 + position_bits - digit;
inline constexpr int by_counting = 256;                // candidates that are ranked by comparing each with each

using u32 = unsigned int;
using u64 = unsigned long long;

struct Params {
  body::TopKArgs args;
  u64* counts = nullptr;  // nan_scores, bad_pages; added to
  int blocks = 1;         // blocks per row
  int page_shift = -1;    // log2 of tokens_per_page, or -1
  bool vector_loads = false;
};

#if KVIRE_CUDA_COMPILER

// Larger is better; unique within a row. 0 is no candidate.
__device__ inline u64 entry_of(u32 key, u32 position) {
  return (u64(key) << position_bits) | (((1U << position_bits) - 1) - position);
}
__device__ inline u32 position_of(u64 entry) { return ((1U << position_bits) - 1) - (u32(entry) & ((1U << position_bits) - 1)); }
__device__ inline u32 key_of(u64 entry) { return u32(entry >> position_bits); }

// The filter of the streaming loop: a 3-instruction map of a float's bits that keeps order_key's order (-0 just below +0), with -inf at 0
// and NaNs of either sign above +inf, so that one unsigned comparison passes what may be selected and all that must be counted.
__device__ inline u32 filter_key(u32 bits) { return ((u32(int(bits) >> 31) & 0x7FFFFFFFU) ^ bits) + 0x7F800001U; }
// Every float with order_key(x) >= key has filter_key(x) >= filter_limit(key).
__device__ inline u32 filter_limit(u32 key) {
  if (key <= 0x00800000U) return 0;
  return key <= sign_bit ? key - 0x00800000U : key - 0x007FFFFFU;
}

__device__ inline u32 candidate_key(u32 bits) { return is_nan_bits(bits) ? 0 : order_key(float_of(bits)); }

// --- cluster primitives; explicit addresses, so that the compiler cannot merge them with local accesses ---------------------------------
__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

#if KVIRE_DEVICE_ARCH >= 900
__device__ inline u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline u32 peer_address(const void* p, u32 rank) {
  u32 a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}
__device__ inline uint4 peer_load4(u32 a) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
__device__ inline void peer_store4(u32 a, uint4 v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void peer_store(u32 a, u32 v) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
__device__ inline void peer_store(u32 a, u64 v) { asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory"); }
__device__ inline u32 peer_add(u32 a, u32 v) {
  u32 old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(a), "r"(v) : "memory");
  return old;
}
#else
__device__ inline u32 cluster_rank() { return 0; }
__device__ inline void cluster_sync() { __syncthreads(); }
__device__ inline u32 peer_address(const void* p, u32) { return shared_address(p); }
__device__ inline uint4 peer_load4(u32) { return {}; }
__device__ inline void peer_store4(u32, uint4) {}
__device__ inline void peer_store(u32, u32) {}
__device__ inline void peer_store(u32, u64) {}
__device__ inline u32 peer_add(u32, u32) { return 0; }
#endif

__device__ inline float4 load_streaming4(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

struct Found {
  u32 bin, above, count, all;
};

// Small shared state of a block.
struct Scratch {
  u32 warp_sums[32];
  u32 warp_sums_high[32];
  u32 part_counts[16];
  Found found;
  u64 cut;
  u32 listed;    // entries of the list, slots reserved
  u32 gathered;  // entries that all blocks sent to the first
  u32 counted;   // entries ranked by counting in this block
  u32 emitted;
};

template <int Threads, int Items, bool Clustered, bool Paged>
struct Block {
  static constexpr int warps = Threads / 32;
  static constexpr int quads = Items / 4;             // 16-byte loads per thread and chunk
  static constexpr int chunk = Threads * Items;
  static constexpr int capacity = chunk + max_k;      // a pruned list always takes a whole chunk
  static constexpr int bin_quads = bins / 4 / Threads;
  static constexpr std::size_t shared_bytes = sizeof(u32) * bins * (Clustered ? 2 : 1) + sizeof(u64) * capacity;
  static_assert(bins % (4 * Threads) == 0 && Threads % by_counting == 0);

  const Params& p;
  Scratch& s;
  u32* hist;   // of this block
  u32* total;  // of the cluster
  u64* list;
  u64* candidates;     // over hist as well
  u32* rank_of;        // behind candidates
  const int tid, lane, warp;
  u32 rank = 0, blocks = 1;
  std::int64_t row;
  const float* scores;
  int begin = 0, end = 0;
  u32 nans = 0;

  __device__ bool candidate_page(int position) const {
    if constexpr (!Paged) return true;
    const int page = p.page_shift >= 0 ? position >> p.page_shift : position / p.args.tokens_per_page;
    return p.args.good_page(p.args.page_table[row / p.args.next_n * p.args.max_pages + page]);
  }
  __device__ int listed_as(int position) const {
    if constexpr (Paged) {
      if (p.args.translate) {
        const int tokens = p.args.tokens_per_page;
        const int page = p.page_shift >= 0 ? position >> p.page_shift : position / tokens;
        return p.args.page_table[row / p.args.next_n * p.args.max_pages + page] * tokens + (position - page * tokens);
      }
    }
    return position;
  }

  // --- loads ---
  __device__ float4 load4(int position) const {
    if (position + 4 <= end && p.vector_loads) return load_streaming4(scores + position);
    float4 v = {float_of(0xFF800000U), float_of(0xFF800000U), float_of(0xFF800000U), float_of(0xFF800000U)};
    if (position < end) v.x = scores[position];
    if (position + 1 < end) v.y = scores[position + 1];
    if (position + 2 < end) v.z = scores[position + 2];
    if (position + 3 < end) v.w = scores[position + 3];
    return v;
  }
  __device__ int place(int base, int q) const { return base + (q * Threads + tid) * 4; }
  __device__ void load_chunk(float4 (&v)[quads], int base) const {
#pragma unroll
    for (int q = 0; q < quads; ++q) v[q] = load4(place(base, q));
  }

  // --- histograms ---
  __device__ void clear_hist() {
    for (int i = tid; i < bins / 4; i += Threads) reinterpret_cast<uint4*>(hist)[i] = uint4{0, 0, 0, 0};
  }
  // Makes `total` the sum of all blocks' histograms, in every block. Ends with a barrier.
  template <bool Distributed>
  __device__ const u32* combine() {
    if constexpr (Distributed) {
      cluster_sync();
      for (int i = tid; i < bins / 4; i += Threads) {
        const u32 peer = u32(i) & (blocks - 1);
        const u32 quad = rank * (bins / 4 / blocks) + u32(i) / blocks;
        uint4 v = peer_load4(peer_address(hist + quad * 4, peer));
        for (u32 distance = 1; distance < blocks; distance *= 2) {
          v.x += __shfl_xor_sync(~0U, v.x, distance);
          v.y += __shfl_xor_sync(~0U, v.y, distance);
          v.z += __shfl_xor_sync(~0U, v.z, distance);
          v.w += __shfl_xor_sync(~0U, v.w, distance);
        }
        peer_store4(peer_address(total + quad * 4, peer), v);
      }
      cluster_sync();
      return total;
    } else {
      __syncthreads();
      return hist;
    }
  }
  // The bin, from the top, in which the need-th entry lies. Starts after a barrier, ends with one.
  __device__ Found find(const u32* h, u32 need) {
    uint4 v[bin_quads];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < bin_quads; ++j) {
      v[j] = reinterpret_cast<const uint4*>(h)[bins / 4 - 1 - (tid * bin_quads + j)];
      sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    u32 before = exclusive_scan(sum);
    if (before < need && need <= before + sum) {
#pragma unroll
      for (int j = 0; j < bin_quads; ++j) {
        const u32 down[4] = {v[j].w, v[j].z, v[j].y, v[j].x};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (before < need && need <= before + down[i]) s.found = {u32(bins - 1 - (tid * bin_quads + j) * 4 - i), before, down[i], 0};
          before += down[i];
        }
      }
    } else if (tid == Threads - 1 && before + sum < need) {
      s.found = {0, 0, 0, 1};
    }
    __syncthreads();
    return s.found;
  }
  // Sum over the threads before this one. One barrier inside; the caller puts one before the next use.
  __device__ u32 exclusive_scan(u32 x) {
    u32 up = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    if (lane == 31) s.warp_sums[warp] = up;
    __syncthreads();
    const u32 w = lane < warp ? s.warp_sums[lane] : 0;
    return __reduce_add_sync(~0U, w) + up - x;
  }

  // --- exact selection over the listed entries -----------------------------------------------------------------------------------------
  // The cut with exactly `need` of the entries that start with `prefix` at or above it; `count` (more than `need`) of them start so.
  template <bool Distributed>
  __device__ u64 refine(u32 n, u64 prefix, int shift, u32 need, u32 count) {
    for (;;) {
      if (count == need) return prefix << shift;
      if (count <= by_counting) return rank_candidates<Distributed>(n, prefix, shift, need, count);
      shift -= digit;
      clear_hist();
      __syncthreads();
      for (u32 i = u32(tid); i < n; i += Threads) {
        const u64 e = list[i];
        if ((e >> (shift + digit)) == prefix && e != 0) atomicAdd(&hist[u32(e >> shift) & (bins - 1)], 1U);
      }
      const Found f = find(combine<Distributed>(), need);
      if (f.all != 0) return u64(1) << position_bits;  // only at the first digit: fewer than need entries
      need -= f.above;
      count = f.count;
      prefix = prefix << digit | f.bin;
    }
  }
  template <bool Distributed>
  __device__ u64 rank_candidates(u32 n, u64 prefix, int shift, u32 need, u32 count) {
    if (tid < by_counting) rank_of[tid] = 0;
    if (tid == 0) s.counted = 0;
    __syncthreads();
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u64 e = list[i];
      if ((e >> shift) == prefix && e != 0) {
        if constexpr (Distributed) {
          peer_store(peer_address(candidates + peer_add(peer_address(&s.gathered, 0), 1), 0), e);
        } else {
          candidates[atomicAdd(&s.counted, 1U)] = e;
        }
      }
    }
    if constexpr (Distributed) {
      cluster_sync();
      if (rank == 0) {
        count_ranks(need, count);
        __syncthreads();
        if (u32(tid) < blocks) peer_store(peer_address(&s.cut, u32(tid)), s.cut);
      }
      cluster_sync();
    } else {
      __syncthreads();
      count_ranks(need, count);
      __syncthreads();
    }
    return s.cut;
  }
  __device__ void count_ranks(u32 need, u32 count) {
    constexpr int teams = Threads / by_counting;
    const int mine = tid % by_counting;
    if (u32(mine) < count) {
      const u64 e = candidates[mine];
      u32 better = 0;
      for (u32 j = u32(tid / by_counting); j < count; j += teams) better += candidates[j] > e ? 1U : 0U;
      if (better != 0) atomicAdd(&rank_of[mine], better);
    }
    __syncthreads();
    if (u32(tid) < count && rank_of[tid] == need - 1) s.cut = candidates[tid];
  }

  // --- the list ---
  __device__ void list_chunk(const u32 (&keys)[Items], u32 least, u32 most) {
    u32 n = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) n += keys[i] >= least && keys[i] <= most ? 1U : 0U;
    u32 up = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    u32 slot = 0;
    if (lane == 31 && up != 0) slot = atomicAdd(&s.listed, up);
    slot = __shfl_sync(~0U, slot, 31) + up - n;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      if (keys[i] >= least && keys[i] <= most) list[slot++] = entry_of(keys[i], u32(place(begin, i / 4) + i % 4));
    }
  }

  // Keeps the exact top k of the listed entries before position `from`; returns the least key that later positions must have.
  __device__ u32 prune(int from) {
    for (int i = tid; i < capacity; i += Threads) {
      if (position_of(list[i]) >= u32(from)) list[i] = 0;
    }
    __syncthreads();
    const u64 cut = refine<false>(capacity, 0, first_shift + digit, u32(p.args.k), ~0U);
    constexpr int each = (capacity + Threads - 1) / Threads;
    u64 kept[each];
#pragma unroll
    for (int j = 0; j < each; ++j) kept[j] = tid + j * Threads < capacity ? list[tid + j * Threads] : 0;
    if (tid == 0) s.listed = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < each; ++j) {
      if (kept[j] >= cut) list[atomicAdd(&s.listed, 1U)] = kept[j];
    }
    __syncthreads();
    return key_of(cut) + 1;  // a later position loses a tie
  }

  // Lists what passes of one chunk; true if some of it found no room.
  __device__ bool filter(const float4 (&v)[quads], int base, u32 limit, bool count_nans) {
    bool overflow = false;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const u32 b[4] = {bits_of(v[q].x), bits_of(v[q].y), bits_of(v[q].z), bits_of(v[q].w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (filter_key(b[i]) >= limit) {
          const int position = place(base, q) + i;
          if (position < end) {
            const u32 key = candidate_key(b[i]);
            if (key == 0) {
              nans += count_nans ? 1U : 0U;
            } else if (candidate_page(position)) {
              const u32 slot = atomicAdd(&s.listed, 1U);
              if (slot < u32(capacity)) {
                list[slot] = entry_of(key, u32(position));
              } else {
                overflow = true;
              }
            }
          }
        }
      }
    }
    return overflow;
  }
  __device__ void take(const float4 (&v)[quads], int base, u32& limit) {
    const bool overflow = filter(v, base, limit, true);
    if (__syncthreads_or(overflow) != 0) {
      limit = filter_limit(prune(base));
      filter(v, base, limit, false);
      __syncthreads();
    }
  }

  // --- output ---
  __device__ std::int32_t* out() const { return p.args.selected + row * p.args.k; }

  // Selected entries before this block's, and in the whole row.
  __device__ void share_counts(u32 mine, u32& before, u32& all) {
    before = 0;
    all = mine;
    if constexpr (Clustered) {
      if (u32(tid) < blocks) peer_store(peer_address(&s.part_counts[rank], u32(tid)), mine);
      cluster_sync();
      all = 0;
      for (u32 r = 0; r < blocks; ++r) {
        before += r < rank ? s.part_counts[r] : 0;
        all += s.part_counts[r];
      }
    }
  }
  __device__ void fill(u32 all) {
    for (int j = int(all) + int(rank) * Threads + tid; j < p.args.k; j += int(blocks) * Threads) out()[j] = -1;
  }

  __device__ void emit_chunk(const u32 (&keys)[Items], u64 cut) {
    // Four 16-bit counts in two words: one per quad of the chunk.
    u32 flags = 0;
    u32 low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const bool taken = entry_of(keys[i], u32(place(begin, i / 4) + i % 4)) >= cut;
      flags |= taken ? 1U << i : 0U;
      const u32 one = taken ? 1U << (i / 4 % 2 * 16) : 0U;
      if (i / 8 == 0) {
        low += one;
      } else {
        high += one;
      }
    }
    u32 low_up = low, high_up = high;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 a = __shfl_up_sync(~0U, low_up, d);
      if (lane >= d) low_up += a;
      if (Items > 8) {
        const u32 b = __shfl_up_sync(~0U, high_up, d);
        if (lane >= d) high_up += b;
      }
    }
    if (lane == 31) {
      s.warp_sums[warp] = low_up;
      if (Items > 8) s.warp_sums_high[warp] = high_up;
    }
    __syncthreads();
    const u32 w = lane < warps ? s.warp_sums[lane] : 0;
    const u32 low_before = __reduce_add_sync(~0U, lane < warp ? w : 0) + low_up - low;
    const u32 low_all = __reduce_add_sync(~0U, w);
    u32 high_before = 0, high_all = 0;
    if (Items > 8) {
      const u32 x = lane < warps ? s.warp_sums_high[lane] : 0;
      high_before = __reduce_add_sync(~0U, lane < warp ? x : 0) + high_up - high;
      high_all = __reduce_add_sync(~0U, x);
    }
    const u32 quad_all[4] = {low_all & 0xFFFFU, low_all >> 16, high_all & 0xFFFFU, high_all >> 16};
    const u32 quad_before[4] = {low_before & 0xFFFFU, low_before >> 16, high_before & 0xFFFFU, high_before >> 16};
    u32 before = 0, all = 0;
    share_counts(quad_all[0] + quad_all[1] + quad_all[2] + quad_all[3], before, all);
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      u32 slot = before + quad_before[q];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((flags >> (q * 4 + i) & 1U) != 0) out()[slot++] = listed_as(place(begin, q) + i);
      }
      before += quad_all[q];
    }
    fill(all);
  }

  // Lists in position order what the list holds at or above the cut: a counting sort over up to 4096 runs of positions, and within a run
  // (about one entry; never more than its positions) each entry counts those before it.
  __device__ void emit_list(u32 n, u64 cut) {
    u32* run_end = hist;
    u32* placed = reinterpret_cast<u32*>(list);
    int run_shift = 0;
    while ((end - begin) >> run_shift >= bins) ++run_shift;
    const auto run_of = [&](u32 position) { return (position - u32(begin)) >> run_shift; };

    constexpr int each = (capacity + Threads - 1) / Threads;
    u64 kept[each];
    clear_hist();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const u32 i = u32(tid + j * Threads);
      kept[j] = i < n ? list[i] : 0;
      if (kept[j] < cut) kept[j] = 0;
      if (kept[j] != 0) atomicAdd(&run_end[run_of(position_of(kept[j]))], 1U);
    }
    __syncthreads();
    uint4 v[bin_quads];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < bin_quads; ++j) {
      v[j] = reinterpret_cast<const uint4*>(run_end)[tid * bin_quads + j];
      sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    u32 start = exclusive_scan(sum);
    if (tid == Threads - 1) s.emitted = start + sum;
#pragma unroll
    for (int j = 0; j < bin_quads; ++j) {
      uint4 w;
      w.x = start;
      w.y = w.x + v[j].x;
      w.z = w.y + v[j].y;
      w.w = w.z + v[j].z;
      start = w.w + v[j].w;
      reinterpret_cast<uint4*>(run_end)[tid * bin_quads + j] = w;
    }
    __syncthreads();
    const u32 mine = s.emitted;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      if (kept[j] != 0) placed[atomicAdd(&run_end[run_of(position_of(kept[j]))], 1U)] = position_of(kept[j]);
    }
    u32 before = 0, all = 0;
    share_counts(mine, before, all);
    __syncthreads();
    for (u32 i = u32(tid); i < mine; i += Threads) {
      const u32 position = placed[i];
      const u32 run = run_of(position);
      const u32 first = run == 0 ? 0 : run_end[run - 1];
      const u32 stop = run_end[run];
      u32 slot = before + first;
      for (u32 j = first; j < stop; ++j) slot += placed[j] < position ? 1U : 0U;
      out()[slot] = listed_as(int(position));
    }
    fill(all);
  }

  // By score: the first block sorts all entries.
  template <class Each>
  __device__ void emit_by_score(Each each) {
    u64* ranked = reinterpret_cast<u64*>(hist);
    each([&](u64 e) {
      if constexpr (Clustered) {
        peer_store(peer_address(ranked + peer_add(peer_address(&s.emitted, 0), 1), 0), e);
      } else {
        ranked[atomicAdd(&s.emitted, 1U)] = e;
      }
    });
    if constexpr (Clustered) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    if (rank != 0) return;
    const u32 all = s.emitted;
    u32 width = 1;
    while (width < all) width *= 2;
    for (u32 i = all + u32(tid); i < width; i += Threads) ranked[i] = 0;
    __syncthreads();
    bitonic(ranked, width, [](u64 a, u64 b) { return a < b; });
    for (u32 i = u32(tid); i < u32(p.args.k); i += Threads) out()[i] = i < all ? listed_as(int(position_of(ranked[i]))) : -1;
  }

  // Sorts `width` (a power of two) values so that after(a, b) holds for no neighbours. Ends with a barrier.
  template <class T, class After>
  __device__ void bitonic(T* x, u32 width, After after) {
    for (u32 size = 2; size <= width; size *= 2) {
      for (u32 stride = size / 2; stride != 0; stride /= 2) {
        for (u32 i = u32(tid); i < width / 2; i += Threads) {
          const u32 a = 2 * i - (i & (stride - 1));
          const u32 b = a + stride;
          const T u = x[a];
          const T v = x[b];
          if (((a & size) == 0) == after(u, v)) {
            if (after(u, v) || after(v, u)) {
              x[a] = v;
              x[b] = u;
            }
          }
        }
        __syncthreads();
      }
    }
  }

  __device__ void count_pages() {
    if constexpr (Paged) {
      if (p.counts == nullptr) return;
      const int tokens = p.args.tokens_per_page;
      // A page belongs to the part in which it begins.
      u32 bad = 0;
      for (int page = (begin + tokens - 1) / tokens + tid; page < (end + tokens - 1) / tokens; page += Threads) {
        const int id = p.args.page_table[row / p.args.next_n * p.args.max_pages + page];
        bad += id >= 0 && !p.args.good_page(id) ? 1U : 0U;
      }
      bad = __reduce_add_sync(~0U, bad);
      if (lane == 0 && bad != 0) atomicAdd(p.counts + 1, u64(bad));
    }
  }

  __device__ void run() {
    blocks = Clustered ? u32(p.blocks) : 1;
    rank = Clustered ? cluster_rank() : 0;
    row = blockIdx.x / blocks;
    scores = p.args.scores + row * p.args.stride;
    const int length = p.args.lengths == nullptr ? int(p.args.stride) : int(p.args.visible(row));
    const int part = Clustered ? int(align_up(ceil_div(std::int64_t(length), std::int64_t(blocks)), std::int64_t(32))) : length;
    begin = Clustered ? int(min(std::int64_t(rank) * part, std::int64_t(length))) : 0;
    end = int(min(std::int64_t(begin) + part, std::int64_t(length)));

    float4 first[quads];
    load_chunk(first, begin);
    clear_hist();
    if (tid == 0) {
      s.listed = 0;
      s.gathered = 0;
      s.emitted = 0;
    }
    __syncthreads();
    u32 keys[Items];
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const u32 b[4] = {bits_of(first[q].x), bits_of(first[q].y), bits_of(first[q].z), bits_of(first[q].w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = place(begin, q) + i;
        u32 key = position < end ? candidate_key(b[i]) : 0;
        nans += position < end && key == 0 ? 1U : 0U;
        if (Paged && key != 0 && !candidate_page(position)) key = 0;
        keys[q * 4 + i] = key;
        if (key != 0) atomicAdd(&hist[key >> (32 - digit)], 1U);
      }
    }
    const u32 k = u32(p.args.k);
    const Found f = find(combine<Clustered>(), k);

    if (part <= chunk) {
      u64 cut = u64(1) << position_bits;
      if (f.all == 0) {
        if (f.count == k - f.above) {
          cut = u64(f.bin) << first_shift;
        } else {
          const u32 least = f.bin << (32 - digit);
          list_chunk(keys, least, least | ((1U << (32 - digit)) - 1));
          __syncthreads();
          cut = refine<Clustered>(s.listed, f.bin, first_shift, k - f.above, f.count);
        }
      }
      if (p.args.order == TopKOrder::by_score) {
        __syncthreads();
        emit_by_score([&](auto push) {
#pragma unroll
          for (int i = 0; i < Items; ++i) {
            const u64 e = entry_of(keys[i], u32(place(begin, i / 4) + i % 4));
            if (e >= cut) push(e);
          }
        });
      } else {
        emit_chunk(keys, cut);
      }
    } else {
      const u32 least = f.all != 0 ? 1U : f.bin << (32 - digit);
      u32 limit = filter_limit(least);
      float4 a[quads], b[quads];
      int base = begin + chunk;
      load_chunk(a, base);
      load_chunk(b, base + chunk);
      list_chunk(keys, least, ~0U);
      __syncthreads();
      while (base < end) {
        take(a, base, limit);
        load_chunk(a, base + 2 * chunk);
        base += chunk;
        if (base >= end) break;
        take(b, base, limit);
        load_chunk(b, base + 2 * chunk);
        base += chunk;
      }
      const u32 n = s.listed;
      const u64 cut = refine<Clustered>(n, 0, first_shift + digit, k, ~0U);
      if (p.args.order == TopKOrder::by_score) {
        __syncthreads();
        emit_by_score([&](auto push) {
          for (u32 i = u32(tid); i < n; i += Threads) {
            const u64 e = list[i];
            if (e >= cut) push(e);
          }
        });
      } else {
        emit_list(n, cut);
      }
    }
    if (p.counts != nullptr) {
      nans = __reduce_add_sync(~0U, nans);
      if (lane == 0 && nans != 0) atomicAdd(p.counts, u64(nans));
      count_pages();
    }
  }
};

template <int Threads, int Items, bool Clustered, bool Paged>
__global__ __launch_bounds__(Threads, 1) void top_k_kernel(const __grid_constant__ Params p) {
  using B = Block<Threads, Items, Clustered, Paged>;
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ Scratch scratch;
  u32* hist = reinterpret_cast<u32*>(dynamic);
  u32* total = Clustered ? hist + bins : hist;
  u64* list = reinterpret_cast<u64*>(hist + bins * (Clustered ? 2 : 1));
  B block{p,    scratch, hist, total, list, reinterpret_cast<u64*>(hist), hist + 2 * by_counting, int(threadIdx.x), int(threadIdx.x & 31U),
          int(threadIdx.x >> 5)};
  block.run();
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

/// How a launch is shaped. Results do not depend on it.
struct TopKShape {
  int threads = 1024;  ///< 512 or 1024
  int items = 8;       ///< scores per thread kept in registers: 4 or 8
  int blocks = 1;      ///< blocks per row: 1, 2, 4, 8 or 16 (above 1 only where there are clusters)
};

#if KVIRE_CUDA_COMPILER

namespace detail::topk {

template <int Threads, int Items, bool Clustered, bool Paged>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  using B = Block<Threads, Items, Clustered, Paged>;
  auto* kernel = top_k_kernel<Threads, Items, Clustered, Paged>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(B::shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * p.blocks));
  config.blockDim = dim3(Threads);
  config.dynamicSmemBytes = B::shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  if constexpr (Clustered) {
    if (p.blocks > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(p.blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int Threads, int Items>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  if (p.blocks > 1) return p.args.page_table != nullptr ? launch<Threads, Items, true, true>(p, rows, stream) : launch<Threads, Items, true, false>(p, rows, stream);
  return p.args.page_table != nullptr ? launch<Threads, Items, false, true>(p, rows, stream) : launch<Threads, Items, false, false>(p, rows, stream);
}

}  // namespace detail::topk

/// The shape for `rows` rows of up to `columns` scores on a device of `processors` multiprocessors.
inline TopKShape top_k_shape(std::int64_t rows, std::int64_t columns, int processors, bool clusters) {
  TopKShape shape;
  if (columns <= 4096) {
    shape.items = 4;
    return shape;
  }
  if (!clusters) return shape;
  while (shape.blocks < 16 && rows * shape.blocks * 2 <= processors && columns > std::int64_t(shape.blocks) * 4096) shape.blocks *= 2;
  if (columns <= std::int64_t(shape.blocks) * 4096) shape.items = 4;
  return shape;
}

/// Exact, deterministic top-k; see body::top_k for what is selected and body::TopKArgs for extents. `counts` (device memory, or null) is
/// added to. Captures into graphs; allocates nothing, waits for nothing.
inline cudaError_t launch_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream, const TopKShape& shape) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (args.k < 0 || args.k > detail::topk::max_k || args.stride > (std::int64_t(1) << detail::topk::position_bits)) return cudaErrorInvalidValue;
  if (rows == 0 || args.k == 0) return cudaSuccess;
  detail::topk::Params p;
  p.args = args;
  p.counts = reinterpret_cast<detail::topk::u64*>(counts);
  p.blocks = shape.blocks;
  p.vector_loads = reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && args.stride % 4 == 0;
  for (int bit = 0; bit < 31; ++bit) {
    if (args.tokens_per_page == 1 << bit) p.page_shift = bit;
  }
  if (shape.threads == 512 && shape.items == 8) return detail::topk::launch<512, 8>(p, rows, stream);
  if (shape.items == 4) return detail::topk::launch<1024, 4>(p, rows, stream);
  return detail::topk::launch<1024, 8>(p, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
