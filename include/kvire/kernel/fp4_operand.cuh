// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/logits_share.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/layout/field.hpp>

KVIRE_NAMESPACE_BEGIN

/// e2m1 keys as an operand of e4m3 or bf16 products. A token's blocks have scales of their own, powers of two: they go into the operand relative to
/// the token's largest, which multiplies the sum over the heads.
namespace sm90::detail {

using ptx::Words4;

/// The e4m3 codes of the eight e2m1 magnitudes times 2^(index - 9), for index 1 to 15, all exact; zeros for 0, NaN for 16.
KVIRE_DEVICE KVIRE_INLINE void make_codes(kstd::uint32_t at, int index) {
  kstd::uint32_t low = 0x3C383000U + 0x08080800U * static_cast<kstd::uint32_t>(index - 9);
  kstd::uint32_t high = 0x4C484440U + 0x08080808U * static_cast<kstd::uint32_t>(index - 9);
  if (index == 3) low = 0x0C080400U, high = 0x1C181410U;
  if (index == 2) low = 0x06040200U, high = 0x14100C08U;
  if (index == 1) low = 0x03020100U, high = 0x0C080604U;
  if (index == 0) low = 0, high = 0;
  if (index == 16) low = high = 0x7F7F7F7FU;
  ptx::store_shared(at + index * 8, low);
  ptx::store_shared(at + index * 8 + 4, high);
}

/// This lane's part of a tile of e2m1 keys as operand A: rows `row` and `row` + 8, of which lane c of a quad owns block c. The blocks' exponents are taken
/// relative to the token's largest, and that one, as the factor of the token this lane finishes, is returned. e4m3 operands hold magnitudes times 2^-8 to
/// 2^6 exactly; `lost` says that a block lay below that.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE float load_fp4_keys(kstd::uint32_t (&k)[Plan::steps][4], bool (&lost)[2], kstd::uint32_t stage, kstd::uint32_t codes, int row, int c) {
  constexpr int n = Plan::key_row / 16;  // words of a lane and key: 8 elements each
  kstd::uint32_t exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t at = stage + Plan::value_bytes + (row + half * 8) * Plan::scale_row + c * Plan::blocks / 4;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent[half]) : "r"(at) : "memory");
  }
  kstd::uint32_t most = (exponent[0] == 255 ? 0 : exponent[0]) | (exponent[1] == 255 ? 0 : exponent[1]) << 16;
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t from = stage + (row + half * 8) * Plan::key_row + c * n * 4;
    kstd::uint32_t words[n];
    if constexpr (n == 4) {
      const Words4 v = ptx::load_shared4(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    }
    const int below = static_cast<int>(exponent[half]) - static_cast<int>(most >> 16 * half & 0xFFFFU);  // at most 0
    if constexpr (Plan::fp8) {
      int index = below + 15 < 0 ? 0 : below + 15;
      if (exponent[half] == 255) index = 16;
      lost[half] = below < -14 && exponent[half] != 255;
      kstd::uint32_t low, high;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(codes + index * 8) : "memory");
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const kstd::uint32_t magnitude = words[u] & 0x77777777U;
        const kstd::uint32_t a = permute(low, high, magnitude), b = permute(low, high, magnitude >> 16);
        k[u][half] = permute(a, b, 0x6420) | (words[u] << 4 & 0x80808080U);      // elements 0, 2, 4, 6
        k[u][half + 2] = permute(a, b, 0x7531) | (words[u] & 0x80808080U);  // 1, 3, 5, 7
      }
    } else {
      // As bf16 subnormals and small normals the bits of e2m1 are its value times 2^-126.
      const int biased = 253 + below;
      kstd::uint32_t factor = biased < 1 ? 0 : static_cast<kstd::uint32_t>(biased) << 7;
      if (exponent[half] == 255) factor = 0x7FC0;
      factor |= factor << 16;
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const kstd::uint32_t w = words[u];
        const kstd::uint32_t pairs[4] = {(w << 6 & 0x01C001C0U) | (w << 12 & 0x80008000U), (w << 2 & 0x01C001C0U) | (w << 8 & 0x80008000U),
                                         (w >> 2 & 0x01C001C0U) | (w << 4 & 0x80008000U), (w >> 6 & 0x01C001C0U) | (w & 0x80008000U)};
#pragma unroll
        for (int r = 0; r < 4; ++r) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(k[2 * u + r / 2][half + 2 * (r % 2)]) : "r"(pairs[r]), "r"(factor));
      }
    }
  }
  const kstd::uint32_t top = c % 2 != 0 ? most >> 16 : most & 0xFFFFU;
  if constexpr (Plan::fp8) return __uint_as_float(top > 6 ? (top - 6) << 23 : 1U << (top + 16));  // 2^(top - 127 - 6)
  return __uint_as_float(top > 0 ? top << 23 : 0x400000U);
}

/// The logits of one token whose blocks span more binades than e4m3 has, in f32 by one warp: rare, and slow. `position`: which of the row's tokens it is;
/// `token`: where its score stands.
template <class P, class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void exact_fp4(const LogitsArguments& a, int row, int token, int position, kstd::uint32_t shared, int lane) {
  const int id = __ldg(a.page_table + a.table_stride * row + position / Plan::tokens);
  const kstd::byte* page = a.pages + a.page_stride * id;
  const auto* key = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Value>(position % Plan::tokens));
  const auto* scales = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Scale>(position % Plan::tokens));
  // A block of zeros loses nothing. Lanes look at their bytes of the key.
  int most = 0;
  for (int b = 0; b < Plan::blocks; ++b) most = __ldg(scales + b) != 255 && __ldg(scales + b) > most ? __ldg(scales + b) : most;
  bool numbers = false;
  for (int i = lane; i < Plan::key_row; i += 32) numbers |= (__ldg(key + i) & 0x77) != 0 && __ldg(scales + i / 16) != 255 && __ldg(scales + i / 16) + 14 < most;
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
        const auto code = static_cast<kstd::uint8_t>(__ldg(key + d / 2) >> d % 2 * 4 & 15);
        dot = fma_exact(f32_from_e4m3(__ldg(query + d)), mul_exact(f32_from_e2m1(code), f32_from_ue8m0(__ldg(scales + d / 32))), dot);
      }
      sum = fma_exact(twice_relu(dot), mul_exact(0.5F, __ldg(a.weights + at * Heads + h)), sum);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum = add_exact(sum, __shfl_xor_sync(~0U, sum, mask));
    if (lane == 0 && position < static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4)) && sum == sum) store_score<Plan>(a, at * a.logits_stride + token, sum);
  }
}

/// The same for all tokens of a warp, `first` and the 15 behind, at `position` and behind, of which `lost` says that their products may be wrong. After
/// their logits were written.
template <class P, class Plan, int Heads, class Shape>
KVIRE_DEVICE KVIRE_INLINE void exact_logits(const LogitsArguments& a, int row, int first, int position, const bool (&lost)[2], kstd::uint32_t shared, int lane) {
  if (!__any_sync(~0U, lost[0] || lost[1])) return;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    unsigned found = __ballot_sync(~0U, half == 0 ? lost[0] : lost[1]);
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
