// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/sync/progress.hpp>
#include <kvire/transfer/digest.hpp>
#include <kvire/transfer/stats.hpp>

KVIRE_NAMESPACE_BEGIN

/// Layers that a transfer moves, in the order they are moved: entry slots of a pool, model layers of a bundle. All of them by default.
struct LayerRange {
  std::int32_t first = 0;
  std::int32_t count = -1;  ///< -1: to the last
};

/// How a backend is to move the bytes; nothing to say for the host. Specialised by backends that have a choice (transfer/cuda/options.hpp).
template <class Backend>
struct EngineOptions {};

class PageSeals;

template <class Backend>
struct TransferOptions {
  std::string name = "transfer";              ///< for messages
  std::vector<Event<Backend>> after = {};     ///< what must be complete first: the events of the kernels that made the source, for instance
  LayerRange layers = {};
  bool alone = false;                         ///< refuse (busy) a destination that has further owners, whose content would change under them; copies of a PageRef count
  bool digest = false;                        ///< checksum source and destination of every layer; a difference fails the transfer there
  std::shared_ptr<PageSeals> seals = {};      ///< of the host's pages: noted by a transfer to the host, compared by one from it, whose layer fails where they differ
  std::shared_ptr<TransferStats> stats = {};  ///< also counted here
  /// How long the stream waits for earlier work before the transfer fails. On the host: a CUDA stream waits without an end.
  std::chrono::milliseconds wait_limit{30'000};
  EngineOptions<Backend> engine = {};
};

namespace detail {

/// What the queued work of a transfer and its ticket share. Holds no pages: those are the ticket's. A template so that it is compiled where
/// a transfer is, not wherever this file is included.
template <class Unused>
struct BasicTransferState {
  std::string name;
  std::deque<std::string> entry_names;  // referred to by queued copies
  std::shared_ptr<TransferStats> totals;
  TransferStats moved;
  std::int64_t planned_bytes = 0;
  bool clean_start = false;  // the stream had not failed when it came to this transfer; only its thread touches it

  std::mutex mutex;
  Digest source;
  Digest destination;

  void count(const MovedCount& count) {
    moved.add(count);
    if (totals) totals->add(count);
  }
};
using TransferState = BasicTransferState<void>;

}  // namespace detail

/// A transfer under way. Owns its pages on both sides until every copy is proven finished: they cannot be handed out or evicted before.
/// The destructor never waits; pages whose copies still run go to the draining list with the transfer's event. Destroying either pool is
/// legal at any time: the bytes live as long as the copies. An empty ticket (made by default, or moved from) stands for no transfer.
template <class Backend>
class KVIRE_NODISCARD Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&&) noexcept = default;
  Ticket& operator=(Ticket&&) noexcept = default;

  explicit operator bool() const { return progress_ != nullptr; }
  /// Empty for an empty ticket.
  std::string name() const { return progress_ ? progress_->name() : std::string(); }
  /// For gates; shared, and valid after the ticket has gone.
  std::shared_ptr<LoadProgress<Backend>> progress() const { return progress_; }
  /// Final when the last copy has finished or failed; an empty event for an empty ticket.
  Event<Backend> event() const { return progress_ ? progress_->done() : Event<Backend>(); }

  /// pending until the event is final, then complete or failed, for good.
  EventState state() const { return event().query(); }
  /// Blocks until the transfer is final. Errors: its failure; timeout, which proves nothing: the pages stay held; invalid_argument for an
  /// empty ticket.
  Status wait(Deadline deadline = no_deadline) const {
    if (!progress_) return Error{ErrorCode::invalid_argument, "waiting on an empty ticket: it stands for no transfer"};
    if (Status status = event().wait(deadline); !status.ok()) return Error{status.error().code, "transfer '" + name() + "': " + status.error().message};
    return {};
  }

  /// What has arrived so far.
  std::vector<MovedCount> moved() const { return shared_ ? shared_->moved.counts() : std::vector<MovedCount>(); }
  /// Sum of the bytes.
  std::int64_t bytes() const { return shared_ ? shared_->moved.bytes() : 0; }

  /// Checksums over everything moved, with TransferOptions::digest and once the ticket is complete. Equal here (or the transfer has failed),
  /// and equal to those of any transfer of the same content by the same plan positions.
  Digest source_digest() const {
    if (!shared_) return {};
    std::lock_guard lock(shared_->mutex);
    return shared_->source;
  }
  Digest destination_digest() const {
    if (!shared_) return {};
    std::lock_guard lock(shared_->mutex);
    return shared_->destination;
  }

 private:
  template <class>
  friend class PreparedTransfer;
  std::shared_ptr<LoadProgress<Backend>> progress_;
  std::shared_ptr<detail::TransferState> shared_;
  std::vector<std::shared_ptr<const void>> holds_;  // PageHold of each ledger
};

KVIRE_NAMESPACE_END
