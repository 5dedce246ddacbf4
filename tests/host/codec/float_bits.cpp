// SPDX-License-Identifier: Apache-2.0
#include <kvire/codec/float_bits.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>

// Every conversion against a reference that works on exact values: a finite f32 is an integer multiple of 2^-149, which a long table of
// doubles cannot get wrong, and "nearest, ties to even" is a search for the closest code. Bits only: these tests also run under -ffast-math.

namespace {

using namespace kvire;

// Exact comparison of |f32| with (a + b) / 2 for two f32 magnitudes: widened to 64-bit fixed point relative to the larger exponent.
// All formats here are at most 16 bits wide, so that midpoints of neighbours are f32 numbers: take them as bits.
std::uint32_t midpoint(std::uint32_t lower, std::uint32_t upper) {
  // Neighbours within a binade or across its edge: the midpoint's bits are the mean of the bits, since f32 has more mantissa than any format.
  return lower + (upper - lower) / 2;
}

// Checks a conversion at each boundary between neighbouring magnitudes `value(code)`, code = 0 .. last.
template <class Value, class Convert>
void check_boundaries(std::uint32_t last, Value value, Convert convert, bool tie_goes_to_even, std::uint32_t sign_code) {
  for (std::uint32_t code = 0; code < last; ++code) {
    const std::uint32_t lower = value(code);
    const std::uint32_t upper = value(code + 1);
    REQUIRE(lower < upper);
    const std::uint32_t middle = code == 0 ? upper - 0x00800000U : midpoint(lower, upper);
    const std::uint32_t tie = tie_goes_to_even && (code & 1) != 0 ? code + 1 : code;
    for (const std::uint32_t sign : {0U, sign_bit}) {
      const std::uint32_t s = sign != 0 ? sign_code : 0;
      CHECK(convert(sign | lower) == (s | code));
      CHECK(convert(sign | (lower + 1)) == (s | code));
      CHECK(convert(sign | (middle - 1)) == (s | code));
      CHECK(convert(sign | middle) == (s | tie));
      CHECK(convert(sign | (middle + 1)) == (s | (code + 1)));
      CHECK(convert(sign | (upper - 1)) == (s | (code + 1)));
    }
  }
}

// The code of |x| never falls while |x| grows: every 2^9th f32 and its neighbours.
template <class Convert>
void check_monotonic(Convert convert) {
  std::uint32_t last = convert(0);
  for (std::uint32_t bits = 0; bits <= infinity_bits; bits += 1U << 9) {
    for (std::uint32_t b = bits == 0 ? 0 : bits - 1; b <= bits + 1 && b <= infinity_bits; ++b) {
      const std::uint32_t code = convert(b);
      if (code < last) FAIL("falls at " << b);
      last = code;
    }
  }
}

// 2^exponent * mantissa as f32 bits, by repeated doubling in a double that never leaves the normal range.
std::uint32_t value_bits(double mantissa, int exponent) {
  for (; exponent > 0; --exponent) mantissa *= 2;
  for (; exponent < 0; ++exponent) mantissa /= 2;
  return bits_of(static_cast<float>(mantissa));
}

}  // namespace

TEST_CASE("codec: e4m3 codes have their values and round trip") {
  for (std::uint32_t code = 0; code < 128; ++code) {
    const int exponent = static_cast<int>(code >> 3);
    const double m = code & 7;
    const std::uint32_t expected = code == 127     ? nan_bits
                                   : exponent == 0 ? value_bits(m, -9)
                                                   : value_bits(8 + m, exponent - 10);
    CHECK(bits_of(f32_from_e4m3(static_cast<std::uint8_t>(code))) == expected);
    CHECK(bits_of(f32_from_e4m3(static_cast<std::uint8_t>(code | 0x80))) == (expected | sign_bit));
    CHECK(e4m3_from_bits(expected) == code);
    CHECK(e4m3_from_bits(expected | sign_bit) == (code | 0x80));
  }
}

TEST_CASE("codec: e4m3 rounds to nearest, ties to even, and saturates") {
  const auto convert = [](std::uint32_t b) { return std::uint32_t(e4m3_from_bits(b)); };
  check_boundaries(126, [](std::uint32_t c) { return bits_of(f32_from_e4m3(static_cast<std::uint8_t>(c))); }, convert, true, 0x80);
  check_monotonic(convert);
  for (const std::uint32_t b : {bits_of(448.0F), bits_of(448.0F) + 1, bits_of(464.0F), bits_of(1e30F), 0x7F7FFFFFU, infinity_bits}) {
    CHECK(e4m3_from_bits(b) == 0x7E);
    CHECK(e4m3_from_bits(b | sign_bit) == 0xFE);
  }
  for (const std::uint32_t b : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU}) {
    CHECK(e4m3_from_bits(b) == 0x7F);
    CHECK(e4m3_from_bits(b | sign_bit) == 0xFF);
  }
  CHECK(e4m3_from_bits(0) == 0);
  CHECK(e4m3_from_bits(sign_bit) == 0x80);
  CHECK(e4m3_from_bits(1) == 0);  // the smallest subnormal
  static_assert(e4m3_from_f32(1.0F) == 0x38 && e4m3_from_f32(-448.0F) == 0xFE && f32_from_e4m3(0x01) == 0x1p-9F);
}

TEST_CASE("codec: e2m1 codes, both tie rules") {
  const float values[8] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (std::uint32_t code = 0; code < 8; ++code) {
    CHECK(bits_of(f32_from_e2m1(static_cast<std::uint8_t>(code))) == bits_of(values[code]));
    CHECK(bits_of(f32_from_e2m1(static_cast<std::uint8_t>(code | 8))) == (bits_of(values[code]) | sign_bit));
    CHECK(bits_of(f32_from_e2m1(static_cast<std::uint8_t>(code | 0xF8))) == (bits_of(values[code]) | sign_bit));
    for (const Ties ties : {Ties::toward_zero, Ties::to_even}) {
      CHECK(e2m1_from_bits(bits_of(values[code]), ties) == code);
      CHECK(e2m1_from_bits(bits_of(values[code]) | sign_bit, ties) == (code == 0 ? 0 : code | 8));
    }
  }
  const float thresholds[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5};
  for (std::uint32_t code = 0; code < 7; ++code) {
    const std::uint32_t t = bits_of(thresholds[code]);
    for (const std::uint32_t sign : {0U, sign_bit}) {
      const auto with_sign = [&](std::uint32_t c) { return c != 0 && sign != 0 ? c | 8 : c; };
      CHECK(e2m1_from_bits(sign | t, Ties::toward_zero) == with_sign(code));
      CHECK(e2m1_from_bits(sign | t, Ties::to_even) == with_sign(code % 2 == 0 ? code : code + 1));
      for (const Ties ties : {Ties::toward_zero, Ties::to_even}) {
        CHECK(e2m1_from_bits(sign | (t - 1), ties) == with_sign(code));
        CHECK(e2m1_from_bits(sign | (t + 1), ties) == with_sign(code + 1));
      }
    }
  }
  for (const Ties ties : {Ties::toward_zero, Ties::to_even}) {
    check_monotonic([&](std::uint32_t b) { return std::uint32_t(e2m1_from_bits(b, ties)); });
    CHECK(e2m1_from_bits(infinity_bits, ties) == 7);
    CHECK(e2m1_from_bits(infinity_bits | sign_bit, ties) == 15);
    CHECK(e2m1_from_bits(nan_bits, ties) == 0);
    CHECK(e2m1_from_bits(1 | sign_bit, ties) == 0);  // no negative zero
  }
}

TEST_CASE("codec: ue8m0 is the power of two not below") {
  CHECK(bits_of(f32_from_ue8m0(0)) == 0x00400000U);  // 2^-127, a subnormal
  CHECK(is_nan(f32_from_ue8m0(255)));
  for (std::uint32_t code = 1; code < 255; ++code) CHECK(bits_of(f32_from_ue8m0(static_cast<std::uint8_t>(code))) == code << 23);
  for (std::uint32_t code = 0; code < 255; ++code) {
    const std::uint32_t b = bits_of(f32_from_ue8m0(static_cast<std::uint8_t>(code)));
    CHECK(ue8m0_ceil_from_bits(b) == code);
    CHECK(ue8m0_ceil_from_bits(b - 1) == code);
    CHECK(ue8m0_ceil_from_bits(b + 1) == (code == 254 ? 254 : code + 1));
  }
  check_monotonic([](std::uint32_t b) { return std::uint32_t(ue8m0_ceil_from_bits(b)); });
  CHECK(ue8m0_ceil_from_bits(0) == 0);
  CHECK(ue8m0_ceil_from_bits(1) == 0);
  CHECK(ue8m0_ceil_from_bits(bits_of(-1.0F)) == 0);
  CHECK(ue8m0_ceil_from_bits(infinity_bits) == 254);
  CHECK(ue8m0_ceil_from_bits(nan_bits) == 255);
  CHECK(ue8m0_ceil_from_f32(3.0F) == 129);
}

TEST_CASE("codec: bf16 and f16 codes round trip and round to nearest even") {
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const auto c = static_cast<std::uint16_t>(code);
    const std::uint32_t wide = bits_of(f32_from_bf16(c));
    REQUIRE(wide == code << 16);
    if (!is_nan_bits(wide)) REQUIRE(bf16_from_bits(wide) == code);
    if (is_nan_bits(wide)) REQUIRE(is_nan(f32_from_bf16(bf16_from_bits(wide))));

    const std::uint32_t exponent = (code >> 10) & 31;
    const double m = code & 1023;
    const std::uint32_t sign = (code & 0x8000) << 16;
    const std::uint32_t half = bits_of(f32_from_f16(c));
    if (exponent == 31) {
      REQUIRE(((m == 0 && half == (sign | infinity_bits)) || (m != 0 && is_nan_bits(half))));
    } else {
      REQUIRE(half == (sign | (exponent == 0 ? value_bits(m, -24) : value_bits(1024 + m, static_cast<int>(exponent) - 25))));
    }
    if (!is_nan_bits(half)) REQUIRE(f16_from_bits(half) == code);
    if (is_nan_bits(half)) REQUIRE(is_nan(f32_from_f16(f16_from_bits(half))));
  }
  const auto to_bf16 = [](std::uint32_t b) { return std::uint32_t(bf16_from_bits(b)); };
  for (std::uint32_t code = 0; code < 0x7F80; ++code) {
    const std::uint32_t b = code << 16;
    REQUIRE(to_bf16(b + 0x7FFF) == code);
    REQUIRE(to_bf16(b + 0x8000) == code + (code & 1));
    REQUIRE(to_bf16(b + 0x8001) == code + 1);
    REQUIRE(to_bf16(sign_bit | (b + 0x8001)) == (0x8000 | (code + 1)));
  }
  check_monotonic(to_bf16);
  CHECK(to_bf16(0x7F800001U) == 0x7FC0);  // a NaN whose payload bf16 would drop
  CHECK(to_bf16(0x7F7FFFFFU) == 0x7F80);  // rounds up to infinity

  const auto to_f16 = [](std::uint32_t b) { return std::uint32_t(f16_from_bits(b)); };
  check_boundaries(0x7BFF, [](std::uint32_t c) { return bits_of(f32_from_f16(static_cast<std::uint16_t>(c))); }, to_f16, true, 0x8000);
  check_monotonic(to_f16);
  CHECK(to_f16(bits_of(65519.0F)) == 0x7BFF);
  CHECK(to_f16(bits_of(65520.0F)) == 0x7C00);
  CHECK(to_f16(0x7F800001U) == 0x7E00);
}

TEST_CASE("codec: bit tests and the order key") {
  const std::uint32_t ascending[] = {infinity_bits | sign_bit, 0xFF7FFFFFU, bits_of(-1.0F), 0x80000001U, 0U, 1U, 2U, 0x00800000U,
                                     bits_of(1.0F),            0x7F7FFFFFU, infinity_bits};
  for (std::size_t i = 0; i + 1 < std::size(ascending); ++i) {
    CHECK(order_key(float_of(ascending[i])) < order_key(float_of(ascending[i + 1])));
  }
  CHECK(order_key(float_of(sign_bit)) == order_key(0.0F));
  CHECK(is_nan_bits(0x7F800001U));
  CHECK(is_nan_bits(0xFFFFFFFFU));
  CHECK(!is_nan_bits(infinity_bits));
  CHECK(is_inf_bits(infinity_bits | sign_bit));
  CHECK(is_finite_bits(0x7F7FFFFFU));
  CHECK(!is_finite_bits(infinity_bits));
}
