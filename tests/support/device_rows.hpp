// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/top_k.hpp>

#include "device_array.hpp"
#include "score_rows.hpp"

namespace kvire_test {

/// Rows of scores in device memory, room for what is selected of them, and the arguments that say so.
struct DeviceRows {
  DeviceRows(const Rows& in, int k, bool by_score = false) : DeviceRows({}, in, k) {
    args.order = by_score ? kvire::TopKOrder::by_score : kvire::TopKOrder::by_position;
  }
  DeviceRows(const PagedRows& in, int k, bool translate) : DeviceRows(in.table, in.rows, k) {
    args.page_table = table.data();
    args.max_pages = in.pages;
    args.tokens_per_page = PagedRows::tokens;
    args.page_count = PagedRows::pool;
    args.translate = translate;
  }

  DeviceArray<float> scores;
  DeviceArray<std::int32_t> lengths, table, selected;
  kvire::body::TopKArgs args;

 private:
  DeviceRows(const std::vector<std::int32_t>& pages, const Rows& in, int k)
      : scores(in.scores), lengths(in.lengths), table(pages), selected(std::vector<std::int32_t>(std::size_t(in.rows) * std::size_t(k), 123456)) {
    args.scores = scores.data();
    args.stride = in.stride;
    args.lengths = lengths.data();
    args.batch = in.rows;
    args.k = k;
    args.selected = selected.data();
  }
};

}  // namespace kvire_test
