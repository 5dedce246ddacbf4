// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvire/exec/backend.hpp>
#include <kvire/pool/extent.hpp>
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

/// Place of a transfer among all transfers of the process, in the order they were prepared; 0 while its pages are still being collected, and once it
/// was withdrawn because nobody has been told of it.
using TransferOrder = std::shared_ptr<const std::atomic<std::int64_t>>;

/// Work that touches a page and has not been proven finished.
template <class Backend>
struct InFlight {
  PageUse use = PageUse::load;
  Event<Backend> event;
  std::shared_ptr<WorkStream> stream = {};  ///< of a lease, which comes behind what was held before it; none for other work
  TransferOrder order = {};                 ///< of a transfer that was prepared; none for other work
  std::shared_ptr<const PageExtent> extent = {};  ///< of a lease, and of a transfer that writes; none: all of the pages
  bool alone = false;                             ///< refused for pages with further owners, as a store is
};

namespace detail {

template <class Backend>
struct Flight {
  InFlight<Backend> work;
  std::vector<std::int32_t> pages;  // ascending
  std::uint64_t number = 0;         // in the order they were held
  bool dropped = false;
  bool ended = false;               // as it was seen last

  /// Whether this comes after other work of the same pages: transfers go in the order they were prepared.
  bool after(const InFlight<Backend>& other, std::uint64_t other_number) const {
    return work.order && other.order ? work.order->load() > other.order->load() : number > other_number;
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
