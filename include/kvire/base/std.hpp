// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/config.hpp>

/// The one switch between `std` and `cuda::std`. The policy core (base, layout, scalar codecs) uses `kstd::` and only what both have,
/// so that a JIT engine can hand the same headers to NVRTC.
#if KVIRE_RTC
#include <cuda/std/bit>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#else
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#endif

KVIRE_NAMESPACE_BEGIN
#if KVIRE_RTC
namespace kstd = ::cuda::std;
#else
namespace kstd = ::std;
#endif
KVIRE_NAMESPACE_END
