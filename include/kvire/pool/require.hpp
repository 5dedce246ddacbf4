// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/exec/backend.hpp>
#include <kvire/layout/describe.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class P, bool Policy>
struct PoolPolicy {
  static_assert(Policy,
                "kvire [pool.not-a-policy]: a pool, a view or an adopted buffer is made of pages of one layout policy. A size or an element type alone cannot say "
                "where a page's bytes are. Fix: name a policy such as Bf16Contiguous<64, 128>, or derive one from PageLayout.");
};
template <class Backend, bool Known>
struct PoolBackend {
  static_assert(Known,
                "kvire [pool.not-a-backend]: the backend of a pool is kvire::Host or kvire::Cuda. Another type has no streams to order transfers by and no memory. "
                "Fix: name one of the two, or leave it out where a default is given.");
};
template <class A, class B, kstd::int64_t PageBytesA, kstd::int64_t PageBytesB, int FirstDifferentSection, bool Same>
struct SamePolicy {
  static_assert(Same,
                "kvire [pool.same-policy]: two pools that exchange pages have one layout. With another size or order of sections every page after the first would be "
                "cut or shifted. Fix: make the host pool with mirror_of(device pool), or convert on purpose with migrate.");
};
template <class P>
struct AdoptPolicy {
  static_assert(!kstd::is_void_v<P>,
                "kvire [pool.adopt-needs-policy]: foreign memory is adopted with a named policy. Shapes and byte counts agree for layouts that mean different bytes, so "
                "nothing is guessed. Fix: write adopt<Policy>(options) with the policy its owner stores by, or declare that policy from PageLayout.");
};
template <class Bundle, bool IsBundle>
struct PoolBundle {
  static_assert(IsBundle,
                "kvire [pool.not-a-bundle]: a bundle pool is made of a CacheBundle, the list of all entries a model keeps. A single policy or pool would leave its "
                "companions out. Fix: name a CacheBundle such as preset::deepseek_v4::Flash<>, or use DevicePool for one policy.");
};
}  // namespace rule

/// Refuses a P that is no layout policy or has an illegal geometry.
template <class P>
constexpr bool require_pool_policy() {
  (void)sizeof(rule::PoolPolicy<P, LayoutPolicy<P>>);
  if constexpr (LayoutPolicy<P>) require_layout<P>();
  return true;
}

/// Refuses two policies that are not one layout; the message carries both, their page bytes and the index of the first section that differs
/// (-1: the sections agree and something else does not; `diff<A, B>()` says what).
template <class A, class B>
constexpr bool require_same_policy() {
  (void)sizeof(rule::SamePolicy<A, B, A::page_bytes, B::page_bytes, first_difference<A, B>(), same_layout<A, B>>);
  return true;
}

KVIRE_NAMESPACE_END
