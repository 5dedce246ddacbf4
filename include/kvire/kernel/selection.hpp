// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

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
/// Where the scores of a selection go that nobody asked to keep: rows as long as the page table.
inline Tensor<float, 3> selection_scores(const Queries& queries, const Tensor<const std::int32_t, 2>& page_table, int tokens_per_page, float* data) {
  return {data, {queries.batch, queries.next_n, page_table.extent[1] * tokens_per_page}};
}
}  // namespace detail

/// The selection step of a decode, on the stream: sparse_logits, and the top-k of what it scores, masked by the page table, as top_k selects. `selected` is
/// [batch][next_n][k]; everything else as sparse_logits takes it. The same selection, bit for bit, as the two calls. Errors: theirs, and exhausted
/// where there is no memory for scores.
template <class Policy = void, class Lease>
Status select_keys(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                   Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Host>& stream, SelectionOptions options = {}) {
  static_assert(require_lease<Lease>());
  if constexpr (!std::is_void_v<Policy>) static_assert(require_kernel_policy<Policy, Lease>());
  if constexpr (is_lease<Lease>) {
    using P = typename Lease::policy;
    auto own = std::make_shared<simd::HeapArray<float>>();
    Tensor<float, 3> scores = options.scores;
    if (scores.data == nullptr) {
      scores = detail::selection_scores(queries, page_table, P::tokens_per_page, nullptr);
      if (!own->allocate(scores.elements() + 1)) return Error{ErrorCode::exhausted, "select_keys: no memory for scores"};
      scores.data = own->get();
    }
    const auto logits = check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, options.level);
    if (!logits.ok()) return logits.error();
    TopKOptions top;
    top.order = options.order;
    top.page_table = page_table;
    top.tokens_per_page = P::tokens_per_page;
    top.translate = options.translate;
    const auto best = check_top_k(scores, lengths, selected, top);
    if (!best.ok()) return best.error();
    launch(
        stream,
        [a = logits.value(), k = best.value(), options, own, owned = detail::own(lengths)](const auto& view) mutable -> Status {
          a.pages = view.base;
          a.page_stride = view.page_stride;
          a.page_count = k.page_count = view.pages;
          a.lengths = k.lengths = owned.data();
          LogitsCounts ignored;
          TopKCounts also_ignored;
          const Status scored =
              simd::SparseLogits(a, simd::key_format<P>(options.level), options.level).run(options.logits_counts != nullptr ? *options.logits_counts : ignored);
          if (!scored.ok()) return scored;
          return simd::TopK(k, options.level).run(options.counts != nullptr ? *options.counts : also_ignored);
        },
        keys);
  }
  return {};
}

KVIRE_NAMESPACE_END
