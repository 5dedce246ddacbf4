// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/pool/ledger.hpp>
#include <kvire/pool/unique.hpp>
#include <kvire/transfer/host_engine.hpp>
#include <kvire/transfer/plan.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {
template <class Backend>
class TransferBuilder;
}

/// A transfer that is checked and owns its pages, and that some thread will issue later. Its progress can be named to a gate at once: the
/// gate waits for `issue`. Dropped unissued, it fails whoever waits. Move-only.
template <class Backend>
class KVIRE_NODISCARD PreparedTransfer {
 public:
  PreparedTransfer() = default;
  PreparedTransfer(PreparedTransfer&&) noexcept = default;
  PreparedTransfer& operator=(PreparedTransfer&& other) noexcept {
    if (this != &other) {
      drop();
      progress_ = std::move(other.progress_);
      order_ = std::move(other.order_);
      shared_ = std::move(other.shared_);
      holds_ = std::move(other.holds_);
      earlier_ = std::move(other.earlier_);
      pieces_ = std::move(other.pieces_);
      after_ = std::move(other.after_);
      wait_limit_ = other.wait_limit_;
      engine_ = other.engine_;
    }
    return *this;
  }
  ~PreparedTransfer() { drop(); }

  /// For gates; shared, and valid after this object has gone.
  std::shared_ptr<LoadProgress<Backend>> progress() const { return progress_; }

  /// Nothing has been queued, and nobody knows of it: dropped from now on, it leaves its pages as they were, to be read as before. Otherwise those that it was to
  /// write cannot be read until they are written, or freed.
  void withdraw() {
    if (order_) order_->store(0);
  }

  /// Queues the copies on `stream`, layer by layer with an event behind each, behind the events of TransferOptions::after and behind earlier
  /// work on the same pages (transfers, kernels with leases of these pages). Blocks for nothing. Errors, which leave the transfer as it was:
  /// busy, if a transfer of the same pages that was prepared earlier has not been issued itself (a later one waits for this); invalid_argument, if this one has been issued.
  Result<Ticket<Backend>> issue(Stream<Backend>& stream) {
    using Engine = detail::TransferEngine<Backend>;
    if (!progress_) return Error{ErrorCode::invalid_argument, "an empty transfer: it was issued before, or never prepared"};
    if (wait_limit_.count() < 0) {
      return Error{ErrorCode::invalid_argument, "transfer '" + progress_->name() + "': wait_limit is " + std::to_string(wait_limit_.count()) + " ms, below 0"};
    }
    std::vector<detail::TransferWait<Backend>> waits;
    for (const auto& event : after_) {
      if (!event.valid()) return Error{ErrorCode::invalid_argument, "transfer '" + progress_->name() + "': an empty event among those to wait for"};
      if (event.query() != EventState::complete) waits.push_back({event, false});
    }
    for (auto& collect : earlier_) {
      if (Status status = collect(stream.identity(), waits); !status.ok()) return status.error();
    }
    if (Status status = Engine::issue(stream, shared_, waits, wait_limit_, pieces_, *progress_, engine_); !status.ok()) return status.error();
    Ticket<Backend> ticket;
    ticket.progress_ = std::move(progress_);
    ticket.shared_ = std::move(shared_);
    ticket.holds_ = std::move(holds_);
    earlier_.clear();  // they know the pages by their holds
    return Result<Ticket<Backend>>(std::move(ticket));
  }

 private:
  friend class detail::TransferBuilder<Backend>;
  using Waits = std::vector<detail::TransferWait<Backend>>;

  void drop() {
    if (!progress_) return;
    progress_->drop();
    // Nothing was queued: the event is final by hand, and the pages go back at once.
    (void)progress_->done().complete(Error{ErrorCode::failed, "transfer '" + progress_->name() + "' was dropped before it was issued"});
    progress_.reset();
    holds_.clear();
    earlier_.clear();
  }

  std::shared_ptr<LoadProgress<Backend>> progress_;
  std::shared_ptr<std::atomic<std::int64_t>> order_;
  std::shared_ptr<detail::TransferState> shared_;
  std::vector<std::shared_ptr<const void>> holds_;
  std::vector<MoveOnlyFunction<Status(const void*, Waits&)>> earlier_;  // work in flight on the pages of one ledger
  std::vector<typename detail::TransferEngine<Backend>::Piece> pieces_;  // ascending by position
  std::vector<Event<Backend>> after_;
  std::chrono::milliseconds wait_limit_{0};
  EngineOptions<Backend> engine_;
};

namespace detail {

/// Puts a transfer together: checks and holds the pages of each ledger, then takes the pieces of each entry. Destroyed before `finish`, it
/// leaves nothing behind.
template <class Backend>
class TransferBuilder {
 public:
  /// `labels[i]`: the number of position i, for messages.
  TransferBuilder(const TransferOptions<Backend>& options, std::vector<std::int32_t> labels) {
    transfer_.progress_ =
        std::make_shared<LoadProgress<Backend>>(options.name, std::move(labels), Event<Backend>::make("transfer '" + options.name + "'"));
    transfer_.shared_ = std::make_shared<TransferState>();
    transfer_.shared_->name = options.name;
    transfer_.shared_->totals = options.stats;
    transfer_.after_ = options.after;
    transfer_.wait_limit_ = options.wait_limit;
    transfer_.engine_ = options.engine;
    alone_ = options.alone;
  }

  LoadProgress<Backend>& progress() { return *transfer_.progress_; }

  /// Checks and holds pages of one ledger; `pages` are ids, which may repeat unless they are the destination.
  template <class PageId>
  Status hold(const PageLedger<PageId, Backend>& of, const std::vector<std::int32_t>& pages, const std::vector<std::uint32_t>& generations,
              const std::vector<const void*>& ledgers, bool destination) {
    PageLedger<PageId, Backend> ledger = of;
    for (std::size_t i = 0; i < ledgers.size() && i < pages.size(); ++i) {
      if (ledgers[i] == ledger.identity()) continue;
      return Error{ErrorCode::mismatch, "pool " + ledger.name() + ": " + PageId::tag::name + " " + std::to_string(pages[i]) + " of the plan is " +
                                            (ledgers[i] == nullptr ? "an empty reference" : "a page of another pool")};
    }
    if (!generations.empty() && generations.size() != pages.size()) {
      return Error{ErrorCode::mismatch, "pool " + ledger.name() + ": " + std::to_string(pages.size()) + " pages but " +
                                            std::to_string(generations.size()) + " generations"};
    }
    UniqueIds<std::int32_t> unique = unique_ids(pages, ledger.pages());
    InFlight<Backend> work{destination ? PageUse::load : PageUse::backup, transfer_.progress_->done(), {}, order_};
    work.alone = destination && alone_;
    if (destination) work.extent = std::shared_ptr<const PageExtent>(transfer_.progress_, &transfer_.progress_->extent());
    auto begun = ledger.hold(std::move(unique.ids), std::move(work));
    if (!begun.ok()) return begun.error();
    // Kept whatever comes: a hold ends with the event, which an error completes.
    const auto hold = std::make_shared<const PageHold<PageId, Backend>>(std::move(begun).value());
    transfer_.holds_.push_back(hold);
    if (destination && unique.twice >= 0) {
      return Error{ErrorCode::duplicate, "pool " + ledger.name() + ": " + PageId::tag::name + " " + std::to_string(unique.twice) +
                                             " is the destination of two pages of the plan"};
    }
    // Behind the hold: from here on the pages cannot change hands.
    for (std::size_t i = 0; i < generations.size(); ++i) {
      if (Status status = ledger.check(PageKey<PageId>{PageId(pages[i]), generations[i]}); !status.ok()) return status;
    }
    if (Status status = destination ? Status() : readable(ledger, hold->pages()); !status.ok()) return status;
    transfer_.earlier_.push_back([ledger, hold, destination, own = transfer_.progress_->done(), order = order_](
                                     const void* stream, std::vector<TransferWait<Backend>>& waits) -> Status {
      const auto flights = ledger.in_flight(hold->pages());
      std::size_t mine = 0;
      for (std::size_t i = 0; i < flights.size(); ++i) mine = flights[i].second.event == own ? i : mine;
      for (std::size_t i = 0; i < flights.size(); ++i) {
        const auto& [page, flight] = flights[i];
        if (i > mine && flight.stream) continue;  // a lease given since: it was refused, or waits for this transfer
        if (flight.event == own || !(destination || writes(flight.use)) || (flight.stream && flight.stream->covers(stream))) continue;
        if (flight.event.query() == EventState::unrecorded) {
          // Of two that are both unissued, one has to be free to go: the later finds this one's event when its turn comes.
          const std::int64_t other = flight.order ? flight.order->load() : -1;
          if (other == 0 || other > order->load()) continue;
          return Error{ErrorCode::busy, "pool " + ledger.name() + ": " + name_of(flight.use) + " of " + PageId::tag::name + " " +
                                            std::to_string(page) + " (" + flight.event.label() + ") has not been issued"};
        }
        bool known = false;
        for (auto& wait : waits) {
          if (!(wait.event == flight.event)) continue;
          known = true;
          wait.may_fail = wait.may_fail && destination;  // one transfer may have written what is read here and read what is written
        }
        if (!known) waits.push_back({flight.event, destination});
      }
      return destination ? Status() : readable(ledger, hold->pages(), order->load());  // an earlier load may have been dropped since
    });
    return {};
  }

  /// A name that lives as long as the queued copies.
  const char* keep(const std::string& name) { return transfer_.shared_->entry_names.emplace_back(name).c_str(); }

  void add(typename TransferEngine<Backend>::Piece piece) {
    transfer_.shared_->planned_bytes += piece.count.bytes;
    transfer_.pieces_.push_back(std::move(piece));
  }

  PreparedTransfer<Backend> finish() {
    // Behind the last hold: whoever draws a higher number sees all pages of this transfer.
    order_->store(next_order());
    transfer_.order_ = order_;
    sort(transfer_.pieces_, [](const auto& a, const auto& b) { return a.position < b.position; });
    return std::move(transfer_);
  }

 private:
  // Success if nothing has failed to write the pages before.
  template <class PageId>
  static Status readable(const PageLedger<PageId, Backend>& ledger, std::span<const std::int32_t> ids, std::int64_t order = 0) {
    auto failed = ledger.failed_writes(ids, order);
    return failed.empty() ? Status() : Status(std::move(failed.front().error));
  }
  static std::int64_t next_order() {
    static std::atomic<std::int64_t> last{0};
    return ++last;
  }

  PreparedTransfer<Backend> transfer_;
  bool alone_ = false;
  std::shared_ptr<std::atomic<std::int64_t>> order_ = std::make_shared<std::atomic<std::int64_t>>(0);
};

}  // namespace detail

KVIRE_NAMESPACE_END
