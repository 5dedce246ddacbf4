// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/arith.hpp>
#include <kvire/kernel/body/sparse_logits.hpp>
#include <kvire/kernel/host/level.hpp>
#include <kvire/kernel/host/vectors.hpp>

/// The inner loop of host sparse logits, once per SimdLevel. A *panel* is the keys of a few consecutive tokens, decoded to f32 and
/// transposed: [dim][tokens]. Queries are packed in blocks of heads: [block][dim][heads of a block], the last block filled with zeros.
/// Each version computes, for every token of a panel, sum over heads of w * relu(q . k) in the order of body::sparse_logits, with tokens
/// side by side in a vector; so all give its bits.

KVIRE_NAMESPACE_BEGIN
namespace simd {

/// sums[t] for every token of the panel. `short_products`: products of this query and these keys have at most 24 bits and are normal.
using PanelSums = void (*)(const float* packed, const float* weights, const float* panel, int heads, int dim, bool short_products, float* sums);

struct PanelKernel {
  int heads;   ///< of a packed block
  int tokens;  ///< of a panel
  PanelSums sums;
  bool wants_short_products;
};

inline constexpr int most_panel_tokens = 32;

inline constexpr kstd::uint32_t least_short = 0x21800000U;  // 2^-60
inline constexpr kstd::uint32_t short_span = 0x3C000000U;   // up to 2^60

/// True if every number is zero or has at most 12 significant bits and a modest exponent: then a product of two such numbers is exact in
/// f32, and a multiplication followed by an addition rounds as one fma. Stored keys and e4m3 or bf16 queries are such numbers.
inline bool are_short(const float* x, kstd::int64_t count) {
  kstd::int64_t i = 0;
#if KVIRE_X86_64
  U4 bad4{};
  for (; i + 4 <= count; i += 4) {
    const U4 a = reinterpret_cast<U4>(load4(x + i)) & ~sign_bit;
    bad4 |= (a & 0xFFFU) | (reinterpret_cast<U4>(a != 0U) & reinterpret_cast<U4>(a - least_short > short_span));
  }
  kstd::uint32_t bad = bad4[0] | bad4[1] | bad4[2] | bad4[3];
#else
  kstd::uint32_t bad = 0;
#endif
  for (; i < count; ++i) {
    const kstd::uint32_t a = abs_bits(bits_of(x[i]));
    bad |= (a & 0xFFFU) | (a != 0 && a - least_short > short_span ? 1U : 0U);
  }
  return bad == 0;
}

namespace baseline {

inline constexpr int heads = 4;
inline constexpr int tokens = 8;

// out[t] = fma(w, relu(dots[t]), out[t])
inline void add_head_slowly(float w, const float* dots, float* out, int count) {
  for (int t = 0; t < count; ++t) out[t] = fma_rn(w, body::relu(dots[t]), out[t]);
}

#if KVIRE_X86_64
// The same for four tokens and a finite weight, in double where that is the same: the product is exact there, and rounding twice shows only where
// the first rounding lands on a tie or the result leaves the normal range; where the product is zero, nothing is rounded.
KVIRE_INLINE void add_head4(float w, F4 dots, F4& out) {
  const F4 x = relu4(dots);
  const D2 weight = {static_cast<double>(w), static_cast<double>(w)};
  D2 low = low_doubles(x) * weight;
  D2 high = high_doubles(x) * weight;
  KVIRE_OPAQUE(low);
  KVIRE_OPAQUE(high);
  low += low_doubles(out);
  high += high_doubles(out);
  KVIRE_OPAQUE(low);
  KVIRE_OPAQUE(high);
  const F4 next = floats_of(low, high);
  const I4 rest = __builtin_shufflevector(reinterpret_cast<I4>(low), reinterpret_cast<I4>(high), 0, 2, 4, 6) & 0x1FFFFFFF;
  const I4 magnitude = reinterpret_cast<I4>(next) & 0x7FFFFFFF;
  const I4 none = reinterpret_cast<I4>(x) == 0;
  const I4 good = none | ((rest != 0x10000000) & (magnitude > (27 << 23) - 1) & (magnitude < 255 << 23));
  if (__builtin_ia32_movmskps(reinterpret_cast<F4>(good)) == 15) [[likely]] {
    out = next;
    return;
  }
  float slow[8];
  store4(slow, dots);
  store4(slow + 4, out);
  add_head_slowly(w, slow, slow + 4, 4);
  out = load4(slow + 4);
}

// For products that are exact in f32 (see are_short) and finite weights.
inline void short_sums(const float* packed, const float* weights, const float* panel, int head_count, int dim, float* out) {
  F4 s0{}, s1{};
  for (int h = 0; h < head_count; h += heads) {
    F4 a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
    const float* k = panel;
    for (int d = 0; d < dim; ++d, packed += heads, k += tokens) {
      const F4 q = load4(packed);
      const F4 qa = lane4<0>(q), qb = lane4<1>(q), qc = lane4<2>(q), qd = lane4<3>(q);
      const F4 k0 = load4(k), k1 = load4(k + 4);
      a0 += k0 * qa, a1 += k1 * qa;
      b0 += k0 * qb, b1 += k1 * qb;
      c0 += k0 * qc, c1 += k1 * qc;
      d0 += k0 * qd, d1 += k1 * qd;
      // The order of the additions is the contract; without this an optimiser with a licence might split the sums.
      KVIRE_OPAQUE(a0);
      KVIRE_OPAQUE(a1);
      KVIRE_OPAQUE(b0);
      KVIRE_OPAQUE(b1);
      KVIRE_OPAQUE(c0);
      KVIRE_OPAQUE(c1);
      KVIRE_OPAQUE(d0);
      KVIRE_OPAQUE(d1);
    }
    const F4 dots[heads][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
    for (int j = 0; j < heads && h + j < head_count; ++j) {
      add_head4(weights[h + j], dots[j][0], s0);
      add_head4(weights[h + j], dots[j][1], s1);
    }
  }
  store4(out, s0);
  store4(out + 4, s1);
}
#endif

inline void sums(const float* packed, const float* weights, const float* panel, int head_count, int dim, bool short_products, float* out) {
#if KVIRE_X86_64
  bool finite = true;
  for (int h = 0; h < head_count; ++h) finite &= abs_bits(bits_of(weights[h])) < infinity_bits;
  if (short_products && finite) return short_sums(packed, weights, panel, head_count, dim, out);
#else
  (void)short_products;
#endif
  for (int t = 0; t < tokens; ++t) out[t] = 0;
  for (int h = 0; h < head_count; ++h) {
    float dots[tokens] = {};
    const float* q = packed + h / heads * heads * dim + h % heads;
    for (int d = 0; d < dim; ++d) {
      for (int t = 0; t < tokens; ++t) dots[t] = fma_rn(q[d * heads], panel[d * tokens + t], dots[t]);
    }
    add_head_slowly(weights[h], dots, out, tokens);
  }
}

}  // namespace baseline

#if KVIRE_X86_64

namespace avx2 {

inline constexpr int heads = 6;
inline constexpr int tokens = 16;

KVIRE_TARGET_AVX2 inline void sums(const float* packed, const float* weights, const float* panel, int head_count, int dim, bool, float* out) {
  F8 s0{}, s1{};
  for (int h = 0; h < head_count; h += heads, packed += heads * dim) {
    F8 a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{}, e0{}, e1{}, f0{}, f1{};
    const float* q = packed;
    const float* p = panel;
    for (int d = 0; d < dim; ++d, q += heads, p += tokens) {
      const F8 k0 = load8(p), k1 = load8(p + 8);
      const F8 qa = all8(q[0]), qb = all8(q[1]);
      a0 = fma8(qa, k0, a0), a1 = fma8(qa, k1, a1);
      b0 = fma8(qb, k0, b0), b1 = fma8(qb, k1, b1);
      const F8 qc = all8(q[2]), qd = all8(q[3]);
      c0 = fma8(qc, k0, c0), c1 = fma8(qc, k1, c1);
      d0 = fma8(qd, k0, d0), d1 = fma8(qd, k1, d1);
      const F8 qe = all8(q[4]), qf = all8(q[5]);
      e0 = fma8(qe, k0, e0), e1 = fma8(qe, k1, e1);
      f0 = fma8(qf, k0, f0), f1 = fma8(qf, k1, f1);
    }
    const F8 dots[heads][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}, {e0, e1}, {f0, f1}};
    for (int j = 0; j < heads && h + j < head_count; ++j) {
      const F8 w = all8(weights[h + j]);
      s0 = fma8(w, relu8(dots[j][0]), s0);
      s1 = fma8(w, relu8(dots[j][1]), s1);
    }
  }
  store8(out, s0);
  store8(out + 8, s1);
}

}  // namespace avx2

namespace avx512 {

inline constexpr int heads = 8;
inline constexpr int tokens = 32;

KVIRE_TARGET_AVX512 inline void sums(const float* packed, const float* weights, const float* panel, int head_count, int dim, bool, float* out) {
  F16 s0{}, s1{};
  for (int h = 0; h < head_count; h += heads, packed += heads * dim) {
    F16 a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{}, e0{}, e1{}, f0{}, f1{}, g0{}, g1{}, h0{}, h1{};
    const float* q = packed;
    const float* p = panel;
    for (int d = 0; d < dim; ++d, q += heads, p += tokens) {
      const F16 k0 = load16(p), k1 = load16(p + 16);
      const F16 qa = all16(q[0]), qb = all16(q[1]), qc = all16(q[2]), qd = all16(q[3]);
      a0 = fma16(qa, k0, a0), a1 = fma16(qa, k1, a1);
      b0 = fma16(qb, k0, b0), b1 = fma16(qb, k1, b1);
      c0 = fma16(qc, k0, c0), c1 = fma16(qc, k1, c1);
      d0 = fma16(qd, k0, d0), d1 = fma16(qd, k1, d1);
      const F16 qe = all16(q[4]), qf = all16(q[5]), qg = all16(q[6]), qh = all16(q[7]);
      e0 = fma16(qe, k0, e0), e1 = fma16(qe, k1, e1);
      f0 = fma16(qf, k0, f0), f1 = fma16(qf, k1, f1);
      g0 = fma16(qg, k0, g0), g1 = fma16(qg, k1, g1);
      h0 = fma16(qh, k0, h0), h1 = fma16(qh, k1, h1);
    }
    const F16 dots[heads][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}, {e0, e1}, {f0, f1}, {g0, g1}, {h0, h1}};
    for (int j = 0; j < heads && h + j < head_count; ++j) {
      const F16 w = all16(weights[h + j]);
      s0 = fma16(w, relu16(dots[j][0]), s0);
      s1 = fma16(w, relu16(dots[j][1]), s1);
    }
  }
  store16(out, s0);
  store16(out + 16, s1);
}

}  // namespace avx512

#endif

/// The inner loop for a level that this processor supports.
inline PanelKernel panel_kernel(SimdLevel level) {
#if KVIRE_X86_64
  if (level == SimdLevel::avx512) return {avx512::heads, avx512::tokens, avx512::sums, false};
  if (level == SimdLevel::avx2) return {avx2::heads, avx2::tokens, avx2::sums, false};
#else
  (void)level;
#endif
  return {baseline::heads, baseline::tokens, baseline::sums, true};
}

}  // namespace simd
KVIRE_NAMESPACE_END
