// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/store_stripes.cuh>

/// Scales of blocks, and codes of chunks, of finite numbers: the bits of ScaleCodec<P> without its branches.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

#if KVIRE_CUDA_COMPILER

/// e4m3 codes of two finite products; `a` in the low byte.
__device__ inline kstd::uint32_t e4m3_pair(float a, float b) {
#if KVIRE_SM89_UP
  unsigned short codes = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
#else
  return kstd::uint32_t(e4m3_from_f32(a)) | kstd::uint32_t(e4m3_from_f32(b)) << 8;
#endif
}

/// a / B rounded to nearest, for normal quotients: a correctly rounded reciprocal and two corrections, as the division of the GPU does it.
template <int B>
__device__ float divided(float a) {
  constexpr float b = B;
  constexpr float r = 1.0F / b;
  float q = mul_rn(a, r);
  q = fma_rn(fma_rn(-q, b, a), r, q);
  return fma_rn(fma_rn(-q, b, a), r, q);
}

/// 1 / a
__device__ inline float reciprocal(float a) {
  float r = 0;
  asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

struct FastScale {
  kstd::uint32_t code;
  float factor;   // what each element is multiplied by
  float divisor;  // scale_clamp: what it is divided by
  bool extreme;   // beyond what the short ways of this file are right for
};

/// ScaleCodec<P>::make of a finite amax.
template <LayoutPolicy P>
__device__ FastScale finite_scale(kstd::uint32_t key) {
  using Codec = ScaleCodec<P>;
  constexpr kstd::uint32_t floor = bits_of(1e-4F);
  constexpr bool e4m3 = Codec::value_element == Element::e4m3;
  if constexpr (P::Scaling::formula == ScaleFormula::scale_clamp) {
    const float s = fmaxf(divided<6>(float_of(key)), 0x1p-9F);
    const kstd::uint32_t code = e4m3_pair(s, 0.0F) & 0xFFU;  // not above 448
    const float stored = code < 8 ? static_cast<float>(code) * 0x1p-9F : float_of((code << 20) + ((127U - 7U) << 23));
    return {code, reciprocal(stored), stored, s > 448.0F};
  } else if constexpr (Codec::scale_element == Element::ue8m0) {
    // amax / 448 rounds to more than a power of two exactly if amax is more than 448 times it, and so for 6: the next f32 above is far enough.
    constexpr kstd::uint32_t beyond_one = e4m3 ? 0x1FFFFFU : 0x3FFFFFU;  // carries out of mantissas above that of 448 = 1.75 * 2^8, of 6 = 1.5 * 2^2
    constexpr int exponent = e4m3 ? 8 : 2;
    constexpr auto code_of = [](kstd::uint32_t bits) { return static_cast<int>((bits + beyond_one) >> 23) - exponent; };
    int code = code_of(P::Scaling::formula == ScaleFormula::amax_floor ? max(key, floor) : key);
    if constexpr (P::Scaling::formula == ScaleFormula::scale_floor) code = max(code, static_cast<int>(ue8m0_ceil_from_bits(floor)));
    return {static_cast<kstd::uint32_t>(code), float_of(static_cast<kstd::uint32_t>(254 - code) << 23), 1.0F, code > 239};
  } else if constexpr (Codec::scale_element == Element::f32 && P::Scaling::formula == ScaleFormula::amax_floor) {
    const float s = divided < e4m3 ? 448 : 6 > (float_of(max(key, floor)));
    return {bits_of(s), reciprocal(s), 1.0F, false};
  } else {
    const BlockScale s = Codec::make(key);
    return {s.code, s.factor, 1.0F, false};
  }
}

/// The e4m3 codes of a chunk in two words.
template <class C>
__device__ void encode_e4m3(const C& x, const FastScale& scale, kstd::uint32_t (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = mul_rn(x.value(4 * i + j), scale.factor);
    codes[i] = e4m3_pair(y[0], y[1]) | e4m3_pair(y[2], y[3]) << 16;
  }
}

/// The e2m1 codes of a chunk of bf16 numbers, from the low nibble on. Times 2^-14 they are f16 numbers in which e2m1's subnormal is a subnormal: the
/// two bits of e2m1's exponent and that of its mantissa are then neighbours, and rounding is an addition. Exact where it matters: bf16 numbers
/// of e2m1's range, times a power of two, have no more digits than f16. A quotient (scale_clamp) need not be exact, only on the right side of
/// each tie: eight digits divided by four are 2^-9 or more away from one, or on it; 2^-12 less brings those that are on it to its lower side.
template <LayoutPolicy P>
__device__ kstd::uint32_t encode_e2m1(const Chunk<Element::bf16>& x, const FastScale& scale, bool to_even) {
  constexpr bool divides = ScaleCodec<P>::divides;
  const float factor = mul_rn(scale.factor, divides ? 0x1p-14F - 0x1p-26F : 0x1p-14F);
  const kstd::uint32_t last = to_even ? 0x00010001U : 0;
  kstd::uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    kstd::uint32_t h = 0;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(mul_rn(x.value(2 * i + 1), factor)), "f"(mul_rn(x.value(2 * i), factor)));
    v[i] = h + 0x00FF00FFU + ((h >> 9) & last);  // up beyond a half; a half itself where that makes the last digit even
  }
  // The high byte of each: sign, three zeros, the code, a digit that is done with.
  const kstd::uint32_t a = __byte_perm(v[0], v[1], 0x7351);
  const kstd::uint32_t b = __byte_perm(v[2], v[3], 0x7351);
  const kstd::uint32_t even = __byte_perm(a, b, 0x5410);
  const kstd::uint32_t odd = __byte_perm(a, b, 0x7632);
  const kstd::uint32_t codes = ((even >> 1) & 0x0F0F0F0FU) | ((odd << 3) & 0xF0F0F0F0U);
  const kstd::uint32_t signs = ((even >> 4) & 0x08080808U) | (odd & 0x80808080U);
  return codes | (signs & (codes + 0x77777777U));  // no sign on zero
}

/// The same of f32 numbers, in f32: times 2^-126, rounded upwards, so that what is above a tie stays above it. Ties toward zero.
template <LayoutPolicy P>
__device__ kstd::uint32_t encode_e2m1(const Chunk<Element::f32>& x, const FastScale& scale, bool) {
  kstd::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < chunk; ++i) {
    float y = mul_rn(float_of(abs_bits(x.w[i])), scale.factor);
    if constexpr (ScaleCodec<P>::divides) y = fma_rn(fma_rn(-y, scale.divisor, float_of(abs_bits(x.w[i]))), scale.factor, y);
    asm("mul.rp.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(0x1p-126F));
    const kstd::uint32_t code = (bits_of(y) + 0x1FFFFFU) >> 22;
    codes |= (code | (code != 0 ? (x.w[i] >> 28) & 8U : 0)) << (4 * i);
  }
  return codes;
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

KVIRE_NAMESPACE_END
