// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class Kernel, bool Holds>
struct KernelTuning {
  static_assert(Holds,
                "kvire [kernel.tuning]: a tuned kernel is built for what its plan assumes of pages, heads, stages and shared memory. Outside of that it would compute "
                "something else or not launch. Fix: call it with a shape it is made for, or use the plain kernel.");
};
}  // namespace rule

/// For the inner consistency of tuned kernels: `static_assert(require_tuning<This, (condition)>())`.
template <class Kernel, bool Holds>
KVIRE_HD constexpr bool require_tuning() {
  (void)sizeof(rule::KernelTuning<Kernel, Holds>);
  return true;
}

KVIRE_NAMESPACE_END
