// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <kvire/codec/row.hpp>
#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/kernel/store.hpp>
#include <kvire/kernel/top_k.hpp>

#include "batch.hpp"
#include "hot_latents.hpp"
#include "queries.hpp"
#include "tiers.hpp"

namespace engine {

/// How a forward pass reaches the cache: every access is a lease of the step, every kernel runs on its stream.
template <class IndexKey>
class StepIo {
 public:
  using Backend = kvire::Host;
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Stream = kvire::Stream<kvire::Host>;
  using Shared = HotLatents<IndexKey>;  ///< of all steps

  StepIo(Tiers<IndexKey, kvire::Host>& tiers, kvire::Step<kvire::Host> step, const Batch& batch, const ReplaySettings& settings, int index_heads, Shared& shared)
      : tiers_(&tiers), step_(std::move(step)), top_k_(settings.top_k), index_heads_(index_heads), log_(settings.log), hot_(&shared) {
    keep(hot_->open(tiers, settings));
    if (status_.ok()) keep(hot_->begin(batch, top_k_, step_.stream(), *hot_rows_));
    for (const Span& s : batch.spans) {
      for (std::int64_t b = s.start / page_raw_tokens; b * page_raw_tokens < s.end(); ++b) {
        full_.push_back(kvire::DevicePage(s.tables.full[static_cast<std::size_t>(b)]));
        window_.push_back(kvire::DevicePage(s.tables.window[static_cast<std::size_t>(b)]));
      }
      request_.push_back(kvire::DevicePage(s.tables.request_row));
    }
  }

  /// A row of an entry, decoded.
  template <class P>
  struct Reader {
    kvire::ConstPageView<P> view;
    void row(std::int64_t slot, float* out) const {
      kvire::decode_row<P>(view.page(static_cast<std::int32_t>(slot / P::tokens_per_page)), static_cast<int>(slot % P::tokens_per_page), out);
    }
  };

  /// A lease on a layer of an entry; the kernels that take it run after the loads of that layer that the step depends on.
  template <class Entry>
  auto read(kvire::LayerId layer) {
    if (tiers_->skips_gate()) return kvire::assume_ready(kvire::ConstPageView(tiers_->template raw_device<Entry>(Entry::slot(layer))));
    auto lease = step_.template read<Entry>(tiers_->device(), layer);
    keep(lease);
    return lease.ok() ? std::move(lease).value() : kvire::assume_ready(kvire::ConstPageView<typename Entry::policy, kvire::Host>());
  }

  template <class F, class... Leases>
  void run(F&& f, const Leases&... leases) {
    if (!status_.ok()) return;
    kvire::launch(
        step_.stream(), [f = std::forward<F>(f)](const auto&... views) mutable { f(Reader<typename std::decay_t<decltype(views)>::policy>{views}...); },
        leases...);
  }

  /// Encodes rows into the pages that this step may write. Compressed latents round through bf16 first, as deployed kernels do; window
  /// latents do not.
  template <class Entry>
  void store(kvire::LayerId layer, const float* rows, const std::vector<std::int64_t>& slots, KeyPrologue prologue = {}) {
    using P = typename Entry::policy;
    if (!status_.ok() || slots.empty()) return;
    constexpr bool compressed_latent = std::is_same_v<Entry, typename Entries::C4Latent> || std::is_same_v<Entry, typename Entries::C128Latent>;
    auto lease = write<Entry>(layer);
    if (!lease.ok()) return keep(lease);
    const auto& kept = slots_.emplace_back(slots);
    expected_ += std::count_if(kept.begin(), kept.end(), [](std::int64_t slot) { return slot >= 0; });
    kvire::StoreOptions options;
    options.row.bf16_round_trip = compressed_latent;
    options.counts = counts_.get();
    if (prologue.gain != nullptr) {
      const auto& positions = slots_.emplace_back(std::move(prologue.positions));
      options.prologue.norm = true;
      options.prologue.weight = prologue.gain;
      options.prologue.rope_dims = rope_dim;
      options.prologue.cos = prologue.model->cos.data();
      options.prologue.sin = prologue.model->sin.data();
      options.prologue.positions = positions.data();
      options.prologue.table_rows = prologue.model->positions;
      options.prologue.hadamard = true;
    }
    keep(kvire::store<P>(kvire::Rows(rows, static_cast<std::int64_t>(kept.size())), kept.data(), lease.value(), step_.stream(), options));
  }

  /// Whether sessions decode in this step whose latents are read through the hot set.
  bool has_hot() const { return hot_rows_->size() > 0; }
  /// The lease on the layer's slots; hot_slots(row) is filled when the kernels run, null for rows that read pages.
  auto resolve(kvire::LayerId layer, const std::int32_t* selected) {
    using P = typename Entries::C4Latent::policy;
    const auto k = static_cast<std::size_t>(top_k_);
    run([this, selected, k] {
      for (std::size_t row = 0; row < hot_rows_->of_row.size(); ++row) {
        const auto b = hot_rows_->of_row[row];
        if (b >= 0) std::copy_n(selected + row * k, k, hot_rows_->selected.data() + static_cast<std::size_t>(b) * k);
      }
    });
    auto lease = hot_->resolve(step_, Entries::C4Latent::slot(layer), *hot_rows_, top_k_);
    keep(lease);
    return lease.ok() ? std::move(lease).value() : kvire::assume_ready(kvire::ConstPageView<P, kvire::Host>());
  }
  const std::int32_t* hot_slots(std::size_t row) const {
    const auto b = hot_rows_->of_row[row];
    return b < 0 ? nullptr : hot_rows_->slots.data() + static_cast<std::size_t>(b) * static_cast<std::size_t>(top_k_);
  }
  /// Takes the latents that decoding sessions complete, out of those to be stored: to a slot, and from there to their page. Others keep theirs in `slots`.
  void append(kvire::LayerId layer, const float* latents, const std::vector<Group>& groups, std::vector<std::int64_t>& slots) {
    if (!status_.ok() || !has_hot()) return;
    auto& fresh = fresh_.emplace_back();
    const auto& spans = hot_rows_->span;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const auto at = std::lower_bound(spans.begin(), spans.end(), groups[i].span);
      if (at == spans.end() || *at != groups[i].span) continue;
      const auto b = at - spans.begin();
      const auto pages = hot_rows_->table.begin() + b * hot_rows_->max_pages;
      fresh.rows.ids.push_back(hot_rows_->ids[static_cast<std::size_t>(b)]);
      fresh.rows.table.insert(fresh.rows.table.end(), pages, pages + hot_rows_->max_pages);
      fresh.positions.push_back(static_cast<std::int32_t>(groups[i].index));
      fresh.group.push_back(i);
      slots[i] = -1;
    }
    fresh.rows.max_pages = hot_rows_->max_pages;
    if (fresh.group.empty()) return;
    // Held until the copies have run: transfers of these pages come before or behind.
    auto pages = write<typename Entries::C4Latent>(layer);
    if (!pages.ok()) return keep(pages);
    fresh.vectors.resize(fresh.group.size() * latent_dim);
    run([&fresh, latents] {
      for (std::size_t i = 0; i < fresh.group.size(); ++i) std::copy_n(latents + fresh.group[i] * latent_dim, latent_dim, fresh.vectors.data() + i * latent_dim);
    });
    kvire::StoreOptions options;
    options.row.bf16_round_trip = true;
    options.counts = counts_.get();
    expected_ += static_cast<std::int64_t>(fresh.group.size());
    keep(hot_->write(step_, Entries::C4Latent::slot(layer), fresh, options));
    kvire::launch(step_.stream(), [](const auto&) {}, pages.value());
  }

  /// Index scores and top-k of every row.
  void select(kvire::LayerId layer, const float* q, const float* weights, const Batch& batch, std::int32_t* selected) {
    const auto keys = read<typename Entries::IndexK>(layer);
    if (!status_.ok()) return;
    const std::size_t heads_in_all = batch.tokens.size() * static_cast<std::size_t>(index_heads_);
    queries_.resize(heads_in_all);
    run([this, q, weights, heads_in_all] {
      kvire::parallel_for(static_cast<std::int64_t>(heads_in_all), 64, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) queries_.set(static_cast<std::size_t>(i), q + i * index_dim, weights[i]);
      });
    });
    // Rows of one session share its keys; sessions with a single row share one call.
    plan_calls(batch);
    for (const Call& call : calls_) {
      const kvire::Queries queries{queries_.codes.data() + static_cast<std::size_t>(call.first_row * index_heads_) * EncodedQueries<IndexKey>::bytes,
                                   EncodedQueries<IndexKey>::element, call.batch, call.rows, index_heads_, index_dim};
      const kvire::Tensor<const float, 3> head_weights{queries_.weights.data() + call.first_row * index_heads_, {call.batch, call.rows, index_heads_}};
      const kvire::Tensor<const std::int32_t, 2> table{tables_.data() + call.table_at, {call.batch, call.pages}};
      const kvire::Tensor<const std::int32_t, 2> lengths{lengths_.data() + call.first_row, {call.batch, call.rows}};
      const kvire::Tensor<float, 3> scores{scores_.data() + call.scores_at, {call.batch, call.rows, call.stride}};
      const kvire::Tensor<std::int32_t, 3> out{selected + call.first_row * top_k_, {call.batch, call.rows, top_k_}};
      keep(kvire::sparse_logits<IndexKey>(queries, head_weights, keys, table, lengths, scores, step_.stream()));
      keep(kvire::top_k(scores, lengths, out, step_.stream()));
    }
    if (log_) run([this, layer, &batch, selected] { log_selections(layer, batch, selected); });
  }

  /// For comparisons: the hidden rows that a layer, or behind the last the head, is about to take.
  void layer_input(int layer, const Batch& batch, float* hidden) {
    if (log_) run([this, layer, &batch, hidden] { log_->layer_input(layer, batch, 0, batch.rows(), hidden); });
  }

  /// Waits for the step. Errors: the first refused lease or kernel, a load that failed, the stream's.
  kvire::Status finish() {
    auto stream = step_.stream().synchronize();
    keep(step_.status());
    keep(stream);
    keep(tiers_->finish_step());
    if (status_.ok() && counts_->stored != expected_) {
      keep(kvire::Status(kvire::Error{kvire::ErrorCode::failed, std::to_string(counts_->stored) + " rows were stored, " + std::to_string(expected_) +
                                                                    " should have been: a slot is not one of the step's pages"}));
    }
    return status_;
  }

 private:
  // Spans [first_row, first_row + batch * rows) of the step that are scored together.
  struct Call {
    std::int64_t first_row, batch, rows, pages, stride;
    std::size_t table_at, scores_at;
  };

  template <class T>
  void keep(const T& result) {
    if (!result.ok() && status_.ok()) status_ = result.error();
  }

  template <class Entry>
  kvire::Result<kvire::WriteLease<typename Entry::policy, kvire::Host>> write(kvire::LayerId layer) {
    using Space = typename Entry::space;
    if (tiers_->skips_gate()) return kvire::assume_ready(tiers_->template raw_device<Entry>(Entry::slot(layer)));
    const auto& pages = std::is_same_v<Space, kvire::space::Full> ? full_ : std::is_same_v<Space, kvire::space::Window> ? window_ : request_;
    return step_.template write<Entry>(tiers_->device(), layer, std::span<const kvire::DevicePage>(pages));
  }

  void plan_calls(const Batch& batch) {
    if (!calls_.empty()) return;
    for (const std::int64_t position : batch.positions) lengths_.push_back(length_after(position));
    std::size_t scores = 0;
    for (std::size_t i = 0; i < batch.spans.size();) {
      std::size_t end = i + 1;
      while (batch.spans[i].rows == 1 && end < batch.spans.size() && batch.spans[end].rows == 1) ++end;
      Call call{batch.spans[i].first_row, static_cast<std::int64_t>(end - i), batch.spans[i].rows, 0, 1, tables_.size(), scores};
      for (std::size_t s = i; s < end; ++s) {
        call.pages = std::max(call.pages, static_cast<std::int64_t>(batch.spans[s].tables.full.size()));
        call.stride = std::max<std::int64_t>(call.stride, length_after(batch.spans[s].end() - 1));
      }
      for (; i < end; ++i) {
        const auto& pages = batch.spans[i].tables.full;
        tables_.insert(tables_.end(), pages.begin(), pages.end());
        tables_.resize(tables_.size() + static_cast<std::size_t>(call.pages) - pages.size(), -1);
      }
      scores += static_cast<std::size_t>(call.batch * call.rows * call.stride);
      calls_.push_back(call);
    }
    scores_.resize(scores);
  }

  void log_selections(kvire::LayerId layer, const Batch& batch, const std::int32_t* selected) const {
    for (const Call& call : calls_) {
      for (std::int64_t i = 0; i < call.batch * call.rows; ++i) {
        const std::int64_t row = call.first_row + i;
        log_->selection(layer.value, batch, row, scores_.data() + call.scores_at + static_cast<std::size_t>(i * call.stride), selected + row * top_k_, top_k_);
      }
    }
  }

  static std::int32_t length_after(std::int64_t position) {
    return static_cast<std::int32_t>(Entries::IndexK::cached(kvire::RawTokens(position + 1)).count);
  }

  Tiers<IndexKey, kvire::Host>* tiers_;
  kvire::Step<kvire::Host> step_;
  int top_k_;
  int index_heads_;
  std::shared_ptr<RowLog> log_;
  Shared* hot_;
  std::unique_ptr<typename Shared::Rows> hot_rows_ = std::make_unique<typename Shared::Rows>();
  std::deque<typename Shared::Fresh> fresh_;
  kvire::Status status_;
  std::vector<kvire::DevicePage> full_, window_, request_;  // pages that the step writes
  std::deque<std::vector<std::int64_t>> slots_;  // of queued stores, and positions
  std::unique_ptr<kvire::StoreCounts> counts_ = std::make_unique<kvire::StoreCounts>();
  std::int64_t expected_ = 0;
  EncodedQueries<IndexKey> queries_;
  std::vector<float> scores_;
  std::vector<std::int32_t> tables_, lengths_;
  std::vector<Call> calls_;
};

}  // namespace engine
