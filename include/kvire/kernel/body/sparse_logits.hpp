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

/// Scores that a kernel writes: f32, or bf16 codes rounded to nearest, ties to even.
struct ScoreArray {
  void* data = nullptr;
  Element element = Element::f32;

  ScoreArray() = default;
  KVIRE_HD ScoreArray(float* scores) : data(scores) {}
  KVIRE_HD ScoreArray(void* scores, Element e) : data(scores), element(e) {}

  KVIRE_HD void store(kstd::int64_t index, float score) const {
    if (element == Element::bf16) {
      static_cast<kstd::uint16_t*>(data)[index] = bf16_from_bits(bits_of(score));
    } else {
      static_cast<float*>(data)[index] = score;
    }
  }
};

/// Queries of an indexer and the weights of their heads; rows are query tokens.
struct QueryArgs {
  const void* queries = nullptr;  ///< [rows][heads][dim]
  Element query_element = Element::f32;
  const float* weights = nullptr;  ///< [rows][heads]
  kstd::int32_t heads = 0;

  KVIRE_HD float query(kstd::int64_t index) const {
    switch (query_element) {
      case Element::e4m3: return f32_from_e4m3(static_cast<const kstd::uint8_t*>(queries)[index]);
      case Element::bf16: return f32_from_bf16(static_cast<const kstd::uint16_t*>(queries)[index]);
      default: return static_cast<const float*>(queries)[index];
    }
  }
  /// sum over heads of weight * relu(query . key) for one row, in the order of the contract.
  KVIRE_HD float head_sum(kstd::int64_t row, const float* key, int dim) const;
};

/// Everything that the sparse-logits kernels read and write. Plain values, to be passed by value to a kernel; what the bytes of a page mean is
/// the kernel's template argument.
struct SparseLogitsArgs : QueryArgs {  // rows are [batch][next_n]
  const kstd::byte* pages = nullptr;  ///< of one layer
  kstd::int64_t page_stride = 0;      ///< bytes from page to page
  kstd::int32_t page_count = 0;

  const kstd::int32_t* page_table = nullptr;  ///< [batch][max_pages]; negative: no page
  const kstd::int32_t* lengths = nullptr;     ///< [batch], or [batch][next_n] if lengths_per_query
  bool lengths_per_query = false;
  ScoreArray scores;  ///< [batch][next_n][stride]
  kstd::int64_t stride = 0;
  kstd::int64_t max_pages = 0;
  kstd::int32_t batch = 0;
  kstd::int32_t next_n = 1;

  const kstd::int32_t* blocks = nullptr;  ///< [batch][max_blocks] entries of the page table to score, in this order; negative: none. Null: all entries
  kstd::int64_t max_blocks = 0;

  KVIRE_HD const kstd::byte* page(kstd::int32_t id) const { return pages + page_stride * id; }
  /// Work items of a row.
  KVIRE_HD kstd::int64_t entries() const { return blocks != nullptr ? max_blocks : max_pages; }

  /// Cached tokens that query token `n` of a row sees. With one length a row, that length includes what the row's last query token may
  /// see, and each earlier one sees one less.
  KVIRE_HD kstd::int64_t visible(kstd::int64_t row, kstd::int32_t n) const {
    const kstd::int64_t length = lengths_per_query ? kstd::int64_t(lengths[row * next_n + n]) : kstd::int64_t(lengths[row]) - (next_n - 1 - n);
    const kstd::int64_t most = blocks != nullptr ? kstd::int64_t(0x7FFFFFFF) : stride;  // listed blocks need not lie within the scores
    return length < 0 ? 0 : length < most ? length : most;
  }
  KVIRE_HD kstd::int64_t longest(kstd::int64_t row) const {
    kstd::int64_t most = 0;
    for (kstd::int32_t n = 0; n < next_n; ++n) {
      const kstd::int64_t v = visible(row, n);
      most = v > most ? v : most;
    }
    return most;
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

/// Where the row of one token starts in each plane.
template <LayoutPolicy P>
struct RowPlanes {
  const kstd::byte* plane[P::plane_count];
};
template <LayoutPolicy P>
KVIRE_HD RowPlanes<P> row_planes(const kstd::byte* page, kstd::int64_t token) {
  RowPlanes<P> at;
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    ((at.plane[I] = page + P::template plane_offset<I>() + token * P::template row_bytes<I>()), ...);
  }(kstd::make_integer_sequence<int, P::plane_count>{});
  return at;
}

/// The scale that multiplies the sum over heads; 1 where there is none.
template <LayoutPolicy P>
KVIRE_HD float outer_scale([[maybe_unused]] const RowPlanes<P>& row) {
  if constexpr (scale_outside<P>) {
    using S = RowField<P, P::template section_of<role::Scale>>;
    return decode_element<S::element>(load_code<S::element>(row.plane[S::plane] + S::row_start, 0));
  } else {
    return 1.0F;
  }
}
template <LayoutPolicy P>
KVIRE_HD float outer_scale(const kstd::byte* page, int token) {
  return outer_scale(row_planes<P>(page, token));
}

namespace detail {
// By its own function, not in a branch of a lambda: what a branch names would have to exist for every policy.
template <LayoutPolicy P, class F>
KVIRE_HD void key_field(const RowPlanes<P>& row, float* x) {
  const kstd::byte* at = row.plane[F::plane] + F::row_start;
  if constexpr (F::scaled && !scale_outside<P>) {
    using Codec = ScaleCodec<P>;
    using S = RowField<P, P::template section_of<role::Scale>>;
    const kstd::byte* scales = row.plane[S::plane] + S::row_start;
    for (int i = 0; i < F::count; ++i) x[F::first + i] = Codec::decode(load_code<F::element>(at, i), load_code<S::element>(scales, i / Codec::block));
  } else if constexpr (F::logical) {
    for (int i = 0; i < F::count; ++i) x[F::first + i] = decode_element<F::element>(load_code<F::element>(at, i));
  }
}
}  // namespace detail

/// The P::dim numbers that the dot product runs over. Refuses policies of which no formula says what they are.
template <LayoutPolicy P>
KVIRE_HD void key_elements(const RowPlanes<P>& row, float* x) {
  require_readable<P>();
  if constexpr (readable_elements<P>) for_each_field<P>([&](auto field) { detail::key_field<P, decltype(field)>(row, x); });
}
template <LayoutPolicy P>
KVIRE_HD void key_elements(const kstd::byte* page, int token, float* x) {
  key_elements(row_planes<P>(page, token), x);
}

/// max(x, 0) on bits: NaN stays NaN, -0 becomes +0.
KVIRE_HD constexpr float relu(float x) {
  constexpr auto minus_infinity = static_cast<kstd::int32_t>(infinity_bits | sign_bit);
  return static_cast<kstd::int32_t>(bits_of(x)) > minus_infinity ? x : 0.0F;
}

KVIRE_HD inline float QueryArgs::head_sum(kstd::int64_t row, const float* key, int dim) const {
  float sum = 0;
  for (kstd::int32_t h = 0; h < heads; ++h) {
    const kstd::int64_t head = row * heads + h;
    float dot = 0;
    for (int d = 0; d < dim; ++d) dot = fma_rn(query(head * dim + d), key[d], dot);
    sum = fma_rn(weights[head], relu(dot), sum);
  }
  return sum;
}

/// The score of a position from its sum over heads; counts a NaN and turns it into -inf.
KVIRE_HD constexpr float finish_logit(float scale, float sum, kstd::int64_t& nan_logits) {
  sum = mul_rn(scale, sum);
  if (!is_nan(sum)) return sum;
  ++nan_logits;
  return float_of(infinity_bits | sign_bit);
}

/// The plain sparse-logits body: work item `row * entries + i` scores the tokens of the row's i-th page-table entry, or i-th listed block, for all
/// its query tokens. The order of every sum is fixed and part of the contract: fma over the elements of a key, ascending; then fma over heads,
/// ascending; then the scale. So any other version that keeps this order for each token gives the same bits, whatever it computes side by side.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD LogitsCounts sparse_logits(G g, kstd::int64_t item, const SparseLogitsArgs& args) {
  LogitsCounts counts;
  const kstd::int64_t row = item / args.entries();
  const kstd::int64_t out = item % args.entries() * P::tokens_per_page;
  const bool listed = args.blocks != nullptr;
  const kstd::int64_t entry = listed ? kstd::int64_t(args.blocks[item]) : item % args.entries();
  const kstd::int64_t first = entry * P::tokens_per_page;
  const kstd::int64_t longest = args.longest(row);
  const bool seen = entry >= 0 && first < longest;
  if (!listed && !seen) return counts;

  const kstd::int32_t id = !seen ? -1 : entry < args.max_pages ? args.page_table[row * args.max_pages + entry] : args.page_count;
  const bool usable = id >= 0 && id < args.page_count;
  counts.bad_pages = id >= args.page_count ? 1 : 0;

  typename G::template Lanes<kstd::int64_t> nan_logits;
  g.each([&](int lane) {
    nan_logits[lane] = 0;
    float key[P::dim];
    for (int token = lane; token < P::tokens_per_page && out + token < args.stride; token += G::size) {
      if (!listed && first + token >= longest) break;
      float scale = 1.0F;
      if (usable) {
        const kstd::byte* page = args.page(id);
        key_elements<P>(page, token, key);
        scale = outer_scale<P>(page, token);
      }
      for (kstd::int32_t n = 0; n < args.next_n; ++n) {
        const bool visible = first + token < args.visible(row, n);
        if (!listed && !visible) continue;
        const kstd::int64_t query_row = row * args.next_n + n;
        float score = float_of(infinity_bits | sign_bit);
        if (usable && visible) score = finish_logit(scale, args.head_sum(query_row, key, P::dim), nan_logits[lane]);
        args.scores.store(query_row * args.stride + out + token, score);
      }
    }
  });
  reduce(g, nan_logits, [](kstd::int64_t a, kstd::int64_t b) { return a + b; });
  g.each([&](int lane) { counts.nan_logits = nan_logits[lane]; });
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
