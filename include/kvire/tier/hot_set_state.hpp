// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvire/kernel/body/move_tokens.hpp>
#include <kvire/kernel/body/place_tokens.hpp>
#include <kvire/kernel/copy_pages.hpp>
#include <kvire/kernel/host/heap_array.hpp>
#include <kvire/memory/resource.hpp>
#include <kvire/sync/host.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// What a hot set and the work that it has queued share.
class HotSetState {
 public:
  /// `memory(bytes)`: zeroed, where the kernels are.
  template <class Memory>
  static Result<std::shared_ptr<HotSetState>> make(std::string name, int layers, std::int64_t rows, std::int64_t slots, std::int64_t most_listed, Memory&& memory) {
    auto state = std::make_shared<HotSetState>();
    state->name_ = std::move(name);
    state->layers_ = layers;
    state->rows_ = rows;
    state->row_words_ = body::HotRecord::words(slots);
    const std::pair<Buffer*, std::int64_t> wanted[] = {
        {&state->records_, checked_mul(checked_mul(rows, layers), state->row_words_ * 4)},
        {&state->misses_, checked_mul(rows, most_listed) * static_cast<std::int64_t>(sizeof(body::TokenPlaces))},
        {&state->counts_, rows * 4},
    };
    for (const auto& [buffer, bytes] : wanted) {
      Result<Buffer> made = memory(bytes);
      if (!made.ok()) return Error{made.error().code, state->name_ + ": " + made.error().message};
      *buffer = std::move(made).value();
    }
    return state;
  }

  const std::string& name() const { return name_; }
  int layers() const { return layers_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t bytes() const { return records_.bytes() + misses_.bytes() + counts_.bytes(); }

  /// From one row's record to the next; a layer has those of all rows.
  std::int64_t row_bytes() const { return row_words_ * 4; }
  std::int64_t layer_bytes() const { return row_bytes() * rows_; }
  std::byte* records(int layer) const { return records_.data() + layer * layer_bytes(); }
  body::TokenPlaces* misses() const { return reinterpret_cast<body::TokenPlaces*>(misses_.data()); }
  std::int32_t* miss_counts() const { return reinterpret_cast<std::int32_t*>(counts_.data()); }

  /// Why nothing may be read or written: the host lacks tokens that slots hold.
  Status status() const {
    std::lock_guard lock(mutex_);
    return lost_ ? Status(*lost_) : Status();
  }
  void lose(const Error& error) {
    std::lock_guard lock(mutex_);
    if (!lost_) lost_ = Error{error.code, name_ + ": the host lacks tokens, so nothing is read until a reset: " + error.message};
  }
  void forgive() {
    std::lock_guard lock(mutex_);
    lost_.reset();
  }

 private:
  std::string name_;
  int layers_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t row_words_ = 0;
  Buffer records_, misses_, counts_;
  mutable std::mutex mutex_;
  std::optional<Error> lost_;
};

/// How a backend runs a hot set's work, in stream order. Specialised per backend (here and in tier/hot_set.cuh).
template <class Backend>
struct HotSetEngine;

template <HostTag Backend>
struct HotSetEngine<Backend> {
  using State = std::shared_ptr<HotSetState>;
  using Ran = std::shared_ptr<bool>;

  static Status check(const std::string&, std::int64_t, std::int64_t) { return {}; }

  /// Empties the slots of a row, -1 for all rows, in all layers.
  static Status clear(Stream<Backend>& stream, const State& state, std::int64_t row) {
    stream.launch([state, row] {
      for (int layer = 0; layer < state->layers(); ++layer) {
        std::memset(state->records(layer) + (row < 0 ? 0 : row) * state->row_bytes(), 0, static_cast<std::size_t>(row < 0 ? state->layer_bytes() : state->row_bytes()));
      }
    });
    return {};
  }

  /// Looks up what is listed and gives misses a slot. `ran` is set when it has.
  template <class Slot, class Lease>
  static Status place(Stream<Backend>& stream, const State& state, const body::PlaceTokensArgs<Slot>& args, const Lease& lease, HotCounts* counts, Ran* ran = nullptr) {
    const Ran done = std::make_shared<bool>(false);
    if (ran != nullptr) *ran = done;
    launch(
        stream,
        [state, args, lease, counts, done](const auto&) -> Status {
          if (Status status = state->status(); !status.ok()) {
            kernel_access::fail(lease, status.error());
            return {};
          }
          std::mutex mutex;
          bool room = true;
          HotCounts total;
          parallel_for(args.batch, 1, [&](std::int64_t begin, std::int64_t end) {
            const simd::HeapArray<std::int32_t> scratch(body::PlaceScratch::words(args.n));
            HotCounts mine;
            for (std::int64_t b = begin; b < end && scratch; ++b) mine += body::place_tokens(HostGroup<1>{}, b, args, body::PlaceScratch(scratch.get(), args.n));
            std::lock_guard lock(mutex);
            total += mine;
            room = room && scratch;
          });
          *done = true;
          if (counts != nullptr) *counts += total;
          return room ? Status() : Status(Error{ErrorCode::exhausted, state->name() + ": no memory to look up " + std::to_string(args.n) + " tokens"});
        },
        lease);
    return {};
  }

  /// `place`, and the copies of what it found missing. If they fail, the layer's slots hold nothing any more.
  template <class P>
  static Status fetch(Stream<Backend>& stream, const State& state, const CopyInfo& info, const body::PlaceTokensArgs<std::int32_t>& args, PageView<P, Backend> to,
                      const ReadLease<P, Backend>& from, const ReadLease<P, Backend>& reader, HotCounts* counts) {
    Ran placed;
    if (Status status = place(stream, state, args, reader, counts, &placed); !status.ok()) return status;
    const auto source = kernel_access::view(from, stream);
    const auto forget = [state, layer = info.layer, placed] {
      if (*placed) std::memset(state->records(layer), 0, static_cast<std::size_t>(state->layer_bytes()));
    };
    stream.copy_with(
        info,
        [args, to, source, reader, from, forget] {
          if (!kernel_access::ready(reader)) return forget();
          parallel_for(args.batch, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t b = begin; b < end; ++b) {
              for (std::int64_t i = 0; i < args.miss_counts[b]; ++i) {
                const body::TokenPlaces& at = args.misses[b * args.n + i];
                body::move_token<P>(HostGroup<1>{}, to.base, to.page_stride, at.device, source.base, source.page_stride, at.host);
              }
            }
          });
        },
        [reader, forget](const Status& status) {
          if (status.ok()) return;
          forget();
          kernel_access::fail(reader, status.error());
        });
    return {};
  }

  /// Copies tokens from their slots (`args.out`) to the host. If that fails, the host lacks them.
  template <class P>
  static Status save(Stream<Backend>& stream, const State& state, const CopyInfo& info, const body::PlaceTokensArgs<std::int64_t>& args,
                     const ReadLease<P, Backend>& from, const WriteLease<P, Backend>& to, CopyCounts* counts) {
    const auto source = kernel_access::view(from, stream);
    const auto target = kernel_access::view(to, stream);
    const Ran reached = std::make_shared<bool>(false);  // a stream or step that has failed before has written nothing that could be lacking
    kernel_access::queued(to);
    stream.launch([reached, to] { *reached = kernel_access::ready(to); });
    stream.copy_with(
        info,
        [args, source, target, from, to, counts, reached] {
          if (!*reached) return;
          const CopyCounts total = count_parallel(std::int64_t(args.batch) * args.n, 64, [&](std::int64_t i) {
            const std::int64_t place = args.host_slot(i);
            CopyCounts one = body::classify(args.out[i], std::int64_t(source.pages) * P::tokens_per_page, place, std::int64_t(target.pages) * P::tokens_per_page,
                                            P::tokens_per_page);
            if (one.copied != 0 && !kernel_access::covers(to, static_cast<std::int32_t>(place / P::tokens_per_page))) one = {.bad_ids = 1};
            if (one.copied != 0) body::move_token<P>(HostGroup<1>{}, target.base, target.page_stride, place, source.base, source.page_stride, args.out[i]);
            return one;
          });
          if (counts != nullptr) *counts += total;
        },
        [state, to, reached](const Status& status) {
          if (status.ok()) return *reached ? kernel_access::ran(to) : void();
          if (*reached) state->lose(status.error());
          kernel_access::fail(to, status.error());
        });
    return {};
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
