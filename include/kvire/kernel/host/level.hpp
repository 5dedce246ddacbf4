// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Which instructions a host kernel uses. Every level gives the same bits; they differ in speed alone.
enum class SimdLevel : unsigned char {
  plain,     ///< the kernel body as a GPU lane would run it: the oracle of the others
  baseline,  ///< what every processor of the architecture has (x86-64: SSE2)
  avx2,      ///< AVX2 and FMA
  avx512,    ///< AVX-512F
};

constexpr const char* name_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::plain: return "plain";
    case SimdLevel::baseline: return "baseline";
    case SimdLevel::avx2: return "avx2";
    case SimdLevel::avx512: return "avx512";
  }
  return "unknown";
}

/// True if this processor (and this build) can run a level.
inline bool supports(SimdLevel level) {
#if KVIRE_X86_64
  switch (level) {
    case SimdLevel::plain:
    case SimdLevel::baseline: return true;
    case SimdLevel::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case SimdLevel::avx512: return supports(SimdLevel::avx2) && __builtin_cpu_supports("avx512f");
  }
  return false;
#else
  return level == SimdLevel::plain || level == SimdLevel::baseline;
#endif
}

/// The fastest level of this processor.
inline SimdLevel best_level() {
  if (supports(SimdLevel::avx512)) return SimdLevel::avx512;
  if (supports(SimdLevel::avx2)) return SimdLevel::avx2;
  return SimdLevel::baseline;
}

namespace detail {

/// While it lives, this thread rounds to nearest and keeps subnormals, whatever mode the program has set: vector instructions follow the
/// mode, and scores must not.
class StandardFloatMode {
 public:
#if KVIRE_X86_64
  StandardFloatMode() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(all_masked); }
  ~StandardFloatMode() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  static constexpr unsigned all_masked = 0x1F80;  // no exception traps, nearest, no flush
  unsigned saved_;
#else
  StandardFloatMode() {}
  ~StandardFloatMode() {}
#endif
 public:
  StandardFloatMode(const StandardFloatMode&) = delete;
  StandardFloatMode& operator=(const StandardFloatMode&) = delete;
};

}  // namespace detail
KVIRE_NAMESPACE_END
