// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class PlanFirst, class PlanSecond, class FromPool, class ToPool, bool Fit>
struct PlanSides {
  static_assert(Fit,
                "kvire [transfer.plan-sides]: a plan pairs pages of the two pools that it is used with, in either order where their ids differ. Ids of another side would "
                "name pages of a pool that they were never of. Fix: make the plan of one list of each pool's pages, or use it with the pools that its pages are of.");
};
template <class First, class Second, bool Lists>
struct PlanLists {
  static_assert(Lists,
                "kvire [transfer.plan-lists]: plan takes two vectors of page ids, of keys or of PageRefs, or one of PagePairs, and plan_tokens two of token slots. Bare numbers "
                "would be pages of nobody knows which side. Fix: take the pages out of a Result with value() and single ones into vectors, or say whose a number is: HostPage(n).");
};
template <class Plan, bool IsPlan>
struct TransferPlan {
  static_assert(IsPlan,
                "kvire [transfer.not-a-plan]: a transfer between two pools takes one plan, of pages or of tokens. A list of ids alone would not say where each page goes. "
                "Fix: make one with plan(from, to) or plan_tokens(from, to), or move bundle pools by a BundlePlan.");
};
template <class Plan, bool Pages>
struct MigratePlan {
  static_assert(Pages,
                "kvire [transfer.migrate-pages]: migrate takes a plan of whole pages. Token slots taken for page ids would name pages that nobody meant. Fix: make the plan of pages "
                "with plan(from, to), or move the tokens by a load or backup with plan_tokens, and migrate their pages.");
};
template <class From, class To, class Plan, class Stream, bool Match>
struct TransferPools {
  static_assert(Match,
                "kvire [transfer.pools]: load takes a host pool, a device pool, a plan and a stream of their backend, backup the device pool first, migrate any two. In the wrong order, "
                "what is to be saved would be overwritten. Fix: put the source first, or take pools and streams out of Results with value(), the destination not const.");
};
}  // namespace rule

KVIRE_NAMESPACE_END
