// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "batch.hpp"

namespace engine {

/// What the rows of a replay went through: the hidden row that each layer took, and what was selected with which scores. For comparing two
/// replays. With `forced`, each layer takes the hidden row of that other replay instead of its own.
class RowLog {
 public:
  explicit RowLog(std::shared_ptr<const RowLog> forced = {}) : forced_(std::move(forced)) {}

  struct Selection {
    std::vector<std::int32_t> indices;  ///< ascending
    std::vector<float> scores;          ///< of these
  };
  template <class T>
  using Rows = std::unordered_map<std::uint64_t, T>;

  /// The hidden rows [first, first + rows) of a batch that a layer is about to take; layers past the last: the head.
  void layer_input(int layer, const Batch& batch, std::int64_t first, std::int64_t rows, float* hidden) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const row = hidden + r * hidden_dim;
      const std::uint64_t at = key(layer, batch, first + r);
      hidden_[at].assign(row, row + hidden_dim);
      if (!forced_) continue;
      const auto other = forced_->hidden_.find(at);
      if (other != forced_->hidden_.end()) std::copy(other->second.begin(), other->second.end(), row);
    }
  }

  /// One row: the scores of all its keys, and its k places, -1 for none.
  void selection(int layer, const Batch& batch, std::int64_t row, const float* scores, const std::int32_t* selected, int k) {
    Selection& s = selections_[key(layer, batch, row)];
    s = {};
    for (int i = 0; i < k && selected[i] >= 0; ++i) {
      s.indices.push_back(selected[i]);
      s.scores.push_back(scores[selected[i]]);
    }
  }

  const Rows<std::vector<float>>& hidden() const { return hidden_; }
  const Rows<Selection>& selections() const { return selections_; }
  static int layer_of(std::uint64_t key) { return static_cast<int>(key >> 32 & 0xFF); }

 private:
  static std::uint64_t key(int layer, const Batch& batch, std::int64_t row) {
    const auto span = std::find_if(batch.spans.begin(), batch.spans.end(), [&](const Span& s) { return row < s.first_row + s.rows; });
    return static_cast<std::uint64_t>(span->request) << 40 | static_cast<std::uint64_t>(layer) << 32 |
           static_cast<std::uint64_t>(batch.positions[static_cast<std::size_t>(row)]);
  }

  std::shared_ptr<const RowLog> forced_;
  Rows<std::vector<float>> hidden_;
  Rows<Selection> selections_;
};

}  // namespace engine
