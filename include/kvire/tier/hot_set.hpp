// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/kernel/tensor.hpp>
#include <kvire/pool/pool.hpp>
#include <kvire/sync/step.hpp>
#include <kvire/tier/hot_set_state.hpp>

KVIRE_NAMESPACE_BEGIN

struct HotSetOptions {
  std::int64_t rows = 0;             ///< requests that it serves at once
  std::int64_t slots = 0;            ///< tokens of a row that each layer has on the device
  std::int64_t most_listed = 2048;   ///< tokens of a row that a call may list, next_n * k; at most `slots`, so that all of them find a place
  std::string name = "hot set";      ///< for messages, and the entry that fault hooks see
  std::optional<AnyResource> memory = {};  ///< for the slots; none: the backend's device memory
};

/// The rows of a batch, in memory that the backend's kernels reach; it stays as it is until the work has run.
struct HotRows {
  Tensor<const std::int32_t, 1> rows = {};        ///< [batch], different rows of the set; negative: padding, whose tokens get -1. Without memory: 0, 1, ...
  Tensor<const std::int32_t, 2> host_pages = {};  ///< [batch][max_pages]: where the host has token t: page t / tokens per page
};

/// The device's part of a cache entry whose pages live on the host: for each row (request) and layer, slots for the tokens that were used last. A
/// selection goes in, the slots of its tokens come out; those without one are copied from the host token by token, every plane of the policy, into
/// the slots that have been unused for longest. What is read through the slots is what the host's pages hold, bit for bit.
///
/// Slots are chosen on the device, with the same result on both backends (body::place_tokens). Calls queue work on the step's stream, allocate nothing
/// and wait for nothing. A set belongs to the first stream that it is used on. For one thread at a time.
template <LayoutPolicy P, class Backend>
class HotSet {
 public:
  using policy = P;
  using HostPages = HostPool<P, Backend>;

  /// Slots for the layers of `host`, which must outlive the set and stay where it is. Errors: out_of_range for counts; unsupported where `most_listed`
  /// is more than the device's shared memory can sort out; those of the memory.
  static Result<HotSet> make(HostPages& host, HotSetOptions options) {
    constexpr std::int64_t tokens = P::tokens_per_page;
    detail::ArgumentCheck check(options.name.c_str());
    check.between("rows", options.rows, 1, detail::most_int32);
    check.between("most_listed", options.most_listed, 1, 8192);
    check.between("slots", options.slots, 1, detail::most_int32);
    if (!check.ok()) return check.error();
    const auto wrong = [&](const std::string& what) { return Error{ErrorCode::out_of_range, options.name + ": " + what}; };
    if (options.slots < options.most_listed) {
      return wrong(std::to_string(options.slots) + " slots a row have no place for the " + std::to_string(options.most_listed) + " tokens that a call may list");
    }
    const std::int64_t row_pages = ceil_div(options.slots, tokens);
    if (checked_mul(row_pages * tokens, options.rows) < 0 || options.rows * row_pages * tokens + tokens > detail::most_int32) {
      return wrong(std::to_string(options.rows) + " rows of " + std::to_string(options.slots) + " slots are more than 32 bits can number");
    }
    if (Status status = Engine::check(options.name, options.rows, options.most_listed); !status.ok()) return status.error();
    auto pool = DevicePool<P, Backend>::make(
        {.layers = host.layers(), .pages = 1 + options.rows * row_pages, .name = options.name, .memory = options.memory});
    if (!pool.ok()) return pool.error();
    auto state = detail::HotSetState::make(options.name, host.layers(), options.rows, options.slots, options.most_listed, [](std::int64_t bytes) -> Result<Buffer> {
      using Memory = BackendMemory<Backend, DeviceSide>;
      auto buffer = Buffer::make(Memory::resource(1), bytes);
      if (!buffer.ok() || buffer.value().zeroed()) return buffer;
      if (Status status = Memory::fill(buffer.value().data(), 0, bytes); !status.ok()) return status.error();
      return buffer;
    });
    if (!state.ok()) return state.error();
    HotSet set(host, std::move(pool).value(), std::move(state).value(), options);
    auto pages = set.pool_.allocate(options.rows * row_pages);
    if (!pages.ok()) return pages.error();
    set.pages_ = std::move(pages).value();
    return Result<HotSet>(std::move(set));
  }

  HotSet(HotSet&&) noexcept = default;
  HotSet& operator=(HotSet&&) noexcept = default;

  const std::string& name() const { return state_->name(); }
  std::int64_t rows() const { return state_->rows(); }
  std::int64_t slots() const { return slots_; }
  /// Where the slots are: slot s of row r is token row_slot(r) + s of this pool, page * tokens per page + token.
  const DevicePool<P, Backend>& pool() const { return pool_; }
  std::int64_t row_slot(std::int64_t row) const { return P::tokens_per_page + row * row_slots(); }
  /// Device memory of the slots and of the record of what they hold.
  Bytes bytes() const { return Bytes(pool_.bytes().count + state_->bytes()); }

  /// Queues the look-up of selections and the copies of what is missing; `slots`, of the same extents, gets the slot of each token in `pool()`. A token
  /// may be listed several times. -1 stays -1, and so do positions beyond the page table or on no page of the host, which are counted. `counts`, if any,
  /// is added to when the work runs. The lease is on the layer's slots: kernels with it read them behind the copies, and not at all if the loads or backups
  /// that the step names, or these copies, have failed.
  /// Errors: mismatch and out_of_range for extents, those of Step::read; busy, if tokens were appended to the layer and not backed up; failed after a
  /// backup that failed.
  Result<ReadLease<P, Backend>> resolve(const Step<Backend>& step, EntrySlot layer, const HotRows& rows, Tensor<const std::int32_t, 3> selected,
                                        Tensor<std::int32_t, 3> slots, HotCounts* counts = nullptr) {
    detail::ArgumentCheck check(name().c_str());
    const std::int64_t batch = selected.extent[0];
    check.memory("selected", selected.data, selected.elements());
    check.extents("slots", slots, {batch, selected.extent[1], selected.extent[2]}, "the selections");
    auto args = arguments<std::int32_t>(check, step, layer, rows, batch, selected.extent[1] * selected.extent[2]);
    if (!args.ok()) return args.error();
    auto from = step.read(*host_, layer);
    if (!from.ok()) return from.error();
    auto reader = step.read(pool_, layer);
    if (!reader.ok()) return reader.error();
    args.value().positions = selected.data;
    args.value().out = slots.data;
    args.value().misses = state_->misses();
    args.value().miss_counts = state_->miss_counts();
    const Status status = Engine::template fetch<P>(step.stream(), state_, info(layer, CopyDirection::host_to_device), args.value(), pool_access::view(pool_, layer),
                                                    from.value(), reader.value(), counts);
    if (!status.ok()) kernel_access::fail(reader.value(), status.error());
    return status.ok() ? std::move(reader) : status.error();
  }

  /// Queues places for tokens that are about to be written, [batch][n]; those that the host has a page for get a slot, -1 otherwise. Write the slots with
  /// the lease, then back them up. Errors: as resolve.
  Result<WriteLease<P, Backend>> append(const Step<Backend>& step, EntrySlot layer, const HotRows& rows, Tensor<const std::int32_t, 2> positions,
                                        Tensor<std::int64_t, 2> slots, HotCounts* counts = nullptr) {
    detail::ArgumentCheck check(name().c_str());
    check.memory("positions", positions.data, positions.elements());
    check.extents("slots", slots, {positions.extent[0], positions.extent[1]}, "the positions");
    auto args = arguments<std::int64_t>(check, step, layer, rows, positions.extent[0], positions.extent[1]);
    if (!args.ok()) return args.error();
    auto lease = step.read(pool_, layer);
    if (!lease.ok()) return lease.error();
    args.value().positions = positions.data;
    args.value().out = slots.data;
    if (Status status = Engine::place(step.stream(), state_, args.value(), lease.value(), counts); !status.ok()) return status.error();
    Unsaved& unsaved = unsaved_[static_cast<std::size_t>(layer.value)];
    unsaved.tokens = positions.elements();
    // Ids in memory are not known here: they may name any row.
    for (std::size_t row = 0; row < unsaved.rows.size(); ++row) unsaved.rows[row] = rows.rows.data != nullptr || static_cast<std::int64_t>(row) < positions.extent[0];
    return detail::LeaseMaker::writable(pool_access::view(pool_, layer), lease.value());
  }

  /// Queues the copies of appended tokens to the host, token by token, behind what the stream has written: all that one `append` was given. `pages`: those of the
  /// host that they belong to; other transfers of these pages come before or behind. Tokens on others, and those whose slot is -1, are dropped and counted.
  /// Errors: mismatch for extents, and for another number of tokens than were appended, which then still wait for their backup; those of Step::write. If a
  /// copy fails the host lacks the tokens, so every later call fails until `reset`, and others may not read the pages; write the tokens again then.
  Status backup(const Step<Backend>& step, EntrySlot layer, const HotRows& rows, Tensor<const std::int32_t, 2> positions, Tensor<const std::int64_t, 2> slots,
                std::span<const HostPage> pages, CopyCounts* counts = nullptr) {
    auto to = step.write(*host_, layer, pages);
    return to.ok() ? save(step, layer, rows, positions, slots, to.value(), counts) : Status(to.error());
  }
  /// The same to pages that the caller keeps from all transfers, whichever they are: for graphs, whose replays write to others.
  Status backup(const Step<Backend>& step, EntrySlot layer, const HotRows& rows, Tensor<const std::int32_t, 2> positions, Tensor<const std::int64_t, 2> slots,
                CopyCounts* counts = nullptr) {
    auto from = step.read(*host_, layer);
    return from.ok() ? save(step, layer, rows, positions, slots, detail::LeaseMaker::writable(pool_access::view(*host_, layer), from.value()), counts)
                     : Status(from.error());
  }

  /// Empties the slots of rows whose requests have gone, in all layers, in stream order. Tokens that were appended to no other rows need no backup then; rows that
  /// HotRows::rows named may be any, so that it takes all rows of the set, or a backup of what was appended, before their layer is used again. Error out_of_range.
  Status reset(std::span<const std::int32_t> rows, Stream<Backend>& stream) {
    if (Status status = claim(stream); !status.ok()) return status;
    for (const std::int32_t row : rows) {
      if (row < 0 || row >= state_->rows()) {
        return Error{ErrorCode::out_of_range, name() + ": row " + std::to_string(row) + " is not in 0 to " + std::to_string(state_->rows() - 1)};
      }
    }
    for (const std::int32_t row : rows) {
      if (Status status = Engine::clear(stream, state_, row); !status.ok()) return status;
      for (Unsaved& unsaved : unsaved_) unsaved.forget(static_cast<std::size_t>(row));
    }
    return {};
  }
  /// Of all rows; ends the refusals that follow a failed backup.
  Status reset(Stream<Backend>& stream) {
    if (Status status = claim(stream); !status.ok()) return status;
    state_->forgive();
    for (Unsaved& unsaved : unsaved_) unsaved.tokens = 0;
    return Engine::clear(stream, state_, -1);
  }

 private:
  using Engine = detail::HotSetEngine<Backend>;

  // What was appended to a layer and not backed up.
  struct Unsaved {
    std::int64_t tokens = 0;
    std::vector<bool> rows;  // that it may be of

    void forget(std::size_t row) {
      rows[row] = false;
      for (const bool left : rows) {
        if (left) return;
      }
      tokens = 0;
    }
  };

  HotSet(HostPages& host, DevicePool<P, Backend> pool, std::shared_ptr<detail::HotSetState> state, const HotSetOptions& options)
      : host_(&host), pool_(std::move(pool)), state_(std::move(state)), slots_(options.slots), most_listed_(options.most_listed),
        unsaved_(static_cast<std::size_t>(host.layers()), Unsaved{0, std::vector<bool>(static_cast<std::size_t>(options.rows))}) {}

  std::int64_t row_slots() const { return align_up(slots_, std::int64_t(P::tokens_per_page)); }
  CopyInfo info(EntrySlot layer, CopyDirection direction) const { return {.entry = state_->name().c_str(), .layer = layer.value, .direction = direction}; }

  Status claim(Stream<Backend>& stream) {
    if (stream_ == nullptr) stream_ = stream.identity();
    return stream_ == stream.identity() ? Status() : Status(Error{ErrorCode::mismatch, name() + ": used on stream '" + stream.name() + "', but it belongs to the one before"});
  }

  // Everything but the lists.
  template <class Slot>
  Result<body::PlaceTokensArgs<Slot>> arguments(detail::ArgumentCheck& check, const Step<Backend>& step, EntrySlot layer, const HotRows& rows, std::int64_t batch,
                                                std::int64_t listed, bool saving = false) {
    check.between("layer", layer.value, 0, state_->layers() - 1);
    check.between("batch", batch, 0, state_->rows());
    check.between("tokens listed a row", listed, 0, most_listed_);
    check.extents("host_pages", rows.host_pages, {batch, rows.host_pages.extent[1]}, "the selections");
    if (rows.rows.data != nullptr || rows.rows.extent[0] != 0) check.extents("rows", rows.rows, {batch}, "the selections");
    if (!check.ok()) return check.error();
    if (Status status = claim(step.stream()); !status.ok()) return status.error();
    if (Status status = state_->status(); !status.ok()) return status.error();
    if (!saving && unsaved_[static_cast<std::size_t>(layer.value)].tokens > 0) {
      return Error{ErrorCode::busy, name() + ": tokens were appended to layer " + std::to_string(layer.value) +
                                        " and not backed up: back up the lists of the append, or reset all rows"};
    }
    body::PlaceTokensArgs<Slot> args;
    args.records = reinterpret_cast<kstd::uint32_t*>(state_->records(layer.value));
    args.rows = static_cast<std::int32_t>(state_->rows());
    args.slots = static_cast<std::int32_t>(slots_);
    args.row_slots = row_slots();
    args.tokens_per_page = P::tokens_per_page;
    args.row_ids = rows.rows.data;
    args.batch = static_cast<std::int32_t>(batch);
    args.n = static_cast<std::int32_t>(listed);
    args.host_pages = rows.host_pages.data;
    args.max_pages = rows.host_pages.extent[1];
    args.host_page_count = host_->pages();
    return args;
  }

  Status save(const Step<Backend>& step, EntrySlot layer, const HotRows& rows, Tensor<const std::int32_t, 2> positions, Tensor<const std::int64_t, 2> slots,
              const WriteLease<P, Backend>& to, CopyCounts* counts) {
    detail::ArgumentCheck check(name().c_str());
    check.memory("positions", positions.data, positions.elements());
    check.extents("slots", slots, {positions.extent[0], positions.extent[1]}, "the positions");
    auto args = arguments<std::int64_t>(check, step, layer, rows, positions.extent[0], positions.extent[1], true);
    if (!args.ok()) return args.error();
    std::int64_t& unsaved = unsaved_[static_cast<std::size_t>(layer.value)].tokens;
    if (positions.elements() != unsaved) {
      return Error{ErrorCode::mismatch, name() + ": " + std::to_string(positions.elements()) + " tokens of layer " + std::to_string(layer.value) +
                                            " are backed up, but " + std::to_string(unsaved) + " were appended"};
    }
    auto from = step.read(pool_, layer);
    if (!from.ok()) return from.error();
    args.value().positions = positions.data;
    args.value().out = const_cast<std::int64_t*>(slots.data);  // only read
    Status status = Engine::template save<P>(step.stream(), state_, info(layer, CopyDirection::device_to_host), args.value(), from.value(), to, counts);
    if (status.ok()) {
      unsaved = 0;
    } else {
      state_->lose(status.error());
      kernel_access::fail(to, status.error());
    }
    return status;
  }

  HostPages* host_;
  DevicePool<P, Backend> pool_;
  std::vector<PageRef<DevicePage>> pages_;  // all of them: nobody else's transfers touch the slots
  std::shared_ptr<detail::HotSetState> state_;
  std::int64_t slots_ = 0;
  std::int64_t most_listed_ = 0;
  std::vector<Unsaved> unsaved_;  // of each layer
  const void* stream_ = nullptr;
};

KVIRE_NAMESPACE_END
