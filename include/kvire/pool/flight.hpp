// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <mutex>
#include <span>

#include <kvire/base/sort.hpp>
#include <kvire/exec/backend.hpp>
#include <kvire/pool/ledger_core.hpp>
#include <kvire/pool/work_stream.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a transfer or a kernel does to the pages it holds.
enum class PageUse : unsigned char {
  load,    ///< writes them
  backup,  ///< reads them
  store,   ///< a kernel writes them
  read     ///< a kernel reads them
};

constexpr const char* name_of(PageUse use) {
  switch (use) {
    case PageUse::load: return "load";
    case PageUse::backup: return "backup";
    case PageUse::store: return "store";
    case PageUse::read: return "read";
  }
  return "unknown";
}

/// True for work that changes the page.
constexpr bool writes(PageUse use) { return use == PageUse::load || use == PageUse::store; }

/// Place of a transfer among all transfers of the process, in the order they were prepared; 0 while its pages are still being collected.
using TransferOrder = std::shared_ptr<const std::atomic<std::int64_t>>;

/// Work that touches a page and has not been proven finished.
template <class Backend>
struct InFlight {
  PageUse use = PageUse::load;
  Event<Backend> event;
  std::shared_ptr<WorkStream> stream = {};  ///< of a lease, which waits for what was held before it; none for other work
  TransferOrder order = {};                 ///< of a transfer that was prepared; none for other work
};

/// Page ownership of another engine's allocator, so that its pages can be transferred and leased without copying its bookkeeping. Ids are
/// that allocator's. All functions may be called from any thread, and none may wait for another thread that uses the ledger.
///
/// | expression | meaning |
/// |---|---|
/// | `a.pages()` | ids are below this |
/// | `a.owners(page)` | owners of an id below `pages()`, those of `retain` included; 0: free |
/// | `a.retain(page)`, `a.release(page)` | one owner more, one less; called around each transfer, `release` when it is proven finished |
template <class A>
concept OutsidePages = requires(A& a, std::int32_t page) {
  static_cast<std::int32_t>(a.pages());
  static_cast<std::int32_t>(a.owners(page));
  a.retain(page);
  a.release(page);
};

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

template <class Backend>
struct Flight {
  PageUse use;
  Event<Backend> event;
  std::vector<std::int32_t> pages;
  std::shared_ptr<WorkStream> stream;
  TransferOrder order;
  bool dropped = false;
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

  Result<Flight<Backend>*> begin(const std::int32_t* page, std::size_t n, PageUse use, Event<Backend> event,
                                 std::shared_ptr<WorkStream> stream, TransferOrder order) {
    const bool alone = use == PageUse::store;
    if (outside) {
      if (auto ok = retain_outside(page, n, alone); !ok.ok()) return ok.error();
    } else if (auto ok = pin(page, n, alone); !ok.ok()) {
      return ok.error();
    }
    auto* flight = new Flight<Backend>{use, std::move(event), std::vector<std::int32_t>(page, page + n), std::move(stream), std::move(order), false};
    detail::sort(flight->pages);
    std::lock_guard lock(mutex_);
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
      bool blocked = false;
      auto kept = flights_.begin();
      for (auto it = flights_.begin(); it != flights_.end(); ++it) {
        Flight<Backend>* const flight = *it;
        const bool look = flight->dropped && (all || !blocked);
        if (look && is_final(flight->event.query())) {
          done.push_back(flight);
        } else {
          blocked = blocked || look;
          *kept++ = flight;
        }
      }
      flights_.erase(kept, flights_.end());
      dropped_ -= static_cast<int>(done.size());
    }
    for (Flight<Backend>* flight : done) finish(flight);
  }

  bool any_dropped() const { return dropped_.load(std::memory_order_relaxed) > 0; }

  /// Unfinished flights that touch the page.
  std::vector<InFlight<Backend>> in_flight(std::int32_t page) {
    std::vector<InFlight<Backend>> found;
    if (!check_id(page).ok() || record(page).holds == 0) return found;
    std::lock_guard lock(mutex_);
    for (const auto* flight : flights_) {
      if (is_final(flight->event.query())) continue;
      if (contains(flight->pages, page)) found.push_back({flight->use, flight->event, flight->stream, flight->order});
    }
    return found;
  }

  /// The same for many pages, ascending, at once: each flight with the first of the pages that it touches, in the order they began.
  std::vector<std::pair<std::int32_t, InFlight<Backend>>> in_flight(std::span<const std::int32_t> pages) {
    std::vector<std::pair<std::int32_t, InFlight<Backend>>> found;
    std::lock_guard lock(mutex_);
    for (const auto* flight : flights_) {
      if (is_final(flight->event.query())) continue;
      auto a = pages.begin();
      auto b = flight->pages.begin();
      while (a != pages.end() && b != flight->pages.end() && *a != *b) *a < *b ? void(++a) : void(++b);
      if (a != pages.end() && b != flight->pages.end()) found.push_back({*a, {flight->use, flight->event, flight->stream, flight->order}});
    }
    return found;
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
      if (state->settle()) {
        state->unanchor();
      } else {
        state->add_orphan();
      }
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
  std::atomic<int> dropped_{0};
  int handles_ = 0;
  bool orphaned_ = false;
};

}  // namespace detail

KVIRE_NAMESPACE_END
