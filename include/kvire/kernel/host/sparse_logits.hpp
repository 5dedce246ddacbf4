// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>
#include <kvire/base/sort.hpp>
#include <kvire/exec/host/parallel.hpp>
#include <kvire/kernel/host/heap_array.hpp>
#include <kvire/kernel/host/key_rows.hpp>
#include <kvire/kernel/host/panel.hpp>

KVIRE_NAMESPACE_BEGIN
namespace simd {

/// Sparse logits of all rows, on all cores. The arguments are checked already (kernel/sparse_logits.hpp does).
template <HostTag Backend = Host>
class SparseLogits {
 public:
  SparseLogits(const body::SparseLogitsArgs& args, const KeyFormat& format, SimdLevel level)
      : args_(args), format_(format), level_(level), kernel_(panel_kernel(level)) {}

  /// Error exhausted: no memory for packed queries or keys.
  Status run(LogitsCounts& counts) {
    if (level_ == SimdLevel::plain || args_.blocks != nullptr) {
      parallel_for(args_.batch * args_.entries(), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t item = begin; item < end; ++item) add(format_.plain(item, args_));
      });
    } else {
      if (!pack_queries() || !cut_rows()) return no_memory();
      std::atomic<bool> exhausted{false};
      parallel_for(first_panel_[args_.batch], panels_a_chunk, [&](std::int64_t begin, std::int64_t end) {
        const detail::StandardFloatMode mode;
        if (!score_panels(begin, end)) exhausted.store(true, std::memory_order_relaxed);
      });
      if (exhausted) return no_memory();
    }
    counts.nan_logits += nan_logits_;
    counts.bad_pages += bad_pages_;
    return {};
  }

 private:
  static constexpr std::int64_t panels_a_chunk = 8;

  static Error no_memory() { return Error{ErrorCode::exhausted, "sparse_logits: no memory for packed queries or keys"}; }

  static constexpr int line_floats = 16;
  struct alignas(64) Line {
    float values[line_floats];
  };

  void add(const LogitsCounts& counts) {
    nan_logits_.fetch_add(counts.nan_logits, std::memory_order_relaxed);
    bad_pages_.fetch_add(counts.bad_pages, std::memory_order_relaxed);
  }

  std::int64_t packed_row() const { return ceil_div<std::int64_t>(args_.heads, kernel_.heads) * kernel_.heads * format_.dim; }

  // [query row][block of heads][dim][heads of a block], zero beyond the last head.
  bool pack_queries() {
    const std::int64_t rows = std::int64_t(args_.batch) * args_.next_n;
    if (!packed_.allocate(rows * packed_row()) || !short_queries_.allocate(rows)) return false;
    parallel_for(rows, 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        float* to = packed_.get() + row * packed_row();
        for (int h = 0; h < args_.heads; h += kernel_.heads, to += kernel_.heads * format_.dim) {
          for (int j = 0; j < kernel_.heads; ++j) pack_head(row, h + j, to + j);
        }
        short_queries_[row] = kernel_.wants_short_products && are_short(packed_.get() + row * packed_row(), packed_row());
      }
    });
    return true;
  }

  // One head of a query, its elements a block of heads apart.
  void pack_head(std::int64_t row, int head, float* to) const {
    const int step = kernel_.heads;
    const int dim = format_.dim;
    if (head >= args_.heads) {
      for (int d = 0; d < dim; ++d) to[d * step] = 0;
      return;
    }
    const std::int64_t first = (row * args_.heads + head) * dim;
    if (args_.query_element == Element::e4m3) {
      const auto* from = static_cast<const std::uint8_t*>(args_.queries) + first;
      for (int d = 0; d < dim; ++d) to[d * step] = baseline::e4m3_table.value[from[d]];
    } else if (args_.query_element == Element::bf16) {
      const auto* from = static_cast<const std::uint16_t*>(args_.queries) + first;
      for (int d = 0; d < dim; ++d) to[d * step] = f32_from_bf16(from[d]);
    } else {
      const auto* from = static_cast<const float*>(args_.queries) + first;
      for (int d = 0; d < dim; ++d) to[d * step] = from[d];
    }
  }

  // Panels start at multiples of their size within a row.
  bool cut_rows() {
    if (!first_panel_.allocate(std::int64_t(args_.batch) + 1)) return false;
    first_panel_[0] = 0;
    for (std::int64_t row = 0; row < args_.batch; ++row) first_panel_[row + 1] = first_panel_[row] + ceil_div<std::int64_t>(args_.longest(row), kernel_.tokens);
    return true;
  }

  bool score_panels(std::int64_t begin, std::int64_t end) {
    const HeapArray<Line> panel_memory(ceil_div(kernel_.tokens * format_.dim, line_floats));
    if (!panel_memory) return false;
    LogitsCounts counts;
    // The last row that starts at or before the first panel.
    const auto rows_before = detail::lower_bound(first_panel_.get(), static_cast<std::size_t>(args_.batch) + 1, begin + 1);
    auto row = static_cast<std::int64_t>(rows_before) - 1;
    for (std::int64_t panel = begin; panel < end; ++panel) {
      while (panel >= first_panel_[row + 1]) ++row;
      score_panel(row, (panel - first_panel_[row]) * kernel_.tokens, panel_memory[0].values, counts);
    }
    add(counts);
    return true;
  }

  void score_panel(std::int64_t row, std::int64_t first, float* panel, LogitsCounts& counts) {
    const int count = static_cast<int>(min_of<std::int64_t>(kernel_.tokens, args_.longest(row) - first));
    PanelToken token[most_panel_tokens];
    float scale[most_panel_tokens];
    for (int t = 0; t < count;) {
      const std::int64_t entry = (first + t) / format_.tokens_per_page;
      const int from = static_cast<int>((first + t) % format_.tokens_per_page);
      const int many = min_of(format_.tokens_per_page - from, count - t);
      const std::int32_t id = args_.page_table[row * args_.max_pages + entry];
      if (from == 0 && id >= args_.page_count) ++counts.bad_pages;
      const std::byte* page = id >= 0 && id < args_.page_count ? args_.page(id) : nullptr;
      for (int i = 0; i < many; ++i, ++t) {
        token[t] = {page, from + i};
        scale[t] = page != nullptr ? format_.outer_scale(page, from + i) : 0.0F;
      }
    }

    format_.fill(token, count, kernel_.tokens, panel);
    const bool short_keys = kernel_.wants_short_products && are_short(panel, std::int64_t(format_.dim) * kernel_.tokens);
    for (std::int32_t n = 0; n < args_.next_n; ++n) {
      const std::int64_t query_row = row * args_.next_n + n;
      const std::int64_t visible = min_of<std::int64_t>(count, args_.visible(row, n) - first);
      if (visible <= 0) continue;
      alignas(64) float sums[most_panel_tokens];
      kernel_.sums(packed_.get() + query_row * packed_row(), args_.weights + query_row * args_.heads, panel, args_.heads, format_.dim,
                   short_keys && short_queries_[query_row], sums);
      for (int t = 0; t < visible; ++t) {
        const float score = token[t].page != nullptr ? body::finish_logit(scale[t], sums[t], counts.nan_logits) : float_of(infinity_bits | sign_bit);
        args_.scores.store(query_row * args_.stride + first + t, score);
      }
    }
  }

  body::SparseLogitsArgs args_;
  KeyFormat format_;
  SimdLevel level_;
  PanelKernel kernel_;
  HeapArray<float> packed_;
  HeapArray<bool> short_queries_;
  HeapArray<std::int64_t> first_panel_;
  std::atomic<std::int64_t> nan_logits_{0};
  std::atomic<std::int64_t> bad_pages_{0};
};

}  // namespace simd
KVIRE_NAMESPACE_END
