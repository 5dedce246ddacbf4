// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>

/// IEEE 754 single precision in integers, round to nearest even, subnormals kept: what arith.hpp computes with in constant expressions and
/// wherever the processor's own result could depend on flush-to-zero. One NaN (nan_bits) for every invalid operation.

KVIRE_NAMESPACE_BEGIN
namespace soft {

namespace detail {

// Zero-based position of the highest set bit; requires value != 0.
KVIRE_HD constexpr int top_bit(kstd::uint64_t value) {
  int n = 0;
  for (int step = 32; step > 0; step /= 2) {
    if ((value >> step) != 0) {
      value >>= step;
      n += step;
    }
  }
  return n;
}

// A finite non-zero magnitude: mantissa * 2^exponent with 2^23 <= mantissa < 2^24.
struct Unpacked {
  kstd::uint32_t mantissa;
  int exponent;
};

KVIRE_HD constexpr Unpacked unpack(kstd::uint32_t bits) {
  const kstd::uint32_t a = abs_bits(bits);
  if (a >= 0x00800000U) return {(a & 0x7FFFFFU) | 0x800000U, static_cast<int>(a >> 23) - 150};
  const int shift = 23 - top_bit(a);
  return {a << shift, -149 - shift};
}

KVIRE_HD constexpr kstd::uint64_t shift_right_sticky(kstd::uint64_t value, int shift) {
  if (shift == 0) return value;
  if (shift > 63) return value != 0 ? 1U : 0U;
  return (value >> shift) | ((value & ((kstd::uint64_t(1) << shift) - 1)) != 0 ? 1U : 0U);
}

// Rounds value * 2^exponent, value < 2^63, its lowest bit sticky if value >= 2^26.
KVIRE_HD constexpr kstd::uint32_t pack(kstd::uint32_t sign, kstd::uint64_t value, int exponent) {
  if (value == 0) return sign;
  const int top = top_bit(value);
  const int biased = top + exponent + 127;
  if (biased > 254) return sign | infinity_bits;
  const int shift = biased >= 1 ? top - 23 : -149 - exponent;
  kstd::uint64_t m = 0;
  if (shift <= 0) {
    m = value << -shift;
  } else if (shift < 64) {
    const kstd::uint64_t half = kstd::uint64_t(1) << (shift - 1);
    const kstd::uint64_t rest = value & ((half << 1) - 1);
    m = value >> shift;
    if (rest > half || (rest == half && (m & 1) != 0)) ++m;
  }
  // The hidden bit adds itself to the exponent, and so does a carry out of the mantissa; the largest carry gives infinity.
  return sign | ((biased >= 1 ? static_cast<kstd::uint32_t>(biased - 1) << 23 : 0U) + static_cast<kstd::uint32_t>(m));
}

}  // namespace detail

/// a * b + c, rounded once.
KVIRE_HD constexpr kstd::uint32_t fma(kstd::uint32_t a, kstd::uint32_t b, kstd::uint32_t c) {
  if (is_nan_bits(a) || is_nan_bits(b) || is_nan_bits(c)) return nan_bits;
  const kstd::uint32_t product_sign = (a ^ b) & sign_bit;
  const kstd::uint32_t c_sign = c & sign_bit;
  const bool product_zero = abs_bits(a) == 0 || abs_bits(b) == 0;
  if (is_inf_bits(a) || is_inf_bits(b)) {
    if (product_zero || (is_inf_bits(c) && c_sign != product_sign)) return nan_bits;
    return product_sign | infinity_bits;
  }
  if (is_inf_bits(c)) return c;
  if (product_zero) return abs_bits(c) == 0 ? product_sign & c_sign : c;

  const detail::Unpacked x = detail::unpack(a);
  const detail::Unpacked y = detail::unpack(b);
  kstd::uint64_t p = (static_cast<kstd::uint64_t>(x.mantissa) * y.mantissa) << 14;  // [2^60, 2^62)
  const int p_exponent = x.exponent + y.exponent - 14;
  if (abs_bits(c) == 0) return detail::pack(product_sign, p, p_exponent);

  // Spare low bits (14 and 38) make every shift exact that a cancellation could expose; farther ones need no more than a sticky bit.
  const detail::Unpacked z = detail::unpack(c);
  kstd::uint64_t q = static_cast<kstd::uint64_t>(z.mantissa) << 38;  // [2^61, 2^62)
  const int q_exponent = z.exponent - 38;
  int exponent = p_exponent;
  if (p_exponent >= q_exponent) {
    q = detail::shift_right_sticky(q, p_exponent - q_exponent);
  } else {
    p = detail::shift_right_sticky(p, q_exponent - p_exponent);
    exponent = q_exponent;
  }
  if (product_sign == c_sign) return detail::pack(c_sign, p + q, exponent);
  if (p == q) return 0;
  return p > q ? detail::pack(product_sign, p - q, exponent) : detail::pack(c_sign, q - p, exponent);
}

KVIRE_HD constexpr kstd::uint32_t mul(kstd::uint32_t a, kstd::uint32_t b) { return fma(a, b, (a ^ b) & sign_bit); }
KVIRE_HD constexpr kstd::uint32_t add(kstd::uint32_t a, kstd::uint32_t b) { return fma(a, 0x3F800000U, b); }

KVIRE_HD constexpr kstd::uint32_t div(kstd::uint32_t a, kstd::uint32_t b) {
  if (is_nan_bits(a) || is_nan_bits(b)) return nan_bits;
  const kstd::uint32_t sign = (a ^ b) & sign_bit;
  const bool a_zero = abs_bits(a) == 0;
  const bool b_zero = abs_bits(b) == 0;
  if ((is_inf_bits(a) && is_inf_bits(b)) || (a_zero && b_zero)) return nan_bits;
  if (is_inf_bits(a) || b_zero) return sign | infinity_bits;
  if (is_inf_bits(b) || a_zero) return sign;
  const detail::Unpacked x = detail::unpack(a);
  const detail::Unpacked y = detail::unpack(b);
  const kstd::uint64_t dividend = static_cast<kstd::uint64_t>(x.mantissa) << 38;
  const kstd::uint64_t quotient = dividend / y.mantissa;  // (2^37, 2^39)
  const kstd::uint64_t sticky = quotient * y.mantissa != dividend ? 1U : 0U;
  return detail::pack(sign, (quotient << 1) | sticky, x.exponent - y.exponent - 39);
}

KVIRE_HD constexpr kstd::uint32_t sqrt(kstd::uint32_t a) {
  if (abs_bits(a) == 0 || a == infinity_bits) return a;
  if (is_nan_bits(a) || (a & sign_bit) != 0) return nan_bits;
  const detail::Unpacked x = detail::unpack(a);
  const int odd = x.exponent & 1;
  const kstd::uint64_t value = static_cast<kstd::uint64_t>(x.mantissa) << (36 + odd);  // the exponent that remains is even
  kstd::uint64_t root = 0;
  for (kstd::uint64_t bit = kstd::uint64_t(1) << 30; bit != 0; bit >>= 1) {
    if ((root | bit) * (root | bit) <= value) root |= bit;
  }
  const kstd::uint64_t sticky = root * root != value ? 1U : 0U;
  return detail::pack(0, (root << 1) | sticky, (x.exponent - odd - 36) / 2 - 1);
}

}  // namespace soft
KVIRE_NAMESPACE_END
