// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/logits_arguments.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/layout/field.hpp>

KVIRE_NAMESPACE_BEGIN

/// Tokens whose blocks of e2m1 elements span more binades than an operand of the tensor cores has are scored once more, in f32: rare, and slow.
namespace sm90::detail {

/// The logits of one token, in f32 by one warp. `position`: which of the row's tokens it is; `token`: where its score stands.
template <class P, class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void exact_fp4(const LogitsArguments& a, int row, int token, int position, kstd::uint32_t shared, int lane) {
  const int id = a.page_table[a.table_stride * row + position / Plan::tokens];
  const kstd::byte* page = a.pages + a.page_stride * id;
  const auto* key = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Value>(position % Plan::tokens));
  const auto* scales = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Scale>(position % Plan::tokens));
  // A block of zeros loses nothing. Lanes look at their bytes of the key.
  int most = 0;
  for (int b = 0; b < Plan::blocks; ++b) most = scales[b] != 255 && scales[b] > most ? scales[b] : most;
  bool numbers = false;
  for (int i = lane; i < Plan::key_row; i += 32) numbers |= (key[i] & 0x77) != 0 && scales[i / 16] != 255 && scales[i / 16] + Plan::fp4_depth < most;
  if (!__any_sync(~0U, numbers)) return;
  __syncwarp();  // after the fast path's store
#pragma unroll 1
  for (int q = 0; q < Plan::next_n; ++q) {
    const kstd::int64_t at = static_cast<kstd::int64_t>(row) * Plan::next_n + q;
    float sum = 0;
#pragma unroll 1
    for (int h = lane; h < Heads; h += 32) {
      const auto* query = static_cast<const kstd::uint8_t*>(a.queries) + (at * Heads + h) * Plan::query_row;
      float dot = 0;
#pragma unroll 1
      for (int d = 0; d < Plan::dim; ++d) {
        const auto code = static_cast<kstd::uint8_t>(key[d / 2] >> d % 2 * 4 & 15);
        dot = fma_exact(f32_from_e4m3(query[d]), mul_exact(f32_from_e2m1(code), f32_from_ue8m0(scales[d / 32])), dot);
      }
      sum = fma_exact(twice_relu(dot), mul_exact(0.5F, a.weights[at * Heads + h]), sum);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum = add_exact(sum, __shfl_xor_sync(~0U, sum, mask));
    if (lane == 0 && position < static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4)) && sum == sum) store_score<Plan>(a, at * a.logits_stride + token, sum);
  }
}

/// The same for all tokens of a warp, `first` and the 15 behind, at `position` and behind, with `depths` of load_fp4_keys. After their logits were written.
template <class P, class Plan, int Heads, class Shape>
KVIRE_DEVICE KVIRE_INLINE void exact_logits(const LogitsArguments& a, int row, int first, int position, kstd::uint32_t depths, kstd::uint32_t shared, int lane) {
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    unsigned found = __ballot_sync(~0U, (depths >> 16 * half & 0xFFFFU) > Plan::fp4_depth);
    while (found != 0) {
      const int quad = (__ffs(static_cast<int>(found)) - 1) / 4;
      found &= ~(15U << quad * 4);
      exact_fp4<P, Plan, Heads>(a, row, first + half * 8 + quad, position + half * 8 + quad, shared, lane);
    }
  }
  if constexpr (Shape::best) {
    __syncwarp();
#pragma unroll 1
    for (int q = 0; q < Plan::next_n; ++q) {
      const kstd::int64_t at = static_cast<kstd::int64_t>(row) * Plan::next_n + q;
      const int seen = static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4));
      const int token = first + lane;
      const bool mine = lane < 16 && token < seen;
      const float logit = mine ? static_cast<const volatile float*>(a.logits)[at * a.logits_stride + token] : 0.0F;
      const kstd::uint32_t best = __reduce_max_sync(~0U, mine ? order_key(logit) : 0U);
      if (mine && lane == 0) a.group_best[at * ((a.logits_stride + 15) / 16) + token / 16] = best;
    }
  }
}

}  // namespace sm90::detail

KVIRE_NAMESPACE_END
