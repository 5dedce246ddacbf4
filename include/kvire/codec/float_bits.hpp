// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Conversions between f32 and the stored formats, in integers alone: the same bits at compile time, on the host and in a kernel, whatever
/// the user's floating-point flags and whether or not the processor flushes subnormals. Formats: OCP 8-bit floating point (e4m3, the
/// variant without infinities), OCP microscaling (e2m1, ue8m0), IEEE 754 (f16), bfloat16.

/// The bits of a float, and a float of given bits. A builtin, because a kernel may not call std::bit_cast.
KVIRE_HD constexpr kstd::uint32_t bits_of(float x) { return __builtin_bit_cast(kstd::uint32_t, x); }
KVIRE_HD constexpr float float_of(kstd::uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// Every NaN that kvire computes is this one, which is also what GPU arithmetic produces: so both backends store the same bytes.
inline constexpr kstd::uint32_t nan_bits = 0x7FFFFFFFU;
inline constexpr kstd::uint32_t infinity_bits = 0x7F800000U;
inline constexpr kstd::uint32_t sign_bit = 0x80000000U;

/// Tests on bit patterns, which -ffast-math cannot assume away.
KVIRE_HD constexpr kstd::uint32_t abs_bits(kstd::uint32_t bits) { return bits & ~sign_bit; }
KVIRE_HD constexpr bool is_nan_bits(kstd::uint32_t bits) { return abs_bits(bits) > infinity_bits; }
KVIRE_HD constexpr bool is_inf_bits(kstd::uint32_t bits) { return abs_bits(bits) == infinity_bits; }
KVIRE_HD constexpr bool is_finite_bits(kstd::uint32_t bits) { return abs_bits(bits) < infinity_bits; }
KVIRE_HD constexpr bool is_nan(float x) { return is_nan_bits(bits_of(x)); }
KVIRE_HD constexpr bool is_finite(float x) { return is_finite_bits(bits_of(x)); }

/// An unsigned key that orders floats as numbers, NaN excepted: a < b exactly if order_key(a) < order_key(b), and -0 equals +0.
/// Comparing keys is immune to flush-to-zero, which makes distinct subnormals compare equal.
KVIRE_HD constexpr kstd::uint32_t order_key(float x) {
  const kstd::uint32_t b = bits_of(x);
  return (b & sign_bit) != 0 ? sign_bit - abs_bits(b) : sign_bit + b;
}

namespace detail {

// value >> shift, rounded to nearest, ties to even. Requires 0 < shift < 32.
KVIRE_HD constexpr kstd::uint32_t shift_right_rne(kstd::uint32_t value, int shift) {
  const kstd::uint32_t half = kstd::uint32_t(1) << (shift - 1);
  const kstd::uint32_t rest = value & ((half << 1) - 1);
  const kstd::uint32_t quotient = value >> shift;
  return quotient + (rest > half || (rest == half && (quotient & 1) != 0) ? 1U : 0U);
}

// The f32 bits of `mantissa` * 2^exponent for mantissa < 2^11 where the result is zero or a normal f32.
KVIRE_HD constexpr kstd::uint32_t exact_bits(kstd::uint32_t mantissa, int exponent) {
  if (mantissa == 0) return 0;
  int top = 0;
  while ((mantissa >> top) > 1) ++top;
  return (static_cast<kstd::uint32_t>(exponent + top + 127) << 23) + ((mantissa << (23 - top)) & 0x7FFFFFU);
}

}  // namespace detail

/// f32 to e4m3: nearest, ties to even, beyond 448 (infinity included) 448; NaN to 0x7F; the sign is kept, that of zero and NaN too.
KVIRE_HD constexpr kstd::uint8_t e4m3_from_bits(kstd::uint32_t bits) {
  const kstd::uint32_t sign = (bits >> 24) & 0x80U;
  const kstd::uint32_t a = abs_bits(bits);
  kstd::uint32_t code = 0;
  if (a > infinity_bits) {
    code = 0x7FU;
  } else if (a >= 0x43E00000U) {  // 448
    code = 0x7EU;
  } else if (a >= 0x3C800000U) {  // 2^-6, the smallest normal
    code = detail::shift_right_rne(a, 20) - ((127U - 7U) << 3);
  } else if (const int shift = 141 - static_cast<int>(a >> 23); shift < 25) {  // a multiple of 2^-9
    code = detail::shift_right_rne((a & 0x7FFFFFU) | 0x800000U, shift);
  }
  return static_cast<kstd::uint8_t>(sign | code);
}
KVIRE_HD constexpr kstd::uint8_t e4m3_from_f32(float x) { return e4m3_from_bits(bits_of(x)); }

/// e4m3 to f32, exact; both NaN codes give NaN with the code's sign.
KVIRE_HD constexpr float f32_from_e4m3(kstd::uint8_t code) {
  const kstd::uint32_t sign = static_cast<kstd::uint32_t>(code & 0x80U) << 24;
  const kstd::uint32_t rest = code & 0x7FU;
  if (rest == 0x7FU) return float_of(sign | nan_bits);
  if (rest >= 8) return float_of(sign | ((rest << 20) + ((127U - 7U) << 23)));
  return float_of(sign | detail::exact_bits(rest, -9));
}

/// How a value halfway between two e2m1 codes is rounded.
enum class Ties : unsigned char {
  toward_zero,  ///< as deployed store kernels do: a code is left only above its threshold
  to_even,      ///< as the hardware's conversion instruction does
};

/// f32 to e2m1 (a nibble): 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives. Beyond 6 (infinity included) 6. A value that rounds to zero has
/// no sign, as deployed kernels store it. e2m1 has no NaN: NaN gives 0, and the block's scale must say so (see codec/scale.hpp).
KVIRE_HD constexpr kstd::uint8_t e2m1_from_bits(kstd::uint32_t bits, Ties ties = Ties::toward_zero) {
  const kstd::uint32_t a = abs_bits(bits);
  if (a > infinity_bits) return 0;
  const kstd::uint32_t to_even = ties == Ties::to_even ? 1U : 0U;  // the tie goes up where the upper code is the even one
  kstd::uint32_t code = 0;
  code += a > 0x3E800000U ? 1U : 0U;            // 0.25
  code += a + to_even > 0x3F400000U ? 1U : 0U;  // 0.75
  code += a > 0x3FA00000U ? 1U : 0U;            // 1.25
  code += a + to_even > 0x3FE00000U ? 1U : 0U;  // 1.75
  code += a > 0x40200000U ? 1U : 0U;            // 2.5
  code += a + to_even > 0x40600000U ? 1U : 0U;  // 3.5
  code += a > 0x40A00000U ? 1U : 0U;            // 5
  return static_cast<kstd::uint8_t>(code | (code != 0 ? (bits >> 28) & 8U : 0U));
}
KVIRE_HD constexpr kstd::uint8_t e2m1_from_f32(float x, Ties ties = Ties::toward_zero) { return e2m1_from_bits(bits_of(x), ties); }

/// e2m1 (the low nibble of `code`) to f32, exact. Code 8 is -0.
KVIRE_HD constexpr float f32_from_e2m1(kstd::uint8_t code) {
  const kstd::uint32_t sign = static_cast<kstd::uint32_t>(code & 8U) << 28;
  const kstd::uint32_t rest = code & 7U;
  if (rest >= 2) return float_of(sign | ((rest << 22) + (126U << 23)));
  return float_of(sign | (rest == 0 ? 0U : 0x3F000000U));
}

/// f32 to ue8m0, upwards: the exponent of the smallest power of two not below x. Not above 2^-127 (zero and negative values too) gives 0,
/// above 2^127 gives 254, NaN gives 255.
KVIRE_HD constexpr kstd::uint8_t ue8m0_ceil_from_bits(kstd::uint32_t bits) {
  if (is_nan_bits(bits)) return 255;
  if ((bits & sign_bit) != 0 || bits <= 0x00400000U) return 0;
  if (bits <= 0x00800000U) return 1;  // a subnormal above 2^-127 still needs 2^-126
  const kstd::uint32_t code = (bits >> 23) + ((bits & 0x7FFFFFU) != 0 ? 1U : 0U);
  return static_cast<kstd::uint8_t>(code > 254 ? 254U : code);
}
KVIRE_HD constexpr kstd::uint8_t ue8m0_ceil_from_f32(float x) { return ue8m0_ceil_from_bits(bits_of(x)); }

/// ue8m0 to f32, exact: 2^(code - 127). Code 0 is 2^-127, a subnormal, built from bits because arithmetic may flush it; 255 is NaN.
KVIRE_HD constexpr float f32_from_ue8m0(kstd::uint8_t code) {
  if (code == 255) return float_of(nan_bits);
  return float_of(code == 0 ? 0x00400000U : static_cast<kstd::uint32_t>(code) << 23);
}

/// f32 to bf16: nearest, ties to even; a NaN keeps its sign and stays a NaN.
KVIRE_HD constexpr kstd::uint16_t bf16_from_bits(kstd::uint32_t bits) {
  if (is_nan_bits(bits)) return static_cast<kstd::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<kstd::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
KVIRE_HD constexpr kstd::uint16_t bf16_from_f32(float x) { return bf16_from_bits(bits_of(x)); }

/// bf16 to f32, exact.
KVIRE_HD constexpr float f32_from_bf16(kstd::uint16_t code) { return float_of(static_cast<kstd::uint32_t>(code) << 16); }

/// f32 to f16: nearest, ties to even, beyond 65504 infinity; a NaN keeps its sign and stays a NaN.
KVIRE_HD constexpr kstd::uint16_t f16_from_bits(kstd::uint32_t bits) {
  const kstd::uint32_t sign = (bits >> 16) & 0x8000U;
  const kstd::uint32_t a = abs_bits(bits);
  kstd::uint32_t code = 0;
  if (a > infinity_bits) {
    code = 0x7E00U | ((a >> 13) & 0x3FFU);
  } else if (a >= 0x477FF000U) {  // 65520 and above round to infinity
    code = 0x7C00U;
  } else if (a >= 0x38800000U) {  // 2^-14, the smallest normal
    code = detail::shift_right_rne(a, 13) - ((127U - 15U) << 10);
  } else if (const int shift = 126 - static_cast<int>(a >> 23); shift < 25) {  // a multiple of 2^-24
    code = detail::shift_right_rne((a & 0x7FFFFFU) | 0x800000U, shift);
  }
  return static_cast<kstd::uint16_t>(sign | code);
}
KVIRE_HD constexpr kstd::uint16_t f16_from_f32(float x) { return f16_from_bits(bits_of(x)); }

/// f16 to f32, exact.
KVIRE_HD constexpr float f32_from_f16(kstd::uint16_t code) {
  const kstd::uint32_t sign = static_cast<kstd::uint32_t>(code & 0x8000U) << 16;
  const kstd::uint32_t rest = code & 0x7FFFU;
  if (rest >= 0x7C00U) return float_of(sign | infinity_bits | ((rest & 0x3FFU) << 13));
  if (rest >= 0x400U) return float_of(sign | ((rest << 13) + ((127U - 15U) << 23)));
  return float_of(sign | detail::exact_bits(rest, -24));
}

KVIRE_NAMESPACE_END
