// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/logits_arguments.cuh>
#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/layout/field.hpp>

KVIRE_NAMESPACE_BEGIN

/// e2m1 keys as an operand of e4m3 or bf16 products. A token's blocks have scales of their own, powers of two: they go into the operand relative to
/// the token's largest, which multiplies the sum over the heads.
namespace sm90::detail {

using ptx::Words4;

/// The e4m3 codes of the eight e2m1 magnitudes times 2^(6 - depth), for depth 0 to 14, all exact, with the sign set; for depth 15 eight times 0x40.
KVIRE_DEVICE KVIRE_INLINE void make_codes(kstd::uint32_t at, int depth) {
  kstd::uint32_t low = 0x3C383000U + 0x08080800U * static_cast<kstd::uint32_t>(6 - depth);
  kstd::uint32_t high = 0x4C484440U + 0x08080808U * static_cast<kstd::uint32_t>(6 - depth);
  if (depth == 12) low = 0x0C080400U, high = 0x1C181410U;
  if (depth == 13) low = 0x06040200U, high = 0x14100C08U;
  if (depth == 14) low = 0x03020100U, high = 0x0C080604U;
  ptx::store_shared(at + depth * 8, depth == 15 ? 0x40404040U : low | 0x80808080U);
  ptx::store_shared(at + depth * 8 + 4, depth == 15 ? 0x40404040U : high | 0x80808080U);
}

/// Whether a block, one of each half, lies so far below its token's largest that an e4m3 operand does not hold it.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE bool loses(kstd::uint32_t depths) {
  return __vminu2(depths, Plan::fp4_depth * 0x10001U) != depths;
}

/// 2^(exponent - 127 - Shift), NaN for 255.
template <int Shift>
KVIRE_DEVICE KVIRE_INLINE float scale_number(kstd::uint32_t exponent) {
  const kstd::uint32_t bits = exponent << 23;
  float x = __uint_as_float(bits > 0x400000U ? bits : 0x400000U);
  if constexpr (Shift != 0) x = mul_exact(x, 1.0F / (1 << Shift));
  return fma_exact(x, 0.0F, x);  // infinity times 0
}

/// This lane's part of a tile of e2m1 keys as operand A: block c of two rows, the second 8 behind the first, whose scale and elements are at `scale_at` and
/// `key_at`. The blocks' exponents are taken relative to the token's largest, and that one, as the factor of the token this lane finishes, is returned.
/// `depths`: how far below the largest the blocks are, one in each half of the word. `positive`: 0x40404040 in a register, not
/// a constant, which the assembler would bring into another register for each use.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE float load_fp4_keys(kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t& depths, kstd::uint32_t scale_at, kstd::uint32_t key_at,
                                              kstd::uint32_t codes, kstd::uint32_t positive, int c) {
  constexpr int n = Plan::key_row / 16;  // words of a lane and key: 8 elements each
  kstd::uint32_t exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent[half]) : "r"(scale_at + half * 8 * Plan::scale_row) : "memory");
  const kstd::uint32_t both = exponent[1] * 0x10000U + exponent[0];
  kstd::uint32_t most = __vmaxu2(both, __shfl_xor_sync(~0U, both, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
  depths = most - both;
  const kstd::uint32_t held = __vminu2(depths, (Plan::fp8 ? Plan::fp4_depth : 253) * 0x10001U);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t from = key_at + half * 8 * Plan::key_row;
    kstd::uint32_t words[n];
    if constexpr (n == 4) {
      const Words4 v = ptx::load_shared4(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    }
    if constexpr (Plan::fp8) {
      const kstd::uint32_t entry = half == 0 ? held * 8 & 0xFFFFU : held * 8 >> 16;
      kstd::uint32_t low, high;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(codes + entry) : "memory");
#pragma unroll
      for (int u = 0; u < n; ++u) {
        // A selector's fourth bit asks for the byte's sign eight times instead of the byte: 0x40 becomes 0 where the element is negative, and 2 * 0x40
        // takes the sign off the others' codes.
        const kstd::uint32_t w = words[u], magnitudes = w & 0x77777777U;
        k[u][half] = permute(low, high, magnitudes) - 2 * permute(positive, positive, w);
        k[u][half + 2] = permute(low, high, magnitudes >> 16) - 2 * permute(positive, positive, w >> 16);
      }
    } else {
      // As bf16 subnormals and small normals the bits of e2m1 are its value times 2^-126.
      const kstd::uint32_t factor = (253 - (half == 0 ? held & 0xFFFFU : held >> 16)) * 0x00800080U;
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
  return scale_number<Plan::fp8 ? 6 : 0>(c % 2 != 0 ? most >> 16 : most & 0xFFFFU);
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
  for (int i = lane; i < Plan::key_row; i += 32) numbers |= (__ldg(key + i) & 0x77) != 0 && __ldg(scales + i / 16) != 255 && __ldg(scales + i / 16) + Plan::fp4_depth < most;
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
