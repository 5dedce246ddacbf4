// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_block.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// A short row: one block keeps it in registers.
template <int Threads, int Items, bool Streams, bool Clustered, bool Paged>
struct ShortRow : Block<Threads, Items, Streams, Clustered, Paged> {
  using Base = Block<Threads, Items, Streams, Clustered, Paged>;
  using Base::begin, Base::chunk, Base::clear, Base::emit_by_score, Base::end, Base::find, Base::hist, Base::keys_of, Base::lane, Base::list, Base::listed_as;
  using Base::load_chunk, Base::out, Base::p, Base::position_in_chunk, Base::quads, Base::s, Base::tid, Base::warp, Base::warps;

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
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
