// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_block.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// The filter of a long row: a threshold that a sample of the row suggests, somewhat below the k-th best, and the list of what passes it, read from the row once.
template <int Threads, int Items, bool Clustered, bool Paged>
struct FilteredRow : Block<Threads, Items, Clustered, Paged> {
  using Base = Block<Threads, Items, Clustered, Paged>;
  using Base::add_keys, Base::begin, Base::capacity, Base::chunk, Base::clear, Base::depth, Base::end, Base::find, Base::hist, Base::lane, Base::list, Base::load_tile;
  using Base::nans, Base::on_good_page, Base::p, Base::passing, Base::place, Base::quads, Base::s, Base::tid, Base::warp, Base::warps;

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
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
