// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include <kvire/kernel/store.hpp>
#include <kvire/pool/adopt.hpp>
#include <kvire/tier/hot_set.hpp>

#include "batch.hpp"
#include "tiers.hpp"

namespace engine {

/// The C4 latents of sessions that decode, through a hot set: the cache's pages are what lives on the host (on a GPU: in pinned memory, see Tiers), and slots
/// of a row for each session are what a step reads. Latents that a decoding session completes are written to a slot and backed up to their page.
template <class IndexKey, class Backend = kvire::Host>
class HotLatents {
 public:
  using Latent = typename kvire::preset::deepseek_v4::Flash<IndexKey>::C4Latent;
  using P = typename Latent::policy;

  explicit operator bool() const { return hot_.has_value(); }
  kvire::HotSet<P, Backend>& set() { return *hot_; }
  /// Of all steps, what their look-ups came to.
  kvire::HotCounts& hot_counts() { return counts_; }

  /// The sessions of a step that decode one token each, and what its work needs until it has run.
  struct Rows {
    std::vector<std::int32_t> span;  ///< of each batch row, ascending
    std::vector<std::int32_t> of_row;  ///< batch row of each row of the step, -1: it reads pages
    std::vector<std::int32_t> ids, table, selected, slots;
    std::int64_t max_pages = 0;

    std::int64_t size() const { return static_cast<std::int64_t>(ids.size()); }
    kvire::HotRows hot() const { return {{ids.data(), {size()}}, {table.data(), {size(), max_pages}}}; }
  };

  /// Before the first step. Nothing without ReplaySettings::hot_slots.
  kvire::Status open(Tiers<IndexKey, Backend>& tiers, const ReplaySettings& settings) {
    if (hot_ || settings.hot_slots == 0 || tiers.template slots<Latent>() == 0) return {};
    kvire::AdoptOptions memory{.name = "c4 latents of the hot set"};
    for (int layer = 0; layer < tiers.template slots<Latent>(); ++layer) {
      const auto view = tiers.template raw_device<Latent>(kvire::EntrySlot(layer));
      memory.bases.push_back(view.base);
      memory.page_stride = view.page_stride;
      memory.pages = view.pages;
      memory.bytes_per_layer = view.page_stride * (view.pages - 1) + P::page_bytes;
    }
    auto pages = kvire::adopt<P, Backend, kvire::HostSide>(std::move(memory));
    if (!pages.ok()) return pages.error();
    pages_ = std::move(pages).value();
    const std::int64_t rows = tiers.device().template ledger<kvire::space::Request>().pages() - 1;  // one for each request row there is
    auto hot = kvire::HotSet<P, Backend>::make(*pages_, {.rows = rows, .slots = settings.hot_slots, .most_listed = settings.top_k, .name = "hot latents"});
    if (!hot.ok()) return hot.error();
    hot_ = std::move(hot).value();
    request_of_.assign(static_cast<std::size_t>(rows), 0);
    return {};
  }

  /// Rows whose session has changed start empty.
  kvire::Status begin(const Batch& batch, kvire::Stream<Backend>& stream) {
    if (!hot_) return {};
    std::vector<std::int32_t> fresh;
    for (const Span& span : batch.spans) {
      if (span.rows != 1) continue;
      std::size_t& request = request_of_[static_cast<std::size_t>(hot_row(span))];
      if (request != span.request + 1) fresh.push_back(hot_row(span));
      request = span.request + 1;
    }
    return hot_->reset(fresh, stream);
  }
  /// The same, and the lists of a step of the host.
  kvire::Status begin(const Batch& batch, int top_k, kvire::Stream<Backend>& stream, Rows& rows) {
    rows.of_row.assign(batch.tokens.size(), -1);
    if (!hot_) return {};
    for (std::size_t s = 0; s < batch.spans.size(); ++s) {
      const Span& span = batch.spans[s];
      if (span.rows != 1) continue;
      rows.of_row[static_cast<std::size_t>(span.first_row)] = static_cast<std::int32_t>(rows.size());
      rows.span.push_back(static_cast<std::int32_t>(s));
      rows.ids.push_back(hot_row(span));
      rows.max_pages = std::max(rows.max_pages, static_cast<std::int64_t>(span.tables.full.size()));
    }
    for (const std::int32_t s : rows.span) {
      const auto& full = batch.spans[static_cast<std::size_t>(s)].tables.full;
      rows.table.insert(rows.table.end(), full.begin(), full.end());
      rows.table.resize(rows.table.size() + static_cast<std::size_t>(rows.max_pages) - full.size(), -1);
    }
    rows.selected.resize(static_cast<std::size_t>(rows.size() * top_k));
    rows.slots.resize(rows.selected.size());
    return begin(batch, stream);
  }

  /// The lease under which rows.slots are read, [rows][top_k]; rows.selected is filled by work queued before.
  auto resolve(const kvire::Step<Backend>& step, kvire::EntrySlot layer, Rows& rows, int top_k) {
    return hot_->resolve(step, layer, rows.hot(), {rows.selected.data(), {rows.size(), 1, top_k}}, {rows.slots.data(), {rows.size(), 1, top_k}}, &counts_);
  }

  /// New latents, at most one a batch row: queued to a slot and to their page. They live until the step has run.
  struct Fresh {
    Rows rows;
    std::vector<std::int32_t> positions;
    std::vector<std::int64_t> slots;
    std::vector<std::size_t> group;  ///< number of each among the step's groups
    std::vector<float> vectors;
  };
  kvire::Status write(const kvire::Step<Backend>& step, kvire::EntrySlot layer, Fresh& fresh, const kvire::StoreOptions& options) {
    const std::int64_t n = fresh.rows.size();
    fresh.slots.resize(static_cast<std::size_t>(n));
    const kvire::Tensor<const std::int32_t, 2> positions{fresh.positions.data(), {n, 1}};
    auto lease = hot_->append(step, layer, fresh.rows.hot(), positions, {fresh.slots.data(), {n, 1}});
    if (!lease.ok()) return lease.error();
    if (auto status = kvire::store<P>({fresh.vectors.data(), n}, fresh.slots.data(), lease.value(), step.stream(), options); !status.ok()) return status;
    return hot_->backup(step, layer, fresh.rows.hot(), positions, {fresh.slots.data(), {n, 1}});
  }

 private:
  std::optional<kvire::HostPool<P, Backend>> pages_;
  std::optional<kvire::HotSet<P, Backend>> hot_;
  std::vector<std::size_t> request_of_;  // whose each row is, counted from 1
  kvire::HotCounts counts_;
};

}  // namespace engine
