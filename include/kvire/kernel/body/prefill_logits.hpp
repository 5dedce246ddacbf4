// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/sparse_logits.hpp>

KVIRE_NAMESPACE_BEGIN
namespace body {

/// Everything that the prefill-logits kernels read and write. Plain values, to be passed by value to a kernel. Positions are keys of one flat
/// space that all rows share: `page_table` says on which pages they lie; without it they are contiguous, as a gather leaves them.
template <LayoutPolicy P>
struct PrefillLogitsArgs : QueryArgs {
  const kstd::byte* pages = nullptr;  ///< of one layer
  kstd::int64_t page_stride = 0;      ///< bytes from page to page
  kstd::int32_t page_count = 0;
  const kstd::int32_t* page_table = nullptr;  ///< [ceil(key_count / tokens_per_page)]; negative: no page. Null: contiguous
  const kstd::byte* planes[P::plane_count] = {};  ///< contiguous: plane i of the policy, row_bytes<i>() a token
  kstd::int32_t key_count = 0;

  const kstd::int32_t* starts = nullptr;  ///< [rows]
  const kstd::int32_t* ends = nullptr;    ///< [rows]
  kstd::int32_t rows = 0;
  ScoreArray scores;           ///< [rows][stride]
  kstd::int64_t stride = 0;

  /// The range of a row, cut to the keys and scores that there are.
  KVIRE_HD kstd::int64_t start(kstd::int64_t row) const { return starts[row] < 0 ? 0 : starts[row]; }
  KVIRE_HD kstd::int64_t end(kstd::int64_t row) const {
    const kstd::int64_t most = stride < key_count ? stride : kstd::int64_t(key_count);
    return ends[row] < most ? kstd::int64_t(ends[row]) : most;
  }
  /// Blocks of tokens_per_page positions.
  KVIRE_HD kstd::int64_t blocks() const { return (kstd::int64_t(key_count) + P::tokens_per_page - 1) / P::tokens_per_page; }

  /// The row of a position; `page` is null where keys are contiguous.
  KVIRE_HD RowPlanes<P> row(const kstd::byte* page, kstd::int64_t position) const {
    if (page != nullptr) return row_planes<P>(page, position % P::tokens_per_page);
    RowPlanes<P> at;
    [&]<int... I>(kstd::integer_sequence<int, I...>) {
      ((at.plane[I] = planes[I] + position * P::template row_bytes<I>()), ...);
    }(kstd::make_integer_sequence<int, P::plane_count>{});
    return at;
  }
};

/// The plain prefill-logits body: work item `row * blocks + block` scores the positions of one block that the row sees. Each score has the bits that
/// body::sparse_logits gives it.
template <LayoutPolicy P, LaneGroup G>
KVIRE_HD LogitsCounts prefill_logits(G g, kstd::int64_t item, const PrefillLogitsArgs<P>& args) {
  LogitsCounts counts;
  const kstd::int64_t row = item / args.blocks();
  const kstd::int64_t block = item % args.blocks();
  const kstd::int64_t first = block * P::tokens_per_page;
  const kstd::int64_t start = args.start(row) > first ? args.start(row) : first;
  const kstd::int64_t end = args.end(row) < first + P::tokens_per_page ? args.end(row) : first + P::tokens_per_page;
  if (start >= end) return counts;

  const kstd::byte* page = nullptr;
  bool usable = true;
  if (args.page_table != nullptr) {
    const kstd::int32_t id = args.page_table[block];
    usable = id >= 0 && id < args.page_count;
    counts.bad_pages = id >= args.page_count ? 1 : 0;
    if (usable) page = args.pages + args.page_stride * id;
  }

  typename G::template Lanes<kstd::int64_t> nan_logits;
  g.each([&](int lane) {
    nan_logits[lane] = 0;
    float key[P::dim];
    for (kstd::int64_t position = start + lane; position < end; position += G::size) {
      float score = float_of(infinity_bits | sign_bit);
      if (usable) {
        const RowPlanes<P> at = args.row(page, position);
        key_elements(at, key);
        score = finish_logit(outer_scale(at), args.head_sum(row, key, P::dim), nan_logits[lane]);
      }
      args.scores.store(row * args.stride + position, score);
    }
  });
  reduce(g, nan_logits, [](kstd::int64_t a, kstd::int64_t b) { return a + b; });
  g.each([&](int lane) { counts.nan_logits = nan_logits[lane]; });
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
