// SPDX-License-Identifier: Apache-2.0
#include <kvire/kernel/tuning.hpp>

struct Ring {
  static constexpr int stages = 12;
  static constexpr int consumers = 4;
};
static_assert(kvire::require_tuning<Ring, Ring::stages % Ring::consumers == 0>());

#if KVIRE_FAIL == 1  // expect: kernel.tuning
struct Uneven {
  static constexpr int stages = 10;
  static constexpr int consumers = 4;
};
static_assert(kvire::require_tuning<Uneven, Uneven::stages % Uneven::consumers == 0>());
#endif
