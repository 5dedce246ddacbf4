// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch.hpp"

namespace engine {

/// What a forward pass computes on its way, row by row of the step. Sizes are settled before anything is queued: queued work holds addresses.
class ForwardBuffers {
 protected:
  /// `groups`: the most compressed rows that one layer completes in the step.
  ForwardBuffers(const Model& model, const Batch& batch, int top_k, std::size_t groups) {
    const std::size_t rows = batch.tokens.size();
    hidden_.resize(rows * hidden_dim);
    normed_.resize(rows * hidden_dim);
    q_.resize(rows * heads * latent_dim);
    kv_.resize(rows * latent_dim);
    mixed_.resize(rows * heads * latent_dim);
    added_.resize(rows * hidden_dim);
    std::size_t state_width = 0;
    std::size_t index_state_width = 0;
    for (const Layer& layer : model.layers) {
      state_width = std::max(state_width, static_cast<std::size_t>(layer.compressor.width));
      index_state_width = std::max(index_state_width, static_cast<std::size_t>(layer.index_compressor.width));
    }
    states_.resize(rows * state_width);
    index_states_.resize(rows * index_state_width);
    if (index_state_width > 0) {
      const std::size_t index_heads = static_cast<std::size_t>(model.index_heads);
      index_q_.resize(rows * index_heads * index_dim);
      index_weight_.resize(rows * index_heads);
      padded_weight_.resize(rows * ((index_heads + Matrix::strip - 1) / Matrix::strip * Matrix::strip));
      selected_.resize(rows * static_cast<std::size_t>(top_k));
    }
    compressed_.resize(groups * latent_dim);
    index_keys_.resize(groups * index_dim);
    logits_.resize(batch.spans.size() * vocabulary);
  }

  std::vector<float> hidden_, normed_, q_, kv_, mixed_, added_;
  std::vector<float> states_, index_states_, index_q_, index_weight_, padded_weight_;
  std::vector<float> window_, compressed_, index_keys_, decoded_, logits_;
  std::vector<std::int32_t> selected_;
};

}  // namespace engine
