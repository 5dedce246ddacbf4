// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "batch.hpp"
#include "cuda_kernels.cuh"
#include "cuda_model.cuh"

namespace engine::gpu {

/// Hands out pieces of one block of memory. Without a block it counts what would be needed.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}
  template <class T>
  T* take(std::int64_t n) {
    used_ = (used_ + 255) / 256 * 256;
    T* const p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += static_cast<std::size_t>(n) * sizeof(T);
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// How large a pass is: kernels are launched for so many rows, groups and logits. A pass may have fewer; the rest is padding that changes nothing.
struct Shape {
  std::int64_t rows = 0;
  std::int64_t groups4 = 0;    ///< compressed rows of ratio 4 that it completes
  std::int64_t groups128 = 0;  ///< of ratio 128
  std::int64_t logits = 0;     ///< rows whose logits are wanted
  std::int64_t hot = 0;        ///< rows, the first ones, of sessions that decode and read their C4 latents through the hot set
  std::int64_t hot_groups = 0; ///< compressed rows of ratio 4, the first ones, that those complete
  std::int64_t pages = 1;      ///< of a page table
  std::int64_t keys = 1;       ///< index keys of a row, at most

  friend bool operator==(const Shape&, const Shape&) = default;
};

/// Of one compressed row: where its candidates are and where it goes.
struct GroupInputs {
  std::int64_t* candidates = nullptr;  ///< [groups][candidates of a group]
  std::int64_t* slots = nullptr;
  std::int64_t* positions = nullptr;
};

/// What the host decides about a pass, in one block of memory; the same pieces in pinned memory and on the device.
struct Inputs {
  std::int32_t* tokens = nullptr;
  std::int64_t* positions = nullptr;     ///< -1: a row of padding
  std::int64_t* window_slots = nullptr;
  std::int64_t* ring_slots = nullptr;    ///< of both states of ratio 4
  std::int64_t* request_slots = nullptr; ///< of the state of ratio 128
  std::int32_t* table = nullptr;         ///< [rows][pages]
  std::int32_t* window_table = nullptr;  ///< [rows][2]
  std::int32_t* lengths = nullptr;
  std::int32_t* logit_rows = nullptr;    ///< -1: padding
  GroupInputs group4, group128;
  std::int32_t* hot_rows = nullptr;         ///< of the hot set, [hot]; -1: padding
  std::int32_t* hot_group_rows = nullptr;   ///< the same of each group of ratio 4, [hot_groups]
  std::int32_t* hot_group_index = nullptr;  ///< which of the session's latents it is; -1: padding
  std::int32_t* hot_group_table = nullptr;  ///< [hot_groups][pages]

  static constexpr int candidates4 = 8;
  static constexpr int candidates128 = 128;

  static Inputs carve(const Shape& shape, Carver& from) {
    Inputs in;
    in.tokens = from.take<std::int32_t>(shape.rows);
    in.positions = from.take<std::int64_t>(shape.rows);
    in.window_slots = from.take<std::int64_t>(shape.rows);
    in.ring_slots = from.take<std::int64_t>(shape.rows);
    in.request_slots = from.take<std::int64_t>(shape.rows);
    in.table = from.take<std::int32_t>(shape.rows * shape.pages);
    in.window_table = from.take<std::int32_t>(shape.rows * 2);
    in.lengths = from.take<std::int32_t>(shape.rows);
    in.logit_rows = from.take<std::int32_t>(shape.logits);
    in.group4 = {from.take<std::int64_t>(shape.groups4 * candidates4), from.take<std::int64_t>(shape.groups4), from.take<std::int64_t>(shape.groups4)};
    in.group128 = {from.take<std::int64_t>(shape.groups128 * candidates128), from.take<std::int64_t>(shape.groups128), from.take<std::int64_t>(shape.groups128)};
    in.hot_rows = from.take<std::int32_t>(shape.hot);
    in.hot_group_rows = from.take<std::int32_t>(shape.hot_groups);
    in.hot_group_index = from.take<std::int32_t>(shape.hot_groups);
    in.hot_group_table = from.take<std::int32_t>(shape.hot_groups * shape.pages);
    return in;
  }
};

/// What a pass computes on its way, on the device.
struct Activations {
  float *hidden, *normed, *q, *kv, *mixed, *added, *states, *index_states, *index_q, *head_weights, *query_weights, *scores, *compressed, *index_keys, *last, *logits;
  unsigned char* query_codes;
  std::int32_t* selected;
  std::int32_t* hot_slots;   ///< where the hot set has what is selected, [hot][top_k]
  std::int64_t* hot_places;  ///< and where new latents go, [hot_groups]

  static Activations carve(const Shape& shape, const Model& model, int top_k, Carver& from) {
    const std::int64_t rows = padded_rows(shape.rows);
    const std::int64_t last = padded_rows(shape.logits);
    std::int64_t state_width = 0;
    std::int64_t index_width = 0;
    for (const Layer& layer : model.layers) {
      state_width = std::max<std::int64_t>(state_width, layer.compressor.width);
      index_width = std::max<std::int64_t>(index_width, layer.index_compressor.width);
    }
    const std::int64_t head_outputs = (model.index_heads + Matrix::strip - 1) / Matrix::strip * Matrix::strip;
    Activations a{};
    a.hidden = from.take<float>(rows * hidden_dim);
    a.normed = from.take<float>(rows * hidden_dim);
    a.q = from.take<float>(rows * heads * latent_dim);
    a.kv = from.take<float>(rows * latent_dim);
    a.mixed = from.take<float>(rows * heads * latent_dim);
    a.added = from.take<float>(rows * hidden_dim);
    a.states = from.take<float>(rows * state_width);
    a.index_states = from.take<float>(rows * index_width);
    a.index_q = from.take<float>(rows * model.index_heads * index_dim);
    a.head_weights = from.take<float>(rows * head_outputs);
    a.query_codes = from.take<unsigned char>(rows * model.index_heads * index_dim * 2);
    a.query_weights = from.take<float>(rows * model.index_heads);
    a.scores = from.take<float>(shape.rows * shape.keys);
    a.selected = from.take<std::int32_t>(shape.rows * top_k);
    a.hot_slots = from.take<std::int32_t>(shape.hot * top_k);
    a.hot_places = from.take<std::int64_t>(shape.hot_groups);
    a.compressed = from.take<float>(std::max(shape.groups4, shape.groups128) * latent_dim);
    a.index_keys = from.take<float>(shape.groups4 * index_dim);
    a.last = from.take<float>(last * hidden_dim);
    a.logits = from.take<float>(last * vocabulary);
    return a;
  }
};

/// The spans [first, end) of a batch: its rows, from the first of them on, and the shape that just holds them.
struct Part {
  const Batch* batch = nullptr;
  std::size_t first = 0;
  std::size_t end = 0;

  bool empty() const { return first == end; }
  const Span& span(std::size_t i) const { return batch->spans[first + i]; }
  std::size_t spans() const { return end - first; }
  std::int64_t first_row() const { return empty() ? 0 : batch->spans[first].first_row; }
  std::int64_t rows() const { return empty() ? 0 : batch->spans[end - 1].first_row + batch->spans[end - 1].rows - first_row(); }

  /// What the part needs; `IndexK` is the entry of the index keys. `hot`: there is a hot set.
  template <class IndexK>
  Shape shape(bool hot) const {
    Shape shape;
    shape.rows = rows();
    for (std::size_t s = 0; s < spans(); ++s) {
      const Span& of = span(s);
      if (hot && of.rows == 1 && shape.hot == static_cast<std::int64_t>(s)) {
        ++shape.hot;
        shape.hot_groups += of.end() / 4 - of.start / 4;
      }
      shape.groups4 += of.end() / 4 - of.start / 4;
      shape.groups128 += of.end() / 128 - of.start / 128;
      shape.logits += of.wants_logits ? 1 : 0;
      shape.pages = std::max(shape.pages, static_cast<std::int64_t>(of.tables.full.size()));
      shape.keys = std::max<std::int64_t>(shape.keys, IndexK::cached(kvire::RawTokens(of.end())).count);
    }
    return shape;
  }
};

/// Fills `in` with a part of a batch; what `shape` has beyond it becomes padding.
template <class Entries>
struct InputBuilder {
  using C4 = typename Entries::C4Latent;
  using C128 = typename Entries::C128Latent;
  using Ring = typename Entries::C4AttentionState;
  using Request = typename Entries::C128RequestState;
  // What shares slots here has the same geometry.
  static_assert(C4::policy::tokens_per_page == Entries::IndexK::policy::tokens_per_page && C4::kind::ratio == 4 && C128::kind::ratio == 128);
  static_assert(Ring::policy::tokens_per_page == Entries::C4IndexerState::policy::tokens_per_page);

  const Part& part;
  const Shape& shape;
  Inputs& in;

  void build() {
    const auto fill = [](auto* p, std::int64_t n, auto value) { std::fill(p, p + n, static_cast<std::remove_pointer_t<decltype(p)>>(value)); };
    fill(in.tokens, shape.rows, 0);
    fill(in.lengths, shape.rows, 0);
    fill(in.table, shape.rows * shape.pages, -1);
    fill(in.window_table, shape.rows * 2, -1);
    fill(in.logit_rows, shape.logits, -1);
    for (std::int64_t* p : {in.positions, in.window_slots, in.ring_slots, in.request_slots}) fill(p, shape.rows, -1);
    fill(in.hot_rows, shape.hot, -1);
    fill(in.hot_group_rows, shape.hot_groups, -1);
    fill(in.hot_group_index, shape.hot_groups, -1);
    fill(in.hot_group_table, shape.hot_groups * shape.pages, -1);
    std::int64_t r = 0;
    std::int64_t logit = 0;
    std::int64_t g4 = 0;
    std::int64_t g128 = 0;
    for (std::size_t s = 0; s < part.spans(); ++s) {
      const Span& span = part.span(s);
      for (std::int64_t p = span.start; p < span.end(); ++p, ++r) row(span, p, r);
      if (span.wants_logits) in.logit_rows[logit++] = static_cast<std::int32_t>(r - 1);
      if (static_cast<std::int64_t>(s) < shape.hot) hot(span, r - 1, g4);
      for (std::int64_t g = span.start / 4; (g + 1) * 4 <= span.end(); ++g) group<C4, Ring>(span, r - span.rows, g, in.group4, g4++, Inputs::candidates4);
      for (std::int64_t g = span.start / 128; (g + 1) * 128 <= span.end(); ++g) group<C128, Request>(span, r - span.rows, g, in.group128, g128++, Inputs::candidates128);
    }
    no_group(in.group4, g4, shape.groups4, Inputs::candidates4);
    no_group(in.group128, g128, shape.groups128, Inputs::candidates128);
  }

 private:
  void row(const Span& span, std::int64_t position, std::int64_t r) {
    in.tokens[r] = part.batch->tokens[static_cast<std::size_t>(part.first_row() + r)];
    in.positions[r] = position;
    in.window_slots[r] = row_slot<typename Entries::WindowLatent>(span.tables.window, position);
    in.ring_slots[r] = kept_state_slot<Ring>(span, position);
    in.request_slots[r] = kept_state_slot<Request>(span, position);
    std::copy(span.tables.full.begin(), span.tables.full.end(), in.table + r * shape.pages);
    const auto block = static_cast<std::size_t>(position / page_raw_tokens);
    in.window_table[2 * r] = block > 0 ? span.tables.window[block - 1] : -1;
    in.window_table[2 * r + 1] = span.tables.window[block];
    in.lengths[r] = static_cast<std::int32_t>(Entries::IndexK::cached(kvire::RawTokens(position + 1)).count);
  }

  // A row that reads through the hot set, and the group that it completes, if any.
  void hot(const Span& span, std::int64_t r, std::int64_t g4) {
    in.hot_rows[r] = hot_row(span);
    if (span.end() % 4 != 0) return;
    in.hot_group_rows[g4] = hot_row(span);
    in.hot_group_index[g4] = static_cast<std::int32_t>(span.start / 4);
    std::copy(span.tables.full.begin(), span.tables.full.end(), in.hot_group_table + g4 * shape.pages);
  }

  template <class Entry, class State>
  void group(const Span& span, std::int64_t span_row, std::int64_t index, GroupInputs& to, std::int64_t at, int candidates) {
    constexpr int ratio = Entry::kind::ratio;
    for (int k = 0; k < candidates; ++k) {
      const std::int64_t position = index * ratio + k - (candidates - ratio);
      std::int64_t& candidate = to.candidates[at * candidates + k];
      if (position >= span.start) {
        candidate = span_row + position - span.start;
      } else {
        candidate = position < 0 ? no_candidate : first_slot - state_slot<State>(span.tables, position);
      }
    }
    to.slots[at] = row_slot<Entry>(span.tables.full, index * ratio);
    to.positions[at] = index * ratio;
  }
  static void no_group(GroupInputs& to, std::int64_t first, std::int64_t end, int candidates) {
    std::fill(to.candidates + first * candidates, to.candidates + end * candidates, no_candidate);
    std::fill(to.slots + first, to.slots + end, std::int64_t(-1));
    std::fill(to.positions + first, to.positions + end, std::int64_t(0));
  }
};

}  // namespace engine::gpu
