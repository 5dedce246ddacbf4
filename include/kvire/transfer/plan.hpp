// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/pool/page_ref.hpp>
#include <kvire/transfer/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a transfer moves: whole pages or single tokens. Said by the caller through the type of the plan, never guessed from a count of ids.
enum class Granularity : unsigned char { page, token };

constexpr const char* name_of(Granularity granularity) { return granularity == Granularity::page ? "page" : "token"; }

/// A row of a page-id space: page * tokens per page + token. 64 bits from the first multiplication on.
template <class PageId>
struct TokenSlot {
  std::int64_t value = -1;
  std::int32_t page_tokens = 0;  ///< tokens per page that it was made with; 0: nobody said. A transfer between pools of other pages refuses it
  friend bool operator==(const TokenSlot& a, const TokenSlot& b) { return a.value == b.value; }
};
using HostSlot = TokenSlot<HostPage>;
using DeviceSlot = TokenSlot<DevicePage>;

/// The slot of a token in a page of policy P. Requires 0 <= token < P::tokens_per_page; a larger one names a token of a later page.
template <class P, class PageId>
constexpr TokenSlot<PageId> slot_of(PageId page, int token) {
  return {static_cast<std::int64_t>(page.value) * P::tokens_per_page + token, P::tokens_per_page};
}

/// Two places that one transfer connects. Which is the source follows from the pools of the transfer where one is a host page and one a device page, whatever
/// their order; of two pages of one kind the first is.
template <class First, class Second>
struct PagePair {
  First first;
  Second second;
};
template <class First, class Second>
PagePair(First, Second) -> PagePair<First, Second>;  // clang++ 14 makes none for aggregates

/// Page ids of both sides, in step; which side is the source, as for PagePair. Holding it checks nothing: `load`, `backup` and `migrate` check every id against their pools before any
/// byte moves, and refuse lists of different lengths instead of cutting the longer.
template <class First, class Second>
struct PagePlan {
  static constexpr Granularity granularity = Granularity::page;
  using first_id = First;
  using second_id = Second;
  std::vector<First> first;
  std::vector<Second> second;
  // Generations that the ids were taken in; empty where the plan was made of bare ids.
  std::vector<std::uint32_t> first_generation = {};
  std::vector<std::uint32_t> second_generation = {};
  // PageRef::ledger of each page; empty where the plan was not made of references.
  std::vector<const void*> first_ledger = {};
  std::vector<const void*> second_ledger = {};
};

/// The same for single tokens: each moves its row of every plane.
template <class First, class Second>
struct TokenPlan {
  static constexpr Granularity granularity = Granularity::token;
  using first_id = First;
  using second_id = Second;
  std::vector<TokenSlot<First>> first;
  std::vector<TokenSlot<Second>> second;
};

template <class First, class Second>
PagePlan<First, Second> plan(std::span<const PagePair<First, Second>> pairs) {
  PagePlan<First, Second> p;
  p.first.reserve(pairs.size());
  p.second.reserve(pairs.size());
  for (const auto& pair : pairs) {
    p.first.push_back(pair.first);
    p.second.push_back(pair.second);
  }
  return p;
}
template <class First, class Second>
PagePlan<First, Second> plan(const std::vector<PagePair<First, Second>>& pairs) {
  return plan(std::span<const PagePair<First, Second>>(pairs));
}
template <class First, class Second>
PagePlan<First, Second> plan(std::initializer_list<PagePair<First, Second>> pairs) {
  return plan(std::span<const PagePair<First, Second>>(pairs.begin(), pairs.size()));
}

/// Two lists, each counted by its own side. An id does not say which pool it was taken from: only its range and its owner can be checked.
template <class FirstTag, class SecondTag>
PagePlan<Id<FirstTag>, Id<SecondTag>> plan(std::vector<Id<FirstTag>> first, std::vector<Id<SecondTag>> second) {
  return {std::move(first), std::move(second), {}, {}, {}, {}};
}

/// With generations, counted by the pools that the keys are used with: the transfer is refused if a page was freed in between, even if its id is in use again.
template <class First, class Second>
PagePlan<First, Second> plan(const std::vector<PageKey<First>>& first, const std::vector<PageKey<Second>>& second) {
  PagePlan<First, Second> p;
  p.first.reserve(first.size());
  p.first_generation.reserve(first.size());
  p.second.reserve(second.size());
  p.second_generation.reserve(second.size());
  for (const auto& key : first) {
    p.first.push_back(key.page);
    p.first_generation.push_back(key.generation);
  }
  for (const auto& key : second) {
    p.second.push_back(key.page);
    p.second_generation.push_back(key.generation);
  }
  return p;
}
/// Of owned pages; no generations, since their owners are at hand. A page of another pool than the transfer's is refused.
template <class First, class Second>
PagePlan<First, Second> plan(const std::vector<PageRef<First>>& first, const std::vector<PageRef<Second>>& second) {
  PagePlan<First, Second> p;
  p.first.reserve(first.size());
  p.first_ledger.reserve(first.size());
  p.second.reserve(second.size());
  p.second_ledger.reserve(second.size());
  for (const auto& ref : first) {
    p.first.push_back(ref.id());
    p.first_ledger.push_back(ref.ledger());
  }
  for (const auto& ref : second) {
    p.second.push_back(ref.id());
    p.second_ledger.push_back(ref.ledger());
  }
  return p;
}

template <class First, class Second>
TokenPlan<First, Second> plan_tokens(std::vector<TokenSlot<First>> first, std::vector<TokenSlot<Second>> second) {
  return {std::move(first), std::move(second)};
}

/// Refused with a reason: anything else.
template <class First, class Second>
PagePlan<HostPage, DevicePage> plan(const First&, const Second&) {
  (void)sizeof(rule::PlanLists<First, Second, !std::is_same_v<First, First>>);
  return {};
}
template <class Pairs>
PagePlan<HostPage, DevicePage> plan(const Pairs&) {
  (void)sizeof(rule::PlanLists<Pairs, void, !std::is_same_v<Pairs, Pairs>>);
  return {};
}
template <class First, class Second>
TokenPlan<HostPage, DevicePage> plan_tokens(const First&, const Second&) {
  (void)sizeof(rule::PlanLists<First, Second, !std::is_same_v<First, First>>);
  return {};
}

namespace detail {

template <class T>
inline constexpr bool is_plan = false;
template <class First, class Second>
inline constexpr bool is_plan<PagePlan<First, Second>> = true;
template <class First, class Second>
inline constexpr bool is_plan<TokenPlan<First, Second>> = true;

/// Whether the source is the first side of a plan between pools with ids of these types.
template <class First, class Second, class From, class To>
inline constexpr bool source_is_first = std::is_same_v<First, From> && std::is_same_v<Second, To>;
/// Whether a plan pairs ids of the two sides, in either order.
template <class First, class Second, class From, class To>
inline constexpr bool sides_fit = source_is_first<First, Second, From, To> || source_is_first<Second, First, From, To>;
/// Whether a plan of pages or tokens can be used between two pools.
template <class From, class To, class Plan>
inline constexpr bool plan_fits = [] {
  if constexpr (is_plan<Plan>) {
    return sides_fit<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>;
  } else {
    return false;
  }
}();

// What refuses is a statement of its own, ahead of an `if constexpr` that asks the same without words: to clang++ a function in which a rule has been
// broken is no constant any more, and what follows from that would be printed as well.
template <class First, class Second, class From, class To>
constexpr void require_sides() {
  (void)sizeof(rule::PlanSides<First, Second, From, To, sides_fit<First, Second, From, To>>);
}
template <class From, class To, class Plan>
constexpr void require_plan() {
  (void)sizeof(rule::TransferPlan<Plan, is_plan<Plan>>);
  if constexpr (is_plan<Plan>) require_sides<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>();
}

/// One side of a plan of pages, as it stands there.
template <class PageId>
struct PageSide {
  const std::vector<PageId>& pages;
  const std::vector<std::uint32_t>& generation;
  const std::vector<const void*>& ledger;
};
template <bool OfFirst, class First, class Second>
auto side_of(const PagePlan<First, Second>& plan) {
  if constexpr (OfFirst) {
    return PageSide<First>{plan.first, plan.first_generation, plan.first_ledger};
  } else {
    return PageSide<Second>{plan.second, plan.second_generation, plan.second_ledger};
  }
}
template <bool OfFirst, class First, class Second>
const auto& side_of(const TokenPlan<First, Second>& plan) {
  if constexpr (OfFirst) {
    return plan.first;
  } else {
    return plan.second;
  }
}

}  // namespace detail

KVIRE_NAMESPACE_END
