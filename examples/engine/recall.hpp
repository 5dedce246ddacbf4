// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <map>

#include <fmt/format.h>

#include <kvire/codec/row.hpp>

#include "forward.hpp"
#include "options.hpp"
#include "plain_io.hpp"
#include "report.hpp"
#include "workload.hpp"

namespace engine {

/// Share of the fp32 top-k that a policy's stored keys still select.
struct Recall {
  double sum = 0;
  double worst = 1;
  int rows = 0;

  void add(double recall) {
    sum += recall;
    worst = std::min(worst, recall);
    ++rows;
  }
  double mean() const { return rows == 0 ? 1 : sum / rows; }
};

/// A plain cache that, for the rows it is told to look at, also selects with keys as each policy would store them.
class RecallIo : public PlainIo<kvire::preset::deepseek_v4::Flash<>> {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<>;
  using PlainIo::PlainIo;

  static constexpr const char* policies[] = {"fp8", "bf16", "fp4"};
  std::int64_t first_watched = 0;  ///< raw position from which rows are looked at
  std::array<Recall, 3> recalls{};

  void select(kvire::LayerId layer, const float* q, const float* weights, const Batch& batch, std::int32_t* selected) {
    PlainIo::select(layer, q, weights, batch, selected);
    const Span& span = batch.spans.front();
    for (std::int64_t p = std::max(span.start, first_watched); p < span.end(); ++p) {
      const int r = static_cast<int>(p - span.start);
      const std::int64_t length = Entries::IndexK::cached(kvire::RawTokens(p + 1)).count;
      if (length <= top_k()) continue;
      using namespace kvire::preset::deepseek_v4;
      recalls[0].add(recall_of<IndexKeyFp8>(layer, q, weights, span, r, length, selected));
      recalls[1].add(recall_of<IndexKeyBf16>(layer, q, weights, span, r, length, selected));
      recalls[2].add(recall_of<IndexKeyFp4>(layer, q, weights, span, r, length, selected));
    }
  }

 private:
  template <class IndexKey>
  double recall_of(kvire::LayerId layer, const float* q, const float* weights, const Span& span, int row, std::int64_t length, const std::int32_t* selected) {
    const auto keys = read<Entries::IndexK>(layer);
    alignas(16) std::byte page[static_cast<std::size_t>(IndexKey::page_bytes)];
    const auto picked = choose(q, weights, row, length, [&](std::int64_t t, float* k) {
      keys.row(row_slot<Entries::IndexK>(span.tables.full, t * Entries::IndexK::kind::ratio), k);
      kvire::encode_row<IndexKey>(k, page, 0);
      kvire::decode_row<IndexKey>(page, 0, k);
    });
    const std::int32_t* exact = selected + static_cast<std::int64_t>(row) * top_k();
    const auto common = std::count_if(picked.begin(), picked.end(), [&](std::int32_t i) { return std::binary_search(exact, exact + top_k(), i); });
    return static_cast<double>(common) / top_k();
  }
};

/// Prints recall of the top-k against fp32 keys, by policy and context length.
inline kvire::Status recall(const Options& options) {
  const std::vector<std::int64_t> contexts{512, 1024, 2048, 4096};
  constexpr std::int64_t watched = 32;  // last rows of each context
  const Model model = make_model(options.seed, std::max(options.layers, 3), options.index_heads, contexts.back());
  RecallIo io(options.index_heads, options.top_k);
  PageTables tables;
  for (std::int32_t p = 0; p <= static_cast<std::int32_t>(contexts.back() / page_raw_tokens); ++p) {
    tables.full.push_back(p + 1);
    tables.window.push_back(p + 1);
  }
  std::vector<int> tokens;
  for (std::int64_t i = 0; i < contexts.back(); ++i) tokens.push_back(block_token(options.seed + static_cast<std::uint64_t>(i) / trace_block_tokens, i));
  nlohmann::ordered_json json;
  fmt::print("recall of the top {} of each row against fp32 keys, {} index heads, mean (worst row) over {} rows a layer\n{:>8}", options.top_k,
             options.index_heads, watched, "context");
  for (const char* policy : RecallIo::policies) fmt::print(" {:>18}", policy);
  fmt::print("\n");
  std::int64_t done = 0;
  for (const std::int64_t context : contexts) {
    io.recalls = {};
    io.first_watched = context - watched;
    while (done < context) {
      const int rows = static_cast<int>(std::min<std::int64_t>(256, context - done));
      Batch batch;
      batch.add(tokens.data() + done, rows, done, false, tables);
      Forward<RecallIo::Entries, RecallIo> forward(model, io, batch, options.top_k);
      forward.run();
      done += rows;
    }
    fmt::print("{:>8}", context);
    for (std::size_t p = 0; p < io.recalls.size(); ++p) {
      fmt::print(" {:>8.2f}% ({:>6.2f}%)", 100 * io.recalls[p].mean(), 100 * io.recalls[p].worst);
      json["recall"].push_back({{"context", context}, {"policy", RecallIo::policies[p]}, {"mean", io.recalls[p].mean()}, {"worst", io.recalls[p].worst}});
    }
    fmt::print("\n");
  }
  return options.json.empty() ? kvire::Status() : write_json(options.json, json);
}

}  // namespace engine
