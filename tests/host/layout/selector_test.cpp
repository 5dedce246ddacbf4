// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>

#include <kvire/layout.hpp>
#include <kvire/layout/reader.hpp>
#include <kvire/layout/selector.hpp>

using namespace kvire;

namespace {
using Compiled = PolicyList<Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>, Bf16Contiguous<64, 128>, Fp4WithScale<64, 128>>;

Status select_name(const LayoutConfig& config, std::string& name) {
  return select_layout(config, Compiled{}, [&]<class P>() -> Status {
    name = P::name;
    return {};
  });
}

struct BulkReader {
  static constexpr ReaderNeeds needs{.page_multiple = 512, .vector_bytes = 4, .least_tokens = 32, .most_tokens = 128};
};
struct WideReader {
  static constexpr ReaderNeeds needs{.page_multiple = 0, .vector_bytes = 16, .least_tokens = 0, .most_tokens = 0};
};
template <int Tokens>
using Fp4Of = Fp4WithScale<Tokens, 128>;
}  // namespace

namespace {
struct PaddedBf16 : PageLayout<64, 4096, Plane<Field<role::Value, Element::bf16, 128>>, Plane<Pad<8>>> {
  static constexpr const char* name = "PaddedBf16";
};
}  // namespace

TEST_CASE("a configuration that several compiled policies fit is refused, with their names") {
  int calls = 0;
  const auto count = [&]<class P>() -> Status {
    ++calls;
    return {};
  };
  const LayoutConfig config{"bf16", 64, 128, "none", 0, "contiguous"};
  const Status status = select_layout(config, PolicyList<PaddedBf16, Bf16Contiguous<64, 128>, Fp8WithScale<64, 128>>{}, count);
  REQUIRE(!status.ok());
  CHECK(status.error().code == ErrorCode::duplicate);
  CHECK(status.error().message.find("PaddedBf16, 20480 bytes a page") != std::string::npos);
  CHECK(status.error().message.find("Bf16Contiguous, 16384 bytes a page") != std::string::npos);
  CHECK(status.error().message.find("Fp8WithScale") == std::string::npos);
  CHECK(calls == 0);
  CHECK(select_layout(config, PolicyList<PaddedBf16, Fp8WithScale<64, 128>>{}, count).ok());
  CHECK(calls == 1);
  LayoutConfig negative = config;
  negative.dim = -3;
  const Status refused = select_layout(negative, PolicyList<PaddedBf16>{}, count);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message == "layout configuration: dim is -3, below 0");
}

TEST_CASE("a configuration names one compiled policy or gets the near misses") {
  std::string name;
  CHECK(select_name({"e4m3", 64, 128, "f32", 128, "planar"}, name).ok());
  CHECK(name == "Fp8WithScale");
  CHECK(select_name({"e4m3", 64, 128, "f32", 128, "interleaved"}, name).ok());
  CHECK(name == "Fp8WithScaleInterleaved");
  CHECK(select_name({"bf16", 64, 128, "none", 0, "contiguous"}, name).ok());
  CHECK(select_name(config_of<Fp4WithScale<64, 128>>(), name).ok());
  CHECK(name == "Fp4WithScale");

  name.clear();
  const Status near = select_name({"bf16", 32, 128, "none", 0, "contiguous"}, name);
  REQUIRE(!near.ok());
  CHECK(near.error().code == ErrorCode::unsupported);
  CHECK(near.error().message.find("Bf16Contiguous differs in tokens_per_page 32 against 64") != std::string::npos);
  CHECK(near.error().message.find("Fp4WithScale") == std::string::npos);
  CHECK(name.empty());

  const Status scale = select_name({"e4m3", 64, 128, "ue8m0", 128, "planar"}, name);
  REQUIRE(!scale.ok());
  CHECK(scale.error().message.find("scale_format ue8m0 against f32") != std::string::npos);
}

TEST_CASE("a configuration from outside is shown in a message without its control bytes, and not in full length") {
  std::string name;
  const Status odd = select_name({"bf\x1b[31m16\n", 64, 128, std::string(100'000, 's'), 0, "contiguous\x7f"}, name);
  REQUIRE(!odd.ok());
  const std::string& message = odd.error().message;
  CHECK(message.find("no compiled layout is: bf\\x1b[31m16\\x0a, 64 tokens") == 0);
  CHECK(message.find("contiguous\\x7f") != std::string::npos);
  CHECK(message.find("sss... (100000 bytes) per 0") != std::string::npos);
  CHECK(message.size() < 2'000);
  for (const char c : message) CHECK((c == '\n' || (static_cast<unsigned char>(c) >= 0x20 && c != 0x7F)));
}

namespace {
using PaddingFirst = PageLayout<16, 1, Plane<Pad<4>, Field<role::Value, Element::bf16, 30>>>;
}  // namespace

TEST_CASE("the element of a configuration is that of a field, not of padding before it") {
  CHECK(config_of<PaddingFirst>().element == "bf16");
}

TEST_CASE("nothing defaults: a field that is not given is an error that names it") {
  std::string name;
  const LayoutConfig whole{"e4m3", 64, 128, "f32", 128, "planar"};
  const auto message = [&](LayoutConfig c) {
    const Status s = select_name(c, name);
    return s.ok() ? std::string("accepted") : s.error().message;
  };
  LayoutConfig c = whole;
  c.element.clear();
  CHECK(message(c).find("element is not given") != std::string::npos);
  c = whole;
  c.tokens_per_page = 0;
  CHECK(message(c).find("tokens_per_page is not given") != std::string::npos);
  c = whole;
  c.placement.clear();
  CHECK(message(c).find("placement is not given") != std::string::npos);
  c = whole;
  c.scale_block = -1;
  CHECK(message(c).find("scale_block is not given") != std::string::npos);
  CHECK(message(LayoutConfig{}).find("not given") != std::string::npos);
}

TEST_CASE("a legal page size is solved for from the readers' needs") {
  static_assert(!reader_accepts<Fp4WithScale<64, 128>, BulkReader>());  // 4,352 B is no multiple of 512
  static_assert(reader_accepts<Fp4WithScale<128, 128>, BulkReader>());
  static_assert(smallest_legal_tokens<Fp4Of, 32, BulkReader>() == 128);
  static_assert(smallest_legal_tokens<Fp4Of, 32, WideReader>() == 0);  // 4-byte scale rows never take 16-byte vectors
  static_assert(reader_accepts<Bf16Contiguous<64, 128>, WideReader>() && require_reader<Bf16Contiguous<64, 128>, WideReader>());
  CHECK(smallest_legal_tokens<Fp4Of, 32, BulkReader>() == 128);
}

TEST_CASE("selector: a word that no layout spells so is answered with those there are") {
  const auto message = [](const LayoutConfig& config) { return select_layout(config, PolicyList<Fp8WithScale<64, 128>>{}, []<class>() { return Status(); }).error().message; };
  LayoutConfig config = config_of<Fp8WithScale<64, 128>>();
  config.element = "E4M3";
  config.placement = "Planar";
  const std::string found = message(config);
  CHECK(found.find("\nelement is one of: f32, f16, bf16, e4m3, e2m1, u8") != std::string::npos);
  CHECK(found.find("\nplacement is one of: planar, interleaved, contiguous") != std::string::npos);
  CHECK(found.find("scale_format is one of") == std::string::npos);
}
