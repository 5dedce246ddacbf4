// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <mutex>
#include <span>

#include <kvire/pool/failed_writes.hpp>
#include <kvire/pool/ledger_core.hpp>
#include <kvire/pool/outside.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

template <class Backend>
class LedgerState;

/// Ledgers without handles whose last transfers are still running. Nobody would ask for their pages again, so other ledgers look after
/// them: whenever a ledger is made, dropped or drained. Never destroyed, so that pools in static storage may still end up here.
template <class Backend>
struct Orphans {
  std::mutex mutex;
  std::vector<LedgerState<Backend>*> states;
  std::atomic<int> count{0};

  static Orphans& get() {
    static auto* orphans = new Orphans;
    return *orphans;
  }
};

/// Core plus the transfers that hold pages. Those whose ticket has gone wait here, in the order they were dropped, until their event is final.
template <class Backend>
class LedgerState final : public LedgerCore {
 public:
  using LedgerCore::LedgerCore;

  /// An allocator of OutsidePages.
  struct OutsideOwner {
    virtual ~OutsideOwner() = default;
    virtual std::int32_t owners(std::int32_t page) = 0;
    virtual void retain(std::int32_t page) = 0;
    virtual void release(std::int32_t page) = 0;
  };
  std::unique_ptr<OutsideOwner> outside;

  /// `pages`: ascending.
  Result<Flight<Backend>*> begin(std::vector<std::int32_t> pages, InFlight<Backend> work) {
    const bool alone = work.use == PageUse::store || work.alone;
    if (outside) {
      if (auto ok = retain_outside(pages.data(), pages.size(), alone); !ok.ok()) return ok.error();
    } else if (auto ok = pin(pages.data(), pages.size(), alone); !ok.ok()) {
      return ok.error();
    }
    auto* flight = new Flight<Backend>{std::move(work), std::move(pages)};
    std::lock_guard lock(mutex_);
    flight->number = ++begun_;
    flights_.push_back(flight);
    return flight;
  }

  /// The ticket of a flight has gone. Never waits.
  void drop(Flight<Backend>* flight) {
    anchor();  // whoever finishes the flight may otherwise destroy this object under our feet
    {
      std::lock_guard lock(mutex_);
      flight->dropped = true;
      ++dropped_;
    }
    poll(true);
    look_after();
    unanchor();
  }

  /// Ends dropped flights whose event is final: from the oldest to the first that is not, or all of them.
  void poll(bool all) {
    std::vector<Flight<Backend>*> done;
    {
      std::lock_guard lock(mutex_);
      bool found = false;
      for (const auto* flight : flights_) {
        if (!flight->dropped) continue;
        const bool final = flight->ended || is_final(flight->work.event.query());
        found = found || final;
        if (!final && !all) break;
      }
      if (!found) return;
      take_note();
      std::erase_if(flights_, [&](Flight<Backend>* flight) {
        const bool over = flight->dropped && flight->ended;
        if (over) done.push_back(flight);
        return over;
      });
      dropped_ -= static_cast<int>(done.size());
    }
    for (Flight<Backend>* flight : done) finish(flight);
  }

  bool any_dropped() const { return dropped_.load(std::memory_order_relaxed) > 0; }

  /// Unfinished flights that touch the page.
  std::vector<InFlight<Backend>> in_flight(std::int32_t page) {
    std::vector<InFlight<Backend>> found;
    if (!check_id(page).ok() || record(page).holds == 0) return found;
    for (auto& flight : in_flight(std::span<const std::int32_t>(&page, 1))) found.push_back(std::move(flight.second));
    return found;
  }

  /// The same for many pages, ascending, at once: each flight with the first of the pages that it touches, in the order they began.
  std::vector<std::pair<std::int32_t, InFlight<Backend>>> in_flight(std::span<const std::int32_t> pages) {
    std::vector<std::pair<std::int32_t, InFlight<Backend>>> found;
    std::lock_guard lock(mutex_);
    take_note();
    for (const auto* flight : flights_) {
      if (flight->ended) continue;
      auto a = pages.begin();
      auto b = flight->pages.begin();
      while (a != pages.end() && b != flight->pages.end() && *a != *b) *a < *b ? void(++a) : void(++b);
      if (a != pages.end() && b != flight->pages.end()) found.push_back({*a, flight->work});
    }
    return found;
  }

  /// What has left any of the pages (ascending) unwritten: each piece of work once, with the first of them. `reader`: see FailedWrites.
  std::vector<FailedWrite<Backend>> failed_writes(std::span<const std::int32_t> pages, std::int64_t reader) {
    std::vector<FailedWrite<Backend>> found;
    std::lock_guard lock(mutex_);
    take_note();
    if (failed_.empty()) return found;
    const auto current = [this](const auto& page) { return record(page.id).generation == page.generation; };
    failed_.each_of(pages, flights_, identity(), reader, current, [&](std::int32_t page, const InFlight<Backend>& work) {
      const std::string what = prefix(page) + "cannot be read: " + work.event.label() + " failed to write it, and nothing has since: ";
      found.push_back({page, work.event, Error{ErrorCode::failed, what + work.event.status().error().message}});
    });
    return found;
  }
  /// Whether it may be anything for any pages at all.
  bool any_failed_writes() {
    std::lock_guard lock(mutex_);
    take_note();
    return !failed_.empty();
  }
  /// Somebody knows that the pages (ascending) have been written.
  void assume_written(const std::vector<std::int32_t>& pages) {
    std::lock_guard lock(mutex_);
    take_note();
    failed_.forget([&](const auto& page) { return contains(pages, page.id); });
  }

  void add_handle() {
    std::lock_guard lock(mutex_);
    ++handles_;
    anchor();
  }
  void remove_handle() {
    {
      std::lock_guard lock(mutex_);
      --handles_;
    }
    look_after();
    unanchor();
    sweep_orphans();
  }

  /// Looks after ledgers that nobody else looks after.
  static void sweep_orphans() {
    auto& orphans = Orphans<Backend>::get();
    if (orphans.count.load(std::memory_order_acquire) == 0) return;
    std::vector<LedgerState*> states;
    {
      std::lock_guard lock(orphans.mutex);
      states.swap(orphans.states);
      orphans.count.store(0, std::memory_order_release);
    }
    // Without the lock: an outside allocator that is given its pages back may well drop a ledger of its own.
    for (auto* state : states) {
      state->poll(true);
      state->settle() ? state->unanchor() : state->add_orphan();
    }
  }

 private:
  // An outside allocator counts our retains among its owners, so retain and pin go together: owners - holds are the others. Looked at behind
  // the retain, since the allocator's own threads ask nobody before they share a page.
  Status retain_outside(const std::int32_t* page, std::size_t n, bool alone) {
    std::lock_guard lock(outside_mutex_);
    for (std::size_t i = 0; i < n; ++i) {
      if (auto ok = check_id(page[i]); !ok.ok()) return ok;
      if (outside->owners(page[i]) <= 0) return Error{ErrorCode::invalid_argument, prefix(page[i]) + "has no owner in the outside allocator"};
    }
    for (std::size_t i = 0; i < n; ++i) outside->retain(page[i]);
    (void)pin(page, n, false);
    for (std::size_t i = 0; alone && i < n; ++i) {
      const std::int32_t others = outside->owners(page[i]) - record(page[i]).holds;
      if (others <= 1) continue;
      release_outside(page, n);
      return shared(page[i], others);
    }
    return {};
  }
  void release_outside(const std::int32_t* page, std::size_t n) {
    anchor();  // unpinning may take the last anchor, and the lock is part of what goes then
    {
      std::lock_guard lock(outside_mutex_);
      for (std::size_t i = 0; i < n; ++i) outside->release(page[i]);
      unpin(page, n);
    }
    unanchor();
  }

  const void* identity() const { return static_cast<const LedgerCore*>(this); }

  // Under the mutex: takes note of flights that have ended, and of the pages that they have written or failed to write.
  void take_note() {
    std::vector<const Flight<Backend>*> wrote;
    // Work on a page waits for what came before it there: once it is seen to have ended, all of that has, and has to be looked at again.
    for (bool again = true; again;) {
      again = false;
      bool older = false;
      for (auto* flight : flights_) {
        if (flight->ended) continue;
        const bool writer = writes(flight->work.use);
        const EventState state = flight->work.event.query();
        flight->ended = is_final(state);
        older = older || (writer && !flight->ended);
        if (!writer || !flight->ended) continue;
        if (state == EventState::failed) {
          add_failed(*flight);
        } else {
          wrote.push_back(flight);
          again = again || older;
        }
      }
    }
    if (failed_.empty()) return;
    for (const auto* flight : wrote) failed_.written(*flight, identity());
  }
  // A page without owners is as good as free: who gets it next has not been promised anything. Nobody else can get it while the flight holds it.
  void add_failed(const Flight<Backend>& flight) {
    if (flight.work.order && flight.work.order->load() == 0) return;  // refused, or withdrawn: nobody was told of it
    failed_.forget([this](const auto& page) { return record(page.id).generation != page.generation; });
    std::vector<typename FailedWrites<Backend>::Page> pages;
    for (const std::int32_t page : flight.pages) {
      const Record now = record(page);
      if (external() || now.owners > 0) pages.push_back({page, now.generation});
    }
    failed_.add(flight, std::move(pages));
  }

  void finish(Flight<Backend>* flight) {
    outside ? release_outside(flight->pages.data(), flight->pages.size()) : unpin(flight->pages.data(), flight->pages.size());
    delete flight;
  }

  // Puts a ledger that nobody will ask again on the list of orphans, which then has an anchor of it.
  void look_after() {
    {
      std::lock_guard lock(mutex_);
      if (handles_ > 0 || dropped_ == 0 || orphaned_) return;
      orphaned_ = true;
      anchor();
    }
    add_orphan();
  }
  void add_orphan() {
    auto& orphans = Orphans<Backend>::get();
    std::lock_guard lock(orphans.mutex);
    orphans.states.push_back(this);
    orphans.count.store(static_cast<int>(orphans.states.size()), std::memory_order_release);
  }
  // True if no dropped flight is left; the list's anchor is the caller's then.
  bool settle() {
    std::lock_guard lock(mutex_);
    if (dropped_ > 0) return false;
    orphaned_ = false;
    return true;
  }

  std::recursive_mutex outside_mutex_;  // an allocator may drop a ledger from within `release`
  std::mutex mutex_;
  std::vector<Flight<Backend>*> flights_;
  std::uint64_t begun_ = 0;
  FailedWrites<Backend> failed_;
  std::atomic<int> dropped_{0};
  int handles_ = 0;
  bool orphaned_ = false;
};

}  // namespace detail

KVIRE_NAMESPACE_END
