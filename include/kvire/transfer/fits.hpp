// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/describe.hpp>
#include <kvire/transfer/plan.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class From, class To, kstd::int64_t FromPageBytes, kstd::int64_t ToPageBytes, int FirstDifferentSection, bool Same>
struct TransferPolicy {
  static_assert(Same,
                "kvire [transfer.same-policy]: a transfer connects pools of one layout. Bytes copied into another size or order of sections read as other numbers. "
                "Fix: make the host pool with mirror_of(device pool), or convert on purpose with migrate(from, to, plan, stream).");
};
template <class From, class To, bool Same>
struct TransferBackend {
  static_assert(Same,
                "kvire [transfer.same-backend]: both pools of a transfer and its stream belong to one backend. Nothing could order the copies of two. "
                "Fix: make both pools with the same backend argument, or go through a host pool of the device's backend.");
};
}  // namespace rule

namespace detail {

template <class From, class To>
inline constexpr bool same_backend = std::is_same_v<typename From::backend, typename To::backend>;
template <class From, class To>
constexpr void require_backend() {
  (void)sizeof(rule::TransferBackend<typename From::backend, typename To::backend, same_backend<From, To>>);
}

/// Whether pages go from one pool to the other by such a plan.
template <class From, class To, class Plan>
inline constexpr bool transfers = same_layout<typename From::policy, typename To::policy> && same_backend<From, To> && plan_fits<From, To, Plan>;
/// Refuses it, in words, if not. Of pools whose pages differ the message carries both policies, their page bytes and the first section that differs.
template <class From, class To, class Plan>
constexpr void require_transfer() {
  using A = typename From::policy;
  using B = typename To::policy;
  (void)sizeof(rule::TransferPolicy<A, B, A::page_bytes, B::page_bytes, first_difference<A, B>(), same_layout<A, B>>);
  require_backend<From, To>();
  require_plan<From, To, Plan>();
}

}  // namespace detail

KVIRE_NAMESPACE_END
