// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/pool/in_flight.hpp>

KVIRE_NAMESPACE_BEGIN

/// A page that cannot be read: work that was to write it has failed, and nothing has written all of that since.
template <class Backend>
struct FailedWrite {
  std::int32_t page = -1;
  Event<Backend> event;  ///< of the work
  Error error;           ///< names pool, page and work
};

namespace detail {

/// The pages of one ledger that work has failed to write. A page is readable again when it has been freed, when a transfer has written all that was to be
/// written, or, where a kernel did not run, when one has run under a lease of the same slot: a step that is repeated. Under the ledger's mutex.
template <class Backend>
class FailedWrites {
 public:
  struct Page {
    std::int32_t id;
    std::uint32_t generation;  // that the work wrote
  };

  bool empty() const { return failures_.empty(); }

  /// `pages`: those of the work's that are still owned, ascending.
  void add(const Flight<Backend>& flight, std::vector<Page> pages) {
    if (!pages.empty()) failures_.push_back({flight.work, flight.number, std::move(pages)});
  }

  /// Work has succeeded.
  void written(const Flight<Backend>& by, const void* ledger) {
    for (Failure& failure : failures_) {
      if (!mends_slots(by, failure, ledger)) continue;
      std::erase_if(failure.pages, [&](const Page& page) { return mends_page(by, failure, page.id); });
    }
    forget_empty();
  }
  /// `gone(page)`: it is another page's life, or somebody knows better.
  template <class Gone>
  void forget(Gone&& gone) {
    for (Failure& failure : failures_) std::erase_if(failure.pages, gone);
    forget_empty();
  }

  /// Calls f(page, work) for each piece of work, with the first of `pages` (ascending) that it left unwritten. `current(page)`: it is the same life.
  /// Not for pages that one of `flights` is on its way to write: who reads waits for that, and fails with it. Not of transfers whose order is `reader`
  /// or later (0: of all): they would have come behind it.
  template <class Current, class F>
  void each_of(std::span<const std::int32_t> pages, const std::vector<Flight<Backend>*>& flights, const void* ledger, std::int64_t reader, Current&& current,
               F&& f) const {
    for (const Failure& failure : failures_) {
      if (reader > 0 && failure.work.order && failure.work.order->load() > reader) continue;
      auto a = pages.begin();
      for (const Page& page : failure.pages) {
        while (a != pages.end() && *a < page.id) ++a;
        if (a == pages.end()) break;
        if (*a != page.id || !current(page) || under_repair(failure, page.id, flights, ledger)) continue;
        f(page.id, failure.work);
        break;
      }
    }
  }

 private:
  struct Failure {
    InFlight<Backend> work;
    std::uint64_t number;
    std::vector<Page> pages;
  };

  static bool mends_slots(const Flight<Backend>& by, const Failure& failure, const void* ledger) {
    if (!by.after(failure.work, failure.number)) return false;
    const bool kernel = by.work.use == PageUse::store;
    if (kernel && (failure.work.use != PageUse::store || !by.work.stream || !by.work.stream->begun())) return false;
    return !by.work.extent || (failure.work.extent && by.work.extent->writes_slots_of(*failure.work.extent, ledger));
  }
  // Requires that the slots are.
  static bool mends_page(const Flight<Backend>& by, const Failure& failure, std::int32_t page) {
    return contains(by.pages, page) && (!by.work.extent || by.work.extent->writes_rows_of(*failure.work.extent, page));
  }
  static bool under_repair(const Failure& failure, std::int32_t page, const std::vector<Flight<Backend>*>& flights, const void* ledger) {
    for (const auto* flight : flights) {
      if (!flight->ended && writes(flight->work.use) && mends_slots(*flight, failure, ledger) && mends_page(*flight, failure, page)) return true;
    }
    return false;
  }
  void forget_empty() {
    std::erase_if(failures_, [](const Failure& failure) { return failure.pages.empty(); });
  }

  std::vector<Failure> failures_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
