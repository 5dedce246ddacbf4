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

// For kernels, in pairs: what is asked, and what refuses it in words if it is not so. A kernel says the second as a statement and compiles its body only
// if the first holds, so that a refusal is all that is printed.

/// Whether `Lease` is a lease on pages of P.
template <LayoutPolicy P, class Lease>
inline constexpr bool reads_pages = [] {
  if constexpr (is_lease<Lease>) {
    return same_layout<P, typename Lease::policy>;
  } else {
    return false;
  }
}();
template <LayoutPolicy P, class Lease>
constexpr void require_source() {
  require_lease<Lease>();
  require_kernel_policy<P, Lease>();
}

/// Whether it is one that permits to write them.
template <LayoutPolicy P, class Lease>
inline constexpr bool writes_pages = reads_pages<P, Lease> && is_write_lease<Lease>;
template <LayoutPolicy P, class Lease>
constexpr void require_target() {
  require_write_lease<Lease>();
  require_kernel_policy<P, Lease>();
}

/// Whether it is a lease on pages whose keys can be decoded; of `Policy`, unless that is void.
template <class Policy, class Lease>
inline constexpr bool reads_keys = [] {
  if constexpr (!is_lease<Lease>) {
    return false;
  } else if constexpr (std::is_void_v<Policy>) {
    return readable_elements<typename Lease::policy>;
  } else {
    return readable_elements<typename Lease::policy> && same_layout<Policy, typename Lease::policy>;
  }
}();
template <class Policy, class Lease>
constexpr void require_keys() {
  require_lease<Lease>();
  if constexpr (!std::is_void_v<Policy>) require_kernel_policy<Policy, Lease>();
  if constexpr (is_lease<Lease>) require_readable<typename Lease::policy>();
}

KVIRE_NAMESPACE_END
