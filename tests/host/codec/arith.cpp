// SPDX-License-Identifier: Apache-2.0
// compiled for itself: it includes a header that other processors do not have
#include <kvire/codec/arith.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#if KVIRE_X86_64
#include <xmmintrin.h>
#endif

// Two independent answers for each operation: the integer version, and the processor's (through doubles and <cmath>), the latter only where
// flags and flush modes leave it trustworthy. The public functions must equal the integer version everywhere.

namespace {

using namespace kvire;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::uint64_t x = state;
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCDULL;
    return x ^ (x >> 33);
  }
};

// Bit patterns with many special values, near-ties and exponents close to each other.
std::uint32_t pattern(Random& random) {
  const std::uint64_t r = random.next();
  const auto bits = static_cast<std::uint32_t>(r >> 32);
  switch (r & 7) {
    case 0: {
      static constexpr std::uint32_t special[] = {0,          0x80000000U, 1,           0x80000001U,   0x007FFFFFU, 0x00800000U, 0x807FFFFFU,
                                                  0x3F800000U, 0xBF800000U, 0x7F7FFFFFU, infinity_bits, 0xFF800000U, 0x7FC00000U, 0xFFC00001U,
                                                  0x00400000U, 0x34000000U};
      return special[(r >> 8) & 15];
    }
    case 1: return (bits & 0x80FFFFFFU);                                // subnormal and tiny
    case 2: return (bits & 0x81FFFFFFU) | 0x7E000000U;                  // huge
    case 3: return (bits & 0xFFC00000U);                                // short mantissa
    default: return (bits & 0x87FFFFFFU) | 0x38000000U;                 // ordinary
  }
}

volatile double sink;

// True where no flush mode and no finite-math flag can have changed a double computation that ended in this f32.
bool trustworthy(std::uint32_t result) { return ((result >> 23) & 0xFF) >= 40 && ((result >> 23) & 0xFF) < 255; }
bool ordinary(std::uint32_t x) { return ((x >> 23) & 0xFF) >= 1 && ((x >> 23) & 0xFF) < 255; }

int failures_over_patterns() {
  Random random{1};
  int failures = 0;
  for (int i = 0; i < 1000000; ++i) {
    const std::uint32_t a = pattern(random);
    const std::uint32_t b = pattern(random);
    const std::uint32_t c = (i & 3) == 0 ? soft::mul(a, b) ^ sign_bit ^ (i & 12) : pattern(random);  // often a near cancellation
    const float x = float_of(a);
    const float y = float_of(b);
    const float z = float_of(c);
    failures += bits_of(mul_rn(x, y)) != soft::mul(a, b);
    failures += bits_of(add_rn(x, z)) != soft::add(a, c);
    failures += bits_of(sub_rn(x, z)) != soft::add(a, c ^ sign_bit);
    failures += bits_of(fma_rn(x, y, z)) != soft::fma(a, b, c);
    failures += bits_of(div_rn(x, y)) != soft::div(a, b);
    failures += bits_of(sqrt_rn(x)) != soft::sqrt(a);
  }
  return failures;
}

}  // namespace

TEST_CASE("codec: arithmetic equals integer arithmetic for every kind of operand") { CHECK(failures_over_patterns() == 0); }

#if KVIRE_X86_64
TEST_CASE("codec: arithmetic equals integer arithmetic while the processor flushes subnormals") {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
  const int failures = failures_over_patterns();
  _mm_setcsr(before);
  CHECK(failures == 0);
}
#endif

TEST_CASE("codec: integer arithmetic equals the processor's where that can be trusted") {
  Random random{2};
  int failures = 0;
  int compared = 0;
  for (int i = 0; i < 1000000; ++i) {
    const std::uint32_t a = pattern(random);
    const std::uint32_t b = pattern(random);
    if (!ordinary(a) || !ordinary(b)) continue;
    // Double holds the product of two floats exactly, and quotients, roots and sums closely enough that rounding twice is harmless.
    volatile double x = float_of(a);
    volatile double y = float_of(b);
    const auto check = [&](std::uint32_t mine, double reference) {
      sink = reference;
      volatile float rounded = static_cast<float>(sink);
      const float copy = rounded;
      const std::uint32_t expected = bits_of(copy);
      if (!trustworthy(expected) || !trustworthy(mine)) return;
      ++compared;
      failures += mine != expected;
    };
    check(soft::mul(a, b), x * y);
    check(soft::add(a, b), x + y);
    check(soft::div(a, b), x / y);
    if ((a & sign_bit) == 0) check(soft::sqrt(a), std::sqrt(x));
  }
  CHECK(failures == 0);
  CHECK(compared > 1000000);
}

TEST_CASE("codec: fused multiply-add rounds once") {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a tie, which an addend far below the last place must break.
  const float a = 1.0F + 0x1p-12F;
  const float tie = 1.0F + 0x1p-11F;
  CHECK(bits_of(fma_rn(a, a, 0.0F)) == bits_of(tie));
  CHECK(bits_of(fma_rn(a, a, 0x1p-100F)) == bits_of(tie) + 1);
  CHECK(bits_of(fma_rn(a, a, float_of(1))) == bits_of(tie) + 1);  // even a subnormal one
  CHECK(bits_of(fma_rn(a, a, float_of(0x80000001U))) == bits_of(tie));
  CHECK(bits_of(fma_rn(a, a, -tie)) == bits_of(0x1p-24F));
  // A product and a sum that must stay two roundings.
  CHECK(bits_of(add_rn(mul_rn(a, a), -tie)) == 0);
  // Order is kept: (1e8 + -1e8) + 1 is 1, 1e8 + (-1e8 + 1) is not.
  CHECK(bits_of(add_rn(add_rn(1e8F, -1e8F), 1.0F)) == bits_of(1.0F));
  CHECK(bits_of(add_rn(1e8F, add_rn(-1e8F, 1.0F))) == 0);
  // A reciprocal stays a rounded reciprocal.
  const float third = div_rn(1.0F, 3.0F);
  CHECK(bits_of(third) == 0x3EAAAAABU);
  CHECK(bits_of(mul_rn(5.0F, div_rn(1.0F, 49.0F))) == soft::mul(bits_of(5.0F), soft::div(bits_of(1.0F), bits_of(49.0F))));
}

TEST_CASE("codec: subnormals, infinities and NaN do not depend on flags") {
  const float tiny = float_of(1);
  CHECK(bits_of(mul_rn(tiny, 1.0F)) == 1);
  CHECK(bits_of(mul_rn(0x1p-100F, 0x1p-27F)) == 0x00400000U);
  CHECK(bits_of(mul_rn(float_of(0x00400000U), 0x1p127F)) == bits_of(1.0F));
  CHECK(bits_of(add_rn(tiny, tiny)) == 2);
  CHECK(bits_of(sub_rn(0x1p-126F, tiny)) == 0x007FFFFFU);
  CHECK(bits_of(div_rn(1.0F, 0x1p127F)) == 0x00400000U);
  CHECK(bits_of(div_rn(float_of(0x00400000U), float_of(0x00400000U))) == bits_of(1.0F));
  CHECK(bits_of(sqrt_rn(float_of(4))) == bits_of(0x1.6a09e6p-74F) );
  CHECK(bits_of(mul_rn(float_of(infinity_bits), 0.0F)) == nan_bits);
  CHECK(bits_of(mul_rn(float_of(infinity_bits), -2.0F)) == (infinity_bits | sign_bit));
  CHECK(bits_of(mul_rn(1e30F, 1e30F)) == infinity_bits);
  CHECK(bits_of(add_rn(float_of(infinity_bits), float_of(infinity_bits | sign_bit))) == nan_bits);
  CHECK(bits_of(div_rn(1.0F, 0.0F)) == infinity_bits);
  CHECK(bits_of(div_rn(0.0F, 0.0F)) == nan_bits);
  CHECK(bits_of(sqrt_rn(-1.0F)) == nan_bits);
  CHECK(bits_of(sqrt_rn(float_of(sign_bit))) == sign_bit);
  CHECK(bits_of(max_rn(float_of(nan_bits), 1.0F)) == nan_bits);
  CHECK(bits_of(max_rn(-1.0F, float_of(1))) == 1);
}

static_assert(kvire::mul_rn(3.0F, 0.5F) == 1.5F && kvire::add_rn(1.0F, 2.0F) == 3.0F && kvire::fma_rn(2.0F, 3.0F, 4.0F) == 10.0F);
static_assert(kvire::div_rn(1.0F, 8.0F) == 0.125F && kvire::sqrt_rn(2.25F) == 1.5F);
