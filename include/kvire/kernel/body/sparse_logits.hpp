// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/row.hpp>
#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN

/// What sparse_logits met and did not follow, added up over its rows.
struct LogitsCounts {
  kstd::int64_t nan_logits = 0;  ///< logits that were NaN (a NaN in the key, its scale, the query or a weight, or infinity less infinity); they score -inf
  kstd::int64_t bad_pages = 0;   ///< page-table entries at or beyond the pool's pages, one a row and entry; their positions score -inf

  KVIRE_HD constexpr LogitsCounts& operator+=(const LogitsCounts& other) {
    nan_logits += other.nan_logits;
    bad_pages += other.bad_pages;
    return *this;
  }
};

namespace body {

/// Everything that the sparse-logits kernels read and write. Plain values, to be passed by value to a kernel; what the bytes of a page mean is
/// the kernel's template argument.
struct SparseLogitsArgs {
  const kstd::byte* pages = nullptr;  ///< of one layer
  kstd::int64_t page_stride = 0;      ///< bytes from page to page
  kstd::int32_t page_count = 0;

  const void* queries = nullptr;  ///< [batch][next_n][heads][dim]
  Element query_element = Element::f32;
  const float* weights = nullptr;             ///< [batch][next_n][heads]
  const kstd::int32_t* page_table = nullptr;  ///< [batch][max_pages]; negative: no page
  const kstd::int32_t* lengths = nullptr;     ///< [batch], or [batch][next_n] if lengths_per_query
  bool lengths_per_query = false;
  float* scores = nullptr;  ///< [batch][next_n][stride]
  kstd::int64_t stride = 0;
  kstd::int64_t max_pages = 0;
  kstd::int32_t batch = 0;
  kstd::int32_t next_n = 1;
  kstd::int32_t heads = 0;

  KVIRE_HD const kstd::byte* page(kstd::int32_t id) const { return pages + page_stride * id; }

  /// Cached tokens that query token `n` of a row sees. With one length a row, that length includes what the row's last query token may
  /// see, and each earlier one sees one less.
  KVIRE_HD kstd::int64_t visible(kstd::int64_t row, kstd::int32_t n) const {
    const kstd::int64_t length = lengths_per_query ? kstd::int64_t(lengths[row * next_n + n]) : kstd::int64_t(lengths[row]) - (next_n - 1 - n);
    return length < 0 ? 0 : length < stride ? length : stride;
  }
  KVIRE_HD kstd::int64_t longest(kstd::int64_t row) const {
    kstd::int64_t most = 0;
    for (kstd::int32_t n = 0; n < next_n; ++n) {
      const kstd::int64_t v = visible(row, n);
      most = v > most ? v : most;
    }
    return most;
  }

  KVIRE_HD float query(kstd::int64_t index) const {
    switch (query_element) {
      case Element::e4m3: return f32_from_e4m3(static_cast<const kstd::uint8_t*>(queries)[index]);
      case Element::bf16: return f32_from_bf16(static_cast<const kstd::uint16_t*>(queries)[index]);
      default: return static_cast<const float*>(queries)[index];
    }
  }
};

/// One scale for the whole key: the dot product runs over the codes and the scale multiplies the sum over heads, as deployed kernels do.
/// With several scales (or unscaled fields beside scaled ones) each element is multiplied by its own first, which comes to the same as
/// scaling the partial dot products before the relu; for power-of-two scales without any rounding.
template <LayoutPolicy P>
inline constexpr bool scale_outside = [] {
  if constexpr (P::Scaling::formula == ScaleFormula::none) {
    return false;
  } else {
    return P::template count_of<role::Scale> == 1 && P::template count_of<typename P::Scaling::of> == P::dim;
  }
}();

/// The scale that multiplies the sum over heads for row `token`; 1 where there is none.
template <LayoutPolicy P>
KVIRE_HD float outer_scale([[maybe_unused]] const kstd::byte* page, [[maybe_unused]] int token) {
  if constexpr (scale_outside<P>) {
    using S = RowField<P, P::template section_of<role::Scale>>;
    return decode_element<S::element>(load_code<S::element>(page + S::offset(token), 0));
  } else {
    return 1.0F;
  }
}

/// The P::dim numbers that the dot product runs over.
template <LayoutPolicy P>
KVIRE_HD void key_elements(const kstd::byte* page, int token, float* x) {
  if constexpr (scale_outside<P>) {
    for_each_field<P>([&](auto field) {
      using F = decltype(field);
      if constexpr (F::logical) {
        for (int i = 0; i < F::count; ++i) x[F::first + i] = decode_element<F::element>(load_code<F::element>(page + F::offset(token), i));
      }
    });
  } else {
    decode_row<P>(page, token, x);
  }
}

/// max(x, 0) on bits: NaN stays NaN, -0 becomes +0.
KVIRE_HD constexpr float relu(float x) {
  constexpr auto minus_infinity = static_cast<kstd::int32_t>(infinity_bits | sign_bit);
  return static_cast<kstd::int32_t>(bits_of(x)) > minus_infinity ? x : 0.0F;
}

/// The score of a position from its sum over heads; counts a NaN and turns it into -inf.
KVIRE_HD constexpr float finish_logit(float scale, float sum, kstd::int64_t& nan_logits) {
  sum = mul_rn(scale, sum);
  if (!is_nan(sum)) return sum;
  ++nan_logits;
  return float_of(infinity_bits | sign_bit);
}

/// The plain sparse-logits body: work item `row * max_pages + entry` scores the tokens of one page-table entry for all query tokens of its
/// row. The order of every sum is fixed and part of the contract: fma over the elements of a key, ascending; then fma over heads,
/// ascending; then the scale. So any other version that keeps this order for each token gives the same bits, whatever it computes side by side.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD LogitsCounts sparse_logits(G g, kstd::int64_t item, const SparseLogitsArgs& args) {
  LogitsCounts counts;
  const kstd::int64_t row = item / args.max_pages;
  const kstd::int64_t first = item % args.max_pages * P::tokens_per_page;
  const kstd::int64_t longest = args.longest(row);
  if (first >= longest) return counts;

  const kstd::int32_t id = args.page_table[item];
  const bool usable = id >= 0 && id < args.page_count;
  counts.bad_pages = id >= args.page_count ? 1 : 0;

  typename G::template Lanes<kstd::int64_t> nan_logits;
  g.each([&](int lane) {
    nan_logits[lane] = 0;
    float key[P::dim];
    for (int token = lane; token < P::tokens_per_page && first + token < longest; token += G::size) {
      float scale = 1.0F;
      if (usable) {
        const kstd::byte* page = args.page(id);
        key_elements<P>(page, token, key);
        scale = outer_scale<P>(page, token);
      }
      for (kstd::int32_t n = 0; n < args.next_n; ++n) {
        if (first + token >= args.visible(row, n)) continue;
        const kstd::int64_t query_row = row * args.next_n + n;
        float score = float_of(infinity_bits | sign_bit);
        if (usable) {
          float sum = 0;
          for (kstd::int32_t h = 0; h < args.heads; ++h) {
            const kstd::int64_t head = query_row * args.heads + h;
            float dot = 0;
            for (int d = 0; d < P::dim; ++d) dot = fma_rn(args.query(head * P::dim + d), key[d], dot);
            sum = fma_rn(args.weights[head], relu(dot), sum);
          }
          score = finish_logit(scale, sum, nan_logits[lane]);
        }
        args.scores[query_row * args.stride + first + token] = score;
      }
    }
  });
  reduce(g, nan_logits, [](kstd::int64_t a, kstd::int64_t b) { return a + b; });
  g.each([&](int lane) { counts.nan_logits = nan_logits[lane]; });
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
