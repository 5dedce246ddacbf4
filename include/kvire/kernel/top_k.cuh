// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/body/top_k.hpp>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/tuning.hpp>

/// The tuned top-k kernel: the same selection as body::top_k, bit for bit, from one launch without workspace.
///
/// Short rows (up to 4096 or 8192 scores): one block keeps the row in registers. A histogram of the leading 12 bits of the order-preserving key
/// gives the bin that holds the k-th key, ranking the candidates of that bin gives the exact cut, and a scan writes what is not below it in
/// position order.
///
/// Longer rows: the blocks of a thread-block cluster (one block where there are none) first read the same sample of the whole row and so
/// agree, without talking, on a threshold that somewhat more than k scores should pass. Each block then reads its part of the row once and
/// lists what passes; the lists meet in the first block's shared memory, which selects exactly among them. If fewer than k passed, or more
/// than the list holds, the sample was misleading and the first block takes the row again, without guessing: the threshold is the k-th best
/// of what it has read so far, and a list that runs over is pruned to its exact top k.
///
/// The cut is a pair of key and position, unique in the row, so ties need no path of their own and nothing depends on the order in which
/// threads arrive. The guess decides how much work is left, never what is selected.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int max_k = 2048;
inline constexpr int bins = 4096;
inline constexpr int digit = 12;
inline constexpr int position_bits = 28;               // rows up to 2^28
inline constexpr int by_counting = 32;                 // candidates that a warp ranks by comparing each with each

using u32 = unsigned int;
using u64 = unsigned long long;

struct Params {
  body::TopKArgs args;
  u64* counts = nullptr;  // nan_scores, bad_pages; added to
  int blocks = 1;         // blocks per row
  int block_shift = 0;    // its log2
  int page_shift = -1;    // log2 of tokens_per_page, or -1
  bool vector_loads = false;
  bool overlap = false;  // programmatic dependent launch
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
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline u32 peer_address(const void* p, u32 rank) {
  u32 a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}
__device__ inline void peer_store(u32 a, u64 v) { asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory"); }
__device__ inline u32 peer_add(u32 a, u32 v) {
  u32 old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(a), "r"(v) : "memory");
  return old;
}
#else
__device__ inline u32 cluster_rank() { return 0; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline u32 peer_address(const void* p, u32) { return shared_address(p); }
__device__ inline void peer_store(u32, u64) {}
__device__ inline u32 peer_add(u32, u32) { return 0; }
#endif

__device__ inline float4 load_streaming4(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

struct alignas(16) Found {
  u32 bin, above, count, all;
};

// Small shared state of a block.
struct Scratch {
  u32 warp_sums[32];
  Found found;
  u64 cut;
  u32 listed;    // entries that this block has listed, from the list's front; beyond its capacity they are only counted
  u32 received;  // entries that other blocks have sent, from the list's back
  u32 counted;   // entries to be ranked by counting
  u32 emitted;
  u32 least, most;  // keys
  u32 sample_most, sample_passed;
};

template <int Threads, int Items, bool Streams, bool Clustered, bool Paged>
struct Block {
  static constexpr int warps = Threads / 32;
  static constexpr int quads = Items / 4;         // 16-byte loads per thread and chunk
  static constexpr int chunk = Threads * Items;
  static constexpr int capacity = Streams ? 1 << 14 : chunk;  // a pruned list always takes a whole chunk
  static constexpr int bin_quads = bins / 4 / Threads;
  static constexpr int depth = Items == 4 ? 6 : 4;  // quads of a thread under way
  static constexpr std::size_t shared_bytes = sizeof(u32) * bins * (Streams ? 2 : 1) + sizeof(u64) * capacity;
  static_assert(require_tuning<Block, (bins % (4 * Threads) == 0 && by_counting <= 32 && Items <= 8 && (!Streams || capacity >= max_k + 4 * Threads))>());

  const Params& p;
  Scratch& s;
  u32* hist;
  u32* passing;  // a histogram of what passed the filter, from its least key on
  u64* list;
  u64* candidates;  // over `passing` (the histogram, where there is one), once it has been searched
  const int tid, lane, warp;
  u32 rank = 0, blocks = 1;
  u32 row = 0;
  const float* scores;
  int begin = 0, end = 0;
  u32 nans = 0;

  __device__ int page_of(int position) const { return p.page_shift >= 0 ? position >> p.page_shift : position / p.args.tokens_per_page; }
  __device__ std::int32_t entry_of_page(int page) const { return p.args.page_table[std::int64_t(request()) * p.args.max_pages + page]; }
  __device__ u32 request() const { return p.args.next_n == 1 ? row : row / u32(p.args.next_n); }
  // body::TopKArgs::visible without its 64-bit divisions, which would be the longest thing a short row waits for.
  __device__ int visible() const {
    if (p.args.lengths == nullptr) return int(p.args.stride);
    const u32 r = request();
    const bool causal = p.args.next_n != 1 && !p.args.lengths_per_query;
    const std::int64_t length = std::int64_t(p.args.lengths[causal ? r : row]) - (causal ? p.args.next_n - 1 - int(row - r * u32(p.args.next_n)) : 0);
    return int(max(std::int64_t(0), min(length, p.args.stride)));
  }
  __device__ bool on_good_page(int position) const {
    if constexpr (!Paged) return true;
    return p.args.good_page(entry_of_page(page_of(position)));
  }
  __device__ int listed_as(int position) const {
    if constexpr (Paged) {
      if (p.args.translate) {
        const int page = page_of(position);
        return entry_of_page(page) * p.args.tokens_per_page + (position - page * p.args.tokens_per_page);
      }
    }
    return position;
  }
  __device__ std::int32_t* out() const { return p.args.selected + std::int64_t(row) * p.args.k; }

  // --- loads; -inf beyond the end ---
  __device__ float4 load4(int position) const {
    if (position + 4 <= end && p.vector_loads) return load_streaming4(scores + position);
    const float none = float_of(0xFF800000U);
    float4 v = {none, none, none, none};
    if (position < end) v.x = scores[position];
    if (position + 1 < end) v.y = scores[position + 1];
    if (position + 2 < end) v.z = scores[position + 2];
    if (position + 3 < end) v.w = scores[position + 3];
    return v;
  }
  // This thread's quad of the block's d-th tile from `base` on. The whole block takes one way: few instructions where the tile is whole.
  __device__ float4 load_tile(int base, int d) const {
    const int first = base + d * Threads * 4;
    if (first + Threads * 4 <= end && p.vector_loads) return load_streaming4(scores + first + tid * 4);
    if (first < end) return load4(first + tid * 4);
    const float none = float_of(0xFF800000U);
    return {none, none, none, none};
  }
  __device__ int place(int base, int q) const { return base + (q * Threads + tid) * 4; }
  __device__ void load_chunk(float4 (&v)[quads], int base) const {
#pragma unroll
    for (int q = 0; q < quads; ++q) v[q] = load4(place(base, q));
  }

  // --- histograms ---
  __device__ void clear(u32* counts) {
    for (int i = tid; i < bins / 4; i += Threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
  }
  // Sum over the threads before this one. One barrier inside; the caller puts one before the next use.
  __device__ u32 exclusive_scan(u32 x) {
    const u32 mine = __reduce_add_sync(~0U, x);
    if (lane == 0) s.warp_sums[warp] = mine;
    u32 up = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    __syncthreads();
    return __reduce_add_sync(~0U, lane < warp ? s.warp_sums[lane] : 0) + up - x;
  }
  // The bin, from the top, in which the need-th entry lies. Starts after a barrier, ends with one. Only the warp whose bins hold it scans.
  __device__ Found find(const u32* counts, u32 need) {
    uint4 v[bin_quads];
    u32 sum = 0;
#pragma unroll
    for (int j = 0; j < bin_quads; ++j) {
      v[j] = reinterpret_cast<const uint4*>(counts)[bins / 4 - 1 - (tid * bin_quads + j)];
      sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
    }
    const u32 mine = __reduce_add_sync(~0U, sum);
    if (lane == 0) s.warp_sums[warp] = mine;
    __syncthreads();
    u32 before = __reduce_add_sync(~0U, lane < warp ? s.warp_sums[lane] : 0);
    if (before < need && need <= before + mine) {
      u32 up = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0U, up, d);
        if (lane >= d) up += other;
      }
      before += up - sum;
      if (before < need && need <= before + sum) {
#pragma unroll
        for (int j = 0; j < bin_quads; ++j) {
          const u32 down[4] = {v[j].w, v[j].z, v[j].y, v[j].x};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (before < need && need <= before + down[i]) s.found = Found{u32(bins - 1 - (tid * bin_quads + j) * 4 - i), before, down[i], 0};
            before += down[i];
          }
        }
      }
    } else if (tid == Threads - 1 && before + mine < need) {
      s.found = Found{0, 0, 0, 1};
    }
    __syncthreads();
    return s.found;
  }

  // --- exact selection -----------------------------------------------------------------------------------------------------------------
  // The need-th best of the `count` candidates, which the caller has put into `candidates` and followed by a barrier. Each warp for itself.
  __device__ u64 rank_candidates(u32 need, u32 count) const {
    const u64 mine = u32(lane) < count ? candidates[lane] : 0;
    u32 better = 0;
    for (u32 j = 0; j < count; ++j) better += candidates[j] > mine ? 1U : 0U;
    const u32 winner = __ballot_sync(~0U, u32(lane) < count && better == need - 1);
    return __shfl_sync(~0U, mine, __ffs(int(winner)) - 1);
  }

  // Entry i of the front and the back of the list.
  __device__ u64 entry(u32 i, u32 front) const { return list[i < front ? i : u32(capacity) - 1 - (i - front)]; }

  // The cut with exactly `need` of the n entries (0 is none) at or above it. More than `need` of them are entries.
  __device__ u64 select(u32 n, u32 front, u32 need) {
    // Bins of equal width between the least and the largest key: few candidates are left where scores are spread at all.
    u32 least = ~0U, most = 0;
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u32 key = key_of(entry(i, front));
      least = min(least, key != 0 ? key : ~0U);
      most = max(most, key);
    }
    least = __reduce_min_sync(~0U, least);
    most = __reduce_max_sync(~0U, most);
    if (tid == 0) {
      s.least = ~0U;
      s.most = 0;
      s.counted = 0;
    }
    clear(hist);
    __syncthreads();
    if (lane == 0) {
      atomicMin(&s.least, least);
      atomicMax(&s.most, most);
    }
    __syncthreads();
    const u64 base = u64(s.least) << position_bits;
    const u64 span = ((u64(s.most) + 1) << position_bits) - base;
    return refine(n, front, base, span, need);
  }
  // The same among the entries in [base, base + span), of which more than `need` are some. The histogram is clear.
  __device__ u64 refine(u32 n, u32 front, u64 base, u64 span, u32 need) {
    int shift = max(0, 64 - __clzll(static_cast<long long>(span - 1)) - digit);
    for (;;) {
      for (u32 i = u32(tid); i < n; i += Threads) {
        const u64 above = entry(i, front) - base;  // beyond any span for what is below the base, or no entry
        if (above < span) atomicAdd(&hist[above >> shift], 1U);
      }
      __syncthreads();
      const Found f = find(hist, need);
      base += u64(f.bin) << shift;
      span = u64(1) << shift;
      need -= f.above;
      if (f.count == need) return base;
      if (f.count <= by_counting) return rank_between(n, front, base, span, need, f.count);
      shift = max(0, shift - digit);
      clear(hist);
      __syncthreads();
    }
  }
  // The need-th best of the `count` entries in [base, base + span); s.counted is 0.
  __device__ u64 rank_between(u32 n, u32 front, u64 base, u64 span, u32 need, u32 count) {
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u64 e = entry(i, front);
      if (e - base < span) candidates[atomicAdd(&s.counted, 1U)] = e;
    }
    __syncthreads();
    return rank_candidates(need, count);
  }

  // --- the row in registers --------------------------------------------------------------------------------------------------------------
  __device__ void keys_of(u32 (&keys)[Items], const float4 (&v)[quads], int base, bool count_nans) {
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const u32 b[4] = {bits_of(v[q].x), bits_of(v[q].y), bits_of(v[q].z), bits_of(v[q].w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = place(base, q) + i;
        u32 key = position < end ? candidate_key(b[i]) : 0;
        nans += count_nans && position < end && key == 0 ? 1U : 0U;
        if (Paged && key != 0 && !on_good_page(position)) key = 0;
        keys[q * 4 + i] = key;
      }
    }
  }
  __device__ void add_keys(const u32 (&keys)[Items]) {
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      if (keys[i] != 0) atomicAdd(&hist[keys[i] >> (32 - digit)], 1U);
    }
  }
  __device__ u32 position_in_chunk(int base, int i) const { return u32(place(base, i / 4) + i % 4); }

  __device__ void row_in_registers() {
    float4 v[quads];
    load_chunk(v, begin);
    clear(hist);
    if (tid == 0) {
      s.listed = 0;
      s.counted = 0;
      s.emitted = 0;
    }
    __syncthreads();
    u32 keys[Items];
    keys_of(keys, v, begin, true);
    // One digit of the entries after another, among those that share the digits before, until a digit's end is the cut.
    u64 cut = 0;
    u32 need = u32(p.args.k);
    int shift = 32 + position_bits - digit;
    bool full = true;
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        const u64 above = entry_of(keys[i], position_in_chunk(begin, i)) - cut;
        if (keys[i] != 0 && above >> shift < u64(bins)) atomicAdd(&hist[above >> shift], 1U);
      }
      __syncthreads();
      const Found f = find(hist, need);
      if (f.all != 0) {
        cut = u64(1) << position_bits;
        full = false;
        break;
      }
      cut += u64(f.bin) << shift;
      need -= f.above;
      if (f.count == need) break;
      shift -= digit;
      clear(hist);
      __syncthreads();
    }
    cut = max(cut, u64(1) << position_bits);
    if (p.args.order == TopKOrder::by_score) {
      __syncthreads();
      u64* ranked = reinterpret_cast<u64*>(hist);
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        const u64 e = entry_of(keys[i], position_in_chunk(begin, i));
        if (e >= cut) ranked[atomicAdd(&s.emitted, 1U)] = e;
      }
      emit_by_score();
    } else {
      emit_keys(keys, cut, full);
    }
  }

  // In position order: 16-bit counts of two quads share a word. Each warp packs its positions in shared memory and writes them side by side.
  __device__ void emit_keys(const u32 (&keys)[Items], u64 cut, bool full) {
    u32* packed = reinterpret_cast<u32*>(list) + warp * 32 * Items;
    u32 flags = 0;
    u32 n = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const bool taken = entry_of(keys[i], position_in_chunk(begin, i)) >= cut;
      flags |= taken ? 1U << i : 0U;
      n += taken ? 1U << (i / 4 * 16) : 0U;
    }
    u32 up = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    const u32 mine = __shfl_sync(~0U, up, 31);
    if (lane == 0) s.warp_sums[warp] = mine;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const int q = i / 4;
      const u32 lower = flags >> (q * 4) & ((1U << (i % 4)) - 1);
      const u32 slot = q == 0 ? (up - n & 0xFFFFU) : (mine & 0xFFFFU) + (up - n >> 16);
      if ((flags >> i & 1U) != 0) packed[slot + u32(__popc(lower))] = position_in_chunk(begin, i);
    }
    __syncthreads();
    const u32 w = lane < warps ? s.warp_sums[lane] : 0;
    const u32 before = __reduce_add_sync(~0U, lane < warp ? w : 0);
    const u32 all = quads == 1 && full ? 0 : __reduce_add_sync(~0U, w);
    std::int32_t* to = out() + (before & 0xFFFFU);
    const u32 first = mine & 0xFFFFU;
    for (u32 i = u32(lane); i < first; i += 32) to[i] = listed_as(int(packed[i]));
    if constexpr (quads > 1) {
      to = out() + (all & 0xFFFFU) + (before >> 16);
      for (u32 i = u32(lane); i < mine >> 16; i += 32) to[i] = listed_as(int(packed[first + i]));
    }
    if (full) return;
    for (int j = int((all & 0xFFFFU) + (all >> 16)) + tid; j < p.args.k; j += Threads) out()[j] = -1;
  }

  // --- the streamed row ------------------------------------------------------------------------------------------------------------------
  struct Filter {
    u32 least = 1;  // key
    u32 limit = 0;  // filter_key of it
    int shift = 0;  // of the bins of `passing`
  };

  __device__ u32* passing_bin(u32 key, const Filter& f) const { return passing + min((key - f.least) >> f.shift, u32(bins - 1)); }

  // Lists what passes of four neighbouring scores. Entries beyond the capacity are counted, not kept; true if there were any.
  template <bool Positive, bool Guessed>
  __device__ bool list_passing(const float4& v, int position, const Filter& f, bool count_nans) {
    const u32 b[4] = {bits_of(v.x), bits_of(v.y), bits_of(v.z), bits_of(v.w)};
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Positive) {  // -inf, which stands beyond the end, does not pass
        if (int(b[i]) >= int(f.limit - 0x7F800001U) && b[i] <= infinity_bits && on_good_page(position + i)) mask |= 1U << i;
      } else if (filter_key(b[i]) >= f.limit && position + i < end) {
        if (is_nan_bits(b[i])) {
          nans += count_nans ? 1U : 0U;
        } else if (on_good_page(position + i)) {
          mask |= 1U << i;
        }
      }
    }
    if (mask == 0) return false;
    u32 slot = atomicAdd(&s.listed, u32(__popc(mask)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((mask >> i & 1U) != 0) {
        const u32 key = Positive ? sign_bit + b[i] : order_key(float_of(b[i]));
        if (slot < u32(capacity)) list[slot] = entry_of(key, u32(position + i));
        ++slot;
        if constexpr (Guessed && !Clustered) atomicAdd(passing_bin(key, f), 1U);
      }
    }
    return slot > u32(capacity);
  }
  // A cheap test of a quad first. Above zero, and if negative NaNs need not be counted, bits compare as signed integers.
  template <bool Positive>
  __device__ void list_part(float4 (&ring)[depth], const Filter& f) {
    const int least = int(f.limit - 0x7F800001U);
    for (int base = begin; base < end; base += depth * Threads * 4) {
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        if (base + d * Threads * 4 >= end) return;
        const float4 v = ring[d];
        const int position = place(base, d);
        ring[d] = load_tile(base, d + depth);
        const u32 x = bits_of(v.x), y = bits_of(v.y), z = bits_of(v.z), w = bits_of(v.w);
        bool pass = false;
        if constexpr (Positive) {
          pass = max(max(int(x), int(y)), max(int(z), int(w))) >= least;
        } else {
          pass = max(max(filter_key(x), filter_key(y)), max(filter_key(z), filter_key(w))) >= f.limit;
        }
        if (pass) list_passing<Positive, true>(v, position, f, true);
      }
    }
  }

  // The filter that the sample suggests. 128 neighbouring scores for each warp and quad, spread over the row.
  __device__ int sample_place(int length, int q) const { return (q * warps + warp) * int(u32(length) / u32(quads * warps) & ~3U) + lane * 4; }
  __device__ Filter guess(const float4 (&v)[quads], int length) {
    // Expected in the sample are `mean` of the row's top k; five standard deviations more, and there are k or more in the row.
    const float mean = __fdividef(float(p.args.k) * float(chunk), float(length));
    const float deviation = __fsqrt_rn(mean);
    const u32 wanted = u32(mean + 5 * deviation + 6);
    const u32 enough = u32(mean + 4 * deviation + 4);
    u32 keys[Items];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const u32 b = bits_of(i % 4 == 0 ? v[i / 4].x : i % 4 == 1 ? v[i / 4].y : i % 4 == 2 ? v[i / 4].z : v[i / 4].w);
      keys[i] = candidate_key(b);
      if (Paged && keys[i] != 0 && !on_good_page(sample_place(length, i / 4) + i % 4)) keys[i] = 0;
      most = max(most, keys[i]);
    }
    add_keys(keys);
    most = __reduce_max_sync(~0U, most);
    if (lane == 0) atomicMax(&s.sample_most, most);
    __syncthreads();
    Found f = find(hist, wanted);
    Filter filter;
    if (f.all == 0) {
      u32 width = 1U << (32 - digit);
      filter.least = f.bin << (32 - digit);
      if (f.count > wanted) {
        // Most of what passes shares this bin: look at the next digit.
        clear(hist);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Items; ++i) {
          if (keys[i] >> (32 - digit) == f.bin) atomicAdd(&hist[keys[i] >> (32 - 2 * digit) & (bins - 1)], 1U);
        }
        __syncthreads();
        const u32 above = f.above;
        f = find(hist, wanted - above);
        f.above += above;
        width = 1U << (32 - 2 * digit);
        filter.least |= f.bin << (32 - 2 * digit);
      }
      // As if the bin's scores were spread evenly; only if the sample bears it out, for they may be few distinct numbers.
      const u32 within = filter.least + u32(float(width) * (1 - __fdividef(float(wanted - f.above), float(f.count))));
      u32 n = 0;
#pragma unroll
      for (int i = 0; i < Items; ++i) n += keys[i] >= within ? 1U : 0U;
      n = __reduce_add_sync(~0U, n);
      if (lane == 0) atomicAdd(&s.sample_passed, n);
      __syncthreads();
      if (s.sample_passed >= enough) filter.least = within;
      filter.limit = filter_limit(filter.least);
    }
    filter.shift = max(0, 32 - __clz(int(max(s.sample_most, filter.least) - filter.least)) - digit);
    return filter;
  }

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
      const bool overflow = list_passing<false, false>(v, place(base, 0), f, false);
      if (__syncthreads_or(overflow) != 0) {
        f.limit = filter_limit(prune(base));
        list_passing<false, false>(v, place(base, 0), f, false);
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
    if constexpr (Clustered) cluster_arrive();  // the first block's counters are set
    const Filter f = guess(v, length);
    clear(hist);
    if constexpr (Clustered) cluster_wait();
    if (p.counts == nullptr && f.limit > 0x7F800001U) {
      list_part<true>(ring, f);
    } else {
      list_part<false>(ring, f);
    }
    __syncthreads();
    u32 n = s.listed;
    u32 front = n;
    if constexpr (Clustered) {
      if (rank != 0) {
        if (tid == 0) s.counted = peer_add(peer_address(&s.received, 0), n);
        __syncthreads();
        const u32 slot = s.counted;
        for (u32 i = u32(tid); i < min(n, u32(capacity)); i += Threads) {
          if (slot + i < u32(capacity)) peer_store(peer_address(list + (capacity - 1 - (slot + i)), 0), list[i]);
        }
        cluster_arrive();
        return;
      }
      cluster_arrive();
      cluster_wait();
      n += s.received;
      if (n <= u32(capacity)) {
        for (u32 i = u32(tid); i < n; i += Threads) atomicAdd(passing_bin(key_of(entry(i, front)), f), 1U);
      }
      __syncthreads();
    }
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

  // Sorts the s.emitted entries over hist by score. Starts with a barrier.
  __device__ void emit_by_score() {
    __syncthreads();
    u64* ranked = reinterpret_cast<u64*>(hist);
    const u32 all = s.emitted;
    u32 width = 1;
    while (width < all) width *= 2;
    for (u32 i = all + u32(tid); i < width; i += Threads) ranked[i] = 0;
    __syncthreads();
    for (u32 size = 2; size <= width; size *= 2) {
      for (u32 stride = size / 2; stride != 0; stride /= 2) {
        for (u32 i = u32(tid); i < width / 2; i += Threads) {
          const u32 at = 2 * i - (i & (stride - 1));
          const u64 u = ranked[at];
          const u64 v = ranked[at + stride];
          if (u != v && ((at & size) == 0) == (u < v)) {
            ranked[at] = v;
            ranked[at + stride] = u;
          }
        }
        __syncthreads();
      }
    }
    for (u32 i = u32(tid); i < u32(p.args.k); i += Threads) out()[i] = i < all ? listed_as(int(position_of(ranked[i]))) : -1;
  }

  __device__ void count_pages(int length) {
    if constexpr (Paged) {
      u32 bad = 0;
      for (int page = tid; page < ceil_div(length, p.args.tokens_per_page); page += Threads) {
        const std::int32_t id = entry_of_page(page);
        bad += id >= 0 && !p.args.good_page(id) ? 1U : 0U;
      }
      bad = __reduce_add_sync(~0U, bad);
      if (lane == 0 && bad != 0) atomicAdd(p.counts + 1, u64(bad));
    }
  }

  __device__ void run() {
    blocks = Clustered ? u32(p.blocks) : 1;
    rank = Clustered ? cluster_rank() : 0;
    row = Clustered ? blockIdx.x >> p.block_shift : blockIdx.x;
    scores = p.args.scores + std::int64_t(row) * p.args.stride;
    if (!Clustered && p.args.stride <= chunk) {
      // The row on its way to L2 while its length is on its way here.
      for (int i = tid; i < int(p.args.stride) / 32; i += Threads) asm volatile("prefetch.global.L2 [%0];" ::"l"(scores + i * 32));
    }
    const int length = visible();
    if (length <= chunk) {
      if (rank != 0) return;
      end = length;
      row_in_registers();
    } else if constexpr (Streams) {
      row_in_stream(length);
    }
    if (p.counts != nullptr) {
      nans = __reduce_add_sync(~0U, nans);
      if (lane == 0 && nans != 0) atomicAdd(p.counts, u64(nans));
      if (rank == 0) count_pages(length);
    }
  }
};

template <int Threads, int Items, bool Streams, bool Clustered, bool Paged>
__global__ __launch_bounds__(Threads, 1) void top_k_kernel(const __grid_constant__ Params p) {
#if KVIRE_DEVICE_ARCH >= 900
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
#endif
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ Scratch scratch;
  u32* hist = reinterpret_cast<u32*>(dynamic);
  u32* passing = Streams ? hist + bins : hist;
  u64* list = reinterpret_cast<u64*>(passing + bins);
  Block<Threads, Items, Streams, Clustered, Paged> block{p, scratch, hist, passing, list, reinterpret_cast<u64*>(passing), int(threadIdx.x), int(threadIdx.x & 31U), int(threadIdx.x >> 5)};
  block.run();
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

/// How a launch is shaped. Results do not depend on it.
struct TopKShape {
  int threads = 1024;  ///< 1024
  int items = 8;       ///< scores per thread kept in registers: 4 or 8
  int blocks = 1;      ///< blocks per row: 1, 2, 4, 8 or 16 (above 1 only where there are clusters)
};

#if KVIRE_CUDA_COMPILER

namespace detail::topk {

template <int Threads, int Items, bool Streams, bool Clustered, bool Paged>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  using B = Block<Threads, Items, Streams, Clustered, Paged>;
  auto* kernel = top_k_kernel<Threads, Items, Streams, Clustered, Paged>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(B::shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * (Clustered ? p.blocks : 1)));
  config.blockDim = dim3(Threads);
  config.dynamicSmemBytes = B::shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (p.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if constexpr (Clustered) {
    if (p.blocks > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(p.blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int Threads, int Items>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  const bool paged = p.args.page_table != nullptr;
  if (p.args.stride <= Threads * Items) return paged ? launch<Threads, Items, false, false, true>(p, rows, stream) : launch<Threads, Items, false, false, false>(p, rows, stream);
  if (p.blocks > 1) return paged ? launch<Threads, Items, true, true, true>(p, rows, stream) : launch<Threads, Items, true, true, false>(p, rows, stream);
  return paged ? launch<Threads, Items, true, false, true>(p, rows, stream) : launch<Threads, Items, true, false, false>(p, rows, stream);
}

}  // namespace detail::topk

/// The shape for `rows` rows of up to `columns` scores on a device of `processors` multiprocessors.
inline TopKShape top_k_shape(std::int64_t rows, std::int64_t columns, int processors, bool clusters) {
  TopKShape shape;
  if (columns <= 8192) {
    shape.items = columns <= 4096 ? 4 : 8;
    return shape;
  }
  while (clusters && shape.blocks < 16 && rows * shape.blocks * 2 <= processors && columns > std::int64_t(shape.blocks) * 4096) shape.blocks *= 2;
  shape.items = shape.blocks == 1 || columns / shape.blocks > 32768 ? 8 : 4;  // a longer part pays for a larger sample
  return shape;
}

/// Exact, deterministic top-k; see body::top_k for what is selected and body::TopKArgs for extents. `counts` (device memory, or null) is
/// added to. `overlap`: programmatic dependent launch, from sm_90 on; the kernel waits for the stream's earlier one before it reads. Captures into
/// graphs; allocates nothing, waits for nothing.
template <int = 0>  // compiled where it is called, not wherever the header is included
cudaError_t launch_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream, const TopKShape& shape, bool overlap = false) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (args.k < 0 || args.k > detail::topk::max_k || args.stride > (std::int64_t(1) << detail::topk::position_bits)) return cudaErrorInvalidValue;
  if (rows == 0 || args.k == 0) return cudaSuccess;
  detail::topk::Params p;
  p.args = args;
  p.counts = reinterpret_cast<detail::topk::u64*>(counts);
  p.blocks = shape.blocks;
  p.overlap = overlap;
  p.vector_loads = reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && args.stride % 4 == 0;
  while (1 << p.block_shift < p.blocks) ++p.block_shift;
  for (int bit = 0; bit < 31; ++bit) {
    if (args.tokens_per_page == 1 << bit) p.page_shift = bit;
  }
  if (shape.items == 4) return detail::topk::launch<1024, 4>(p, rows, stream);
  return detail::topk::launch<1024, 8>(p, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
