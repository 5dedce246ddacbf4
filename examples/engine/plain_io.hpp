// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "batch.hpp"

namespace engine {

/// The cache as plain fp32 rows, without pages, policies, pools or kernels: checks the model apart from the library, and is what the
/// recall experiment compares with.
template <class Entries>
class PlainIo {
 public:
  PlainIo(int index_heads, int top_k) : index_heads_(index_heads), top_k_(top_k) {}

  int top_k() const { return top_k_; }

  using Rows = std::unordered_map<std::int64_t, std::vector<float>>;
  struct Reader {
    const Rows* rows;
    void row(std::int64_t slot, float* out) const {
      const auto& row = rows->at(slot);
      std::copy(row.begin(), row.end(), out);
    }
  };

  template <class F, class... Readers>
  void run(F&& f, const Readers&... readers) {
    f(readers...);
  }

  template <class Entry>
  void store(kvire::LayerId layer, const float* rows, const std::vector<std::int64_t>& slots, const KeyPrologue& prologue = {}) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const float* row = rows + i * Entry::policy::dim;
      if (slots[i] < 0) continue;
      std::vector<float>& kept = all_[key<Entry>(layer)][slots[i]];
      kept.assign(row, row + Entry::policy::dim);
      if (prologue.gain == nullptr) continue;
      const std::int64_t at = prologue.positions[i] * (rope_dim / 2);
      math::rms_norm(kept.data(), prologue.gain, Entry::policy::dim, kept.data());
      math::rope(kept.data(), Entry::policy::dim, prologue.model->cos.data() + at, prologue.model->sin.data() + at);
      math::hadamard128(kept.data());
    }
  }

  template <class Entry>
  Reader read(kvire::LayerId layer) {
    return {&all_[key<Entry>(layer)]};
  }

  void select(kvire::LayerId layer, const float* q, const float* weights, const Batch& batch, std::int32_t* selected) {
    const auto keys = read<typename Entries::IndexK>(layer);
    for (const Span& s : batch.spans) {
      for (int r = s.first_row; r < s.first_row + s.rows; ++r) {
        const std::int64_t length = Entries::IndexK::cached(kvire::RawTokens(batch.positions[static_cast<std::size_t>(r)] + 1)).count;
        auto picked = choose(q, weights, r, length, [&](std::int64_t t, float* k) {
          keys.row(row_slot<typename Entries::IndexK>(s.tables.full, t * Entries::IndexK::kind::ratio), k);
        });
        picked.resize(static_cast<std::size_t>(top_k_), -1);
        std::copy(picked.begin(), picked.end(), selected + static_cast<std::int64_t>(r) * top_k_);
      }
    }
  }

  /// Top-k of one row over `length` keys, ascending; `key_at(t, out)` gives a key.
  template <class KeyAt>
  std::vector<std::int32_t> choose(const float* q, const float* weights, int row, std::int64_t length, KeyAt&& key_at) const {
    std::vector<float> scores;
    for (std::int64_t t = 0; t < length; ++t) {
      float k[index_dim];
      key_at(t, k);
      float score = 0;
      for (int h = 0; h < index_heads_; ++h) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * index_heads_ + h;
        float dot = 0;
        for (int d = 0; d < index_dim; ++d) dot += q[at * index_dim + d] * k[d];
        score += weights[at] * std::max(dot, 0.0f);
      }
      scores.push_back(score);
    }
    std::vector<std::int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)]; });
    if (static_cast<std::int64_t>(order.size()) > top_k_) order.resize(static_cast<std::size_t>(top_k_));
    std::sort(order.begin(), order.end());
    return order;
  }

 private:
  template <class Entry>
  static std::int64_t key(kvire::LayerId layer) {
    return Entries::template index_of<Entry>() * 1000 + layer.value;
  }

  int index_heads_;
  int top_k_;
  std::unordered_map<std::int64_t, Rows> all_;
};

}  // namespace engine
