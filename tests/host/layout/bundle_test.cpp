// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <kvire/layout.hpp>
#include <kvire/layout/budget.hpp>

using namespace kvire;
namespace v4 = preset::deepseek_v4;

namespace {
using Flash = v4::Flash<v4::IndexKeyFp8>;
using Pro = v4::Pro<v4::IndexKeyFp8>;
}  // namespace

TEST_CASE("V4-Flash bytes per page id and per raw token are the golden sums") {
  CHECK(Flash::page_bytes<space::Full>() == Bytes(998'208));
  CHECK(v4::Flash<v4::IndexKeyBf16>::page_bytes<space::Full>() == Bytes(1'164'864));
  CHECK(v4::Flash<v4::IndexKeyFp4>::page_bytes<space::Full>() == Bytes(912'192));
  CHECK(Flash::bytes_per_raw_token<space::Full>() == 3899.25);
  CHECK(v4::Flash<v4::IndexKeyBf16>::bytes_per_raw_token<space::Full>() == 4550.25);
  CHECK(v4::Flash<v4::IndexKeyFp4>::bytes_per_raw_token<space::Full>() == 3563.25);
  CHECK(Flash::page_bytes<space::Window>() == Bytes(6'439'680 + 1'720'320));
  CHECK(Flash::page_bytes<space::Request>() == Bytes(20 * 524'288));
}

TEST_CASE("layers own entries as the model's schedule says") {
  CHECK(Flash::C4Latent::slots(43) == 21);
  CHECK(Flash::C128Latent::slots(43) == 20);
  CHECK(Flash::WindowLatent::slots(43) == 43);
  CHECK(Pro::C4Latent::slots(61) == 30);
  CHECK(Pro::C128Latent::slots(61) == 31);
  CHECK(Flash::IndexK::slot(LayerId(2)) == EntrySlot(0));
  CHECK(Flash::IndexK::slot(LayerId(42)) == EntrySlot(20));
  CHECK(Flash::IndexK::slot(LayerId(3)).none());
  CHECK(Flash::IndexK::slot(LayerId(-1)).none());
  CHECK(Flash::IndexK::slots(5) == 2);  // fewer layers at run time
}

TEST_CASE("raw tokens become cached tokens only through an entry's ratio") {
  static_assert(Flash::IndexK::cached(RawTokens(1023)) == CachedTokens(255));
  static_assert(Flash::C128Latent::cached(RawTokens(1023)) == CachedTokens(7));
  CHECK(Flash::raw_tokens_per_page<space::Full>() == 256);
}

TEST_CASE("spaces are distinct and in order, entries fold in order") {
  CHECK(Flash::space_count == 3);
  CHECK(Flash::space_index<space::Full>() == 0);
  CHECK(Flash::space_index<space::Window>() == 1);
  CHECK(Flash::space_index<space::Request>() == 2);
  std::vector<std::string> names;
  Flash::for_each([&]<class Entry>() { names.emplace_back(Entry::name); });
  CHECK(names == std::vector<std::string>{"c4_latent", "index_k", "c128_latent", "window_latent", "c4_state", "c4_index_state", "c128_state"});
  CHECK(Flash::index_of<Flash::IndexK>() == 1);
}

TEST_CASE("bundles that differ in one companion's policy have other fingerprints") {
  CHECK(bundle_fingerprint64<Flash> != bundle_fingerprint64<v4::Flash<v4::IndexKeyBf16>>);
  CHECK(bundle_fingerprint64<Flash> != bundle_fingerprint64<Pro>);
  const auto text = canonical_bundle_text<Flash>();
  CHECK(std::string(text.c_str()).find(";entry{index_k:tokens*4;space=full;layers=2,4,") != std::string::npos);
}

TEST_CASE("a byte budget is never exceeded and sums every companion") {
  CHECK(pages_in<Fp8WithScale<64, 128>>(Bytes(1 << 20)) == Pages(124));
  CHECK(pages_in<Bf16Contiguous<64, 128>>(Bytes(1 << 20)) == Pages(64));
  CHECK(pages_in<Fp4WithScale<64, 128>>(Bytes(1 << 20)) == Pages(240));
  CHECK(pages_in<Fp8WithScale<64, 128>>(Bytes(-1)) == Pages(0));
  constexpr PageRatio ratios[] = {{}, {1, 4, 2}, {0, 1, 8}};
  for (std::int64_t budget : {INT64_C(0), INT64_C(1) << 20, INT64_C(1) << 28, INT64_C(1) << 30, INT64_C(12345678901), INT64_C(1) << 40}) {
    const auto pages = pages_in_budget<Flash>(Bytes(budget), ratios);
    CHECK(pages.bytes().count <= budget);
    if (pages.of<space::Full>() > 0) CHECK(pages_for<Flash>(pages.of<space::Full>() + 1, ratios).bytes().count > budget);
  }
}

TEST_CASE("numbers of a budget that do not fit 63 bits are held by no budget") {
  constexpr std::int64_t most = INT64_C(0x7FFFFFFFFFFFFFFF);
  BundlePages<Flash> pages;
  for (auto& count : pages.count) count = INT64_C(1) << 60;
  CHECK(pages.bytes().count == most);
  for (auto& count : pages.count) count = -5;
  CHECK(pages.bytes().count == 0);
  CHECK(PageRatio{1, 0, 1}.apply(100) == most);
  CHECK(PageRatio{-1, 2, 1}.apply(100) == most);
  CHECK(PageRatio{most, 1, 1}.apply(2) == most);
  CHECK(PageRatio{1, 4, 3}.apply(100) == 25);
  CHECK(PageRatio{1, 4, 3}.apply(5) == 3);
  PageRatio ratios[Flash::space_count] = {};
  for (const int layers : {0, -3, Flash::layers + 1}) CHECK(pages_in_budget<Flash>(Bytes(INT64_C(1) << 40), ratios, layers).bytes().count == 0);
  CHECK(pages_in_budget<Flash>(Bytes(INT64_C(1) << 40), ratios).bytes().count > 0);
  for (auto& ratio : ratios) ratio = {most, 1, 1};
  CHECK(pages_in_budget<Flash>(Bytes(INT64_C(1) << 40), ratios).count[0] <= 1);
}
