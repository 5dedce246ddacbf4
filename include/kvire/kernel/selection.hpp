// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/kernel/top_k.hpp>

KVIRE_NAMESPACE_BEGIN

struct SelectionOptions {
  TopKOrder order = TopKOrder::by_position;
  bool translate = false;        ///< list token slots instead of positions, as TopKOptions::translate
  Tensor<float, 3> scores = {};  ///< [batch][next_n][stride]: keeps the scores too, stride at least the longest length. Without data they are not kept
  LogitsCounts* logits_counts = nullptr;  ///< added to when the work has run; must live until then
  TopKCounts* counts = nullptr;           ///< likewise
  SimdLevel level = best_level();
};

namespace detail {
/// The options of the top-k behind logits of pages of P, Top being those of either backend: masked by the page table.
template <class P, class Top = TopKOptions, class Options>
Top selection_top_k(const Options& options, const Tensor<const std::int32_t, 2>& page_table) {
  Top top;
  top.order = options.order;
  top.page_table = page_table;
  top.tokens_per_page = P::tokens_per_page;
  top.translate = options.translate;
  return top;
}
/// Where the scores of a selection go that nobody asked to keep: rows as long as the page table.
inline Tensor<float, 3> selection_scores(const Queries& queries, const Tensor<const std::int32_t, 2>& page_table, int tokens_per_page, float* data) {
  return {data, {queries.batch, queries.next_n, checked_mul(page_table.extent[1], tokens_per_page)}};
}
/// The same logits, and the same top-k, of rows `first` to `first` + n of the batch alone; the scores stay where they are.
inline void take_rows(body::SparseLogitsArgs& logits, body::TopKArgs& top, std::int64_t first, std::int64_t n, int dim) {
  const std::int64_t tokens = first * logits.next_n;
  const std::int64_t lengths = logits.lengths_per_query ? tokens : first;
  logits.queries = static_cast<const std::byte*>(logits.queries) + tokens * logits.heads * dim * bits(logits.query_element) / 8;
  logits.weights += tokens * logits.heads;
  logits.page_table += first * logits.max_pages;
  logits.lengths += lengths;
  top.page_table += first * top.max_pages;
  top.lengths += lengths;
  top.selected += tokens * top.k;
  logits.batch = top.batch = static_cast<std::int32_t>(n);
}
inline constexpr std::int64_t selection_rows_bytes = std::int64_t(4) << 20;  // of scores that exist at a time, or those of one row
}  // namespace detail

/// The selection step of a decode, on the stream: sparse_logits, and the top-k of what it scores, masked by the page table, as top_k selects. `selected` is
/// [batch][next_n][k]; everything else as sparse_logits takes it. The same selection, bit for bit, as the two calls. Scores that are not kept never exist
/// all at once: a few rows of the batch are scored and selected from at a time, in memory of one row or 4 MiB. Errors: those of the two calls, and
/// exhausted where there is no such memory.
template <class Policy = void, class Lease>
Status select_keys(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                   Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Host>& stream, SelectionOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    const bool kept = options.scores.data != nullptr;
    float later = 0;  // stands for memory that is there once the arguments have been checked
    Tensor<float, 3> scores = kept ? options.scores : detail::selection_scores(queries, page_table, P::tokens_per_page, &later);
    const auto logits = check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, options.level);
    if (!logits.ok()) return logits.error();
    const auto best = check_top_k(scores, lengths, selected, detail::selection_top_k<P>(options, page_table));
    if (!best.ok()) return best.error();
    const std::int64_t row_bytes = checked_mul(checked_mul(scores.extent[1], scores.extent[2]), std::int64_t(sizeof(float)));
    const std::int64_t rows = kept ? max_of<std::int64_t>(queries.batch, 1) : max_of<std::int64_t>(1, min_of(queries.batch, detail::selection_rows_bytes / max_of<std::int64_t>(row_bytes, 1)));
    auto own = std::make_shared<simd::HeapArray<float>>();
    if (!kept && (row_bytes < 0 || !own->allocate(rows * row_bytes / std::int64_t(sizeof(float)) + 1))) return Error{ErrorCode::exhausted, "select_keys: no memory for scores"};
    launch(
        stream,
        [l = logits.value(), t = best.value(), options, keys, own, kept, rows, owned = detail::own(lengths)](const auto& view) -> Status {
          LogitsCounts ignored;
          TopKCounts also_ignored;
          std::vector<std::int32_t> table;
          const std::int32_t* pages = detail::readable_pages(keys, l.page_table, l.batch * l.max_pages, view.pages, table);
          for (std::int64_t first = 0; first < l.batch; first += rows) {
            body::SparseLogitsArgs logits_of = l;
            body::TopKArgs top = t;
            logits_of.page_table = top.page_table = pages;
            logits_of.pages = view.base;
            logits_of.page_stride = view.page_stride;
            logits_of.page_count = top.page_count = view.pages;
            logits_of.lengths = top.lengths = owned.data();
            if (!kept) {
              logits_of.scores = own->get();
              top.scores = own->get();
            }
            detail::take_rows(logits_of, top, first, min_of<std::int64_t>(rows, l.batch - first), P::dim);
            const Status scored = simd::SparseLogits(logits_of, simd::key_format<P>(options.level), options.level)
                                      .run(options.logits_counts != nullptr ? *options.logits_counts : ignored);
            if (!scored.ok()) return scored;
            const Status selected_of = simd::TopK(top, options.level).run(options.counts != nullptr ? *options.counts : also_ignored);
            if (!selected_of.ok()) return selected_of;
          }
          return {};
        },
        keys);
  }
  return {};
}

KVIRE_NAMESPACE_END
