// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include <kvire/preset/deepseek_v4.hpp>

#include "math.hpp"
#include "random.hpp"
#include "request.hpp"

namespace engine {

inline constexpr int hidden_dim = 64;
inline constexpr int window_tokens = 128;    ///< raw tokens that every layer attends to without selection
/// Raw tokens of one page id of the full and of the window space.
inline constexpr int page_raw_tokens = kvire::preset::deepseek_v4::Flash<>::raw_tokens_per_page<kvire::space::Full>();
static_assert(page_raw_tokens == kvire::preset::deepseek_v4::Flash<>::raw_tokens_per_page<kvire::space::Window>());

/// Compress ratio of a layer: V4-Flash's, of which the engine runs the first `--layers`.
constexpr int compress_ratio(int layer) { return kvire::preset::deepseek_v4::FlashSchedule::ratio(layer); }

/// Weights of one compressor. A row of its projection is what a state page keeps of a token: for ratio 4
/// kv (overlap half) | kv | score (overlap half) | score, for ratio 128 kv | score.
struct Compressor {
  int dims = 0;   ///< of one compressed row
  int width = 0;  ///< of one state row
  Matrix project;
  std::vector<float> bias;  ///< added to the scores, [candidates][dims]
  std::vector<float> gain;  ///< of the norm behind it
};

struct Layer {
  int ratio = 0;
  std::vector<float> norm;  ///< [hidden]
  Matrix q;                 ///< hidden -> heads * latent
  Matrix kv;                ///< hidden -> latent
  std::vector<float> kv_gain;
  float sink[heads] = {};
  Matrix out;  ///< heads * latent -> hidden
  Compressor compressor;
  Compressor index_compressor;  ///< ratio 4 alone has an indexer
  Matrix index_q;               ///< hidden -> index heads * 128
  Matrix index_weight;          ///< hidden -> index heads
};

/// A miniature of DeepSeek-V4's attention whose weights come from a seed: real cache geometry, small hidden sizes, no feed-forward part.
struct Model {
  int index_heads = 0;
  std::vector<Layer> layers;
  std::vector<float> embedding;  ///< [vocabulary][hidden]
  std::vector<float> norm;
  Matrix head;               ///< hidden -> vocabulary
  std::int64_t positions = 0;
  std::vector<float> cos, sin;  ///< [positions][32], of each rotated pair
};

namespace detail {

inline Matrix random_matrix(Random& random, int inputs, int outputs, float gain) {
  Matrix m;
  m.inputs = inputs;
  m.outputs = (outputs + Matrix::strip - 1) / Matrix::strip * Matrix::strip;
  m.packed.resize(static_cast<std::size_t>(m.inputs) * static_cast<std::size_t>(m.outputs));
  const float scale = gain * std::sqrt(3.0f / static_cast<float>(inputs));
  for (float& w : m.packed) w = random.symmetric() * scale;
  return m;
}

inline std::vector<float> random_vector(Random& random, int count, float center, float spread) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = center + spread * random.symmetric();
  return v;
}

inline Compressor random_compressor(Random& random, int dims, int ratio) {
  const bool overlap = ratio == 4;
  Compressor c;
  c.dims = dims;
  c.width = dims * (overlap ? 4 : 2);
  c.project = random_matrix(random, hidden_dim, c.width, 1.5f);
  c.bias = random_vector(random, (overlap ? 8 : ratio) * dims, 0.0f, 1.0f);
  c.gain = random_vector(random, dims, 1.0f, 0.5f);
  return c;
}

}  // namespace detail

/// `positions`: how many positions the rotary table holds.
inline Model make_model(std::uint64_t seed, int layers, int index_heads, std::int64_t positions) {
  Model model;
  model.index_heads = index_heads;
  Random random(seed);
  model.embedding = detail::random_vector(random, vocabulary * hidden_dim, 0.0f, 1.0f);
  for (int l = 0; l < layers; ++l) {
    Layer layer;
    layer.ratio = compress_ratio(l);
    layer.norm = detail::random_vector(random, hidden_dim, 1.0f, 0.25f);
    layer.q = detail::random_matrix(random, hidden_dim, heads * latent_dim, 1.0f);
    layer.kv = detail::random_matrix(random, hidden_dim, latent_dim, 1.0f);
    layer.kv_gain = detail::random_vector(random, latent_dim, 1.0f, 0.25f);
    for (float& s : layer.sink) s = random.symmetric();
    layer.out = detail::random_matrix(random, heads * latent_dim, hidden_dim, 4.0f);
    if (layer.ratio != 0) layer.compressor = detail::random_compressor(random, latent_dim, layer.ratio);
    if (layer.ratio == 4) {
      layer.index_compressor = detail::random_compressor(random, index_dim, layer.ratio);
      layer.index_q = detail::random_matrix(random, hidden_dim, index_heads * index_dim, 1.0f);
      layer.index_weight = detail::random_matrix(random, hidden_dim, index_heads, 1.0f);
    }
    model.layers.push_back(std::move(layer));
  }
  model.norm = detail::random_vector(random, hidden_dim, 1.0f, 0.25f);
  model.head = detail::random_matrix(random, hidden_dim, vocabulary, 2.0f);
  model.positions = positions;
  model.cos.reserve(static_cast<std::size_t>(positions) * rope_dim / 2);
  model.sin.reserve(static_cast<std::size_t>(positions) * rope_dim / 2);
  for (std::int64_t p = 0; p < positions; ++p) {
    for (int i = 0; i < rope_dim; i += 2) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / rope_dim);
      model.cos.push_back(static_cast<float>(std::cos(angle)));
      model.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return model;
}

}  // namespace engine
