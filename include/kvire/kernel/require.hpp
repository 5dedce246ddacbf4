// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/row.hpp>
#include <kvire/layout/describe.hpp>
#include <kvire/sync/lease.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class KernelPolicy, class LeasePolicy, kstd::int64_t KernelPageBytes, kstd::int64_t LeasePageBytes, int FirstDifferentSection, bool Same>
struct KernelPolicyMatches {
  static_assert(Same,
                "kvire [kernel.policy]: a kernel reads and writes pages of the one layout it names. Pages of another, even of the same size, would be taken "
                "apart in the wrong places without a fault. Fix: name the policy of the pool behind the lease, or convert the pool with migrate.");
};
}  // namespace rule

/// For kernels that name the policy they implement: refuses a lease on pages of another layout. The message carries both policies, their page
/// bytes and the first section that differs.
template <LayoutPolicy P, class Lease>
constexpr bool require_kernel_policy() {
  if constexpr (is_lease<Lease>) {
    using Q = typename Lease::policy;
    (void)sizeof(rule::KernelPolicyMatches<P, Q, P::page_bytes, Q::page_bytes, first_difference<P, Q>(), same_layout<P, Q>>);
  }
  return true;
}

/// For kernels that decode keys: whether there is a lease (refused before, if not) on pages that can be decoded, which is refused in words, if not.
template <class Lease>
constexpr bool require_keys() {
  if constexpr (is_lease<Lease>) {
    return require_readable<typename Lease::policy>();
  } else {
    return false;
  }
}

KVIRE_NAMESPACE_END
