// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>
#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN

/// How top_k lists what it selects.
enum class TopKOrder : unsigned char {
  by_position,  ///< ascending
  by_score,     ///< descending; equal scores by ascending position
};

/// What top_k met, added up over its rows.
struct TopKCounts {
  kstd::int64_t nan_scores = 0;  ///< NaN within a row's length; never selected
  kstd::int64_t bad_pages = 0;   ///< page-table entries that name no page of the pool, or one whose slots exceed 32 bits; never selected

  KVIRE_HD constexpr TopKCounts& operator+=(const TopKCounts& other) {
    nan_scores += other.nan_scores;
    bad_pages += other.bad_pages;
    return *this;
  }
};

namespace body {

/// Everything that the top-k kernels read and write. Plain values, to be passed by value to a kernel.
struct TopKArgs {
  const float* scores = nullptr;  ///< [batch][next_n][stride]
  kstd::int64_t stride = 0;
  const kstd::int32_t* lengths = nullptr;  ///< as sparse_logits takes them
  bool lengths_per_query = false;
  kstd::int32_t batch = 0;
  kstd::int32_t next_n = 1;
  kstd::int32_t k = 0;
  kstd::int32_t* selected = nullptr;  ///< [batch][next_n][k]
  kstd::int32_t* scratch = nullptr;   ///< the same extents; only for TopKOrder::by_score
  TopKOrder order = TopKOrder::by_position;

  const kstd::int32_t* page_table = nullptr;  ///< [batch][max_pages]; null: every position is a candidate
  kstd::int64_t max_pages = 0;
  kstd::int32_t tokens_per_page = 1;
  kstd::int32_t page_count = 0x7FFFFFFF;  ///< ids from here on are bad
  bool translate = false;                 ///< list page_table[i / tokens_per_page] * tokens_per_page + i % tokens_per_page for position i

  /// Positions of a row (batch * next_n of them), as SparseLogitsArgs::visible; none beyond the page table.
  KVIRE_HD kstd::int64_t visible(kstd::int64_t row) const {
    const kstd::int64_t length =
        lengths_per_query ? kstd::int64_t(lengths[row]) : kstd::int64_t(lengths[row / next_n]) - (next_n - 1 - row % next_n);
    const kstd::int64_t most = page_table != nullptr && max_pages * tokens_per_page < stride ? max_pages * tokens_per_page : stride;
    return length < 0 ? 0 : length < most ? length : most;
  }

  KVIRE_HD kstd::int32_t entry(kstd::int64_t row, kstd::int64_t position) const {
    return page_table[row / next_n * max_pages + position / tokens_per_page];
  }
  /// A page that positions may be selected from: one of the pool and, if translated, with slots that fit 32 bits.
  KVIRE_HD bool good_page(kstd::int32_t id) const {
    return id >= 0 && id < page_count && (!translate || id < 0x7FFFFFFF / tokens_per_page);
  }

  /// Orders candidates; 0 if the position is none. Lower than every other key is that of -inf, which is a candidate.
  KVIRE_HD kstd::uint32_t key(kstd::int64_t row, kstd::int64_t position) const {
    const float score = scores[row * stride + position];
    if (is_nan(score)) return 0;
    if (page_table != nullptr && !good_page(entry(row, position))) return 0;
    return order_key(score);
  }
};

namespace detail {

template <LaneGroup G, class Count>
KVIRE_HD kstd::int64_t count_positions(G g, kstd::int64_t length, Count count) {
  typename G::template Lanes<kstd::int64_t> n;
  g.each([&](int lane) {
    n[lane] = 0;
    for (kstd::int64_t i = lane; i < length; i += G::size) n[lane] += count(i) ? 1 : 0;
  });
  reduce(g, n, [](kstd::int64_t a, kstd::int64_t b) { return a + b; });
  kstd::int64_t total = 0;
  g.each([&](int lane) { total = n[lane]; });
  return total;
}

}  // namespace detail

/// The plain top-k body: one work item is one row. Exact on any distribution: the k-th key is found bit by bit, so nothing is sampled,
/// binned or bounded; of the positions that share it the lowest are taken. Every slot of the row is written, -1 behind the last selected.
/// Reads nothing beyond the row's length. Deterministic for any group: counts are integers and slots are positions in a scan.
template <LaneGroup G>
KVIRE_HD TopKCounts top_k(G g, kstd::int64_t row, const TopKArgs& args) {
  TopKCounts counts;
  const kstd::int64_t length = args.visible(row);
  kstd::int32_t* selected = args.selected + row * args.k;

  counts.nan_scores = detail::count_positions(g, length, [&](kstd::int64_t i) { return is_nan(args.scores[row * args.stride + i]); });
  if (args.page_table != nullptr) {
    counts.bad_pages = detail::count_positions(g, ceil_div(length, kstd::int64_t(args.tokens_per_page)), [&](kstd::int64_t i) {
      const kstd::int32_t id = args.entry(row, i * args.tokens_per_page);
      return id >= 0 && !args.good_page(id);
    });
  }
  const kstd::int64_t candidates = detail::count_positions(g, length, [&](kstd::int64_t i) { return args.key(row, i) != 0; });
  const kstd::int64_t wanted = candidates < args.k ? candidates : kstd::int64_t(args.k);

  kstd::uint32_t threshold = 1;
  if (candidates > args.k) {
    threshold = 0;
    for (kstd::uint32_t bit = sign_bit; bit != 0; bit >>= 1) {
      const kstd::uint32_t trial = threshold | bit;
      const kstd::int64_t above = detail::count_positions(g, length, [&](kstd::int64_t i) { return args.key(row, i) >= trial; });
      if (above >= wanted) threshold = trial;
      if (above == wanted) break;
    }
  }
  const kstd::int64_t greater = detail::count_positions(g, length, [&](kstd::int64_t i) { return args.key(row, i) > threshold; });
  const kstd::int64_t ties = wanted - greater;

  kstd::int64_t done = 0;
  kstd::int64_t ties_done = 0;
  for (kstd::int64_t tile = 0; tile < length && done < wanted; tile += G::size) {
    typename G::template Lanes<kstd::int64_t> tie_rank;
    typename G::template Lanes<kstd::int64_t> slot;
    g.each([&](int lane) { tie_rank[lane] = tile + lane < length && args.key(row, tile + lane) == threshold ? 1 : 0; });
    const kstd::int64_t tile_ties = scan_sum(g, tie_rank);
    typename G::template Lanes<bool> taken;
    g.each([&](int lane) {
      const kstd::uint32_t key = tile + lane < length ? args.key(row, tile + lane) : 0;
      taken[lane] = key > threshold || (key == threshold && ties_done + tie_rank[lane] < ties);
      slot[lane] = taken[lane] ? 1 : 0;
    });
    const kstd::int64_t tile_taken = scan_sum(g, slot);
    g.each([&](int lane) {
      if (taken[lane]) selected[done + slot[lane]] = static_cast<kstd::int32_t>(tile + lane);
    });
    done += tile_taken;
    ties_done += tile_ties;
  }
  g.each([&](int lane) {
    for (kstd::int64_t j = wanted + lane; j < args.k; j += G::size) selected[j] = -1;
  });
  g.sync();

  if (args.order == TopKOrder::by_score) {
    kstd::int32_t* ranked = args.scratch + row * args.k;
    g.each([&](int lane) {
      for (kstd::int64_t j = lane; j < wanted; j += G::size) {
        const kstd::uint32_t key = args.key(row, selected[j]);
        kstd::int64_t rank = 0;
        for (kstd::int64_t i = 0; i < wanted; ++i) {
          const kstd::uint32_t other = args.key(row, selected[i]);
          rank += other > key || (other == key && i < j) ? 1 : 0;
        }
        ranked[rank] = selected[j];
      }
    });
    g.sync();
    g.each([&](int lane) {
      for (kstd::int64_t j = lane; j < wanted; j += G::size) selected[j] = ranked[j];
    });
    g.sync();
  }
  if (args.translate) {
    g.each([&](int lane) {
      for (kstd::int64_t j = lane; j < wanted; j += G::size) {
        const kstd::int32_t position = selected[j];
        selected[j] = args.entry(row, position) * args.tokens_per_page + position % args.tokens_per_page;
      }
    });
  }
  return counts;
}

}  // namespace body
KVIRE_NAMESPACE_END
