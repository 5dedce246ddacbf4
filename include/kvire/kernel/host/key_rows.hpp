// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/sparse_logits.hpp>
#include <kvire/kernel/host/level.hpp>
#include <kvire/kernel/host/vectors.hpp>

/// From stored keys to panels (kernel/host/panel.hpp): the vector version of body::key_elements, and the transposition.

KVIRE_NAMESPACE_BEGIN
namespace simd {

#if KVIRE_X86_64
namespace avx2 {

// e4m3 and e2m1 magnitudes, shifted to where an f32 has its exponent and mantissa, are the number times a power of two.
template <int MantissaBits, int Bias>
KVIRE_TARGET_AVX2 KVIRE_INLINE F8 small_float8(U8 magnitude) {
  F8 x = reinterpret_cast<F8>(magnitude << (23 - MantissaBits)) * float_of((254U - Bias) << 23);
  KVIRE_OPAQUE(x);
  return x;
}

/// 8 elements, the first at `index` (a multiple of 8), of a run that starts at `p`.
template <Element E>
KVIRE_TARGET_AVX2 KVIRE_INLINE F8 decode8(const kstd::byte* p, int index) {
  if constexpr (E == Element::bf16) {
    Halves8 codes;
    __builtin_memcpy(&codes, p + 2 * index, sizeof(codes));
    return reinterpret_cast<F8>(__builtin_convertvector(codes, U8) << 16);
  } else if constexpr (E == Element::e4m3) {
    // 8 bytes to 8 words; the compiler's own conversion takes them apart one by one.
    kstd::uint64_t eight = 0;
    __builtin_memcpy(&eight, p + index, 8);
    const U8 apart = (reinterpret_cast<U8>(L4{eight, eight, eight, eight}) >> U8{0, 0, 8, 8, 16, 16, 24, 24}) & 0xFFU;
    const U8 codes = __builtin_shufflevector(apart, apart, 0, 2, 4, 6, 1, 3, 5, 7);
    const U8 magnitude = codes & 0x7FU;
    const U8 nan = reinterpret_cast<U8>(magnitude == 0x7FU) & nan_bits;
    return reinterpret_cast<F8>(reinterpret_cast<U8>(small_float8<3, 7>(magnitude)) | ((codes & 0x80U) << 24) | nan);
  } else if constexpr (E == Element::e2m1) {
    kstd::uint32_t packed = 0;
    __builtin_memcpy(&packed, p + index / 2, 4);
    const U8 codes = (U8{packed, packed, packed, packed, packed, packed, packed, packed} >> U8{0, 4, 8, 12, 16, 20, 24, 28}) & 15U;
    return reinterpret_cast<F8>(reinterpret_cast<U8>(small_float8<1, 1>(codes & 7U)) | ((codes & 8U) << 28));
  } else if constexpr (E == Element::f32) {
    return load8(p + 4 * index);
  } else {
    F8 x{};
    for (int i = 0; i < 8; ++i) x[i] = decode_element<E>(load_code<E>(p, index + i));
    return x;
  }
}

// Multiplies the elements of field F, decoded to x, by the scales of their blocks.
template <LayoutPolicy P, class F>
KVIRE_TARGET_AVX2 inline void scale_blocks(const kstd::byte* page, int token, float* x) {
  using S = RowField<P, P::template section_of<role::Scale>>;
  constexpr int block = P::Scaling::block;
  for (int b = 0; b < F::count / block; ++b) {
    const float scale = decode_element<S::element>(load_code<S::element>(page + S::offset(token), b));
    float* values = x + F::first + b * block;
    if constexpr (block % 8 == 0) {
      const F8 scales = all8(scale);
      for (int i = 0; i < block; i += 8) store8(values + i, load8(values + i) * scales);
    } else {
      for (int i = 0; i < block; ++i) values[i] = mul_rn(values[i], scale);
    }
  }
}

template <LayoutPolicy P, class F>
KVIRE_TARGET_AVX2 inline void decode_field(const kstd::byte* page, int token, float* x) {
  if constexpr (F::logical) {
    const kstd::byte* at = page + F::offset(token);
    constexpr int whole = F::count / 8 * 8;
    for (int i = 0; i < whole; i += 8) store8(x + F::first + i, decode8<F::element>(at, i));
    for (int i = whole; i < F::count; ++i) x[F::first + i] = decode_element<F::element>(load_code<F::element>(at, i));
    if constexpr (F::scaled && !body::scale_outside<P>) scale_blocks<P, F>(page, token, x);
  }
}

template <LayoutPolicy P, int... I>
void decode_fields(const kstd::byte* page, int token, float* x, kstd::integer_sequence<int, I...>) {
  (decode_field<P, RowField<P, I>>(page, token, x), ...);
}

/// body::key_elements.
template <LayoutPolicy P>
void key_elements(const kstd::byte* page, int token, float* x) {
  avx2::decode_fields<P>(page, token, x, kstd::make_integer_sequence<int, P::section_count>{});
}

}  // namespace avx2
#endif

namespace baseline {

struct CodeTable {
  float value[256];
};
inline constexpr CodeTable e4m3_table = [] {
  CodeTable table{};
  for (int code = 0; code < 256; ++code) table.value[code] = f32_from_e4m3(static_cast<kstd::uint8_t>(code));
  return table;
}();

// Elements of a packed field with block scales: sixteen products a block instead of one an element.
template <LayoutPolicy P, class F>
void decode_nibbles(const kstd::byte* page, int token, float* x) {
  using S = RowField<P, P::template section_of<role::Scale>>;
  for (int b = 0; b < F::count / P::Scaling::block; ++b) {
    const float scale = decode_element<S::element>(load_code<S::element>(page + S::offset(token), b));
    float scaled[16];
    for (int code = 0; code < 16; ++code) scaled[code] = mul_rn(f32_from_e2m1(static_cast<kstd::uint8_t>(code)), scale);
    const kstd::byte* at = page + F::offset(token) + b * P::Scaling::block / 2;
    for (int i = 0; i < P::Scaling::block; ++i) x[F::first + b * P::Scaling::block + i] = scaled[load_code<Element::e2m1>(at, i)];
  }
}

/// body::key_elements, by tables where they save the most.
template <LayoutPolicy P>
void key_elements(const kstd::byte* page, int token, float* x) {
  using F = RowField<P, 0>;
  if constexpr (F::scaled && F::count == P::dim && F::element == Element::e4m3 && body::scale_outside<P>) {
    for (int i = 0; i < F::count; ++i) x[i] = e4m3_table.value[load_code<F::element>(page + F::offset(token), i)];
  } else if constexpr (F::scaled && F::count == P::dim && F::element == Element::e2m1 && !body::scale_outside<P> && P::Scaling::block % 2 == 0) {
    decode_nibbles<P, F>(page, token, x);
  } else {
    body::key_elements<P>(page, token, x);
  }
}

}  // namespace baseline

/// One token of a panel: its page, null for a position without one, and its row there.
struct PanelToken {
  const kstd::byte* page = nullptr;
  int row = 0;
};

/// Fills a panel [P::dim][tokens] with the keys of `count` <= tokens tokens; columns of positions without a page, and those beyond, are zero.
template <LayoutPolicy P>
void fill_panel(const PanelToken* token, int count, int tokens, float* panel) {
  float key[P::dim];
  for (int t = 0; t < tokens; ++t) {
    const bool usable = t < count && token[t].page != nullptr;
    if (usable) baseline::key_elements<P>(token[t].page, token[t].row, key);
    for (int d = 0; d < P::dim; ++d) panel[d * tokens + t] = usable ? key[d] : 0.0F;
  }
}

#if KVIRE_X86_64
namespace avx2 {

template <LayoutPolicy P>
KVIRE_TARGET_AVX2 void fill_panel(const PanelToken* token, int count, int tokens, float* panel) {
  alignas(32) float keys[8][P::dim];
  for (int first = 0; first < tokens; first += 8) {
    for (int t = 0; t < 8; ++t) {
      if (first + t < count && token[first + t].page != nullptr) {
        avx2::key_elements<P>(token[first + t].page, token[first + t].row, keys[t]);
      } else {
        __builtin_memset(keys[t], 0, sizeof(keys[t]));
      }
    }
    constexpr int whole = P::dim / 8 * 8;
    for (int d = 0; d < whole; d += 8) transpose8(keys[0] + d, P::dim, panel + d * tokens + first, tokens);
    for (int d = whole; d < P::dim; ++d) {
      for (int t = 0; t < 8; ++t) panel[d * tokens + first + t] = keys[t][d];
    }
  }
}

}  // namespace avx2
#endif

/// What the policy-independent part of host sparse logits needs of a policy: so that it is compiled once and not once a policy.
struct KeyFormat {
  int dim = 0;
  int tokens_per_page = 0;
  void (*fill)(const PanelToken* token, int count, int tokens, float* panel) = nullptr;
  float (*outer_scale)(const kstd::byte* page, int token) = nullptr;
  LogitsCounts (*plain)(kstd::int64_t item, const body::SparseLogitsArgs& args) = nullptr;  ///< body::sparse_logits
};

template <LayoutPolicy P>
KeyFormat key_format(SimdLevel level) {
  KeyFormat format;
  format.dim = P::dim;
  format.tokens_per_page = P::tokens_per_page;
  format.fill = fill_panel<P>;
#if KVIRE_X86_64
  if (level == SimdLevel::avx2 || level == SimdLevel::avx512) format.fill = avx2::fill_panel<P>;
#else
  (void)level;
#endif
  format.outer_scale = body::outer_scale<P>;
  format.plain = [](kstd::int64_t item, const body::SparseLogitsArgs& args) { return body::sparse_logits<P>(HostGroup<1>{}, item, args); };
  return format;
}

}  // namespace simd
KVIRE_NAMESPACE_END
