// SPDX-License-Identifier: Apache-2.0
#include <kvire/layout/expect.hpp>
#include <kvire/layout/policies.hpp>

// Numbers that a project states about its layouts, once right and then wrong.
using Policy = kvire::Fp8WithScale<64, 128>;
static_assert(kvire::require_expected<Policy, 8448>());
static_assert(kvire::require_expected<Policy, 8448, kvire::fingerprint64<Policy>>());

#if KVIRE_FAIL == 1  // expect: layout.expected-bytes
static_assert(kvire::require_expected<Policy, 16384>());
#elif KVIRE_FAIL == 2  // expect: layout.expected-fingerprint
static_assert(kvire::require_expected<Policy, 8448, kvire::fingerprint64<kvire::Fp8WithScaleInterleaved<64, 128>>>());
#endif
