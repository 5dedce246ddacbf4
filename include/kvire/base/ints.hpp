// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

template <class T>
KVIRE_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
KVIRE_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

/// Smallest integer not below a / b. Requires a >= 0 and b > 0.
template <class T>
KVIRE_HD constexpr T ceil_div(T a, T b) {
  return a / b + (a % b != 0 ? T(1) : T(0));
}

/// Smallest multiple of `multiple` not below `value`. Requires value >= 0 and multiple > 0.
template <class T>
KVIRE_HD constexpr T align_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <class T>
KVIRE_HD constexpr bool is_power_of_two(T value) {
  return value > 0 && (value & (value - 1)) == 0;
}

/// Largest power of two that divides `value` and is not above `limit` (itself a power of two). Requires value >= 0; 0 gives `limit`.
template <class T>
KVIRE_HD constexpr T power_of_two_divisor(T value, T limit) {
  while (limit > 1 && value % limit != 0) limit /= 2;
  return limit;
}

/// a * b for non-negative operands; -1 where the product does not fit 63 bits, so that a size computed from outside numbers cannot wrap.
KVIRE_HD constexpr kstd::int64_t checked_mul(kstd::int64_t a, kstd::int64_t b) {
  if (a < 0 || b < 0) return -1;
  return b != 0 && a > INT64_C(0x7FFFFFFFFFFFFFFF) / b ? -1 : a * b;
}

/// a + b for non-negative operands, likewise; an operand of -1 gives -1.
KVIRE_HD constexpr kstd::int64_t checked_add(kstd::int64_t a, kstd::int64_t b) {
  if (a < 0 || b < 0) return -1;
  return a > INT64_C(0x7FFFFFFFFFFFFFFF) - b ? -1 : a + b;
}

KVIRE_NAMESPACE_END
