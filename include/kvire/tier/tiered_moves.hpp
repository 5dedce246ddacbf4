// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include <kvire/tier/prefix_place.hpp>
#include <kvire/transfer/bundle.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// A page of a prefix cache in one page-id space.
struct TierPage {
  std::int32_t node = -1;  // -1: a page in a request's hands
  int space = 0;
};
using TierPages = std::vector<TierPage>;

/// Pairs of pages, collected by the number of their space, as one transfer of the bundle.
template <class Bundle>
class TierPairs {
 public:
  void add(int space, HostPage host, DevicePage device) {
    spaces_[space].first.push_back(host);
    spaces_[space].second.push_back(device);
  }
  BundlePlan<Bundle> plan() { return plan_of(static_cast<const Bundle*>(nullptr)); }

 private:
  template <class Schedule, class... Entries>
  BundlePlan<Bundle> plan_of(const CacheBundle<Schedule, Entries...>*) {
    return std::apply([](auto&&... named) { return BundlePlan<Bundle>(std::move(named)...); }, std::tuple_cat(named<Entries>()...));
  }
  template <class Entry>
  auto named() {
    using Space = typename Entry::space;
    if constexpr (Bundle::template first_of_space<Entry>) {
      return std::tuple(in_space<Space>(std::move(spaces_[Bundle::template space_index<Space>()])));
    } else {
      return std::tuple<>();
    }
  }

  PagePlan<HostPage, DevicePage> spaces_[Bundle::space_count];
};

/// Calls f.template operator()<Space>(index) for each page-id space of a bundle.
template <class Bundle, class F>
void for_each_space(F&& f) {
  Bundle::for_each([&]<class Entry>() {
    if constexpr (Bundle::template first_of_space<Entry>) {
      f.template operator()<typename Entry::space>(Bundle::template space_index<typename Entry::space>());
    }
  });
}

/// The ledger of a space, by its number.
template <class Pool>
typename Pool::Ledger& ledger_of(Pool& pool, int space) {
  typename Pool::Ledger* found = nullptr;
  for_each_space<typename Pool::bundle>([&]<class Space>(int index) { found = index == space ? &pool.template ledger<Space>() : found; });
  return *found;
}

}  // namespace detail

KVIRE_NAMESPACE_END
