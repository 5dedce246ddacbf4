// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/kernel/body/prefill_logits.hpp>
#include <kvire/kernel/host/page_table.hpp>
#include <kvire/kernel/require.hpp>
#include <kvire/kernel/tensor.hpp>
#include <kvire/sync/host.hpp>

KVIRE_NAMESPACE_BEGIN

struct PrefillLogitsOptions {
  LogitsCounts* counts = nullptr;  ///< added to when the work has run; must live until then
};

/// Keys outside of pages, as a gather leaves them: plane i of the policy is an array of rows, one a token.
template <LayoutPolicy P>
struct ContiguousKeys {
  const std::byte* planes[P::plane_count] = {};
  std::int64_t tokens = 0;
};

/// Checks the arguments of prefill_logits and gathers them for a kernel, all but the keys. `key_count`: the positions that there are. Starts and ends
/// are read here, unless they are in device memory.
template <LayoutPolicy P>
Result<body::PrefillLogitsArgs<P>> check_prefill_logits(const Queries& queries, Tensor<const float, 2> weights, std::int64_t key_count,
                                                        Tensor<const std::int32_t, 1> starts, Tensor<const std::int32_t, 1> ends, const ScoreTensor<2>& scores,
                                                        bool ranges_readable = true) {
  detail::ArgumentCheck check("prefill_logits");
  check.queries(queries, P::dim, P::name, 1);
  const std::int64_t rows = queries.batch;
  check.extents("weights", weights, {rows, queries.heads}, "queries");
  check.extents("starts", starts, {rows}, "queries");
  check.extents("ends", ends, {rows}, "queries");
  check.extents("scores", scores, {rows, scores.extent(1)}, "queries");
  check.between("keys", key_count, 0, detail::most_int32);
  const auto bound = [&](const char* what, std::int64_t row, std::int64_t end, std::int64_t most, const char* of) {
    if (end > most) {
      check.require(false, ErrorCode::out_of_range, "ends[" + std::to_string(row) + "] is " + std::to_string(end) + ", above the " + std::to_string(most) + " " + what + of);
    }
  };
  for (std::int64_t row = 0; check.ok() && ranges_readable && row < rows; ++row) {
    if (starts.data[row] >= ends.data[row]) continue;
    check.require(starts.data[row] >= 0, ErrorCode::out_of_range, "starts[" + std::to_string(row) + "] is " + std::to_string(starts.data[row]) + ", below 0");
    bound("keys", row, ends.data[row], key_count, "");
    bound("scores", row, ends.data[row], scores.extent(1), " of a row");
  }
  if (!check.ok()) return check.error();

  body::PrefillLogitsArgs<P> args;
  args.queries = queries.data;
  args.query_element = queries.element;
  args.weights = weights.data;
  args.heads = static_cast<std::int32_t>(queries.heads);
  args.key_count = static_cast<std::int32_t>(key_count);
  args.starts = starts.data;
  args.ends = ends.data;
  args.rows = static_cast<std::int32_t>(rows);
  args.scores = {scores.data(), scores.element()};
  args.stride = scores.extent(1);
  return args;
}

namespace detail {

/// The arguments of the contiguous form, or what is wrong with them.
template <LayoutPolicy P>
Result<body::PrefillLogitsArgs<P>> check_contiguous_prefill(const Queries& queries, Tensor<const float, 2> weights, const ContiguousKeys<P>& keys,
                                                            Tensor<const std::int32_t, 1> starts, Tensor<const std::int32_t, 1> ends,
                                                            const ScoreTensor<2>& scores, bool ranges_readable = true) {
  auto checked = check_prefill_logits<P>(queries, weights, keys.tokens, starts, ends, scores, ranges_readable);
  if (!checked.ok()) return checked;
  for (int i = 0; i < P::plane_count; ++i) {
    if (keys.planes[i] == nullptr && keys.tokens > 0) {
      return Error{ErrorCode::invalid_argument, "prefill_logits: keys have " + std::to_string(keys.tokens) + " tokens and no memory for plane " + std::to_string(i)};
    }
    checked.value().planes[i] = keys.planes[i];
  }
  return checked;
}

/// The arguments of the paged form, all but the pages, or what is wrong with them.
template <LayoutPolicy P>
Result<body::PrefillLogitsArgs<P>> check_paged_prefill(const Queries& queries, Tensor<const float, 2> weights, Tensor<const std::int32_t, 1> page_table,
                                                       Tensor<const std::int32_t, 1> starts, Tensor<const std::int32_t, 1> ends,
                                                       const ScoreTensor<2>& scores, bool ranges_readable = true) {
  ArgumentCheck check("prefill_logits");
  check.between("page_table.extent[0]", page_table.extent[0], 0, most_int32 / P::tokens_per_page);
  check.memory("page_table", page_table.data, page_table.extent[0]);
  if (!check.ok()) return check.error();
  auto checked = check_prefill_logits<P>(queries, weights, page_table.extent[0] * P::tokens_per_page, starts, ends, scores, ranges_readable);
  if (!checked.ok()) return checked;
  checked.value().page_table = page_table.data;
  return checked;
}

/// Host work: all rows on all cores.
template <LayoutPolicy P>
void run_prefill_logits(body::PrefillLogitsArgs<P> args, const std::vector<std::int32_t>& starts, const std::vector<std::int32_t>& ends, LogitsCounts* counts) {
  args.starts = starts.data();
  args.ends = ends.data();
  std::atomic<std::int64_t> nan_logits{0}, bad_pages{0};
  parallel_for(args.rows * args.blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
    LogitsCounts found;
    for (std::int64_t item = begin; item < end; ++item) found += body::prefill_logits<P>(HostGroup<1>{}, item, args);
    nan_logits.fetch_add(found.nan_logits, std::memory_order_relaxed);
    bad_pages.fetch_add(found.bad_pages, std::memory_order_relaxed);
  });
  if (counts != nullptr) *counts += LogitsCounts{nan_logits, bad_pages};
}

inline std::vector<std::int32_t> own(const Tensor<const std::int32_t, 1>& x) { return {x.data, x.data + x.elements()}; }

}  // namespace detail

/// Scores keys against the rows of a prompt, on the stream:
///
///     scores[r][s] = k_scale[s] * sum over heads h of weights[r][h] * max(0, queries[r][h] . key[s])      for s in [starts[r], ends[r])
///
/// in the order of body::sparse_logits: a row gets the bits that a decode of it would get, whatever the other rows. Nothing outside of a row's range
/// is written; a range with start >= end is empty.
///
/// queries     [rows][heads][dim]: Queries with batch = rows and next_n = 1
/// weights     [rows][heads]
/// keys        contiguous, or a read lease with page_table [pages], device page ids: position s lies on page page_table[s / tokens per page], so
///             that sequences stand one behind the other, each from a page of its own on. Ids that are negative or beyond the pool are treated, and
///             counted, as by sparse_logits.
/// starts, ends [rows], positions: cached tokens
/// scores      [rows][stride], f32 or bf16; position s at index s
///
/// Returns an error, and queues nothing, where extents disagree or a range exceeds the keys or the stride. All but starts and ends is read when
/// the work runs and must live until then.
template <LayoutPolicy P>
Status prefill_logits(const Queries& queries, Tensor<const float, 2> weights, const ContiguousKeys<P>& keys, Tensor<const std::int32_t, 1> starts,
                      Tensor<const std::int32_t, 1> ends, const ScoreTensor<2>& scores, Stream<Host>& stream, PrefillLogitsOptions options = {}) {
  static_assert(require_layout<P>());
  require_readable<P>();
  if constexpr (readable_elements<P>) {
    const auto checked = detail::check_contiguous_prefill(queries, weights, keys, starts, ends, scores);
    if (!checked.ok()) return checked.error();
    stream.launch([args = checked.value(), from = detail::own(starts), to = detail::own(ends), options] {
      detail::run_prefill_logits(args, from, to, options.counts);
    });
  }
  return {};
}
template <class Policy = void, class Lease>
Status prefill_logits(const Queries& queries, Tensor<const float, 2> weights, const Lease& keys, Tensor<const std::int32_t, 1> page_table,
                      Tensor<const std::int32_t, 1> starts, Tensor<const std::int32_t, 1> ends, const ScoreTensor<2>& scores, Stream<Host>& stream,
                      PrefillLogitsOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    const auto checked = detail::check_paged_prefill<P>(queries, weights, page_table, starts, ends, scores);
    if (!checked.ok()) return checked.error();
    launch(
        stream,
        [args = checked.value(), keys, entries = page_table.extent[0], from = detail::own(starts), to = detail::own(ends), options](const auto& view) mutable {
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          std::vector<std::int32_t> table;
          args.page_table = detail::readable_pages(keys, args.page_table, entries, view.pages, table);
          detail::run_prefill_logits(args, from, to, options.counts);
        },
        keys);
  }
  return {};
}

KVIRE_NAMESPACE_END
