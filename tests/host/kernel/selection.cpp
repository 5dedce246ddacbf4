// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <doctest/doctest.h>

#include <kvire/kernel/selection.hpp>
#include <kvire/layout/policies.hpp>
#include <tests/support/key_case.hpp>

using namespace kvire;
using namespace kvire_test;

TEST_CASE("selection: what logits and top-k select one after the other, with and without scores kept") {
  using P = Fp8WithScale<16, 64>;
  std::mt19937 random{12};
  for (int trial = 0; trial < 6; ++trial) {
    const auto c = random_case<P>({.batch = 3, .next_n = 2, .heads = 4, .max_pages = 5, .element = Element::bf16, .per_query = trial % 2 == 1, .holes_percent = 20}, random);
    constexpr int k = 20;
    const auto slots = static_cast<std::size_t>(c.batch * c.next_n * k);
    const Scores scores = run_logits(c, best_level(), test_stream());
    for (const bool translate : {false, true}) {
      std::vector<std::int32_t> want(slots, 12345), got(slots, 12345), again(slots, 12345);
      TopKOptions top;
      top.page_table = c.table_view();
      top.tokens_per_page = P::tokens_per_page;
      top.pages = c.page_count;
      top.translate = translate;
      top_k({scores.values.data(), {c.batch, c.next_n, c.stride}}, c.length_view(), {want.data(), {c.batch, c.next_n, k}}, test_stream(), top).value();
      LogitsCounts counts;
      select_keys(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(), {got.data(), {c.batch, c.next_n, k}}, test_stream(),
                  {.translate = translate, .logits_counts = &counts})
          .value();
      std::vector<float> kept(scores.values.size(), untouched);
      select_keys(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(), {again.data(), {c.batch, c.next_n, k}}, test_stream(),
                  {.translate = translate, .scores = {kept.data(), {c.batch, c.next_n, c.stride}}})
          .value();
      test_stream().synchronize().value();
      CHECK(got == want);
      CHECK(again == want);
      // Rows so long that the scores of one fill the memory there is for some: the batch row by row.
      const std::int64_t wide = detail::selection_rows_bytes / (4 * P::tokens_per_page) + 1;
      std::vector<std::int32_t> table(static_cast<std::size_t>(c.batch * wide), -1), row_by_row(slots, 12345);
      for (std::int64_t b = 0; b < c.batch; ++b) std::copy_n(c.table.begin() + b * c.max_pages, c.max_pages, table.begin() + b * wide);
      select_keys(c.query_view(), c.weight_view(), assume_ready(c.view()), {table.data(), {c.batch, wide}}, c.length_view(), {row_by_row.data(), {c.batch, c.next_n, k}},
                  test_stream(), {.translate = translate})
          .value();
      test_stream().synchronize().value();
      CHECK(row_by_row == want);
      CHECK(counts.bad_pages == scores.counts.bad_pages);
      int differ = 0;
      for (std::size_t i = 0; i < kept.size(); ++i) differ += bits_of(kept[i]) != bits_of(scores.values[i]);
      CHECK(differ == 0);
    }
  }
}
