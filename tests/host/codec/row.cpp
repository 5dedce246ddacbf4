// SPDX-License-Identifier: Apache-2.0
#include <kvire/codec/error_bound.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace kvire;

template <class P>
struct Page {
  std::vector<std::byte> bytes = std::vector<std::byte>(P::page_bytes, std::byte{0xA5});
  std::byte* data() { return bytes.data(); }

  std::vector<unsigned> field(std::int64_t at, int count) const {
    std::vector<unsigned> values;
    for (int i = 0; i < count; ++i) values.push_back(static_cast<unsigned>(bytes[static_cast<std::size_t>(at + i)]));
    return values;
  }
  float f32(std::int64_t at) const {
    float x = 0;
    std::memcpy(&x, bytes.data() + at, 4);
    return x;
  }
};

template <class P>
std::vector<float> filled(float value) {
  return std::vector<float>(P::dim, value);
}

using Fp8 = Fp8WithScale<4, 128>;
using Fp4 = Fp4WithScale<4, 128>;
using Bf16 = Bf16Contiguous<4, 128>;
using V4 = preset::deepseek_v4::Latent<2>;

// x scaled by 2^k, from a fixed generator; some exact zeros.
std::vector<float> random_row(int n, std::uint32_t seed, int exponent) {
  std::vector<float> x;
  std::uint32_t s = seed * 2654435761U + 1;
  for (int i = 0; i < n; ++i) {
    s = s * 1664525U + 1013904223U;
    const std::uint32_t r = s >> 8;
    const std::uint32_t e = static_cast<std::uint32_t>(127 + exponent - static_cast<int>(r % 11));
    x.push_back(r % 13 == 0 ? 0.0F : float_of(((r & 1) << 31) | (e << 23) | ((s * 2246822519U) >> 9)));
  }
  return x;
}

double magnitude(float x) { return static_cast<double>(float_of(abs_bits(bits_of(x)))); }

// Checks the documented bound of one field over rows of many sizes.
template <class P, class Role>
void check_bound(RowOptions options = {}) {
  const ErrorBound bound = error_bound<P, Role>(options);
  int failures = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const auto x = random_row(P::dim, seed, static_cast<int>(seed % 20) - 12);
    Page<P> page;
    const int token = static_cast<int>(seed) % P::tokens_per_page;
    encode_row<P>(x.data(), page.data(), token, options);
    std::vector<float> y(P::dim);
    decode_row<P>(page.data(), token, y.data());
    using F = RowField<P, P::template section_of<Role>>;
    for (int i = 0; i < F::count; ++i) {
      double scale = 0;
      if constexpr (F::scaled) {
        using S = RowField<P, P::template section_of<role::Scale>>;
        scale = static_cast<double>(decode_element<S::element>(load_code<S::element>(page.data() + S::offset(token), i / P::Scaling::block)));
      }
      const double error = magnitude(static_cast<float>(static_cast<double>(y[F::first + i]) - static_cast<double>(x[F::first + i])));
      const double relative = static_cast<double>(bound.relative) * magnitude(x[F::first + i]);
      const double in_scales = static_cast<double>(bound.in_scales) * scale;
      failures += !(error <= relative || error <= in_scales || error <= static_cast<double>(bound.absolute));
    }
  }
  INFO(std::string(P::name));
  CHECK(failures == 0);
}

// Keys whose scale is kept in a format of 8 or 16 bits.
template <Element Scale>
struct ShortScale : PageLayout<1, 1, Plane<Field<role::Value, Element::e4m3, 32>>, Plane<Field<role::Scale, Scale, 1>>> {
  using Scaling = ScaleRule<role::Value, 32>;
  static constexpr const char* name = "ShortScale";
};

}  // namespace

TEST_CASE("codec: error bounds hold where f16 rounds a small scale down") {
  using P = ShortScale<Element::f16>;
  check_bound<P, role::Value>();
  check_bound<ShortScale<Element::bf16>, role::Value>();
  // The scale is 4.5 steps of f16, and 4 are stored: the largest element saturates.
  std::vector<float> x(P::dim, 448 * 4.5F * 0x1p-24F);
  std::vector<float> y(P::dim);
  Page<P> page;
  encode_row<P>(x.data(), page.data(), 0);
  decode_row<P>(page.data(), 0, y.data());
  CHECK(y[0] == 448 * 4 * 0x1p-24F);
  CHECK(x[0] - y[0] <= error_bound<P, role::Value>().relative * x[0]);
}

TEST_CASE("codec: error bounds hold") {
  check_bound<Fp8, role::Value>();
  check_bound<Fp8WithScaleInterleaved<4, 128, 64>, role::Value>();
  check_bound<Bf16, role::Value>();
  check_bound<Fp4, role::Value>();
  check_bound<Fp4, role::Value>({.ties = Ties::to_even});
  check_bound<V4, role::Nope>();
  check_bound<V4, role::Nope>({.bf16_round_trip = true});
  check_bound<V4, role::Rope>();
  check_bound<preset::deepseek_v3_2::Latent<2>, role::Nope>();
  check_bound<preset::deepseek_v3_2::Latent<2>, role::Rope>();
  check_bound<preset::deepseek_v4_1::LatentFp8<2>, role::Value>();
  check_bound<preset::deepseek_v4_1::LatentFp4<2>, role::Value>();
  check_bound<F32Rows<2, 64>, role::State>();
}

TEST_CASE("codec: a row of zeros stores zeros under a finite scale") {
  for (const float zero : {0.0F, float_of(0x00000200U)}) {  // 2^-140 too: far below the floor of the scale
    Page<Fp8> fp8;
    encode_row<Fp8>(filled<Fp8>(zero).data(), fp8.data(), 1);
    CHECK(fp8.field(128, 128) == std::vector<unsigned>(128, 0));
    CHECK(bits_of(fp8.f32(4 * 128 + 4)) == bits_of(div_rn(1e-4F, 448.0F)));
    std::vector<float> y(128);
    decode_row<Fp8>(fp8.data(), 1, y.data());
    CHECK(y == std::vector<float>(128, 0.0F));

    Page<Fp4> fp4;
    encode_row<Fp4>(filled<Fp4>(zero).data(), fp4.data(), 3);
    CHECK(fp4.field(3 * 64, 64) == std::vector<unsigned>(64, 0));
    CHECK(fp4.field(4 * 64 + 12, 4) == std::vector<unsigned>(4, 0x70));
  }
}

TEST_CASE("codec: infinities saturate and leave the scale of the finite elements alone") {
  auto x = filled<Fp8>(1.0F);
  x[5] = float_of(infinity_bits);
  x[6] = float_of(infinity_bits | sign_bit);
  Page<Fp8> fp8;
  encode_row<Fp8>(x.data(), fp8.data(), 0);
  CHECK(bits_of(fp8.f32(512)) == bits_of(div_rn(1.0F, 448.0F)));
  CHECK(fp8.field(4, 4) == std::vector<unsigned>{0x7E, 0x7E, 0xFE, 0x7E});
  Page<Fp4> fp4;
  encode_row<Fp4>(x.data(), fp4.data(), 0);
  CHECK(fp4.field(2, 2) == std::vector<unsigned>{0x76, 0x6F});  // 1 is code 6 (4.0) under the scale 2^-2
  CHECK(fp4.field(256, 1) == std::vector<unsigned>{125});
  Page<Fp8> all;
  encode_row<Fp8>(filled<Fp8>(float_of(infinity_bits)).data(), all.data(), 0);
  CHECK(all.field(0, 128) == std::vector<unsigned>(128, 0x7E));
  CHECK(bits_of(all.f32(512)) == bits_of(div_rn(1e-4F, 448.0F)));
}

TEST_CASE_TEMPLATE("codec: what the largest scale of a short format cannot reach saturates, zeros stay zeros", P, ShortScale<Element::f16>, ShortScale<Element::bf16>,
                   ShortScale<Element::ue8m0>) {
  std::vector<float> x(P::dim, 1e30F);
  x[1] = 0;
  x[2] = -3e38F;
  std::vector<float> y(P::dim);
  Page<P> page;
  encode_row<P>(x.data(), page.data(), 0);
  decode_row<P>(page.data(), 0, y.data());
  CHECK(bits_of(y[1]) == 0);
  if constexpr (P::template element_of<role::Scale> == Element::f16) {
    CHECK(y[0] == 448.0F * 65504.0F);
    CHECK(y[2] == -448.0F * 65504.0F);
  } else {
    CHECK(y[2] == doctest::Approx(-3e38F).epsilon(0.0625));
  }
}

TEST_CASE("codec: a NaN stores a NaN, in its element or in its block's scale") {
  auto x = filled<Fp8>(1.0F);
  x[40] = float_of(0x7FC00000U);
  x[41] = float_of(0xFFC00000U);
  Page<Fp8> fp8;
  encode_row<Fp8>(x.data(), fp8.data(), 0);
  CHECK(fp8.field(39, 4) == std::vector<unsigned>{0x7E, 0x7F, 0xFF, 0x7E});
  std::vector<float> y(128);
  decode_row<Fp8>(fp8.data(), 0, y.data());
  CHECK(is_nan(y[40]));
  CHECK(!is_nan(y[39]));

  Page<Fp4> fp4;
  encode_row<Fp4>(x.data(), fp4.data(), 0);
  CHECK(fp4.field(256, 4) == std::vector<unsigned>{125, 255, 125, 125});
  CHECK(fp4.field(16, 16) == std::vector<unsigned>(16, 0));
  decode_row<Fp4>(fp4.data(), 0, y.data());
  for (int i = 0; i < 128; ++i) CHECK(is_nan(y[static_cast<std::size_t>(i)]) == (i / 32 == 1));

  Page<Bf16> bf16;
  encode_row<Bf16>(x.data(), bf16.data(), 2);
  decode_row<Bf16>(bf16.data(), 2, y.data());
  for (int i = 0; i < 128; ++i) CHECK(is_nan(y[static_cast<std::size_t>(i)]) == (i == 40 || i == 41));

  // An e4m3 scale has a NaN too.
  using V41 = preset::deepseek_v4_1::LatentFp4<2>;
  auto z = filled<V41>(1.0F);
  z[17] = float_of(nan_bits);
  Page<V41> v41;
  encode_row<V41>(z.data(), v41.data(), 0);
  CHECK(v41.field(512 + 1, 1) == std::vector<unsigned>{0x7F});
  CHECK(v41.field(512 + 2, 1) != std::vector<unsigned>{0x7F});
}

TEST_CASE("codec: a scale that is no power of two stays what it is") {
  // amax 1344 gives the scale 3; the key's 1.0 codes stand for 3 each.
  auto x = filled<Fp8>(3.0F);
  x[0] = 1344.0F;
  Page<Fp8> fp8;
  encode_row<Fp8>(x.data(), fp8.data(), 0);
  CHECK(bits_of(fp8.f32(512)) == bits_of(3.0F));
  CHECK(fp8.field(0, 3) == std::vector<unsigned>{0x7E, 0x38, 0x38});
  // As ue8m0 it is rounded up to 4, and that is another policy.
  using Latent = preset::deepseek_v4::Latent<2>;
  auto z = filled<Latent>(3.0F);
  z[0] = 1344.0F;
  Page<Latent> latent;
  encode_row<Latent>(z.data(), latent.data(), 1);
  CHECK(latent.field(1152 + 8, 1) == std::vector<unsigned>{129});
}

TEST_CASE("codec: the largest and smallest power-of-two scales work in every flush mode") {
  // ue8m0 code 254 is 2^127; its reciprocal 2^-127 is a subnormal that a flush mode would turn into zero.
  CHECK(bits_of(div_rn(1.0F, f32_from_ue8m0(254))) == 0x00400000U);
  CHECK(bits_of(mul_rn(0x1p127F, div_rn(1.0F, f32_from_ue8m0(254)))) == bits_of(1.0F));
  CHECK(bits_of(mul_rn(1.0F, f32_from_ue8m0(0))) == 0x00400000U);
  using Codec = ScaleCodec<Fp4>;
  CHECK(bits_of(Codec::decode(7, 0)) == 0x01400000U);  // 6 * 2^-127
  CHECK(bits_of(Codec::decode(1, 0)) == 0x00200000U);  // 0.5 * 2^-127
  CHECK(is_nan(Codec::decode(0, 255)));
  const BlockScale huge = Codec::make(0x7F7FFFFFU);
  CHECK(huge.code == 253);  // FLT_MAX / 6 is below 2^126
  CHECK(Codec::encode(0x7F7FFFFFU, huge, Ties::toward_zero) == 6);  // 4 * 2^126 = 2^128
}

TEST_CASE("codec: a row writes itself and nothing else") {
  const auto x = random_row(V4::dim, 7, 0);
  Page<V4> page;
  encode_row<V4>(x.data(), page.data(), 1);
  const std::vector<unsigned> untouched_row(576, 0xA5);
  CHECK(page.field(0, 576) == untouched_row);
  CHECK(page.field(1152, 8) == std::vector<unsigned>(8, 0xA5));
  CHECK(page.field(1152 + 15, 1) == std::vector<unsigned>{0});  // padding inside the row
  CHECK(page.field(1168, 560) == std::vector<unsigned>(560, 0xA5));
}

TEST_CASE("codec: planar and interleaved pages hold the same numbers in other places") {
  using Planar = Fp8WithScale<4, 128>;
  using Interleaved = Fp8WithScaleInterleaved<4, 128>;
  const auto x = random_row(128, 3, 4);
  Page<Planar> a;
  Page<Interleaved> b;
  encode_row<Planar>(x.data(), a.data(), 2);
  encode_row<Interleaved>(x.data(), b.data(), 2);
  CHECK(a.field(2 * 128, 128) == b.field(2 * 132, 128));
  CHECK(a.field(4 * 128 + 8, 4) == b.field(2 * 132 + 128, 4));
  std::vector<float> y(128);
  std::vector<float> z(128);
  decode_row<Planar>(a.data(), 2, y.data());
  decode_row<Interleaved>(b.data(), 2, z.data());
  CHECK(y == z);
}

TEST_CASE("codec: the second scale rule divides, the third puts its floor under the scale") {
  using V41Fp8 = preset::deepseek_v4_1::LatentFp8<2>;
  Page<V41Fp8> fp8;
  encode_row<V41Fp8>(filled<V41Fp8>(1e-3F).data(), fp8.data(), 0);
  CHECK(fp8.field(1024, 16) == std::vector<unsigned>(16, 114));  // 1e-4 rounded up to 2^-13, not amax / 448
  using V41Fp4 = preset::deepseek_v4_1::LatentFp4<2>;
  Page<V41Fp4> fp4;
  encode_row<V41Fp4>(filled<V41Fp4>(7.0F).data(), fp4.data(), 0);
  CHECK(fp4.field(512, 32) == std::vector<unsigned>(32, 0x39));  // 7/6 is nearest to 1.125
  CHECK(fp4.field(0, 256) == std::vector<unsigned>(256, 0x77));
  encode_row<V41Fp4>(filled<V41Fp4>(0.0F).data(), fp4.data(), 0);
  CHECK(fp4.field(512, 32) == std::vector<unsigned>(32, 0x01));  // 2^-9
}
