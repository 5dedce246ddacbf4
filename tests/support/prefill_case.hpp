// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <kvire/kernel/prefill_logits.hpp>

#include "key_case.hpp"

// Inputs of prefill logits: one sequence whose query tokens are the rows, each with a range of its own. What a decode of the same row
// scores is the answer.

namespace kvire_test {

template <class P>
struct PrefillCase {
  KeyCase<P> keys;  // batch 1, next_n rows, lengths are the ends
  std::vector<std::int32_t> starts;

  int rows() const { return keys.next_n; }
  kvire::Queries queries() const { return {keys.queries.data(), keys.element, rows(), 1, keys.heads, P::dim}; }
  kvire::Tensor<const float, 2> weights() const { return {keys.weights.data(), {rows(), keys.heads}}; }
  kvire::Tensor<const std::int32_t, 1> table() const { return {keys.table.data(), {keys.max_pages}}; }
  kvire::Tensor<const std::int32_t, 1> starts_view() const { return {starts.data(), {rows()}}; }
  kvire::Tensor<const std::int32_t, 1> ends_view() const { return {keys.lengths.data(), {rows()}}; }
  bool sees(int row, std::int64_t s) const { return s >= starts[static_cast<std::size_t>(row)] && s < keys.lengths[static_cast<std::size_t>(row)]; }
  int longest() const { return *std::max_element(keys.lengths.begin(), keys.lengths.end()); }

  /// The keys up to the last end, without pages: an array of rows for each plane. Requires a table without holes.
  std::vector<std::vector<std::byte>> planes() const {
    std::vector<std::vector<std::byte>> out;
    for (int i = 0; i < P::plane_count; ++i) {
      const std::int64_t bytes = P::table.row_bytes[i];
      std::vector<std::byte> plane(static_cast<std::size_t>(longest() * bytes));
      for (std::int64_t s = 0; s < longest(); ++s) {
        const std::byte* page = keys.page(keys.table[static_cast<std::size_t>(s / P::tokens_per_page)]);
        std::memcpy(plane.data() + s * bytes, page + P::table.plane_offset[i] + s % P::tokens_per_page * bytes, static_cast<std::size_t>(bytes));
      }
      out.push_back(std::move(plane));
    }
    return out;
  }
};

template <class P>
PrefillCase<P> random_prefill(int rows, int heads, int max_pages, kvire::Element element, int holes_percent, std::mt19937& random) {
  PrefillCase<P> c;
  c.keys = random_case<P>({.batch = 1, .next_n = rows, .heads = heads, .max_pages = max_pages, .element = element, .per_query = true, .holes_percent = holes_percent}, random);
  for (const std::int32_t end : c.keys.lengths) {
    const auto r = random() % 4;
    c.starts.push_back(r == 0 || end == 0 ? 0 : r == 1 ? std::max(0, end - 1 - static_cast<int>(random() % 70)) : static_cast<int>(random() % static_cast<unsigned>(end + 1)));
  }
  return c;
}

/// What a decode of each row scores, where the row's range has it; `untouched` elsewhere. Its counts are those of the whole [0, end).
template <class P>
Scores decoded(const PrefillCase<P>& c, kvire::SimdLevel level = kvire::best_level()) {
  Scores out = run_logits(c.keys, level, test_stream());
  for (int row = 0; row < c.rows(); ++row) {
    for (std::int64_t s = 0; s < c.keys.stride; ++s) {
      if (!c.sees(row, s)) out.values[static_cast<std::size_t>(row * c.keys.stride + s)] = untouched;
    }
  }
  return out;
}

}  // namespace kvire_test
