// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstring>
#include <string>

#include <kvire/layout.hpp>

using namespace kvire;
namespace v4 = preset::deepseek_v4;

namespace {
using Fp8 = Fp8WithScale<64, 128>;

struct Renamed : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "AnotherName";
};
// Each of these differs from Fp8WithScale<64, 128> in one respect that no byte count shows.
struct Int8Values : PageLayout<64, 1, Plane<Field<role::Value, Element::u8, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "Int8Values";
};
struct PowerOfTwoScale : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 128, ScaleFormula::scale_floor>;
  static constexpr const char* name = "PowerOfTwoScale";
};
struct ScaleFirst : PageLayout<64, 1, Plane<Field<role::Scale, Element::f32, 1>>, Plane<Field<role::Value, Element::e4m3, 128>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "ScaleFirst";
};
struct Half : PageLayout<64, 1, Plane<Field<role::Value, Element::f16, 128>>> {
  static constexpr const char* name = "Half";
};
}  // namespace

TEST_CASE("the canonical form and its hash are the checked-in vectors") {
  CHECK(std::string(canonical_text<Fp8>().c_str()) ==
        "kvire.page/1;tokens=64;plane{value:e4m3*128};plane{scale:f32*1};pad=0;scale=value/128:max(amax,1e-4)/max;content=plain");
  // Made with sha256sum from the text above.
  CHECK(std::string(hex_text(fingerprint128<Fp8>).c_str()) == "14c354d30e8259f842408d41ef1ac94e");
  CHECK(fingerprint64<Fp8> == 0x14c354d30e8259f8ull);
  CHECK(hash_text("", 0).high == 0xe3b0c44298fc1c14ull);
  CHECK(hash_text("abc", 3).high == 0xba7816bf8f01cfeaull);
  const char two_blocks[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(hash_text(two_blocks, 56).high == 0x248d6a61d20638b8ull);
}

TEST_CASE("pages of 8,448 bytes with another order, element, scale or meaning hash apart; a name does not count") {
  static_assert(same_layout<Fp8, Renamed>);
  static_assert(!same_layout<Fp8, Fp8WithScaleInterleaved<64, 128>>);
  static_assert(!same_layout<Fp8, Int8Values> && !same_layout<Fp8, PowerOfTwoScale> && !same_layout<Fp8, ScaleFirst>);
  static_assert(!same_layout<v4::IndexKeyFp8, preset::deepseek_v3_2::IndexKeyFp8>);
  static_assert(!same_layout<Bf16Contiguous<64, 128>, Half> && Half::page_bytes == Bf16Contiguous<64, 128>::page_bytes);
  static_assert(!same_layout<Bf16Contiguous<64, 128>, Bf16Contiguous<32, 256>>);
  static_assert(!same_layout<v4::Latent<64>, v4::Latent<256>>);
  CHECK(fingerprint64<Fp8> == fingerprint64<Renamed>);
}

TEST_CASE("describe draws a page and diff names the first differing section") {
  const std::string latent = describe<v4::Latent<64>>().c_str();
  CHECK(latent.find("@36864  8 B a token: scale ue8m0 x7, pad 1 B") != std::string::npos);
  CHECK(latent.find("page padding 64 B") != std::string::npos);
  const std::string d = diff<Fp8, Bf16Contiguous<64, 128>>().c_str();
  CHECK(d == "Fp8WithScale (8448 B a page) and Bf16Contiguous (16384 B a page) differ: section 0 is value e4m3 x128 in plane 0 against value bf16 x128 in plane 0");
  CHECK(std::string(diff<Fp8, Fp8WithScaleInterleaved<64, 128>>().c_str()).find("section 1 is scale f32 x1 in plane 1 against scale f32 x1 in plane 0") != std::string::npos);
  CHECK(std::string(diff<Fp8, Renamed>().c_str()).empty());
  using V4Keys = Bf16Contiguous<64, 128, v4::IndexKeyMeaning>;
  CHECK(std::string(diff<V4Keys, Bf16Contiguous<64, 128, content::RopeHead64>>().c_str()).find("content rope_tail64+hadamard128 against rope_head64") != std::string::npos);
  CHECK(std::string(diff<Fp8, PowerOfTwoScale>().c_str()).find("scale rule") != std::string::npos);
  CHECK(std::string(diff<Bf16Contiguous<64, 128>, Bf16Contiguous<32, 128>>().c_str()).find("64 against 32 tokens a page") != std::string::npos);
  static_assert(first_difference<Fp8, Bf16Contiguous<64, 128>>() == 0 && first_difference<Fp8, Renamed>() == -1);
}
