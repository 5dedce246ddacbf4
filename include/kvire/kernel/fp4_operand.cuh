// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/ptx/f16x2.cuh>

KVIRE_NAMESPACE_BEGIN

/// e2m1 keys as an operand of products with e4m3 or bf16 queries. A token's blocks have scales of their own, powers of two: they go into the operand relative to
/// the token's largest, which multiplies the sum over the heads.
///
/// Instructions of the half-rate pipe, and integer products, are what the time of a tile grows with most: where there is a choice the work is done in f16.
namespace sm90::detail {

using ptx::Words4;

/// Look-ups for a block `depth` binades below its token's largest: the e5m2 codes of the eight e2m1 magnitudes times 2^(13 - depth), all exact, with the sign set; for
/// the last depth, and for those that an operand does not hold, eight times 0x40.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void make_codes(kstd::uint32_t at, int depth) {
  const bool held = depth <= Plan::fp4_depth;
  ptx::store_shared(at + depth * 8, held ? 0xF2F0EC80U - 0x04040400U * static_cast<kstd::uint32_t>(depth) : 0x40404040U);
  ptx::store_shared(at + depth * 8 + 4, held ? 0xFAF8F6F4U - 0x04040404U * static_cast<kstd::uint32_t>(depth) : 0x40404040U);
}

/// Not 0 where a block, one of each half, lies so far below its token's largest that an e5m2 operand does not hold it.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t lost(kstd::uint32_t depths) {
  constexpr kstd::uint32_t to_32 = 31 - Plan::fp4_depth;
  return ptx::add_f16x2(depths, ptx::f16_pair(to_32, to_32)) & 0xFFE0FFE0U;
}

/// 2^(exponent - 127 - Shift), NaN for 255; higher bits than eight are none of it. With a one behind the exponent, so that 255 is no infinity; a factor takes it away
/// again, as it is rounded.
template <int Shift>
KVIRE_DEVICE KVIRE_INLINE float scale_number(kstd::uint32_t exponent) {
  const kstd::uint32_t bits = exponent * 0x800000U + 1;
  return mul_exact(__uint_as_float(bits > 0x400000U ? bits : 0x400000U), (1 - 0x1p-23F) / (1 << Shift));
}

/// This lane's part of a tile of e2m1 keys as operand A: block c of two rows, the second 8 behind the first, whose scale and elements are at `scale_at` and
/// `key_at`. The blocks' exponents are taken relative to the token's largest, and that one, as the factor of the token this lane finishes, is returned.
/// `depths`: how far below the largest the blocks are, one in each half of the word. `positive`: 0x40404040 in a register, not
/// a constant, which the assembler would bring into another register for each use. `pick`: f16 one in the half of the token this lane finishes.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE float load_fp4_keys(kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t& depths, kstd::uint32_t scale_at, kstd::uint32_t key_at,
                                              kstd::uint32_t codes, kstd::uint32_t positive, kstd::uint32_t pick) {
  using ptx::Halves;
  constexpr kstd::uint32_t one = 0x3C00;        // f16
  constexpr int n = Plan::key_row / 16;         // words of a lane and key: 8 elements each
  kstd::uint32_t exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent[half]) : "r"(scale_at + half * 8 * Plan::scale_row) : "memory");
  const kstd::uint32_t both = ptx::add_f16x2(ptx::mul_f16x2<Halves::low>(exponent[1], ptx::f16_pair(0, one)), exponent[0]);
  kstd::uint32_t most = __vmaxu2(both, __shfl_xor_sync(~0U, both, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
  depths = ptx::sub_f16x2(most, both);
  // Depths as shares of 32, at most one; at 2^-16 the bits of such a number are eight times the depth.
  [[maybe_unused]] kstd::uint32_t held = 0;
  if constexpr (Plan::fp8) {
    held = ptx::mul_saturated_f16x2(ptx::mul_f16x2(depths, ptx::f16_pair(0x7800, 0x7800)), ptx::f16_pair(0x4C00, 0x4C00));  // 2^15 and 2^4
  } else {
    held = __vminu2(depths, 253 * 0x10001U);
  }
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
      constexpr kstd::uint32_t to_bytes = ptx::f16_pair(0x0100, 0);
      const kstd::uint32_t entry = half == 0 ? ptx::mul_f16x2(held, to_bytes) : ptx::mul_f16x2<Halves::high>(held, to_bytes);
      kstd::uint32_t low, high;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(codes + entry) : "memory");
#pragma unroll
      for (int u = 0; u < n; ++u) {
        // A selector's fourth bit asks for the byte's sign eight times instead of the byte: 0x40 becomes 0 where the element is negative, and 2 * 0x40
        // takes the sign off the others' codes. The upper half of magnitudes is no NaN, since a bit of the exponent is clear, so the product with one is it.
        const kstd::uint32_t w = words[u], magnitudes = w & 0x77777777U;
        k[u][half] = permute(low, high, magnitudes) - 2 * permute(positive, positive, w);
        k[u][half + 2] = permute(low, high, ptx::mul_f16x2<Halves::high>(magnitudes, ptx::f16_pair(one, one))) - 2 * permute(positive, positive, w >> 16);
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
  const kstd::uint32_t picked = ptx::mul_f16x2(most, pick);  // and 0 in the other half
  return scale_number<Plan::fp8 ? 13 : 0>(ptx::add_f16x2<Halves::high>(picked, picked));
}

}  // namespace sm90::detail

KVIRE_NAMESPACE_END
