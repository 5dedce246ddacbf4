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

namespace {
struct Unnamed : PageLayout<64, 16, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>, Pad<4>>> {
  using Scaling = ScaleRule<role::Value, 128>;
};
struct ScaledNope : PageLayout<4, 1, Plane<Field<role::Nope, Element::e4m3, 64>, Field<role::Value, Element::e4m3, 64>, Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Nope, 64>;
};
struct ScaledValue : ScaledNope {
  using Scaling = ScaleRule<role::Value, 64>;
};
}  // namespace

TEST_CASE("a policy without a name is called by its planes, so that a message tells two of them apart") {
  CHECK(std::string(Unnamed::name) == "PageLayout(tokens=64;plane{value:e4m3*128};plane{scale:f32*1,pad:u8*4})");
  CHECK(std::string(describe<Unnamed>().c_str()).starts_with(Unnamed::name));
  CHECK(std::string(Fp8::name) == "Fp8WithScale");
}

TEST_CASE("diff says which field each of two scale rules is for") {
  const std::string d = diff<ScaledNope, ScaledValue>().c_str();
  CHECK(d.ends_with("differ: scale rule max(amax,1e-4)/max per 64 of nope against max(amax,1e-4)/max per 64 of value"));
}

namespace {
struct ManyLayers {
  static constexpr int layers = 200;
};
template <int N>
struct Numbered : CacheEntry<Bf16Contiguous<64, 128>, space::Full, Tokens<1>> {
  static constexpr char name[] = {'e', 'n', 't', 'r', 'y', '_', static_cast<char>('a' + N), 0};
};
template <int... N>
auto numbered(std::integer_sequence<int, N...>) -> CacheBundle<ManyLayers, Numbered<N>...>;
template <class Role>
using One = Plane<Field<Role, Element::u8, 1>>;
template <int N>
struct RoleOf {
  static constexpr char name[] = {'r', 'o', 'l', 'e', static_cast<char>('a' + N / 26), static_cast<char>('a' + N % 26), 0};
};
template <int... N>
auto planes(std::integer_sequence<int, N...>) -> PageLayout<1, 1, One<RoleOf<N>>...>;
struct EightyPlanes : decltype(planes(std::make_integer_sequence<int, 80>{})) {};
}  // namespace

TEST_CASE("canonical forms and descriptions have the length they need: many entries, layers and planes") {
  using Bundle = decltype(numbered(std::make_integer_sequence<int, 12>{}));
  constexpr auto text = canonical_bundle_text<Bundle>();
  static_assert(text.size > 8'000 && bundle_fingerprint64<Bundle> != 0);
  CHECK(std::string(text.c_str()).ends_with("}"));
  static_assert(canonical_text<EightyPlanes>().size > 1'400);
  const std::string words = describe<EightyPlanes>().c_str();
  CHECK(words.starts_with("PageLayout(tokens=1;plane{roleaa:u8*1};"));
  CHECK(words.ends_with("roledb u8 x1\n  content: plain"));
}
