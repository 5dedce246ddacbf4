// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <span>
#include <type_traits>
#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/pool/page_ref.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class Backend, class PoolBackend, bool Same>
struct StepBackend {
  static_assert(Same,
                "kvire [sync.same-backend]: a step leases pools of its own backend. Its stream could not wait for another backend's loads. "
                "Fix: begin the step on a stream of the pool's backend, or name the pool of the step's backend.");
};
template <class Argument, class Needed, bool Fits>
struct LeaseArgument {
  static_assert(Fits,
                "kvire [sync.lease-arguments]: a lease is asked for by an entry slot, of a bundle by a model layer, and by a list of pages of the pool. A bare number, or a "
                "page of another pool's side, would name memory that holds something else. Fix: pass EntrySlot(n) or LayerId(n), and a list of ids or "
                "references, or .value() of the Result that has them.");
};
}  // namespace rule

namespace detail {

/// What a pool's layers are named by in a lease.
template <class Pool>
struct LeaseSlot {
  using type = EntrySlot;
};
template <class Pool>
  requires requires { typename Pool::bundle; }
struct LeaseSlot<Pool> {
  using type = LayerId;
};

template <class Pool>
using LeasePages = std::span<const typename Pool::page_id>;

template <class Pool, class Slot>
concept LeasesSlot = std::convertible_to<const Slot&, typename LeaseSlot<Pool>::type>;
template <class Pool, class Pages>
concept LeasesPages = std::convertible_to<const Pages&, LeasePages<Pool>>;
/// A list of page references.
template <class Pool, class Pages>
concept LeasesRefs = std::convertible_to<const Pages&, std::span<const PageRef<typename Pool::page_id>>>;

/// Refuses, in words, what a lease cannot be asked for with.
template <class Pool, class Slot, class Pages = LeasePages<Pool>>
constexpr bool require_lease_arguments() {
  (void)sizeof(rule::LeaseArgument<Slot, typename LeaseSlot<Pool>::type, LeasesSlot<Pool, Slot>>);
  (void)sizeof(rule::LeaseArgument<Pages, LeasePages<Pool>, LeasesPages<Pool, Pages> || LeasesRefs<Pool, Pages>>);
  return true;
}

/// The ids of a list of references; none of anything else, which has been refused.
template <class Pool, class Pages>
std::vector<typename Pool::page_id> ids_of(const Pages& pages) {
  std::vector<typename Pool::page_id> ids;
  if constexpr (LeasesRefs<Pool, Pages>) {
    for (const auto& page : std::span<const PageRef<typename Pool::page_id>>(pages)) ids.push_back(page.id());
  } else if constexpr (LeasesPages<Pool, Pages>) {
    for (const auto page : LeasePages<Pool>(pages)) ids.push_back(page);
  }
  return ids;
}

}  // namespace detail
KVIRE_NAMESPACE_END
