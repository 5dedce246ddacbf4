// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include <kvire/exec/host/parallel.hpp>

#include "batch.hpp"
#include "buffers.hpp"
#include "compressor.hpp"
#include "work.hpp"

namespace engine {

/// The forward pass of one step. `Io` is how it reaches the cache; everything it is given runs in order:
///   io.read<Entry>(layer) -> lease                      permission to read a layer of an entry
///   io.run(f, leases...)                                f(readers...), in order with the rest; reader.row(slot, out) decodes a row
///   io.store<Entry>(layer, rows, slots[, prologue])     encodes row i into slot slots[i]; negative slots are skipped
///   io.select(layer, q, weights, batch, selected)       index scores and top-k of every row; selected is [rows][k], padded with -1
///   io.has_hot(), append, resolve, hot_slots            if it has those: latents of decoding sessions by way of slots (HotLatents)
///   io.layer_input(layer, batch, hidden)                if it has that: told what each layer takes
/// What a chunk computes is stored first and then read back from its page, never from the activation. Only compressor states of the
/// same chunk are taken from the activation: they are fp32 in both places, and a ring does not keep a whole chunk.
template <class Entries, class Io>
class Forward : ForwardBuffers {
  static_assert(Entries::WindowLatent::policy::dim == latent_dim && Entries::C4Latent::policy::dim == latent_dim && Entries::IndexK::policy::dim == index_dim);
  static_assert(Entries::C4AttentionState::policy::dim == 4 * latent_dim && Entries::C128RequestState::policy::dim == 2 * latent_dim);

 public:

  Forward(const Model& model, Io& io, const Batch& batch, int top_k)
      : ForwardBuffers(model, batch, top_k, completed_groups(batch, Entries::C4Latent::kind::ratio).size()),
        model_(model),
        io_(io),
        batch_(batch),
        top_k_(top_k) {
    for (const Span& s : batch.spans) {
      window_first_.push_back(window_rows_);
      window_rows_ += s.end() - std::max<std::int64_t>(0, s.start - window_tokens + 1);
      for (int r = 0; r < s.rows; ++r) span_of_row_.push_back(static_cast<int>(&s - batch.spans.data()));
    }
    window_.resize(static_cast<std::size_t>(window_rows_) * latent_dim);
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) window_slots_.push_back(row_slot<typename Entries::WindowLatent>(span(i).tables.window, batch.positions[i]));
  }

  /// Queues the step. The buffers live in this object, which must outlive the queued work. Logits of span i are at logits(i) afterwards.
  void run() {
    io_.run([this] {
      for (std::size_t r = 0; r < batch_.tokens.size(); ++r) {
        std::memcpy(&hidden_[r * hidden_dim], &model_.embedding[static_cast<std::size_t>(batch_.tokens[r]) * hidden_dim], hidden_dim * sizeof(float));
      }
    });
    const int layers = static_cast<int>(model_.layers.size());
    for (int l = 0; l < layers; ++l) {
      layer_input(l);
      layer(l);
    }
    layer_input(layers);
    io_.run([this] { head(); });
  }

  const float* logits(std::size_t span) const { return logits_.data() + span * vocabulary; }

 private:
  void layer_input(int layer) {
    if constexpr (requires { io_.layer_input(layer, batch_, hidden_.data()); }) io_.layer_input(layer, batch_, hidden_.data());
  }

  const Span& span(std::size_t row) const { return batch_.spans[static_cast<std::size_t>(span_of_row_[row])]; }
  void rope(float* x, int dims, std::int64_t position) const {
    math::rope(x, dims, model_.cos.data() + position * (rope_dim / 2), model_.sin.data() + position * (rope_dim / 2));
  }
  int rows() const { return batch_.rows(); }

  void layer(int l) {
    const Layer& layer = model_.layers[static_cast<std::size_t>(l)];
    const kvire::LayerId id(l);
    io_.run([this, &layer] { project_rows(layer); });
    io_.template store<typename Entries::WindowLatent>(id, kv_.data(), window_slots_);
    const auto window = io_.template read<typename Entries::WindowLatent>(id);
    if (layer.ratio == 0) {
      io_.run(
          [this, &layer](const auto& window_rows) {
            this->read_window(window_rows);
            this->attend(layer, [](std::size_t, std::vector<const float*>&) {});
          },
          window);
    } else if (layer.ratio == 4) {
      layer_c4(id, layer, window);
    } else {
      layer_c128(id, layer, window);
    }
  }

  void project_rows(const Layer& layer) {
    each_row(rows(), [&](std::size_t r) { math::rms_norm(&hidden_[r * hidden_dim], layer.norm.data(), hidden_dim, &normed_[r * hidden_dim]); });
    project(normed_.data(), hidden_dim, rows(), {{&layer.q, q_.data()}, {&layer.kv, kv_.data()}});
    if (layer.ratio != 0) project(normed_.data(), hidden_dim, rows(), {{&layer.compressor.project, states_.data()}});
    if (layer.ratio == 4) {
      project(normed_.data(), hidden_dim, rows(),
              {{&layer.index_compressor.project, index_states_.data()}, {&layer.index_q, index_q_.data()}, {&layer.index_weight, padded_weight_.data()}});
    }
    each_row(rows(), [&](std::size_t r) {
      const std::int64_t position = batch_.positions[r];
      float* kv = &kv_[r * latent_dim];
      math::rms_norm(kv, layer.kv_gain.data(), latent_dim, kv);
      rope(kv, latent_dim, position);
      for (int h = 0; h < heads; ++h) {
        float* q = &q_[(r * heads + static_cast<std::size_t>(h)) * latent_dim];
        math::rms_norm(q, nullptr, latent_dim, q);
        rope(q, latent_dim, position);
      }
      if (layer.ratio != 4) return;
      for (int h = 0; h < model_.index_heads; ++h) {
        const std::size_t at = r * static_cast<std::size_t>(model_.index_heads) + static_cast<std::size_t>(h);
        float* q = &index_q_[at * index_dim];
        math::rms_norm(q, nullptr, index_dim, q);
        rope(q, index_dim, position);
        math::hadamard128(q);
        index_weight_[at] = padded_weight_[r * static_cast<std::size_t>(layer.index_weight.outputs) + static_cast<std::size_t>(h)];
      }
    });
  }

  // Decodes the window rows of every span into one buffer.
  template <class Reader>
  void read_window(const Reader& reader) {
    for (std::size_t s = 0; s < batch_.spans.size(); ++s) {
      const Span& span = batch_.spans[s];
      const std::int64_t first = std::max<std::int64_t>(0, span.start - window_tokens + 1);
      each_row(span.end() - first, [&](std::size_t i) {
        reader.row(row_slot<typename Entries::WindowLatent>(span.tables.window, first + static_cast<std::int64_t>(i)),
                   &window_[(static_cast<std::size_t>(window_first_[s]) + i) * latent_dim]);
      });
    }
  }

  // Attention of every row over what `pick` names, then the window; adds the projected result to the hidden rows.
  template <class Pick>
  void attend(const Layer& layer, Pick&& pick) {
    kvire::parallel_for(rows(), 4, [&](std::int64_t begin, std::int64_t end) {
      std::vector<const float*> latents;
      std::vector<float> scratch;
      for (std::size_t r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
        latents.clear();
        pick(r, latents);
        const std::size_t s = static_cast<std::size_t>(span_of_row_[r]);
        const std::int64_t base = std::max<std::int64_t>(0, batch_.spans[s].start - window_tokens + 1);
        const std::int64_t position = batch_.positions[r];
        for (std::int64_t p = std::max<std::int64_t>(0, position - window_tokens + 1); p <= position; ++p) {
          latents.push_back(&window_[static_cast<std::size_t>(window_first_[s] + p - base) * latent_dim]);
        }
        scratch.resize(latents.size() * heads);
        math::attend(&q_[r * heads * latent_dim], latents.data(), static_cast<int>(latents.size()), layer.sink, attention_scale, scratch.data(),
                     &mixed_[r * heads * latent_dim]);
      }
    });
    project(mixed_.data(), heads * latent_dim, rows(), {{&layer.out, added_.data()}});
    each_row(rows(), [&](std::size_t r) {
      for (std::size_t d = r * hidden_dim; d < (r + 1) * hidden_dim; ++d) hidden_[d] += added_[d];
    });
  }

  // A compressed row stands at the first raw position of its group.
  static std::int64_t group_position(const Group& group, int ratio) { return group.index * ratio; }

  // Norm and rotary position of new latents; the store of an index key does that itself, with its Hadamard transform.
  void finish_latents(const Layer& layer, const std::vector<Group>& groups) {
    each_row(static_cast<std::int64_t>(groups.size()), [&](std::size_t i) {
      float* row = &compressed_[i * latent_dim];
      math::rms_norm(row, layer.compressor.gain.data(), latent_dim, row);
      rope(row, latent_dim, group_position(groups[i], layer.ratio));
    });
  }

  template <class Entry>
  std::vector<std::int64_t> group_slots(const std::vector<Group>& groups) const {
    std::vector<std::int64_t> slots;
    for (const Group& g : groups) {
      slots.push_back(row_slot<Entry>(batch_.spans[static_cast<std::size_t>(g.span)].tables.full, g.index * Entry::kind::ratio));
    }
    return slots;
  }

  KeyPrologue key_prologue(const Layer& layer, const std::vector<Group>& groups) const {
    KeyPrologue prologue{&model_, layer.index_compressor.gain.data(), {}};
    for (const Group& g : groups) prologue.positions.push_back(group_position(g, layer.ratio));
    return prologue;
  }

  // Compressed rows that each row of a span may see, summed over spans: where a span's decoded rows start.
  template <class Entry>
  std::vector<std::int64_t> compressed_first() const {
    std::vector<std::int64_t> first{0};
    for (const Span& s : batch_.spans) first.push_back(first.back() + Entry::cached(kvire::RawTokens(s.end())).count);
    return first;
  }

  // Decodes compressed latents, those that are wanted or all, to where `first` says.
  template <class Entry, class Reader>
  void read_compressed(const Reader& latents, const std::vector<std::int64_t>& first, const unsigned char* wanted) {
    decoded_.resize(std::max(decoded_.size(), static_cast<std::size_t>(first.back()) * latent_dim));
    for (std::size_t s = 0; s < batch_.spans.size(); ++s) {
      each_row(first[s + 1] - first[s], [&](std::size_t i) {
        const std::size_t at = static_cast<std::size_t>(first[s]) + i;
        if (wanted != nullptr && wanted[at] == 0) return;
        const std::int64_t position = static_cast<std::int64_t>(i) * Entry::kind::ratio;
        latents.row(row_slot<Entry>(batch_.spans[s].tables.full, position), &decoded_[at * latent_dim]);
      });
    }
  }

  // Where the hot set has what a row selected; null for a row that reads pages.
  const std::int32_t* hot_slots([[maybe_unused]] std::size_t row) const {
    if constexpr (requires { io_.hot_slots(row); }) {
      return io_.hot_slots(row);
    } else {
      return nullptr;
    }
  }

  template <class Window>
  void layer_c4(kvire::LayerId id, const Layer& layer, const Window& window_lease) {
    constexpr int ratio = Entries::C4Latent::kind::ratio;
    const auto groups = std::make_shared<const std::vector<Group>>(completed_groups(batch_, ratio));
    if (!groups->empty()) {
      const auto state = io_.template read<typename Entries::C4AttentionState>(id);
      const auto index_state = io_.template read<typename Entries::C4IndexerState>(id);
      io_.run(
          [this, &layer, groups](const auto& states, const auto& index_states) {
            compress<typename Entries::C4AttentionState>(layer.compressor, ratio, batch_, *groups, states_, states, compressed_);
            this->finish_latents(layer, *groups);
            compress<typename Entries::C4IndexerState>(layer.index_compressor, ratio, batch_, *groups, index_states_, index_states, index_keys_);
          },
          state, index_state);
      std::vector<std::int64_t> latent_slots = group_slots<typename Entries::C4Latent>(*groups);
      if constexpr (requires { io_.append(id, compressed_.data(), *groups, latent_slots); }) io_.append(id, compressed_.data(), *groups, latent_slots);
      io_.template store<typename Entries::C4Latent>(id, compressed_.data(), latent_slots);
      io_.template store<typename Entries::IndexK>(id, index_keys_.data(), group_slots<typename Entries::IndexK>(*groups), key_prologue(layer, *groups));
    }
    io_.template store<typename Entries::C4AttentionState>(id, states_.data(), state_slots<typename Entries::C4AttentionState>(batch_));
    io_.template store<typename Entries::C4IndexerState>(id, index_states_.data(), state_slots<typename Entries::C4IndexerState>(batch_));
    io_.select(id, index_q_.data(), index_weight_.data(), batch_, selected_.data());
    const auto read_c4 = [this, &layer](const auto& window, const auto& latents, const auto&... hot) {
      read_window(window);
      // Only what some row selected is decoded; what one row's neighbours select does not change its bits.
      const std::vector<std::int64_t> first = compressed_first<typename Entries::C4Latent>();
      std::vector<unsigned char> wanted(static_cast<std::size_t>(first.back()), 0);
      const auto row_of = [&](std::size_t r, int k) {
        const std::int32_t index = selected_[r * static_cast<std::size_t>(top_k_) + static_cast<std::size_t>(k)];
        return index < 0 ? -1 : first[static_cast<std::size_t>(span_of_row_[r])] + index;
      };
      for (std::size_t r = 0; r < batch_.tokens.size(); ++r) {
        for (int k = 0; k < top_k_; ++k) {
          if (const std::int64_t at = row_of(r, k); at >= 0 && hot_slots(r) == nullptr) wanted[static_cast<std::size_t>(at)] = 1;
        }
      }
      read_compressed<typename Entries::C4Latent>(latents, first, wanted.data());
      for (std::size_t r = 0; r < batch_.tokens.size(); ++r) {
        const std::int32_t* const slots = hot_slots(r);
        for (int k = 0; k < top_k_ && slots != nullptr; ++k) {
          if (const std::int64_t at = row_of(r, k); at >= 0) (hot.row(slots[k], &decoded_[static_cast<std::size_t>(at) * latent_dim]), ...);
        }
      }
      attend(layer, [&](std::size_t r, std::vector<const float*>& list) {
        for (int k = 0; k < top_k_; ++k) {
          if (const std::int64_t at = row_of(r, k); at >= 0) list.push_back(&decoded_[static_cast<std::size_t>(at) * latent_dim]);
        }
      });
    };
    // Behind the loads of the layer, on which a look-up depends too.
    const auto latents = io_.template read<typename Entries::C4Latent>(id);
    if constexpr (requires { io_.has_hot(); }) {
      if (io_.has_hot()) return io_.run(read_c4, window_lease, latents, io_.resolve(id, selected_.data()));
    }
    io_.run(read_c4, window_lease, latents);
  }

  template <class Window>
  void layer_c128(kvire::LayerId id, const Layer& layer, const Window& window_lease) {
    constexpr int ratio = Entries::C128Latent::kind::ratio;
    const auto groups = std::make_shared<const std::vector<Group>>(completed_groups(batch_, ratio));
    if (!groups->empty()) {
      const auto state = io_.template read<typename Entries::C128RequestState>(id);
      io_.run(
          [this, &layer, groups](const auto& states) {
            compress<typename Entries::C128RequestState>(layer.compressor, ratio, batch_, *groups, states_, states, compressed_);
            this->finish_latents(layer, *groups);
          },
          state);
      io_.template store<typename Entries::C128Latent>(id, compressed_.data(), group_slots<typename Entries::C128Latent>(*groups));
    }
    io_.template store<typename Entries::C128RequestState>(id, states_.data(), state_slots<typename Entries::C128RequestState>(batch_));
    const auto read_c128 = [this, &layer](const auto& window, const auto& latents) {
      read_window(window);
      const std::vector<std::int64_t> first = compressed_first<typename Entries::C128Latent>();
      read_compressed<typename Entries::C128Latent>(latents, first, nullptr);
      attend(layer, [&](std::size_t r, std::vector<const float*>& list) {
        const std::int64_t seen = Entries::C128Latent::cached(kvire::RawTokens(batch_.positions[r] + 1)).count;
        const std::int64_t base = first[static_cast<std::size_t>(span_of_row_[r])];
        for (std::int64_t i = 0; i < seen; ++i) list.push_back(&decoded_[static_cast<std::size_t>(base + i) * latent_dim]);
      });
    };
    io_.run(read_c128, window_lease, io_.template read<typename Entries::C128Latent>(id));
  }

  void head() {
    for (std::size_t s = 0; s < batch_.spans.size(); ++s) {
      const Span& span = batch_.spans[s];
      if (!span.wants_logits) continue;
      float* normed = &normed_[static_cast<std::size_t>(span.first_row + span.rows - 1) * hidden_dim];
      math::rms_norm(&hidden_[static_cast<std::size_t>(span.first_row + span.rows - 1) * hidden_dim], model_.norm.data(), hidden_dim, normed);
      project(normed, hidden_dim, 1, {{&model_.head, logits_.data() + s * vocabulary}});
    }
  }

  static constexpr float attention_scale = 0.044194174f * 4.0f;  // 1/sqrt(512), sharpened: generated keys are nearly orthogonal

  const Model& model_;
  Io& io_;
  const Batch& batch_;
  int top_k_;
  std::vector<int> span_of_row_;
  std::vector<std::int64_t> window_slots_;
  std::vector<std::int64_t> window_first_;
  std::int64_t window_rows_ = 0;
};

}  // namespace engine
