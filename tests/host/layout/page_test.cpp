// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/layout.hpp>

using namespace kvire;
namespace v4 = preset::deepseek_v4;
namespace v32 = preset::deepseek_v3_2;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
using Fp8Interleaved = Fp8WithScaleInterleaved<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;

// A user's own policy, odd on purpose: three fields, a prime token count, a page multiple.
struct Odd : PageLayout<7, 64, Plane<Field<role::Scale, Element::f32, 2>, Field<role::Value, Element::e2m1, 6>, Pad<1>>, Plane<Field<role::Rope, Element::bf16, 3>>> {
  using Scaling = ScaleRule<role::Value, 3>;
  static constexpr const char* name = "Odd";
};

template <class P>
void check_coverage_byte_by_byte() {
  std::vector<int> owners(static_cast<std::size_t>(P::page_bytes), 0);
  for (const Section& s : P::table.sections) {
    for (int token = 0; token < P::tokens_per_page; ++token) {
      const auto first = P::table.plane_offset[s.plane] + token * P::table.row_bytes[s.plane] + s.row_offset_bits / 8;
      for (std::int64_t i = 0; i < s.size_bits / 8; ++i) ++owners[static_cast<std::size_t>(first + i)];
    }
  }
  for (std::int64_t i = P::used_bytes; i < P::page_bytes; ++i) ++owners[static_cast<std::size_t>(i)];
  for (int count : owners) REQUIRE(count == 1);
}

}  // namespace

TEST_CASE("page bytes are those of the deployed formats") {
  CHECK(Fp8::page_bytes == 8448);
  CHECK(Fp8Interleaved::page_bytes == 8448);
  CHECK(Bf16::page_bytes == 16384);
  CHECK(Fp4::page_bytes == 4352);
  CHECK(v4::Latent<64>::page_bytes == 37440);
  CHECK(v4::Latent<2>::page_bytes == 1728);
  CHECK(v4::Latent<256>::page_bytes == 149760);
  CHECK(v4::Latent<1>::page_bytes == 1152);
  CHECK(v4::Latent<32>::page_bytes == 19008);
  CHECK(v4::Latent<128>::page_bytes == 74880);
  CHECK(v32::Latent<1>::page_bytes == 656);
  CHECK(preset::deepseek_v4_1::LatentFp8<64>::page_bytes == 33792);
  CHECK(preset::deepseek_v4_1::LatentFp4<64>::page_bytes == 18432);
  CHECK(KvPages<16, 8, 128>::page_bytes == 2 * 16 * 8 * 128 * 2);
}

TEST_CASE("byte addresses follow the worked examples of the deployed formats") {
  // loc 70 of pages of 64: page 1, row 6.
  CHECK(37440 + v4::Latent<64>::offset<role::Nope>(6) == 40896);
  CHECK(37440 + v4::Latent<64>::offset<role::Scale>(6) == 74352);
  CHECK(149760 + v4::Latent<256>::offset<role::Nope>(1) == 150336);
  CHECK(149760 + v4::Latent<256>::offset<role::Scale>(1) == 297224);
  CHECK(1728 + v4::Latent<2>::offset<role::Scale>(1) == 2888);
  CHECK(2 * 8448 + Fp8::offset<role::Value>(2) == 17152);
  CHECK(2 * 8448 + Fp8::offset<role::Scale>(2) == 25096);
  CHECK(v4::Latent<64>::offset<role::Rope>(0) == 448);
}

TEST_CASE("planar and interleaved pages of one size part from the first scale on") {
  CHECK(Fp8::offset<role::Scale>(63) == 8444);
  CHECK(Fp8Interleaved::offset<role::Scale>(63) == 8444);  // a test of the last scale alone would pass
  CHECK(Fp8::offset<role::Value>(0) == Fp8Interleaved::offset<role::Value>(0));
  CHECK(Fp8::offset<role::Value>(63) != Fp8Interleaved::offset<role::Value>(63));
  CHECK(Fp8::offset<role::Scale>(0) != Fp8Interleaved::offset<role::Scale>(0));
  static_assert(!same_layout<Fp8, Fp8Interleaved>);
}

TEST_CASE_TEMPLATE("every byte is one field's or declared padding", P, Fp8, Fp8Interleaved, Bf16, Fp4, v4::Latent<64>, v4::Latent<2>, v4::Latent<256>,
                   v32::Latent<64>, preset::deepseek_v4_1::LatentFp8<2>, preset::deepseek_v4_1::LatentFp4<2>, F32Rows<8, 2048>, KvPages<16, 2, 64>, Odd) {
  static_assert(require_layout<P>() && covers_exactly_once<P>());
  check_coverage_byte_by_byte<P>();
}

TEST_CASE("proofs refuse gaps, overlaps and short covers") {
  constexpr Extent gap[] = {{0, 4}, {8, 8}};
  constexpr Extent overlap[] = {{4, 12}, {0, 8}};
  constexpr Extent right[] = {{8, 8}, {0, 8}};
  constexpr Extent beyond[] = {{0, 8}, {8, 16}};
  static_assert(!tiles_exactly(gap, 16) && !tiles_exactly(overlap, 16) && !tiles_exactly(beyond, 16) && tiles_exactly(right, 16));
  CHECK(tiles_exactly(right, 16));
}

TEST_CASE("widest vectors follow from rows, planes and pages") {
  CHECK(Fp8::row_vector_bytes<0> == 16);
  CHECK(Fp8::row_vector_bytes<1> == 4);
  CHECK(Fp8Interleaved::row_vector_bytes<0> == 4);
  CHECK(v4::Latent<64>::row_vector_bytes<0> == 16);
  CHECK(v4::Latent<64>::row_vector_bytes<1> == 8);
  CHECK(v4::Latent<2>::page_vector_bytes == 16);
  CHECK(Odd::page_vector_bytes == 16);
}

TEST_CASE("rows of a page lie in one run a plane, the whole page in one") {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  const auto collect = [&](std::int64_t first, std::int64_t bytes) { runs.emplace_back(first, bytes); };
  for_each_run<v4::Latent<64>>(3, 2, collect);
  REQUIRE(runs.size() == 2);
  CHECK(runs[0] == std::pair<std::int64_t, std::int64_t>(3 * 576, 2 * 576));
  CHECK(runs[1] == std::pair<std::int64_t, std::int64_t>(36864 + 3 * 8, 2 * 8));
  runs.clear();
  for_each_run<v4::Latent<64>>(0, 64, collect);
  REQUIRE(runs.size() == 1);
  CHECK(runs[0].second == 37440);
}

TEST_CASE("addresses are formed in 64 bits") {
  // Page 131,072 of bf16 starts at exactly 2^31; fp8 page 254,200 reaches it at token 16.
  static_assert(strides_of(Arrangement::layer_first, 1, 131073, Bf16::page_bytes).offset(0, 131072) == INT64_C(2147483648));
  static_assert(strides_of(Arrangement::layer_first, 1, 254201, Fp8::page_bytes).offset(0, 254200) + Fp8::offset<role::Value>(16) == INT64_C(2147483648));
  static_assert(strides_of(Arrangement::layer_first, 1, 262145, Bf16::page_bytes).offset(0, 262144) == INT64_C(4294967296));
  // The strides of reported failures.
  static_assert(Strides{0, 1039680}.offset(0, 2066) == INT64_C(2147978880));
  static_assert(Strides{0, 1435968}.offset(0, 4564) == INT64_C(6553757952));
  static_assert(checked_mul(INT64_C(1) << 40, INT64_C(1) << 40) == -1 && checked_mul(-1, 2) == -1 && checked_mul(3, 4) == 12);
  CHECK(strides_of(Arrangement::page_first, 21, 100, Bf16::page_bytes).offset(2, 3) == (3 * 21 + 2) * Bf16::page_bytes);
}
