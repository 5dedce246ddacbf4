// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/soft_float.hpp>

/// f32 arithmetic whose bits come from the code and not from the user's flags: -ffast-math, -ffp-contract, -mrecip, -march=native,
/// -use_fast_math, flush-to-zero and denormals-are-zero change nothing. Round to nearest even, one rounding per call, one NaN (nan_bits),
/// subnormals kept; the same bits in a constant expression, on the host and in a kernel.
///
/// How. On the device each operation is one PTX instruction without .ftz. On the host the operands and the result are opaque to the
/// optimiser, so it can neither fuse, reorder nor approximate; a result that is zero, subnormal, infinite or NaN (where the processor's
/// mode could show) is computed again in integers. A reduction written with these has the order it is written in.

KVIRE_NAMESPACE_BEGIN

namespace detail {

// Exponent fields 1 to 254: a normal number, which no flush mode can have touched.
KVIRE_HD constexpr bool is_normal_bits(kstd::uint32_t bits) { return ((bits >> 23) & 0xFFU) - 1U < 254U; }

// At least 2^-100 and finite: an operand read as zero instead of subnormal is then far below half a unit in the last place of a sum.
KVIRE_HD constexpr bool is_well_normal_bits(kstd::uint32_t bits) { return ((bits >> 23) & 0xFFU) - 27U < 228U; }

KVIRE_HD constexpr bool is_not_subnormal(float x) { return abs_bits(bits_of(x)) - 1U >= 0x7FFFFFU; }

}  // namespace detail

/// a * b
KVIRE_HD constexpr float mul_rn(float a, float b) {
  if (!__builtin_is_constant_evaluated()) {
#if KVIRE_DEVICE_PASS
    float r = 0;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
#else
    KVIRE_OPAQUE(a);
    KVIRE_OPAQUE(b);
    float r = a * b;
    KVIRE_OPAQUE(r);
    if (detail::is_normal_bits(bits_of(r))) [[likely]] return r;
#endif
  }
  return float_of(soft::mul(bits_of(a), bits_of(b)));
}

/// a + b
KVIRE_HD constexpr float add_rn(float a, float b) {
  if (!__builtin_is_constant_evaluated()) {
#if KVIRE_DEVICE_PASS
    float r = 0;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
#else
    KVIRE_OPAQUE(a);
    KVIRE_OPAQUE(b);
    float r = a + b;
    KVIRE_OPAQUE(r);
    if (detail::is_well_normal_bits(bits_of(r))) [[likely]] return r;
#endif
  }
  return float_of(soft::add(bits_of(a), bits_of(b)));
}

/// a - b
KVIRE_HD constexpr float sub_rn(float a, float b) { return add_rn(a, float_of(bits_of(b) ^ sign_bit)); }

/// a * b + c with one rounding
KVIRE_HD constexpr float fma_rn(float a, float b, float c) {
  if (!__builtin_is_constant_evaluated()) {
#if KVIRE_DEVICE_PASS
    float r = 0;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
#else
    if (detail::is_not_subnormal(a) && detail::is_not_subnormal(b) && detail::is_not_subnormal(c)) [[likely]] {
      KVIRE_OPAQUE(a);
      KVIRE_OPAQUE(b);
      KVIRE_OPAQUE(c);
      if constexpr (KVIRE_HOST_FMA) {
        float r = __builtin_fmaf(a, b, c);
        KVIRE_OPAQUE(r);
        if (detail::is_well_normal_bits(bits_of(r))) [[likely]] return r;
      } else {
        // The product of two floats is exact in double. Rounding the sum twice shows only where the first rounding lands on a tie.
        double s = static_cast<double>(a) * static_cast<double>(b);
        KVIRE_OPAQUE(s);
        s += static_cast<double>(c);
        KVIRE_OPAQUE(s);
        if ((__builtin_bit_cast(kstd::uint64_t, s) & 0x1FFFFFFFU) != 0x10000000U) [[likely]] {
          float r = static_cast<float>(s);
          KVIRE_OPAQUE(r);
          if (detail::is_well_normal_bits(bits_of(r))) [[likely]] return r;
        }
      }
    }
#endif
  }
  return float_of(soft::fma(bits_of(a), bits_of(b), bits_of(c)));
}

/// a / b. In integers on the host: a compiler told to may replace a division by an approximate reciprocal.
KVIRE_HD constexpr float div_rn(float a, float b) {
#if KVIRE_DEVICE_PASS
  if (!__builtin_is_constant_evaluated()) {
    float r = 0;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
#endif
  return float_of(soft::div(bits_of(a), bits_of(b)));
}

/// The square root. In integers on the host, for the same reason.
KVIRE_HD constexpr float sqrt_rn(float a) {
#if KVIRE_DEVICE_PASS
  if (!__builtin_is_constant_evaluated()) {
    float r = 0;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
  }
#endif
  return float_of(soft::sqrt(bits_of(a)));
}

/// The larger number; NaN if either is. -0 and +0 count as equal (the first is returned).
KVIRE_HD constexpr float max_rn(float a, float b) {
  if (is_nan(a) || is_nan(b)) return float_of(nan_bits);
  return order_key(b) > order_key(a) ? b : a;
}

KVIRE_NAMESPACE_END
