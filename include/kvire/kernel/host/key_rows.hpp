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

#if KVIRE_X86_64
// Eight 16-bit codes, each already the upper half of an f32 but for its exponent, to eight floats times 2^up.
KVIRE_INLINE void store_halves(Halves8 upper, unsigned up, float* x) {
  constexpr Halves8 zero{};
  F4 low = reinterpret_cast<F4>(__builtin_shufflevector(zero, upper, 0, 8, 1, 9, 2, 10, 3, 11));
  F4 high = reinterpret_cast<F4>(__builtin_shufflevector(zero, upper, 4, 12, 5, 13, 6, 14, 7, 15));
  if (up != 0) {
    low *= all4(float_of((127U + up) << 23));
    high *= all4(float_of((127U + up) << 23));
  }
  KVIRE_OPAQUE(low);
  KVIRE_OPAQUE(high);
  store4(x, low);
  store4(x + 4, high);
}

/// 8 elements, the first at `index` (a multiple of 8), of a run that starts at `p`.
template <Element E>
KVIRE_INLINE void decode8(const kstd::byte* p, int index, float* x) {
  if constexpr (E == Element::bf16) {
    Halves8 codes;
    __builtin_memcpy(&codes, p + 2 * index, sizeof(codes));
    store_halves(codes, 0, x);
  } else if constexpr (E == Element::e4m3) {
    kstd::uint64_t eight = 0;
    __builtin_memcpy(&eight, p + index, 8);
    const auto bytes = reinterpret_cast<Bytes16>(L2{eight, 0});
    const auto codes = reinterpret_cast<Halves8>(__builtin_shufflevector(Bytes16{}, bytes, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    store_halves((codes & 0x8000) | ((codes & 0x7F00) >> 4), 120, x);
    // A NaN is rare enough to look for all at once.
    const auto nan = reinterpret_cast<Bytes16>((bytes & 0x7F) == 0x7F);
    if (__builtin_ia32_pmovmskb128(reinterpret_cast<SignedBytes16>(nan)) != 0) [[unlikely]] {
      for (int i = 0; i < 8; ++i) x[i] = decode_element<E>(load_code<E>(p, index + i));
    }
  } else if constexpr (E == Element::e2m1) {
    kstd::uint32_t packed = 0;
    __builtin_memcpy(&packed, p + index / 2, 4);
    const auto pairs = reinterpret_cast<Halves8>(U4{packed, 0, 0, 0});
    const auto low = reinterpret_cast<Bytes16>(pairs & 0x0F0F);
    const auto high = reinterpret_cast<Bytes16>((pairs >> 4) & 0x0F0F);
    const auto bytes = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const auto codes = reinterpret_cast<Halves8>(__builtin_shufflevector(bytes, Bytes16{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    store_halves(((codes & 8) << 12) | ((codes & 7) << 6), 126, x);
  } else {
    for (int i = 0; i < 8; ++i) x[i] = decode_element<E>(load_code<E>(p, index + i));
  }
}

// Multiplies the elements of field F, decoded to x, by the scales of their blocks.
template <LayoutPolicy P, class F>
void scale_blocks(const kstd::byte* page, int token, float* x) {
  using S = RowField<P, P::template section_of<role::Scale>>;
  constexpr int block = P::Scaling::block;
  for (int b = 0; b < F::count / block; ++b) {
    const float scale = decode_element<S::element>(load_code<S::element>(page + S::offset(token), b));
    float* values = x + F::first + b * block;
    if constexpr (block % 4 == 0) {
      for (int i = 0; i < block; i += 4) {
        F4 product = load4(values + i) * all4(scale);
        KVIRE_OPAQUE(product);
        store4(values + i, product);
      }
    } else {
      for (int i = 0; i < block; ++i) values[i] = mul_rn(values[i], scale);
    }
  }
}

// By functions: nvcc warns where for_each_field, which kernels use too, calls a lambda of the host alone.
template <LayoutPolicy P, class F>
void decode_field(const kstd::byte* page, int token, float* x) {
  if constexpr (F::logical) {
    const kstd::byte* at = page + F::offset(token);
    constexpr int whole = F::count / 8 * 8;
    for (int i = 0; i < whole; i += 8) decode8<F::element>(at, i, x + F::first + i);
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
  baseline::decode_fields<P>(page, token, x, kstd::make_integer_sequence<int, P::section_count>{});
}
#else
/// body::key_elements, by a table where that saves the most.
template <LayoutPolicy P>
void key_elements(const kstd::byte* page, int token, float* x) {
  using F = RowField<P, 0>;
  if constexpr (F::scaled && F::count == P::dim && F::element == Element::e4m3 && body::scale_outside<P>) {
    for (int i = 0; i < F::count; ++i) x[i] = e4m3_table.value[load_code<F::element>(page + F::offset(token), i)];
  } else {
    body::key_elements<P>(page, token, x);
  }
}
#endif

}  // namespace baseline

/// One token of a panel: its page, null for a position without one, and its row there.
struct PanelToken {
  const kstd::byte* page = nullptr;
  int row = 0;
};

/// Fills a panel [P::dim][tokens] with the keys of `count` <= tokens tokens; columns of positions without a page, and those beyond, are zero.
template <LayoutPolicy P>
void fill_panel(const PanelToken* token, int count, int tokens, float* panel) {
  alignas(16) float keys[4][P::dim];
  for (int first = 0; first < tokens; first += 4) {
    for (int t = 0; t < 4; ++t) {
      if (first + t < count && token[first + t].page != nullptr) {
        baseline::key_elements<P>(token[first + t].page, token[first + t].row, keys[t]);
      } else {
        __builtin_memset(keys[t], 0, sizeof(keys[t]));
      }
    }
    int d = 0;
#if KVIRE_X86_64
    for (; d + 4 <= P::dim; d += 4) transpose4(keys[0] + d, P::dim, panel + d * tokens + first, tokens);
#endif
    for (; d < P::dim; ++d) {
      for (int t = 0; t < 4; ++t) panel[d * tokens + first + t] = keys[t][d];
    }
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
