// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <kvire/exec/host/stream.hpp>
#include <kvire/kernel/host/top_k.hpp>
#include <kvire/kernel/tensor.hpp>

KVIRE_NAMESPACE_BEGIN

struct TopKOptions {
  TopKOrder order = TopKOrder::by_position;

  /// The page table that the scores were made with, [batch][max_pages]: positions on a negative id, or on one not below `pages`, are then
  /// never selected. Without it every position of a row is a candidate, those that score -inf too.
  Tensor<const std::int32_t, 2> page_table = {};
  std::int64_t tokens_per_page = 0;          ///< required with a page table
  std::int64_t pages = detail::most_int32;   ///< of the pool
  /// List token slots, page_table[i / tokens_per_page] * tokens_per_page + i % tokens_per_page, instead of positions i.
  bool translate = false;

  TopKCounts* counts = nullptr;  ///< added to when the work has run; must live until then
  SimdLevel level = best_level();
};

/// Checks the arguments of top_k and gathers them for a kernel. `lengths` are read here, unless they are in device memory.
inline Result<body::TopKArgs> check_top_k(Tensor<const float, 3> scores, Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected,
                                          const TopKOptions& options = {}, bool lengths_readable = true) {
  detail::ArgumentCheck check("top_k");
  const std::int64_t batch = scores.extent[0];
  const std::int64_t next_n = scores.extent[1];
  check.between("scores.extent[0]", batch, 0, detail::most_int32);
  check.between("scores.extent[1]", next_n, 1, detail::most_int32);
  check.between("k", selected.extent[2], 1, detail::most_int32);
  check.between("scores.extent[2]", scores.extent[2], 0, INT64_C(0x7FFFFFFFFFFFFFFF));
  check.require(options.order == TopKOrder::by_position || options.order == TopKOrder::by_score, ErrorCode::invalid_argument,
                "order " + std::to_string(static_cast<int>(options.order)) + " is none of TopKOrder");
  check.require(batch < 0 || next_n < 1 || scores.extent[2] < 0 || scores.elements() >= 0, ErrorCode::out_of_range,
                "scores is " + detail::ArgumentCheck::text(scores.extent) + ", which is more than 63 bits can count");
  check.memory("scores", scores.data, scores.elements());
  check.extents("selected", selected, {batch, next_n, selected.extent[2]}, "scores");
  std::int64_t table_tokens = detail::most_int32;
  const auto& table = options.page_table;
  const bool has_table = table.data != nullptr || table.extent[0] != 0 || table.extent[1] != 0;
  if (has_table) {
    check.extents("page_table", table, {batch, table.extent[1]}, "scores");
    check.between("page_table.extent[1]", table.extent[1], 0, detail::most_int32);
    check.between("tokens_per_page", options.tokens_per_page, 1, detail::most_int32);
    check.between("pages", options.pages, 0, detail::most_int32);
    if (check.ok()) table_tokens = table.extent[1] * options.tokens_per_page;
  }
  check.require(has_table || !options.translate, ErrorCode::invalid_argument, "translate needs a page table");
  check.require(supports(options.level), ErrorCode::unsupported, std::string("this processor has no ") + name_of(options.level));
  if (check.ok()) check.lengths(lengths, batch, next_n, table_tokens, scores.extent[2], lengths_readable);
  if (!check.ok()) return check.error();

  body::TopKArgs args;
  args.scores = scores.data;
  args.stride = scores.extent[2];
  args.lengths = lengths.data;
  args.lengths_per_query = next_n > 1 && lengths.extent[1] == next_n;
  args.batch = static_cast<std::int32_t>(batch);
  args.next_n = static_cast<std::int32_t>(next_n);
  args.k = static_cast<std::int32_t>(selected.extent[2]);
  args.selected = selected.data;
  args.order = options.order;
  if (has_table) {
    args.page_table = table.data;
    args.max_pages = table.extent[1];
    args.tokens_per_page = static_cast<std::int32_t>(options.tokens_per_page);
    args.page_count = static_cast<std::int32_t>(options.pages);
    args.translate = options.translate;
  }
  return args;
}

/// Selects the k highest scores of each row, on the stream. Exact on any distribution and the same on every run: the higher score first, equal
/// scores (-0 and +0 too) by the lower position; a row's answer depends on that row alone.
///
/// scores    [batch][next_n][stride]
/// lengths   as sparse_logits takes them; nothing beyond what a query token sees is read
/// selected  [batch][next_n][k], k at least 1 (0 is an error): positions, ascending unless TopKOptions says otherwise. A row with fewer candidates
///           than k lists them all and then -1; every slot is written.
///
/// A NaN score is never selected, and counted: a row of NaN alone gives -1 alone. Error, with nothing queued, where extents disagree, k is 0,
/// or a length is out of bounds. Everything but `lengths` is read when the work runs and must live until then.
template <HostTag Backend>
Status top_k(Tensor<const float, 3> scores, Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Backend>& stream,
             TopKOptions options = {}) {
  auto checked = check_top_k(scores, lengths, selected, options);
  if (!checked.ok()) return checked.error();
  stream.launch([args = checked.value(), options, owned = detail::own(lengths)]() mutable -> Status {
    args.lengths = owned.data();
    TopKCounts ignored;
    return simd::TopK<Backend>(args, options.level).run(options.counts != nullptr ? *options.counts : ignored);
  });
  return {};
}

/// The same with k given in the code: `selected` must be [batch][next_n][K].
template <int K, HostTag Backend>
  requires(K > 0)
Status top_k(Tensor<const float, 3> scores, Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Backend>& stream,
             TopKOptions options = {}) {
  if (selected.extent[2] != K) {
    return Error{ErrorCode::mismatch, "top_k: selected has " + std::to_string(selected.extent[2]) + " slots a row, k is " + std::to_string(K)};
  }
  return top_k(scores, lengths, selected, stream, std::move(options));
}

KVIRE_NAMESPACE_END
