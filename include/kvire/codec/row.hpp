// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/scale.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class P, Element E>
struct NumberFields {
  static_assert(E != Element::u8,
                "kvire [codec.number-fields]: a row is encoded from numbers, and u8 is bytes that only their owner understands. Guessing an integer "
                "conversion would change them silently. Fix: write the field through its offset, or declare it as the element that it holds.");
};
template <class P, bool Readable>
struct ReadableElements {
  static_assert(Readable,
                "kvire [codec.readable-elements]: keys and rows are decoded from elements that stand for numbers. u8 is bytes that only their owner understands, so that "
                "no formula says what a code times its scale is. Fix: declare the field as the element that it holds, or read its bytes in a kernel of your own, through "
                "launch and offset<Role>.");
};
}  // namespace rule

/// How a row is encoded, beyond what its layout says: two stores that differ here write pages of the same layout.
struct RowOptions {
  Ties ties = Ties::toward_zero;  ///< e2m1 only
  bool bf16_round_trip = false;   ///< round each element to bf16 first: DeepSeek-V4's compressed latents do, its window latents do not
};

/// Section `I` of a policy's rows as compile-time numbers that kernels may use.
template <LayoutPolicy P, int I>
struct RowField {
  static constexpr Element element = P::table.sections[I].element;
  static constexpr int count = P::table.sections[I].count;
  static constexpr int plane = P::table.sections[I].plane;
  static constexpr bool padding = P::table.sections[I].padding;
  static constexpr bool scale = !padding && I == P::template section_of<role::Scale>;
  static constexpr bool logical = !padding && !scale;
  static constexpr bool scaled = [] {
    if constexpr (P::Scaling::formula == ScaleFormula::none) {
      return false;
    } else {
      return I == P::template section_of<typename P::Scaling::of>;
    }
  }();

  /// Index, among the logical elements of a row, of the field's first.
  static constexpr int first = [] {
    int n = 0;
    for (int s = 0; s < I; ++s) {
      if (!P::table.sections[s].padding && s != P::template section_of<role::Scale>) n += P::table.sections[s].count;
    }
    return n;
  }();

  static constexpr kstd::int64_t row_start = P::table.sections[I].row_offset_bits / 8;

  /// Bytes that element 0 of each row is aligned to, if pages start on 16 bytes.
  static constexpr int byte_alignment = static_cast<int>(power_of_two_divisor(row_start | P::template row_vector_bytes<plane>, kstd::int64_t(16)));

  /// Byte offset of the field in the page, for row `token`.
  KVIRE_HD static constexpr kstd::int64_t offset(int token) {
    constexpr kstd::int64_t start = P::table.plane_offset[plane] + row_start;
    constexpr kstd::int64_t stride = P::table.row_bytes[plane];
    return start + stride * token;
  }
};

/// Calls f(RowField<P, I>{}) for every section of a row, in declared order.
template <LayoutPolicy P, class F>
KVIRE_HD constexpr void for_each_field(F&& f) {
  [&]<int... I>(kstd::integer_sequence<int, I...>) { (f(RowField<P, I>{}), ...); }(kstd::make_integer_sequence<int, P::section_count>{});
}

/// The bits of an input element as they enter the encoder.
KVIRE_HD constexpr kstd::uint32_t prepare_bits(kstd::uint32_t bits, const RowOptions& options) {
  return options.bf16_round_trip ? static_cast<kstd::uint32_t>(bf16_from_bits(bits)) << 16 : bits;
}

/// Whether decode_row and the logits can read the policy's rows: no field but padding is u8.
template <LayoutPolicy P>
inline constexpr bool readable_elements = [] {
  bool readable = true;
  for (int i = 0; i < P::section_count; ++i) readable = readable && (P::table.sections[i].padding || P::table.sections[i].element != Element::u8);
  return readable;
}();
/// Refuses, in words, a policy of which that is not so.
template <LayoutPolicy P>
KVIRE_HD constexpr void require_readable() {
  (void)sizeof(rule::ReadableElements<P, readable_elements<P>>);
}

namespace detail {

// Elements that share bytes, and so are stored together.
template <Element E>
inline constexpr int store_step = bits(E) < 8 ? 2 : 1;

// Each field by its own function, not in a branch of a lambda: what a branch names would have to exist for every policy.
template <LayoutPolicy P, class F>
KVIRE_HD void encode_scaled_field(const float* x, kstd::byte* page, int token, const RowOptions& options) {
  using Codec = ScaleCodec<P>;
  using S = RowField<P, P::template section_of<role::Scale>>;
  constexpr int step = store_step<F::element>;
  for (int b = 0; b < Codec::blocks; ++b) {
    const float* values = x + F::first + b * Codec::block;
    kstd::uint32_t key = 0;
    for (int i = 0; i < Codec::block; ++i) {
      const kstd::uint32_t k = Codec::amax_key(prepare_bits(bits_of(values[i]), options));
      key = k > key ? k : key;
    }
    const BlockScale scale = Codec::make(key);
    store_codes<S::element>(page + S::offset(token), b, {scale.code});
    for (int i = 0; i < Codec::block; i += step) {
      kstd::uint32_t codes[step];
      for (int j = 0; j < step; ++j) codes[j] = Codec::encode(prepare_bits(bits_of(values[i + j]), options), scale, options.ties);
      store_codes<F::element>(page + F::offset(token), b * Codec::block + i, codes);
    }
  }
}

template <LayoutPolicy P, class F>
KVIRE_HD void encode_plain_field(const float* x, kstd::byte* page, int token, const RowOptions& options) {
  (void)sizeof(rule::NumberFields<P, F::element>);
  if constexpr (NumberElement<F::element>) {
    constexpr int step = store_step<F::element>;
    for (int i = 0; i < F::count; i += step) {
      kstd::uint32_t codes[step];
      for (int j = 0; j < step; ++j) {
        codes[j] = encode_element<F::element>(prepare_bits(bits_of(x[F::first + i + j]), options), options.ties);
      }
      store_codes<F::element>(page + F::offset(token), i, codes);
    }
  }
}

template <LayoutPolicy P, class F>
KVIRE_HD void decode_scaled_field(const kstd::byte* page, int token, float* x) {
  using Codec = ScaleCodec<P>;
  using S = RowField<P, P::template section_of<role::Scale>>;
  for (int i = 0; i < F::count; ++i) {
    const kstd::uint32_t scale = load_code<S::element>(page + S::offset(token), i / Codec::block);
    x[F::first + i] = Codec::decode(load_code<F::element>(page + F::offset(token), i), scale);
  }
}

template <class F>
KVIRE_HD void zero_padding(kstd::byte* page, int token) {
  for (int i = 0; i < F::count; ++i) page[F::offset(token) + i] = kstd::byte{0};
}

}  // namespace detail

/// Encodes the P::dim logical elements of one token (all fields but scales and padding, in declared order) into row `token` of a page, its
/// scales with them. Padding inside the row is written as zero, so that equal inputs give equal rows; nothing outside the row is touched.
/// Requires 0 <= token < tokens_per_page and a page aligned for the policy's elements. This is the plain version: kernel/body/store.hpp
/// writes the same bytes with a group.
template <LayoutPolicy P>
KVIRE_HD void encode_row(const float* x, kstd::byte* page, int token, RowOptions options = {}) {
  for_each_field<P>([&](auto field) {
    using F = decltype(field);
    if constexpr (F::padding) {
      detail::zero_padding<F>(page, token);
    } else if constexpr (F::scaled) {
      detail::encode_scaled_field<P, F>(x, page, token, options);
    } else if constexpr (F::logical) {
      detail::encode_plain_field<P, F>(x, page, token, options);
    }
  });
}

/// Decodes row `token` of a page into its P::dim logical elements: code times scale, rounded once. Same requirements as encode_row.
template <LayoutPolicy P>
KVIRE_HD void decode_row(const kstd::byte* page, int token, float* x) {
  require_readable<P>();
  for_each_field<P>([&](auto field) {
    using F = decltype(field);
    if constexpr (!readable_elements<P>) {
    } else if constexpr (F::scaled) {
      detail::decode_scaled_field<P, F>(page, token, x);
    } else if constexpr (F::logical) {
      for (int i = 0; i < F::count; ++i) x[F::first + i] = decode_element<F::element>(load_code<F::element>(page + F::offset(token), i));
    }
  });
}

KVIRE_NAMESPACE_END
