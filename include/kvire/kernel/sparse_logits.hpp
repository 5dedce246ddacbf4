// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <kvire/kernel/host/page_table.hpp>
#include <kvire/kernel/host/sparse_logits.hpp>
#include <kvire/kernel/require.hpp>
#include <kvire/kernel/tensor.hpp>
#include <kvire/sync/host.hpp>

KVIRE_NAMESPACE_BEGIN

struct SparseLogitsOptions {
  /// The blocks of a two-level indexer, [batch][max_blocks]: entries of each row's page table, in any order; negative: none. Only these are scored:
  /// scores are then [batch][next_n][max_blocks * tokens per page], block after block as listed, every one written, and -inf where the query token
  /// does not see the position. An entry beyond the page table counts as a bad page.
  Tensor<const std::int32_t, 2> blocks = {};
  LogitsCounts* counts = nullptr;  ///< added to when the work has run; must live until then
  SimdLevel level = best_level();  ///< one that this processor does not support is an error
};

/// Checks the arguments of sparse_logits and gathers them for a kernel, all but the pages. `policy`, `dim` and `tokens_per_page` are those of
/// the keys. `lengths` are read here, unless they are in device memory.
inline Result<body::SparseLogitsArgs> check_sparse_logits(const char* policy, int dim, int tokens_per_page, const Queries& queries,
                                                          Tensor<const float, 3> weights, Tensor<const std::int32_t, 2> page_table,
                                                          Tensor<const std::int32_t, 2> lengths, const ScoreTensor<3>& scores, SimdLevel level,
                                                          bool lengths_readable = true, const Tensor<const std::int32_t, 2>& blocks = {}) {
  detail::ArgumentCheck check("sparse_logits");
  check.queries(queries, dim, policy, detail::most_int32);
  check.extents("weights", weights, {queries.batch, queries.next_n, queries.heads}, "queries");
  check.extents("page_table", page_table, {queries.batch, page_table.extent[1]}, "queries");
  check.between("page_table.extent[1]", page_table.extent[1], 0, detail::most_int32);
  const bool listed = blocks.data != nullptr || blocks.extent[1] != 0;
  if (listed) {
    check.extents("blocks", blocks, {queries.batch, blocks.extent[1]}, "queries");
    check.between("blocks.extent[1]", blocks.extent[1], 0, detail::most_int32 / tokens_per_page);
  }
  check.extents("scores", scores, {queries.batch, queries.next_n, listed ? checked_mul(blocks.extent[1], tokens_per_page) : scores.extent(2)}, listed ? "blocks" : "queries");
  check.require(supports(level), ErrorCode::unsupported, std::string("this processor has no ") + name_of(level));
  if (check.ok()) check.lengths(lengths, queries.batch, queries.next_n, page_table.extent[1] * tokens_per_page, listed ? detail::most_int32 : scores.extent(2), lengths_readable);
  if (!check.ok()) return check.error();

  body::SparseLogitsArgs args;
  args.queries = queries.data;
  args.query_element = queries.element;
  args.weights = weights.data;
  args.page_table = page_table.data;
  args.lengths = lengths.data;
  args.lengths_per_query = queries.next_n > 1 && lengths.extent[1] == queries.next_n;
  args.scores = {scores.data(), scores.element()};
  args.stride = scores.extent(2);
  args.blocks = listed ? blocks.data : nullptr;
  args.max_blocks = blocks.extent[1];
  args.max_pages = page_table.extent[1];
  args.batch = static_cast<std::int32_t>(queries.batch);
  args.next_n = static_cast<std::int32_t>(queries.next_n);
  args.heads = static_cast<std::int32_t>(queries.heads);
  return args;
}

/// Scores cached keys against the queries of a batch, on the stream:
///
///     scores[b][n][s] = k_scale[s] * sum over heads h of weights[b][n][h] * max(0, queries[b][n][h] . key[s])
///
/// for s below what query token n of row b sees, f32 throughout, in the order of body::sparse_logits. Each score depends on its own row and key
/// alone and is the same bits on every run, whatever the batch, the processor and the count of threads.
///
/// queries     [batch][next_n][heads][dim]
/// weights     [batch][next_n][heads]
/// keys        a read lease of the index keys
/// page_table  [batch][max_pages], device page ids. A position on a negative id scores -inf; so does one on an id beyond the pool, which is
///             counted, and on the host one on a page that the lease does not name, if it names any; none is followed.
/// lengths     [batch][1]: cached tokens of each row, those of its next_n query tokens included: token n sees length - (next_n - 1 - n) of them
///             (its causal view). Or [batch][next_n]: what each query token sees.
/// scores      [batch][next_n][stride], f32 or bf16. Nothing is written from what a query token sees on.
///
/// A NaN logit (a NaN or an infinity somewhere in key, scale, query or weight) scores -inf and is counted. With several scales a key, each
/// element is multiplied by its own before the dot product.
///
/// Returns an error, and queues nothing, where extents disagree, a length is negative or exceeds the page table or the stride, or the level
/// is not supported. Everything but `lengths` is read when the work runs and must live until then.
template <class Policy = void, class Lease>
Status sparse_logits(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                     Tensor<const std::int32_t, 2> lengths, const ScoreTensor<3>& scores, Stream<Host>& stream, SparseLogitsOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    auto checked = check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, options.level, true, options.blocks);
    if (!checked.ok()) return checked.error();
    launch(
        stream,
        [args = checked.value(), options, keys, owned = detail::own(lengths)](const auto& view) mutable {
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          args.lengths = owned.data();
          std::vector<std::int32_t> table;
          args.page_table = detail::readable_pages(keys, args.page_table, args.batch * args.max_pages, view.pages, table);
          LogitsCounts ignored;
          return simd::SparseLogits(args, simd::key_format<P>(options.level), options.level).run(options.counts != nullptr ? *options.counts : ignored);
        },
        keys);
  }
  return {};
}

KVIRE_NAMESPACE_END
